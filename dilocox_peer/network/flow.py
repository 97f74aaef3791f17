"""How much of what we serve may be on its way to a peer at once: as much as its line carries in a moment. Pure: times in, bytes out.

What is handed to p2pd goes into buffers of sockets and streams that hold seconds of a slow line, and every message waits behind it. So
fetchers acknowledge what has come (bulk.py), and no more is on its way than keeps the line busy: the window grows while answers come
sooner than `target_s` after the least ever seen, and shrinks while they come later, as in LEDBAT (RFC 6817). All streams to a peer share
one; flows to several peers share a line by its delay, which all of them see.

What no round waits for gives way to what one does: it aims at a smaller delay, which counts where the narrow place is elsewhere, and while
we send something urgent it may take a tenth of that beside it, and half of what our line carries beyond that: a member on a slow line, or one that
reads slowly on purpose, does not keep the line for itself.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from dilocox_peer.types import PeerId

URGENT_S, BACKGROUND_S = 0.15, 0.06  # of delay beside the least
NEWEST = 8  # answers whose soonest counts: what else is late then is this computer or the other, not the line
START_BYTES = 32 * 1024
LEAST_BYTES, MOST_BYTES = 8 * 1024, 16 * 1024 * 1024
PIECE_BYTES = 16 * 1024
GAIN = 0.5  # of the window an answer time; with an answer time's delay 1 swings for ever
REMEMBERED_S = 300.0  # the least answer time: the way to a peer may change
MAX_FLOWS = 1024
SPARE = 0.5  # of what the line carries beyond what is urgent
RATE_OVER_S = 1.0
BESIDE, MOST_BESIDE_BYTES = 0.1, 256 * 1024  # of what is urgent, that the rest may take beside it; no more is saved up
TRICKLE_S = 3.0  # a piece goes in any case after so long: nobody is to think that we are gone


@dataclass(slots=True)
class Uplink:
    """What the flows of a transport know of each other. line: bytes a second that it is known to carry, None: not known. num_urgent: streams of what a round waits
    for. beside: bytes of the rest that may go meanwhile."""

    line: Callable[[], float | None] = lambda: None
    num_urgent: int = 0
    beside: float = 0.0
    _urgent_bytes: float = 0.0  # sent lately
    _looked_s: float = float("-inf")

    def sent_urgent(self, num_bytes: int, now_s: float) -> None:
        self.look(now_s)
        self._urgent_bytes += num_bytes
        self.beside = min(self.beside + BESIDE * num_bytes, MOST_BESIDE_BYTES)

    def look(self, now_s: float) -> None:
        """What the line had to spare since the last look may go beside. Of a line that nobody has measured nothing is known to be: taken for a fast one,
        a slow one would be filled with what can wait."""
        passed_s = min(max(now_s - self._looked_s, 0.0), RATE_OVER_S)
        self._looked_s = now_s
        spare = (self.line() or 0.0) - self._urgent_bytes / RATE_OVER_S
        self._urgent_bytes *= math.exp(-passed_s / RATE_OVER_S)
        self.beside = min(self.beside + SPARE * max(spare, 0.0) * passed_s, MOST_BESIDE_BYTES)


class Flow:
    """To one peer. window: bytes that may be on their way."""

    def __init__(self, uplink: Uplink, *, is_urgent: bool) -> None:
        self._uplink, self._is_urgent = uplink, is_urgent
        self._target_s = URGENT_S if is_urgent else BACKGROUND_S
        self._sent_s = float("-inf")
        self._answers_s: deque[float] = deque(maxlen=NEWEST)
        self.window = START_BYTES
        self.in_flight = 0
        self._is_limiting = False  # since the last answer
        self._least_s, self._least_before_s = float("inf"), float("inf")
        self._since_s = float("-inf")

    def opened(self) -> None:
        """A stream. Pair it with `closed`."""
        self._uplink.num_urgent += self._is_urgent

    def closed(self, num_lost: int) -> None:
        """num_lost: bytes of the stream that were sent and will not be acknowledged."""
        self._uplink.num_urgent -= self._is_urgent
        self.in_flight -= num_lost

    def may_send(self, num_bytes: int, now_s: float, *, of_stream: int) -> bool:
        """of_stream: bytes of the same stream that are on their way. One piece of each may always be: else those that share a
        flow could starve one another."""
        if self._gives_way:
            self._uplink.look(now_s)
            if self._uplink.beside < num_bytes and now_s - self._sent_s < TRICKLE_S:
                return False
        fits = not of_stream or self.in_flight + num_bytes <= self.window
        self._is_limiting = self._is_limiting or not fits
        return fits

    @property
    def _gives_way(self) -> bool:
        return not self._is_urgent and self._uplink.num_urgent > 0

    @property
    def piece_bytes(self) -> int:
        """Bytes that should be sent at a time: a quarter of a small window, as each piece costs a packet and an acknowledgement; a sixteenth of a
        large one, so that acknowledgements keep coming."""
        return max(LEAST_BYTES // 2, min(self.window // 4, PIECE_BYTES), self.window // 16)

    def sent(self, num_bytes: int, now_s: float) -> None:
        self.in_flight += num_bytes
        self._sent_s = now_s
        if self._is_urgent:
            self._uplink.sent_urgent(num_bytes, now_s)
        elif self._gives_way:
            self._uplink.beside = max(0.0, self._uplink.beside - num_bytes)

    def acknowledged(self, num_bytes: int, answer_s: float, now_s: float) -> None:
        """answer_s: since the last of these bytes was sent."""
        self.in_flight -= num_bytes
        if now_s - self._since_s > REMEMBERED_S:
            self._since_s, self._least_before_s, self._least_s = now_s, self._least_s, float("inf")
        self._least_s = min(self._least_s, answer_s)
        self._answers_s.append(answer_s)
        wanted_s = min(self._least_s, self._least_before_s) + self._target_s
        change = num_bytes * max(-GAIN, GAIN * (1 - min(self._answers_s) / wanted_s))
        if change < 0 or self._is_limiting:
            self.window = int(min(max(self.window + change, LEAST_BYTES), MOST_BYTES))
        self._is_limiting = False


class Flows:
    """Of a transport. The least lately used are forgotten."""

    def __init__(self, line: Callable[[], float | None] = lambda: None) -> None:
        """line: bytes a second that ours carries, as far as is known."""
        self._uplink = Uplink(line)
        self._flows: OrderedDict[tuple[PeerId, bool], Flow] = OrderedDict()

    def to(self, peer: PeerId, *, is_urgent: bool) -> Flow:
        """is_urgent: a round waits for it."""
        key = (peer, is_urgent)
        flow = self._flows.pop(key, None) or Flow(self._uplink, is_urgent=is_urgent)
        self._flows[key] = flow
        while len(self._flows) > MAX_FLOWS:
            self._flows.popitem(last=False)
        return flow
