"""Bodies that wait for their turn under the limits of bandwidth, in order. Pure but for the paces.

Those that stay in the network at home are a line of their own, which no limit of the upload holds up. The place of the first of a line is kept
when it is dropped, for the next if it is of its kind: its bytes are counted as passed. Where the rate of what leaves becomes another meanwhile, so does what
is left of the wait: one that began on a line that nobody has measured yet would last half a minute, where the line is known after three seconds.
"""

from collections import OrderedDict
from collections.abc import Callable, Container
from dataclasses import dataclass

from dilocox_peer.model.activations import Bytes
from dilocox_peer.pipeline.turnstile import Delay, at_once
from dilocox_peer.types import PeerId
from dilocox_peer.wire.hops import Grad, MicroBatchId, Step

QueuedBody = tuple[PeerId, Step | Grad, Bytes]
Rate = Callable[[], float | None]
"""Bytes a second that may leave by now; None: no limit."""

_Key = tuple[PeerId, MicroBatchId, int]


class BodyQueue:
    def __init__(self, pace: Delay, pace_in: Delay, *, answer_bytes: int, rate: Rate = lambda: None) -> None:
        """pace: of the bodies that leave, which goes by rate. pace_in: of the answers to Steps, of answer_bytes each."""
        self._home = _Line(at_once, pace_in, answer_bytes, lambda: None)
        self._away = _Line(pace, pace_in, answer_bytes, rate)

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
    def __init__(self, pace: Delay, pace_in: Delay, answer_bytes: int, rate: Rate) -> None:
        self._pace, self._pace_in, self._rate = pace, pace_in, rate
        self._answer_bytes = answer_bytes
        self.waiting: OrderedDict[_Key, QueuedBody] = OrderedDict()
        self._place: _Place | None = None  # of the first of them; None: it has not asked yet

    @property
    def opens_at(self) -> float:
        return float("inf") if not self.waiting else float("-inf") if self._place is None else self._place.opens_at

    def take(self, now: float, linked: Container[PeerId]) -> QueuedBody | None:
        while self.waiting:
            peer, message, body = next(iter(self.waiting.values()))
            if peer in linked:
                if self._place is None or self._place.kind is not type(message):
                    answer_s = self._pace_in(self._answer_bytes) if isinstance(message, Step) else 0.0
                    self._place = _Place(type(message), now + self._pace(len(body)), now + answer_s, self._rate())
                self._place.follow(self._rate(), now)
                if self._place.opens_at > now:
                    return None
                self._place = None
                return self.waiting.popitem(last=False)[1]
            self.waiting.popitem(last=False)
        return None


@dataclass(slots=True)
class _Place:
    """In a line. kind: of the message that asked. leaves_at: by the limit of what leaves, at that rate. answered_at: by that of what comes in."""

    kind: type[Step | Grad]
    leaves_at: float
    answered_at: float
    rate: float | None

    @property
    def opens_at(self) -> float:
        return max(self.leaves_at, self.answered_at)

    def follow(self, rate: float | None, now: float) -> None:
        """rate: by now."""
        if rate == self.rate or self.rate is None:
            self.rate = rate
            return
        left_s = max(0.0, self.leaves_at - now)
        self.leaves_at = now + (0.0 if rate is None else left_s * self.rate / rate)
        self.rate = rate
