"""Bodies that wait for their turn under the limits of bandwidth, in order. Pure but for the paces.

Those that stay in the network at home are a line of their own, which no limit of the upload holds up. The place of the first of a line is kept
when it is dropped, for the next if it is of its kind: its bytes are counted as passed.
"""

from collections import OrderedDict
from collections.abc import Container

from dilocox_peer.model.activations import Bytes
from dilocox_peer.pipeline.turnstile import Delay, at_once
from dilocox_peer.types import PeerId
from dilocox_peer.wire.hops import Grad, MicroBatchId, Step

QueuedBody = tuple[PeerId, Step | Grad, Bytes]
_Key = tuple[PeerId, MicroBatchId, int]


class BodyQueue:
    def __init__(self, pace: Delay, pace_in: Delay, *, answer_bytes: int) -> None:
        """pace: of the bodies that leave. pace_in: of the answers to Steps, of answer_bytes each."""
        self._home, self._away = (_Line(each, pace_in, answer_bytes) for each in (at_once, pace))

    @property
    def opens_at(self) -> float:
        """When `take` has one to give, as far as is known; inf when nothing waits."""
        return min(self._home.opens_at, self._away.opens_at)

    def add(self, peer: PeerId, message: Step | Grad, body: Bytes, *, at_home: bool = False) -> None:
        """An answer that is asked for again while it waits keeps its place."""
        line, other = (self._home, self._away) if at_home else (self._away, self._home)
        # The call that it is part of: a peer is our caller or our callee, so the numbers are one side's.
        key = (peer, message.id, message.call)
        other.waiting.pop(key, None)
        line.waiting[key] = (peer, message, body)

    def drop(self, peer: PeerId, id_: MicroBatchId, call: int) -> None:
        """Nobody wants it any more."""
        for line in (self._home, self._away):
            line.waiting.pop((peer, id_, call), None)

    def take(self, now: float, linked: Container[PeerId]) -> QueuedBody | None:
        """The next whose time has come. Those of peers that are not linked are dropped."""
        return self._home.take(now, linked) or self._away.take(now, linked)


class _Line:
    def __init__(self, pace: Delay, pace_in: Delay, answer_bytes: int) -> None:
        self._pace, self._pace_in = pace, pace_in
        self._answer_bytes = answer_bytes
        self.waiting: OrderedDict[_Key, QueuedBody] = OrderedDict()
        self._at: float | None = None  # when the first of them may go; None: it has not asked yet
        self._asked_for: type[Step | Grad] = Step

    @property
    def opens_at(self) -> float:
        return float("inf") if not self.waiting else float("-inf") if self._at is None else self._at

    def take(self, now: float, linked: Container[PeerId]) -> QueuedBody | None:
        while self.waiting:
            peer, message, body = next(iter(self.waiting.values()))
            if peer in linked:
                if self._at is None or self._asked_for is not type(message):
                    self._asked_for = type(message)
                    answer_s = self._pace_in(self._answer_bytes) if isinstance(message, Step) else 0.0
                    self._at = now + max(self._pace(len(body)), answer_s)
                if self._at > now:
                    return None
                self._at = None
                return self.waiting.popitem(last=False)[1]
            self.waiting.popitem(last=False)
        return None
