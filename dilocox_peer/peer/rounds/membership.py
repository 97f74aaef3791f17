"""The peers of the stage: when each was last heard, what it last said of itself. Pure.

Liveness is what we heard ourselves, never a lease. It decides who is waited for and who is in the next roster; nothing
that must not fork depends on it.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from dilocox_peer.peer.rounds.timing import NEVER, Timing
from dilocox_peer.types import Digest, PeerId, sha256
from dilocox_peer.wire.rounds import Heartbeat

MAX_KNOWN = 512  # peers remembered; beyond, the one silent for longest goes, of those who have no vote in our roster
SMALL = 16  # peers of a roster: of a smaller one a quarter is reckoned as if it were so large


@dataclass(slots=True)
class Seen:
    """What is known of one peer. left: the incarnation that said it leaves, -1 if none did."""

    heard_at: float = NEVER
    incarnation: int = 0
    refused: bool = False
    left: int = -1
    said: Heartbeat | None = None
    ready_at: Digest | None = None  # where it was when it last said that it holds the state there
    is_listed: bool = False  # in the directory
    is_met: bool = False  # heard or named by discovery, and not put out of the run since
    linked_at: float = NEVER  # when it was last heard without others between us
    passed_at: float = NEVER  # and when by way of another
    answered_at: float = NEVER  # when we last told it where we are, unasked
    has_voted: bool = False  # in a roster that we sat in
    range: str = ""  # of its addresses, as far as our own connection tells

    @property
    def has_left(self) -> bool:
        return self.left >= self.incarnation


def within_shares(
    stay: Iterable[PeerId], join: Iterable[PeerId], range_of: Callable[[PeerId], str], max_peers: int
) -> list[PeerId]:
    """Those who stay, and the newcomers as far as no range of addresses has more than a quarter of the places (two at
    least). Places that nobody has are counted up to SMALL: where 64 may come and eight are here, a quarter of 64 would be most of them.
    A peer that is in stays: where a peer is seen from may change, and a roster must not come apart by it."""
    roster = list(stay)
    most = max(2, min(max_peers, max(SMALL, len(roster))) // 4)
    taken = Counter(range_of(peer) for peer in roster)
    for peer in join:
        addresses = range_of(peer)
        if not addresses or taken[addresses] < most:
            taken[addresses] += 1
            roster.append(peer)
    return roster


class Members:
    """The peers of the stage but ourselves."""

    def __init__(self, me: PeerId, timing: Timing) -> None:
        self._me = me
        self._we_may_offer = True
        self._timing = timing
        self._alive_s = timing.alive_s  # silence after which one counts as absent
        self._seen: dict[PeerId, Seen] = {}
        self._voters: frozenset[PeerId] = frozenset()  # of our roster
        self._back: set[PeerId] = set()  # who voted in an earlier one, and followed already when this one began
        self.cut_off: set[PeerId] = set()  # those that there is no path to
        self.ways: dict[PeerId, PeerId] = {}  # of these: by whom something of its came last
        self._alive: tuple[float, set[PeerId], set[PeerId]] | None = None  # when, without and with ourselves
        self.is_elsewhere: Callable[[Digest], bool] = lambda _: False  # whether a head is known to be on another branch

    def __getitem__(self, peer: PeerId) -> Seen:
        return self._seen[peer]

    @property
    def known(self) -> Collection[PeerId]:
        return self._seen.keys()

    def add(self, peer: PeerId) -> bool:
        """Whether peer was unknown."""
        if peer == self._me or peer in self._seen:
            return False
        if len(self._seen) >= MAX_KNOWN:
            oldest = min(self._seen, key=lambda each: (each in self._voters, self._seen[each].heard_at, each))
            del self._seen[oldest]
            self.cut_off.discard(oldest)
            self.ways.pop(oldest, None)
        self._seen[peer] = Seen()
        self._alive = None
        return True

    def has_voted(self, peer: PeerId) -> bool:
        """Whether it votes in our roster, or did in one that we sat in."""
        return (seen := self._seen.get(peer)) is not None and seen.has_voted

    def seen_in(self, peer: PeerId, addresses: str) -> None:
        """Discovery has named it; our connection to it leads to this range of addresses, "": to none that is known."""
        if peer in self._seen:
            self._seen[peer].is_listed = self._seen[peer].is_met = True
            self._seen[peer].range = addresses or self._seen[peer].range

    def heard(self, peer: PeerId, now: float) -> Seen:
        self.add(peer)
        seen = self._seen[peer]
        seen.heard_at = now
        seen.is_met = True
        seen.refused = False
        self._alive = None
        return seen

    def linked(self, peer: PeerId, now: float) -> None:
        """A message of its came, and by nobody else."""
        if (seen := self._seen.get(peer)) is not None:
            seen.linked_at = now
            self.cut_off.discard(peer)
            self.ways.pop(peer, None)

    def passed(self, peer: PeerId, now: float) -> None:
        """A message of its came by way of another."""
        if (seen := self._seen.get(peer)) is not None:
            seen.passed_at = now

    def comes_by(self, peer: PeerId, way: PeerId) -> bool:
        """Whether it is news that there is one, of a peer that is cut off."""
        is_news = peer in self.cut_off and peer not in self.ways
        if peer in self.cut_off:
            self.ways[peer] = way
        return is_news

    def around(self, peer: PeerId, linked: Sequence[PeerId], turn: int) -> list[PeerId]:
        """By whom one that is cut off is got at: the way that is known, and another one in turn. linked: those to choose from."""
        way, other = self.ways.get(peer), linked[turn % len(linked)] if linked else None
        return [each for each in dict.fromkeys((way, other)) if each is not None and each in linked]

    def cut(self, peer: PeerId, now: float) -> None:
        """A message to it could not be delivered: there is no path to it, unless we hear it. One that is slow has a path, and its line
        must not be told everything twice."""
        seen = self._seen.get(peer)
        if seen is not None and now - seen.linked_at > self._alive_s:
            self.cut_off.add(peer)

    def sit_down(
        self, roster: Collection[PeerId], voters: Collection[PeerId], heads: Collection[Digest], now: float
    ) -> None:
        """With these, as far as it goes on: the more they are, the more seldom each is heard. heads: the newest of our chain."""
        for peer in roster:
            self.add(peer)
        self._voters = frozenset(voters)
        for peer in voters:
            if peer in self._seen:
                self._seen[peer].has_voted = True
        self._back = {
            peer for peer in self.following(heads, now) if self._seen[peer].has_voted and peer not in self._voters
        }
        self._alive_s = self._timing.absent_s(len(roster))

    def is_linked(self, peer: PeerId, now: float) -> bool:
        """Whether we hear it, and it us, as far as is known."""
        seen = self._seen.get(peer)
        return seen is not None and now - seen.linked_at <= self._alive_s and peer not in self.cut_off

    def reachable(self, peers: Iterable[PeerId]) -> list[PeerId]:
        """Those of them that there is a path to, as far as is known; all, if there is one to none."""
        asked = list(peers)
        return [peer for peer in asked if peer not in self.cut_off] or asked

    def is_here(self, peer: PeerId, now: float) -> None:
        """Something of it has come that is no message. Of one that was never heard it tells nothing."""
        seen = self._seen.get(peer)
        if seen is not None and seen.heard_at != NEVER:
            seen.heard_at = max(seen.heard_at, now)
            self.linked(peer, now)
            self._alive = None

    def said(self, peer: PeerId, heartbeat: Heartbeat) -> bool:
        """Whether heartbeat is news: one of a past incarnation is not."""
        seen = self._seen[peer]
        if heartbeat.incarnation < seen.incarnation:
            return False
        if heartbeat.incarnation > seen.incarnation:
            seen.ready_at = None  # another process: what it holds it has not said
            self._alive = None
        seen.incarnation = heartbeat.incarnation
        seen.said = heartbeat
        if heartbeat.ready:
            seen.ready_at = heartbeat.head
        return True

    def left(self, peer: PeerId, incarnation: int) -> None:
        seen = self._seen[peer]
        seen.left = max(seen.left, incarnation)
        seen.incarnation = max(seen.incarnation, incarnation)
        self._alive = None

    def refused(self, peer: PeerId, now: float, *, is_out: bool = False) -> None:
        """Its computer refuses a connection: its process has ended, unless others hear it, and a router refuses us. is_out: it was put out of the run."""
        seen = self._seen.get(peer)
        if seen is not None and is_out:
            seen.is_met = False
        if seen is not None and now - seen.passed_at > self._alive_s:
            seen.refused = True
            self._alive = None

    def is_alive(self, peer: PeerId, now: float) -> bool:
        """Heard within three heartbeats, not refusing, not gone. We ourselves always are."""
        seen = self._seen.get(peer)
        if seen is None:
            return peer == self._me
        return now - seen.heard_at <= self._alive_s and not seen.refused and seen.left < seen.incarnation

    def takes_part(self, peer: PeerId, now: float) -> bool:
        """Alive, and not gone on along another branch as far as we know: of one that has, nothing is to be waited for here."""
        if not self.is_alive(peer, now):
            return False
        head = self.head_of(peer)
        return head is None or not self.is_elsewhere(head)

    def is_paused(self, peer: PeerId) -> bool:
        """Whether it last said that it trains nothing for now."""
        seen = self._seen.get(peer)
        return seen is not None and seen.said is not None and seen.said.paused

    def reports(self, offered: Iterable[PeerId], after: int) -> dict[PeerId, tuple[int, int]]:
        """(round in training, micro-batches done in it) of each as it last said; those that have offered are in round `after` at least."""
        said = {peer: self._seen[peer].said for peer in self._seen}
        reports = {peer: (each.training_round, each.micro_batches) for peer, each in said.items() if each is not None}
        for peer in offered:
            if reports.get(peer, (0, 0))[0] < after:
                reports[peer] = (after, 0)
        return reports

    def we_said(self, *, micro_batches: int, paused: bool) -> None:
        """What our own heartbeats say."""
        self._we_may_offer = not paused or micro_batches > 0

    def may_offer(self, peer: PeerId, now: float) -> bool:
        """Whether a contribution of its can come: it is here, and trains or has trained in its round."""
        if peer == self._me:
            return self._we_may_offer
        if not self.takes_part(peer, now):
            return False
        said = self._seen[peer].said if peer in self._seen else None
        return said is None or not said.paused or said.micro_batches > 0

    def is_surely_gone(self, peer: PeerId) -> bool:
        """Its process refuses connections or said it leaves; silence alone is not sure."""
        seen = self._seen.get(peer)
        return seen is not None and (seen.refused or seen.has_left)

    def alive(self, now: float) -> set[PeerId]:
        """Everyone alive, without ourselves; do not modify."""
        return self._reckoned(now)[1]

    def here(self, now: float) -> set[PeerId]:
        """Everyone alive, and ourselves; do not modify."""
        return self._reckoned(now)[2]

    def _reckoned(self, now: float) -> tuple[float, set[PeerId], set[PeerId]]:
        """Many ask while one event is handled: it is reckoned once, until something is heard or time has passed."""
        if self._alive is None or self._alive[0] != now:
            alive = {peer for peer in self._seen if self.is_alive(peer, now)}
            self._alive = now, alive, alive | {self._me}
        return self._alive

    def unreached(self) -> list[PeerId]:
        """Those that discovery has named, while nobody was ever heard; none once somebody was."""
        if any(seen.heard_at != NEVER for seen in self._seen.values()):
            return []
        return sorted(peer for peer, seen in self._seen.items() if seen.is_listed)

    def head_of(self, peer: PeerId) -> Digest | None:
        seen = self._seen.get(peer)
        return seen.said.head if seen is not None and seen.said is not None else None

    def heads(self, now: float) -> set[Digest]:
        """The ends of the chains of those alive, as they last said."""
        return {
            seen.said.head for peer, seen in self._seen.items() if seen.said is not None and self.is_alive(peer, now)
        }

    def at(self, head: Digest, now: float, *, ready: bool = True) -> set[PeerId]:
        """Those alive whose chain ends in head and who hold the state there; not ready: those who do not yet."""
        return {
            peer
            for peer, seen in self._seen.items()
            if seen.said is not None
            and seen.said.head == head
            and seen.said.ready is ready
            and self.is_alive(peer, now)
        }

    def following(self, heads: Collection[Digest], now: float) -> set[PeerId]:
        """Those alive that held the state at one of these heads when they last said that they hold one."""
        return {peer for peer, seen in self._seen.items() if seen.ready_at in heads and self.is_alive(peer, now)}

    def next_roster(
        self,
        roster: Iterable[PeerId],
        offered: Collection[PeerId],
        heads: Collection[Digest],
        *,
        me_too: bool,
        max_peers: int,
        now: float,
    ) -> tuple[PeerId, ...]:
        """The peers that offered or are alive, in the old order, then those that joined and follow; at most max_peers. heads: the
        newest of our chain. Where rounds are short, or merged a round late, a newcomer is never heard of at the very last."""
        old = tuple(roster)
        stay = [
            peer
            for peer in old
            if (me_too if peer == self._me else self.is_alive(peer, now) or (peer in offered and not self._gone(peer)))
        ]
        join = sorted(peer for peer in self.following(heads, now) if peer not in old)
        return tuple(within_shares(stay, join, self._range_of, max_peers)[:max_peers])

    def why_expelled(
        self, before: Collection[PeerId], after: Collection[PeerId], contributors: Collection[PeerId], now: float
    ) -> str | None:
        """Why nobody in good faith writes this roster, in a certificate with these contributors, or None: members that are here are not in it.
        before: without those that may be left out."""
        here = [peer for peer in before if peer not in after and (peer == self._me or self.is_alive(peer, now))]
        if expelled := [peer for peer in here if peer in contributors]:
            return f"a roster without {expelled[0]}, which has contributed and is here"
        return f"a roster without {len(here)} members that are here" if len(here) > few_of(before) else None

    def why_unseated(
        self,
        after: Collection[PeerId],
        now: float,
        *,
        is_unwanted: Callable[[PeerId], bool],
        max_peers: int,
        leader: PeerId | None = None,
    ) -> str | None:
        """Why this roster leaves out more voters than it may, or None: a third of those here, or who leads a few rounds would be a quorum alone;
        and as it could leave out others each time, who voted before and is back counts, if there is a place for it. A leader may not have
        heard them. is_unwanted: of a peer, whether it may be left out. leader: who has proposed the roster just now."""
        is_here = {peer for peer in self._voters if peer in (self._me, leader) or self.is_alive(peer, now)}
        back = [peer for peer in sorted(self._back) if self.is_alive(peer, now) and not is_unwanted(peer)]
        voters = [peer for peer in is_here if not is_unwanted(peer)]
        places = within_shares(after, [peer for peer in back if peer not in after], self._range_of, max_peers)
        out = [peer for peer in voters if peer not in after] + places[len(after) : max_peers]
        if 3 * len(out) > len({*voters, *back}):
            return f"a roster without {len(out)} voters that are here"
        return None

    def why_unknown(self, before: Collection[PeerId], after: Collection[PeerId], *, vote_at_once: bool) -> str | None:
        """Why this roster cannot be judged yet, or None: it has newcomers that were not met here, whose keys its leader may have made up. That they
        sat in a roster tells nothing of them, as leaders write those. vote_at_once: newcomers do; then one is too many, else many are."""
        unknown = len(self.unmet(before, after))
        few = 0 if vote_at_once else few_of(before)
        return f"a roster with {unknown} newcomers that are not known here" if unknown > few else None

    def unmet(self, before: Collection[PeerId], after: Collection[PeerId]) -> list[PeerId]:
        """The newcomers of this roster that were not met here."""
        newcomers = [peer for peer in after if peer not in before and peer != self._me]
        return [peer for peer in newcomers if peer not in self._seen or not self._seen[peer].is_met]

    def why_crowded(self, before: Collection[PeerId], after: Iterable[PeerId], max_peers: int) -> str | None:
        """Why the newcomers in this roster are too many of one range of addresses, or None."""
        roster = list(after)
        stay = [peer for peer in roster if peer in before]
        kept = within_shares(stay, [peer for peer in roster if peer not in before], self._range_of, max_peers)
        crowd = [peer for peer in roster if peer not in kept]
        return f"a roster with too many newcomers from {self._range_of(crowd[0])}" if crowd else None

    def _range_of(self, peer: PeerId) -> str:
        return seen.range if (seen := self._seen.get(peer)) is not None else ""

    def _gone(self, peer: PeerId) -> bool:
        return (seen := self._seen.get(peer)) is not None and seen.has_left


def name_of(newcomer: PeerId) -> Digest:
    """By which a NACK says that it was not met, among what is not to be had."""
    return sha256(b"newcomer", newcomer.encode())


def few_of(roster: Collection[PeerId]) -> int:
    """Members of a roster that one leader may leave out, or take in unheard of."""
    return max(1, len(roster) // 3)
