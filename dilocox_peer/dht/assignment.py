"""Which stage a peer claims, and who moves to one that was left; from the leases of all stages. Pure, so that it can be
asked about any swarm.

By need: the stage that gets least done. Everybody else is reading the same leases at the same moment, so a choice is
checked once more after it was announced: of a stage that has more than its share only the newest moves, until none
has two peers more than another that could use them.
"""

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from dilocox_peer.dht.records import Lease
from dilocox_peer.types import PeerId, canonical, sha256
from dilocox_peer.wire.chain import MAX_ROSTER

PATIENCE_S = 45.0  # with an empty stage, in which whoever left may come back; for each turn before ours
UNLINKED_S = (
    600.0  # a stage beside ours of whose peers none is linked for so long counts as empty: leases are anybody's words
)
MAX_TURNS = 4  # who comes later than that in the order comes in one of as many turns more, drawn: those before it may be leases and no more
MOST_COUNTED = 4.0  # of a peer's throughput, times the usual
FAR, ALIKE_S = 3.0, 0.01  # of ways there and back: times the shortest, and what makes no difference
REFUSED_S = 12.0  # with one of which the leases name peers whose processes are gone: their computers say so


@dataclass(frozen=True, slots=True)
class Claimant:
    """A peer that claims a stage. most: peers that a stage may have. fits: the stages whose memory it has. is_dialable: whether others can reach it, through a relay if
    need be; if not it can only be an origin, which dials and is not dialled. held: the stage of which it has a state. near: those of
    the run to which its ways are short; none where all are, or nothing is known."""

    peer: PeerId
    fits: Collection[int]
    is_dialable: bool
    held: int | None = None
    near: Collection[PeerId] = ()
    most: int = MAX_ROSTER


def choose_stage(stages: Mapping[int, Sequence[Lease]], claimant: Claimant) -> tuple[int | None, str]:
    """(stage, why) for a peer that has none yet; None and the reason if there is none for it.

    stages: every stage of the run with the leases of its peers, claimant's own left out. Nobody chooses a full one, but a peer
    that has its state: it may be in the roster still. An empty stage is needed most,
    then the one with the least throughput; a peer that reports none counts as the usual one, the median of those
    that do, and none as more than MOST_COUNTED times it: a report is a peer's own word. While some stage is empty, a peer
    that holds a state goes where that is: a run that comes together again would be torn, each at another's stage. Should the empty one stay
    so, somebody moves there (EmptyStages). Among stages with as few peers the one that the fewest near ones hold comes first: micro-batches
    pass between near peers.
    """
    eligible = eligible_stages(stages, claimant)
    if not eligible:
        if not claimant.is_dialable and 0 in stages:
            return None, "others cannot dial this peer, so it can only hold stage 0, for which its memory is too small"
        return None, "its memory is too small for any stage"
    roomy = [stage for stage in eligible if not is_full(stages, claimant, stage)]
    if not roomy:
        return None, why_full(stages, claimant, eligible)
    eligible = roomy
    if claimant.held in eligible and not all(stages.values()):
        return claimant.held, "its state is on this disk"
    known = [lease.tokens_per_s for leases in stages.values() for lease in leases if lease.tokens_per_s > 0]
    usual = median(known) if known else 1.0

    def capacity(stage: int) -> float:
        return sum(min(lease.tokens_per_s or usual, MOST_COUNTED * usual) for lease in stages[stage])

    def need(stage: int) -> tuple[bool, float, bytes]:
        # The last resort is a draw of its own for every peer: those who start together spread over equal stages.
        return bool(stages[stage]), capacity(stage), sha256(canonical(["claim", claimant.peer, stage]))

    chosen = min(eligible, key=need)
    if stages[chosen] and (lacking := _lacking_near(stages, claimant, eligible)):
        return min(lacking, key=need), "the fewest of the peers near here hold it"
    if not stages[chosen]:
        return chosen, "nobody holds it"
    peers = f"{len(stages[chosen])} peer{'' if len(stages[chosen]) == 1 else 's'}"
    if not known:
        return chosen, f"it has the fewest peers ({peers})"
    return chosen, f"it has the least throughput ({peers}, {capacity(chosen):.0f} tokens/s)"


