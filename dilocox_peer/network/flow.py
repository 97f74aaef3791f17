"""How much of what we serve may be on its way to a peer at once: as much as its line carries in a moment. Pure: times in, bytes out.

What is handed to p2pd goes into buffers of sockets and streams that hold seconds of a slow line, and every message waits behind it. So
fetchers acknowledge what has come (bulk.py), and no more is on its way than keeps the line busy: the window grows while answers come
sooner than `target_s` after the least ever seen, and shrinks while they come later, as in LEDBAT (RFC 6817). All streams to a peer share
one; flows to several peers share a line by its delay, which all of them see. What no round waits for aims at a smaller delay, and so gives way
to what one does.
"""

from collections import OrderedDict

from dilocox_peer.types import PeerId

URGENT_S, BACKGROUND_S = 0.1, 0.04  # of delay beside the least
START_BYTES = 32 * 1024
LEAST_BYTES, MOST_BYTES = 8 * 1024, 16 * 1024 * 1024
GAIN = 0.5  # of the window an answer time; with an answer time's delay 1 swings for ever
REMEMBERED_S = 300.0  # the least answer time: the way to a peer may change
MAX_FLOWS = 1024


class Flow:
    """To one peer. window: bytes that may be on their way."""

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s
        self.window = START_BYTES
        self.in_flight = 0
        self._is_limiting = False  # since the last answer
        self._least_s, self._least_before_s = float("inf"), float("inf")
        self._since_s = float("-inf")

    def may_send(self, num_bytes: int) -> bool:
        """One piece may always be on its way."""
        fits = not self.in_flight or self.in_flight + num_bytes <= self.window
        self._is_limiting = self._is_limiting or not fits
        return fits

    @property
    def piece_bytes(self) -> int:
        """As much as should be sent at a time."""
        return max(LEAST_BYTES // 2, self.window // 16)

    def sent(self, num_bytes: int) -> None:
        self.in_flight += num_bytes

    def lost(self, num_bytes: int) -> None:
        """They will not be acknowledged: their stream has ended."""
        self.in_flight -= num_bytes

    def acknowledged(self, num_bytes: int, answer_s: float, now_s: float) -> None:
        """answer_s: since the last of these bytes was sent."""
        self.in_flight -= num_bytes
        if now_s - self._since_s > REMEMBERED_S:
            self._since_s, self._least_before_s, self._least_s = now_s, self._least_s, float("inf")
        self._least_s = min(self._least_s, answer_s)
        wanted_s = min(self._least_s, self._least_before_s) + self._target_s
        change = num_bytes * max(-GAIN, GAIN * (1 - answer_s / wanted_s))
        if change < 0 or self._is_limiting:
            self.window = int(min(max(self.window + change, LEAST_BYTES), MOST_BYTES))
        self._is_limiting = False


class Flows:
    """Of a transport. The least lately used are forgotten."""

    def __init__(self) -> None:
        self._flows: OrderedDict[tuple[PeerId, bool], Flow] = OrderedDict()

    def to(self, peer: PeerId, *, is_urgent: bool) -> Flow:
        """is_urgent: a round waits for it."""
        key = (peer, is_urgent)
        flow = self._flows.pop(key, None) or Flow(URGENT_S if is_urgent else BACKGROUND_S)
        self._flows[key] = flow
        while len(self._flows) > MAX_FLOWS:
            self._flows.popitem(last=False)
        return flow
