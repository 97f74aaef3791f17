"""Who is there: peers of the stage, when each was last heard, what it last said of itself. Pure.

Liveness is what we heard ourselves, never a lease. It decides who is waited for and who is in the next roster; nothing
that must not fork depends on it.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from dilocox_peer.peer.rounds.messages import Heartbeat
from dilocox_peer.peer.rounds.timing import Timing
from dilocox_peer.types import Digest, PeerId

MAX_KNOWN = 512  # peers remembered; beyond, the one silent for longest goes
NEVER = float("-inf")


@dataclass(slots=True)
class Seen:
    """What is known of one peer. left: the incarnation that said it leaves, -1 if none did."""

    heard_at: float = NEVER
    incarnation: int = 0
    refused: bool = False
    left: int = -1
    said: Heartbeat | None = None
    answered_at: float = NEVER  # when we last told it where we are, unasked

    @property
    def has_left(self) -> bool:
        return self.left >= self.incarnation


class Members:
    """The peers of the stage but ourselves."""

    def __init__(self, me: PeerId, timing: Timing) -> None:
        self._me = me
        self._we_may_offer = True
        self._alive_s = timing.alive_s
        self._seen: dict[PeerId, Seen] = {}

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
            del self._seen[min(self._seen, key=lambda each: (self._seen[each].heard_at, each))]
        self._seen[peer] = Seen()
        return True

    def heard(self, peer: PeerId, now: float) -> Seen:
        self.add(peer)
        seen = self._seen[peer]
        seen.heard_at = now
        seen.refused = False
        return seen

    def said(self, peer: PeerId, heartbeat: Heartbeat) -> bool:
        """Whether heartbeat is news: one of a past incarnation is not."""
        seen = self._seen[peer]
        if heartbeat.incarnation < seen.incarnation:
            return False
        seen.incarnation = heartbeat.incarnation
        seen.said = heartbeat
        return True

    def left(self, peer: PeerId, incarnation: int) -> None:
        seen = self._seen[peer]
        seen.left = max(seen.left, incarnation)
        seen.incarnation = max(seen.incarnation, incarnation)

    def refused(self, peer: PeerId) -> None:
        if peer in self._seen:
            self._seen[peer].refused = True

    def is_alive(self, peer: PeerId, now: float) -> bool:
        """Heard within three heartbeats, not refusing, not gone. We ourselves always are."""
        seen = self._seen.get(peer)
        if seen is None:
            return peer == self._me
        return now - seen.heard_at <= self._alive_s and not seen.refused and seen.left < seen.incarnation

    def is_paused(self, peer: PeerId) -> bool:
        """Whether it last said that it trains nothing for now."""
        seen = self._seen.get(peer)
        return seen is not None and seen.said is not None and seen.said.paused

    def we_said(self, *, micro_batches: int, paused: bool) -> None:
        """What our own heartbeats say."""
        self._we_may_offer = not paused or micro_batches > 0

    def may_offer(self, peer: PeerId, now: float) -> bool:
        """Whether a contribution of its can come: it is here, and trains or has trained in its round."""
        if peer == self._me:
            return self._we_may_offer
        if not self.is_alive(peer, now):
            return False
        said = self._seen[peer].said if peer in self._seen else None
        return said is None or not said.paused or said.micro_batches > 0

    def is_surely_gone(self, peer: PeerId) -> bool:
        """Its process refuses connections or said it leaves; silence alone is not sure."""
        seen = self._seen.get(peer)
        return seen is not None and (seen.refused or seen.has_left)

    def alive(self, now: float) -> set[PeerId]:
        """Everyone alive, without ourselves."""
        return {peer for peer in self._seen if self.is_alive(peer, now)}

    def head_of(self, peer: PeerId) -> Digest | None:
        seen = self._seen.get(peer)
        return seen.said.head if seen is not None and seen.said is not None else None

    def at(self, head: Digest, now: float) -> set[PeerId]:
        """Those alive whose chain ends in head and who hold the state there."""
        return {
            peer
            for peer, seen in self._seen.items()
            if seen.said is not None and seen.said.head == head and seen.said.ready and self.is_alive(peer, now)
        }

    def next_roster(
        self,
        roster: Iterable[PeerId],
        offered: Collection[PeerId],
        head: Digest,
        *,
        me_too: bool,
        max_peers: int,
        now: float,
    ) -> tuple[PeerId, ...]:
        """Who offered or is alive, in the old order, then those that joined and hold the head; at most max_peers."""
        old = tuple(roster)
        stay = [
            peer
            for peer in old
            if (me_too if peer == self._me else self.is_alive(peer, now) or (peer in offered and not self._gone(peer)))
        ]
        join = sorted(peer for peer in self.at(head, now) if peer not in old)
        return tuple([*stay, *join][:max_peers])

    def _gone(self, peer: PeerId) -> bool:
        return (seen := self._seen.get(peer)) is not None and seen.has_left