def eligible_stages(stages: Mapping[int, Sequence[Lease]], claimant: Claimant) -> list[int]:
    """Those that claimant could hold, were there a place."""
    return [stage for stage in sorted(stages) if stage in claimant.fits and (claimant.is_dialable or stage == 0)]


def is_full(stages: Mapping[int, Sequence[Lease]], claimant: Claimant, stage: int) -> bool:
    """Whether one more would be averaged with nobody: a stage has as many peers as the run allows, and claimant has no state of it.
    Its own lease, of an earlier start, is not counted."""
    others = sum(lease.peer != claimant.peer for lease in stages.get(stage, ()))
    return stage != claimant.held and others >= claimant.most


def why_full(stages: Mapping[int, Sequence[Lease]], claimant: Claimant, wanted: Sequence[int]) -> str:
    """That there is no place in the wanted stages, and what to do instead."""
    which = f"stage {wanted[0]}" if len(wanted) == 1 else f"each of the {len(wanted)} stages that fit here"
    has = f"{which} has its {claimant.most} peers, as many as the run allows (limits.max_peers): one more would train for nothing"
    roomy = [stage for stage in eligible_stages(stages, claimant) if not is_full(stages, claimant, stage)]
    if roomy:
        return f"{has}; there is room in stage {', '.join(map(str, roomy))}: pass --stage {roomy[0]}, or no --stage"
    return (
        f"{has}; try again when one of them has left, or join another run; a run that is cut into more stages "
        "has places for more (`dilocox-peer plan`)"
    )


def no_place(
    stages: Mapping[int, Sequence[Lease]], claimant: Claimant, wanted: Sequence[int], *, mode: str
) -> tuple[bool, str]:
    """(whether that keeps claimant out, what it is told) where all wanted stages are full. mode: of the run's admission. Where that is "open"
    leases cost nothing, so made-up ones keep nobody out: the roster decides; elsewhere only who was let in has one."""
    reason = why_full(stages, claimant, wanted)
    if mode != "open":
        return True, reason
    return False, f"{reason}. Leases of an open run may be made up, so this peer asks for a place all the same"


def _lacking_near(stages: Mapping[int, Sequence[Lease]], claimant: Claimant, eligible: Sequence[int]) -> list[int]:
    """Among the eligible stages with the fewest peers those with the fewest near ones; none where that makes no difference. Any
    other stage would have to be left again by somebody (better_stage)."""
    fewest = min(len(stages[stage]) for stage in eligible)
    near = {
        stage: sum(lease.peer in claimant.near for lease in stages[stage])
        for stage in eligible
        if len(stages[stage]) == fewest
    }
    if len(set(near.values())) < 2:
        return []
    return [stage for stage, count in near.items() if count == min(near.values())]


