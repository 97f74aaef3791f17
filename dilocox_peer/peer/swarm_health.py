"""What is wrong with a run, from what its peers are heard to do and say. Pure; peers and the page see it with the same eyes.

Leases say whom to look for. Whether somebody is there is told by what is heard of it: its heartbeats, its links, and its answers
when it is asked how it is (wire/health.py), which every peer does every few seconds, the silent and the unheard first. A peer is asked
of itself; others' word counts only for what cannot be asked for, that one of their stage is hostile, and as the majority of them has it.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from dilocox_peer.dht.assignment import PATIENCE_S, REFUSED_S, spare_order
from dilocox_peer.dht.records import Lease
from dilocox_peer.events_of_health import Trouble, TroubleKind
from dilocox_peer.peer.rounds.timing import stretch
from dilocox_peer.types import PeerId
from dilocox_peer.wire.health import Ail, HealthForm
from dilocox_peer.wire.records import KEEPERS

ASK_EVERY_S = 3.0
MOST_VAIN = 6  # 3.2 minutes
ASKS_A_LOOK = 8  # at most, of which there is one a second: larger swarms are gone round more slowly
HEARD_EVERY_S = 2.0  # one of those that are heard anyway, so that what a peer asks does not grow with the swarm
MOST_SELDOM = 2.0  # times as long, where we hear many of our stage
SILENT_S = 5.5  # without a sign of life, an unanswered question among it
REMEMBERED_S = 30.0  # that the directory has not, after its last sign of life
UNANSWERED_S = 2.5  # a question that is out for so long
GAP_S = 3.0  # between two looks: we ourselves stood still, and nobody is silent for that
CLOCK_S = 20.0  # a clock that is so far from the others'
SLOW_S = 30.0  # for so long a stage is the brake before it is said
MOST_UNREACHED = (
    4  # times that nobody was where a lease says, of whom nothing was ever heard: such a lease may be made up
)
TAKE_OVER_LOOK_S = 5.0  # until who takes a stage over looks again
MAX_PEERS = 1024
MAX_TROUBLES = 32
NEVER = float("-inf")
BLOCKING: frozenset[Ail] = frozenset({"disk", "links"})  # without these a peer does no work
ORDER: tuple[TroubleKind, ...] = (
    "empty", "frozen", "paused", "disk", "links", "line", "waiting", "clock", "clocks", "hostile", "refused", "silent", "data",
    "bootstrap", "slow", "thin",
)  # fmt: skip

Miss = Literal["gone", "silent", "unreached"]
"""How a question stayed without an answer: the process is gone; the connection is there, and no answer; no connection."""


@dataclass(slots=True)
class Known:
    """A peer. heard_at: the last sign of life. gone: since when its process is gone. is_listed: in the directory."""

    peer: PeerId
    stage: int
    lease: Lease | None = None
    lease_until: float = NEVER
    is_listed: bool = False
    heard_at: float = NEVER
    asked_at: float = NEVER
    is_asked: bool = False
    misses: int = 0  # questions without an answer since the last sign of life, though a connection was there
    # Doublings of the time between two questions to one that was never heard, and may be nothing but a lease.
    vain: int = 0
    unreached: int = 0  # questions for which there was no connection, while nothing was ever heard of it
    gone_at: float | None = None
    refuses: bool = False
    said: HealthForm | None = None
    ahead_s: float | None = None  # of our clock

    def is_silent(self, now: float) -> bool:
        if now - self.heard_at <= SILENT_S:
            return False
        if self.heard_at == NEVER:
            # A peer that cannot be dialled holds stage 0 and dials; after that stage nobody works without being reached.
            return self.misses > 1 or (self.unreached >= MOST_UNREACHED and self.stage not in (0, KEEPERS))
        return self.misses > 0 or (self.is_asked and now - self.asked_at > UNANSWERED_S)


@dataclass(frozen=True, slots=True)
class _Stage:
    """Those who hold it, as far as is known; silent, paused, ailing: of them; the others work."""

    number: int
    holders: Sequence[Known]
    silent: Sequence[Known]
    paused: Sequence[Known]
    ailing: Mapping[PeerId, Collection[Ail]]

    @property
    def idle(self) -> Collection[PeerId]:
        blocked = {peer for peer, ails in self.ailing.items() if BLOCKING & set(ails)}
        return {each.peer for each in (*self.silent, *self.paused)} | blocked


@dataclass
class SwarmHealth:
    """me: None: somebody who looks on. stage: ours. Times are seconds of a clock that does not go back, but for what is said to be of the
    wall."""

    me: PeerId | None
    num_stages: int
    start_peers: int
    stage: int | None = None
    bootstraps: Collection[PeerId] = ()
    has_begun: bool = False  # a round is certified, of any stage
    is_over: bool = False  # the last round is, of all stages: nobody has to be there any more
    _known: dict[PeerId, Known] = field(default_factory=dict)
    _looked_at: float | None = None
    _asked_heard_at: float = NEVER
    _read: set[int] = field(default_factory=set)  # stages that the directory was read for
    _empty_since: dict[int, float] = field(default_factory=dict)
    _last_of: dict[int, PeerId] = field(default_factory=dict)
    _slow_since: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for peer in self.bootstraps:
            if peer != self.me:
                self._known[peer] = Known(peer, KEEPERS, is_listed=True)

    # ---- what is seen ------------------------------------------------------------------------------------------------

    def look(self, now: float) -> None:
        """Before anything else at this time."""
        if self._looked_at is not None and now - self._looked_at > GAP_S:
            for each in self._known.values():
                if each.gone_at is None and each.heard_at != NEVER:
                    each.heard_at, each.misses = now, 0
        self._looked_at = now

    def of_ourselves(self, said: HealthForm, now: float) -> None:
        assert self.me is not None, "somebody who looks on says nothing"
        own = self._of(self.me, said.stage)
        if own is not None:
            own.stage, own.said, own.heard_at, own.ahead_s, own.is_listed = said.stage, said, now, 0.0, True
        self.has_begun = self.has_begun or said.round > 0

    def listed(self, stages: Mapping[int, Sequence[Lease]], now: float, wall: float) -> None:
        """The leases of these stages, of those that have not left. wall: seconds since 1970, by which leases end."""
        self._read |= set(stages)
        for stage, leases in stages.items():
            here = {lease.peer for lease in leases}
            for each in self._known.values():
                if each.stage == stage and each.peer not in here and each.peer != self.me:
                    each.is_listed, each.lease = False, None
            for lease in leases:
                known = self._of(lease.peer, stage)
                if known is None or (known.lease is not None and lease.incarnation < known.lease.incarnation):
                    continue
                if known.lease is not None and lease.incarnation > known.lease.incarnation:
                    self._forget(known)  # another process
                known.stage, known.lease, known.is_listed = stage, lease, True
                known.lease_until = now + lease.expires_s - wall
        self._drop_strangers(now)

    def heard(self, peer: PeerId, stage: int, at: float) -> None:
        """A sign of life, not necessarily a new one."""
        known = self._of(peer, stage)
        if known is not None and at > known.heard_at:
            known.heard_at, known.misses, known.gone_at, known.refuses, known.vain = at, 0, None, False, 0

    def is_heard(self, peer: PeerId, since: float) -> bool:
        """Whether it has given a sign of life since then."""
        known = self._known.get(peer)
        return known is not None and known.heard_at >= since

    def kept_round(self, since: float) -> int | None:
        """The newest round that a bootstrap heard since then says it keeps the run up to, 0: none; None: none of them has said."""
        kept = [
            known.said.round
            for peer in self.bootstraps
            if (known := self._known.get(peer)) is not None and known.heard_at >= since and known.said is not None
        ]
        return max(kept, default=None)

    def ask_soon(self, peers: Iterable[PeerId]) -> None:
        """These, whose links have ended: at the next look."""
        for peer in peers:
            if (known := self._known.get(peer)) is not None and not known.is_asked:
                known.asked_at = NEVER

    def asked(self, peer: PeerId, now: float) -> None:
        known = self._known.get(peer)
        if known is not None:
            known.asked_at, known.is_asked = now, True

    def told(self, peer: PeerId, said: HealthForm | None, now: float, *, ahead_s: float | None = None) -> None:
        """It answered, None: with nothing that is understood here, or is busy. ahead_s: of our wall clock."""
        known = self._known.get(peer)
        if known is None:
            return
        known.is_asked = False
        self.heard(peer, known.stage, now)
        known.ahead_s = ahead_s if ahead_s is not None else known.ahead_s
        if said is not None and (said.stage < self.num_stages or peer in self.bootstraps):
            known.said = said
            if peer not in self.bootstraps:
                known.stage = said.stage
            self.has_begun = self.has_begun or said.round > 0

    def missed(self, peer: PeerId, how: Miss, now: float, *, refuses: bool = False) -> None:
        """It did not answer. refuses: its computer says that nobody is there."""
        known = self._known.get(peer)
        if known is None:
            return
        known.is_asked = False
        known.vain = min(known.vain + 1, MOST_VAIN) if known.heard_at == NEVER and peer not in self.bootstraps else 0
        if how == "gone" and (refuses or known.heard_at != NEVER) and now - known.heard_at > 1.0:
            known.gone_at = known.gone_at if known.gone_at is not None else now
            known.refuses = known.refuses or refuses
        elif how == "silent":
            known.misses += 1
        elif how == "unreached" and known.heard_at == NEVER:
            known.unreached += 1

    # ---- whom to ask -------------------------------------------------------------------------------------------------

    def to_ask(self, now: float, most: int = ASKS_A_LOOK) -> list[PeerId]:
        """Whom to ask how it is: those that are not heard first, then those that were asked longest ago. Each is followed by
        `asked`."""
        of_ours = (each for each in self._known.values() if each.stage == self.stage and each.peer != self.me)
        many = stretch(1 + sum(now - each.heard_at <= REMEMBERED_S for each in of_ours))
        due = [
            each
            for each in self._known.values()
            if each.peer != self.me
            and (each.is_listed or now - each.heard_at <= REMEMBERED_S)
            and not each.is_asked
            and now - each.asked_at >= ASK_EVERY_S * (many if each.peer in self.bootstraps else 2.0**each.vain)
        ]
        due.sort(key=lambda each: (each.asked_at, each.peer))
        quiet = {each.peer for each in due if now - each.heard_at > self._quiet_s(each, many)}
        unheard = [each.peer for each in due if each.peer in quiet][:most]
        heard = [each.peer for each in due if each.peer not in quiet]
        if not heard or len(unheard) == most or now - self._asked_heard_at < HEARD_EVERY_S * min(many, MOST_SELDOM):
            return unheard
        self._asked_heard_at = now
        return [*unheard, heard[0]]

    def _quiet_s(self, known: Known, many: float) -> float:
        """Without a sign of life, before it is asked whether it is there: two heartbeats of our stage, which say them the more seldom
        the more they are (many). Others say none."""
        return max(ASK_EVERY_S, 2 * many) if known.stage == self.stage else ASK_EVERY_S

    def addresses(self, peer: PeerId) -> tuple[str, ...]:
        """Where it is dialled, as far as its lease says."""
        known = self._known.get(peer)
        return known.lease.addresses if known is not None and known.lease is not None else ()

    # ---- what is wrong -----------------------------------------------------------------------------------------------

    def troubles(self, now: float) -> tuple[Trouble, ...]:
        """The worst first."""
        stages = [self._stage(number, now) for number in range(self.num_stages)]
        for stage in stages:
            if stage.holders:
                self._empty_since.pop(stage.number, None)
                self._last_of[stage.number] = stage.holders[-1].peer
            elif stage.number in self._read:
                self._empty_since.setdefault(stage.number, now)
        found = [*self._of_clocks(), *self._of_bootstraps(now)]
        if not self.has_begun and not self.is_over:
            found += self._of_beginning(stages)
        elif not self.is_over:
            for stage in stages:
                found += self._of_stage(stage, now)
            found += self._thin(stages, now)
        found += self._accused(stages)
        found.sort(key=lambda each: (not each.stops, ORDER.index(each.kind), each.stage or 0, each.peers))
        return tuple(found[:MAX_TROUBLES])

    def _stage(self, number: int, now: float) -> _Stage:
        holders = sorted(
            (
                each
                for each in self._known.values()
                if each.stage == number
                and each.gone_at is None
                and (each.is_listed or now - each.heard_at <= REMEMBERED_S)
            ),
            key=lambda each: each.peer,
        )
        silent = [each for each in holders if each.is_silent(now)]
        speaking = [each for each in holders if each not in silent]
        paused = [each for each in speaking if _is_paused(each)]
        ailing = {each.peer: each.said.ails for each in speaking if each.said is not None and each.said.ails}
        return _Stage(number, holders, silent, paused, ailing)

    def _of_stage(self, stage: _Stage, now: float) -> list[Trouble]:
        number = stage.number
        if not stage.holders:
            if number not in self._read:
                return []  # nobody has looked yet
            last = self._last_of.get(number)
            helper, in_s = self._helper(stage, now)
            peers = () if last is None else (last,)
            return [Trouble("empty", number, peers, stops=True, helper=helper, in_s=in_s)]
        stands = len(stage.idle) == len(stage.holders)
        found = []
        silent, paused = _peers(stage.silent), _peers(stage.paused)
        if stands and stage.paused:
            found.append(Trouble("paused", number, paused, stops=True))
        elif stands and not stage.ailing:
            helper, in_s = self._helper(stage, now)
            found.append(Trouble("frozen", number, silent, stops=True, helper=helper, in_s=in_s))
        if not (stands and silent and not stage.paused and not stage.ailing):
            found += [Trouble("silent", number, (peer,)) for peer in silent]
        for peer, ails in sorted(stage.ailing.items()):
            found += [Trouble(ail, number, (peer,), stops=stands and ail in BLOCKING) for ail in ails]
        return found

    def _of_beginning(self, stages: Iterable[_Stage]) -> list[Trouble]:
        """Of a run that has not begun: who is missing."""
        found = []
        for stage in stages:
            here = len(stage.holders) - len(stage.silent)
            if stage.number in self._read and here < self.start_peers:
                found.append(Trouble("waiting", stage.number, stops=True, number=here, of=self.start_peers))
        return found

    def _thin(self, stages: Sequence[_Stage], now: float) -> list[Trouble]:
        """Stages whose one peer is all they have, where others have more; and those that all wait for."""
        found, counts = [], [len(stage.holders) for stage in stages]
        speeds = [self._speed(stage) for stage in stages]
        known = [each for each in speeds if each is not None]
        middle = median(known) if len(known) == len(stages) and len(stages) > 1 else 0.0
        for stage, count, speed in zip(stages, counts, speeds, strict=True):
            is_slow = speed is not None and 0 < speed < middle / 2
            since = (
                self._slow_since.setdefault(stage.number, now) if is_slow else self._slow_since.pop(stage.number, now)
            )
            if count == 1 and max(counts) > 1:
                found.append(Trouble("thin", stage.number, _peers(stage.holders)))
            elif is_slow and now - since >= SLOW_S:
                found.append(Trouble("slow", stage.number))
        return found

    def _of_clocks(self) -> list[Trouble]:
        """Clocks that are not where most are; of two alone nobody can say which of them is right."""
        told = {each.peer: each.ahead_s for each in self._known.values() if each.ahead_s is not None}
        if self.me is not None and self.me not in told:
            told[self.me] = 0.0
        if len(told) == 2:
            (one, its), (other, others) = sorted(told.items(), key=lambda each: -each[1])
            if its - others > CLOCK_S:
                return [Trouble("clocks", None, (one, other), number=round(its - others))]
            return []
        usual = median(told.values()) if told else 0.0
        return [
            Trouble(
                "clock", self._known[peer].stage if self._trains(peer) else None, (peer,), number=round(ahead_s - usual)
            )
            for peer, ahead_s in sorted(told.items())
            if abs(ahead_s - usual) > CLOCK_S
        ]

    def _of_bootstraps(self, now: float) -> list[Trouble]:
        away = [
            each
            for peer in sorted(self.bootstraps)
            if (each := self._known.get(peer)) is not None and (each.gone_at is not None or each.is_silent(now))
        ]
        return [Trouble("bootstrap", None, _peers(away))] if away else []

    def _accused(self, stages: Iterable[_Stage]) -> list[Trouble]:
        """Of a stage, by more than half of the others of it that say anything of themselves, or by ourselves."""
        found = []
        for stage in stages:
            speaking = {each.peer: each.said for each in stage.holders if each.said is not None}
            by_kind: dict[tuple[PeerId, TroubleKind], set[PeerId]] = defaultdict(set)
            for speaker, said in speaking.items():
                for each in said.accused:
                    if each.peer != speaker:
                        by_kind[each.peer, "hostile" if each.of == "proven" else "refused"].add(speaker)
            here = {each.peer for each in stage.holders}
            for (peer, kind), accusers in sorted(by_kind.items()):
                if peer not in here:
                    continue
                judges = len(speaking.keys() - {peer})
                if self.me in accusers or 2 * len(accusers) > judges:
                    found.append(Trouble(kind, stage.number, (peer,)))
        return found

    def _helper(self, stage: _Stage, now: float) -> tuple[PeerId | None, float]:
        """The peer that takes the stage over, as dht/assignment.py has it, and in how many seconds."""
        leases: dict[int, list[Lease]] = {number: [] for number in range(self.num_stages)}
        for each in self._known.values():
            if each.lease is not None and each.gone_at is None and each.stage < self.num_stages:
                leases[each.stage].append(each.lease)
        held = [each for each in self._known.values() if each.stage == stage.number and each.is_listed]
        leases[stage.number] = []
        # A process that ended is known to be gone to those beside it; whoever only stands still has a lease that has to end.
        gone = [each.gone_at for each in held if each.gone_at is not None and each.refuses]
        is_known = len(gone) == len(held)
        until = max((each.lease_until for each in held), default=now)
        for turn, peer in enumerate(spare_order(leases)):
            known = self._known[peer]
            if known.said is None or not known.said.moves:
                continue
            is_beside = is_known and abs(known.stage - stage.number) == 1
            since = self._empty_since.get(stage.number, now) if is_beside or not held else max(now, until)
            patience_s = PATIENCE_S * turn + (REFUSED_S if is_beside and held else PATIENCE_S)
            return peer, max(0.0, since + patience_s + TAKE_OVER_LOOK_S - now)
        return None, 0.0

    # ---- books -------------------------------------------------------------------------------------------------------

    def _of(self, peer: PeerId, stage: int) -> Known | None:
        known = self._known.get(peer)
        if known is None and len(self._known) < MAX_PEERS:
            known = self._known[peer] = Known(peer, stage)
        return known

    def _forget(self, known: Known) -> None:
        known.heard_at, known.misses, known.unreached = NEVER, 0, 0
        known.gone_at, known.refuses = None, False
        known.said, known.ahead_s, known.is_asked = None, None, False

    def _drop_strangers(self, now: float) -> None:
        for each in list(self._known.values()):
            if not each.is_listed and each.peer != self.me and now - each.heard_at > REMEMBERED_S and not each.is_asked:
                del self._known[each.peer]

    def _trains(self, peer: PeerId) -> bool:
        return peer in self._known and self._known[peer].stage < self.num_stages

    def _speed(self, stage: _Stage) -> float | None:
        """None: somebody who works there has not said how fast."""
        working = [each for each in stage.holders if each.peer not in stage.idle]
        speeds = [each.lease.tokens_per_s for each in working if each.lease is not None and each.lease.tokens_per_s > 0]
        return sum(speeds) if len(speeds) == len(working) else None


def _is_paused(known: Known) -> bool:
    if known.said is not None:
        return known.said.is_paused
    return known.lease is not None and known.lease.is_paused


def _peers(known: Iterable[Known]) -> tuple[PeerId, ...]:
    return tuple(each.peer for each in known)