def to_ask(stages: Mapping[int, Sequence[Lease]], most: int, rng: random.Random) -> list[Lease]:
    """Of whom to find out whether they are there: as many of each stage, so that what is said of one is not measured by another; drawn, as
    whoever makes leases up has many of one range, and names them as it likes. Those that nobody can dial are not asked."""
    of_each = max(1, most // max(1, len(stages)))
    dialled = ([lease for lease in leases if lease.is_reachable] for leases in stages.values())
    drawn = [rng.sample(leases, min(of_each, len(leases))) for leases in dialled]
    return [lease for leases in rng.sample(drawn, len(drawn)) for lease in leases][:most]


def doubtful(
    stages: Mapping[int, Sequence[Lease]], answered: Mapping[PeerId, bool], rng: random.Random, *, mode: str
) -> frozenset[PeerId]:
    """Whose leases are not counted where a stage is chosen. answered: of those that were asked. One that did not is left out, and of the others of
    its stage, drawn, as large a part: by leases alone a stranger, whom they cost nothing, kept all newcomers from a stage. Nobody where none answers:
    then it may be our own line. mode: of the run's admission; who was let in alone has a lease where that is not "open"."""
    found = set[PeerId]()
    for leases in stages.values() if mode == "open" and any(answered.values()) else ():
        asked = [lease.peer for lease in leases if lease.peer in answered]
        silent = [peer for peer in asked if not answered[peer]]
        others = [lease.peer for lease in leases if lease.peer not in answered and lease.is_reachable]
        found.update(silent, rng.sample(others, round(len(others) * len(silent) / max(1, len(asked)))))
    return frozenset(found)


def without(stages: Mapping[int, Sequence[Lease]], peers: Collection[PeerId]) -> dict[int, list[Lease]]:
    """The leases of the others."""
    return {stage: [lease for lease in leases if lease.peer not in peers] for stage, leases in stages.items()}


def nearest(round_trips_s: Mapping[PeerId, float]) -> frozenset[PeerId]:
    """Those that are near, by what a way there and back takes; none where all are alike."""
    least_s = min(round_trips_s.values(), default=0.0)
    near = frozenset(peer for peer, seconds in round_trips_s.items() if seconds <= FAR * least_s + ALIKE_S)
    return near if len(near) < len(round_trips_s) else frozenset()


def where_they_are(stages: Mapping[int, Sequence[Lease]]) -> dict[int, list[Lease]]:
    """Each peer where it was started last: the lease of one that was killed, and came back to another stage, stands for a while."""
    newest: dict[PeerId, int] = {}
    for leases in stages.values():
        for lease in leases:
            newest[lease.peer] = max(lease.incarnation, newest.get(lease.peer, 0))
    return {
        stage: [lease for lease in leases if lease.incarnation == newest[lease.peer]]
        for stage, leases in stages.items()
    }


def better_stage(stages: Mapping[int, Sequence[Lease]], claimant: Claimant, mine: int) -> tuple[int | None, str]:
    """(stage, why) if claimant, whose lease is among those of stage `mine`, should move; (None, "") if it should stay.

    Only the newest of a stage moves, never its last peer, and only to a stage that has at least two fewer.
    """
    stage, turn, why = _thinner(stages, claimant, mine)
    return (None, "") if turn else (stage, why)


def _thinner(stages: Mapping[int, Sequence[Lease]], claimant: Claimant, mine: int) -> tuple[int | None, int, str]:
    """(stage, turn, why): one that has at least two fewer, and how many newer ones of its own come first."""
    peers = stages[mine]
    movable = [lease for lease in peers if lease.is_reachable]  # who cannot be reached stays where it is
    order = [lease.peer for lease in sorted(movable, key=lambda lease: (lease.incarnation, lease.peer), reverse=True)]
    if not claimant.is_dialable or claimant.peer not in order:
        return None, 0, ""
    others = [stage for stage in sorted(stages) if stage in claimant.fits and stage != mine]
    thinnest = min(others, key=lambda stage: len(stages[stage]), default=None)
    if thinnest is None or len(peers) - len(stages[thinnest]) < 2:
        return None, 0, ""
    why = f"it has {len(stages[thinnest])} peer{'' if len(stages[thinnest]) == 1 else 's'} where stage {mine} has {len(peers)}"
    return thinnest, order.index(claimant.peer), why


def stage_that_waits(
    stages: Mapping[int, Sequence[Lease]], claimant: Claimant, mine: int, start_peers: int
) -> tuple[int | None, int, str]:
    """(stage, turn, why) if claimant could move to one that has peers, and too few to begin with. Those who chose at one moment may all have chosen
    the same: who had looked for the last time saw nothing of who came after it. turn: how many others could and come first, as far as leases tell."""
    stage, turn, _ = _thinner(stages, claimant, mine)
    if stage is None or not stages[stage]:
        return None, 0, ""  # an empty one may have been left a moment ago (EmptyStages)
    count = len(stages[stage])
    if count >= start_peers or any(lease.round > 1 for lease in stages[stage]):  # the one in training
        return None, 0, ""
    why = f"it begins with {start_peers} peer{'' if start_peers == 1 else 's'} and has {count}, where stage {mine} has {len(stages[mine])}"
    return stage, _bounded(turn, claimant.peer), why


class ScantStages:
    """Which stage has too few peers to begin with, and since when, as one peer sees it in look after look."""

    def __init__(self) -> None:
        self._since: tuple[int, float] | None = None
        self._unlinked_since: dict[PeerId, float] = {}

    def to_fill(
        self,
        stages: Mapping[int, Sequence[Lease]],
        claimant: Claimant,
        mine: int,
        start_peers: int,
        now: float,
        *,
        linked: Collection[PeerId],
        beside: Collection[int] = (),
    ) -> tuple[int | None, str]:
        """(stage, why) that claimant should move to now: one seen so twice, as whoever it waits for may be on the way. The newest may not be able
        to, or be nothing but a lease: the next has its turn after PATIENCE_S. linked: peers that claimant is linked with; of the stages beside its
        own nobody counts who was not for UNLINKED_S: one lease more had others wait for ever. now: seconds, of any clock that does not go back."""
        unlinked = [each.peer for stage in beside for each in stages[stage] if each.peer not in linked]
        self._unlinked_since = {peer: self._unlinked_since.get(peer, now) for peer in unlinked}
        stages = without(stages, [peer for peer, since in self._unlinked_since.items() if now - since >= UNLINKED_S])
        stage, turn, why = stage_that_waits(stages, claimant, mine, start_peers)
        if stage is None or self._since is None or self._since[0] != stage:
            self._since = None if stage is None else (stage, now)
            return None, ""
        return (stage, why) if now - self._since[1] >= PATIENCE_S * turn else (None, "")


def take_over(stages: Mapping[int, Sequence[Lease]], claimant: Claimant, mine: int) -> tuple[int | None, int]:
    """(stage, turn): an empty stage that claimant, whose lease is among those of stage `mine`, could move to, and how many
    others could and come first; (None, 0) if there is none.

    Peers that can be spared go in order: of the stages with the most peers, there the newest. The oldest that can be dialled
    stays, unless somebody else does.
    """
    order = spare_order(stages)
    empty = [stage for stage in sorted(stages) if not stages[stage] and stage in claimant.fits]
    if not empty or not claimant.is_dialable or claimant.peer not in order or not stages[mine]:
        return None, 0
    turn, which = divmod(order.index(claimant.peer), len(empty))
    return empty[which], _bounded(turn, claimant.peer)


def _bounded(turn: int, peer: PeerId) -> int:
    return turn if turn < MAX_TURNS else MAX_TURNS + sha256(peer.encode())[0] % MAX_TURNS


def spare_order(stages: Mapping[int, Sequence[Lease]]) -> list[PeerId]:
    """The peers that their stages can spare, in the order in which they move to an empty one."""
    spare: list[tuple[int, int, PeerId]] = []
    for leases in stages.values():
        movable = sorted((-lease.incarnation, lease.peer) for lease in leases if lease.is_reachable)
        spare += [(-len(leases), *each) for each in movable[: max(0, len(leases) - 1)]]
    return [peer for _, _, peer in sorted(spare)]


class EmptyStages:
    """Which stages stand empty, and since when, as one peer sees it in look after look."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        self._unlinked_since: dict[int, float] = {}

    def to_take_over(
        self,
        stages: Mapping[int, Sequence[Lease]],
        claimant: Claimant,
        mine: int,
        *,
        linked: Collection[int],
        refused: Collection[int] = (),
        beside: Collection[int] = (),
        now: float,
    ) -> int | None:
        """The stage that claimant should move to now. linked: stages of peers that it is linked with; they are not empty,
        whatever the leases say. refused: stages whose leases were left out because all their peers refuse connections. beside: stages
        whose peers are to be linked with it. now: seconds, of any clock that does not go back."""
        unlinked = [stage for stage in beside if stages[stage] and stage not in linked]
        self._unlinked_since = {stage: self._unlinked_since.get(stage, now) for stage in unlinked}
        squatted = [stage for stage, since in self._unlinked_since.items() if now - since >= UNLINKED_S]
        stages = {**stages, **dict.fromkeys(squatted, ())}
        empty = [stage for stage, leases in stages.items() if not leases and stage not in linked]
        self._since = {stage: self._since.get(stage, now) for stage in empty}
        stage, turn = take_over(stages, claimant, mine)
        patience_s = PATIENCE_S * turn + (REFUSED_S if stage in refused else PATIENCE_S)
        if stage not in self._since or now - self._since[stage] < patience_s:
            return None
        return stage
