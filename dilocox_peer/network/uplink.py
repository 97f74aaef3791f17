"""How fast this peer's bulk replies leave it. Pure: times in, a rate out."""

from collections import deque

SMALLEST_BYTES, SHORTEST_S = 1 << 20, 1.0
"""Of a busy stretch that counts, one of them: less tells of the way there and back, not of the link."""
STRETCHES = 8


class UplinkMeter:
    """Bytes over the time in which at least one reply was being sent, so that replies side by side count as one link."""

    def __init__(self) -> None:
        self._sending = 0
        self._since_s = 0.0
        self._bytes = 0
        self._stretches: deque[tuple[int, float]] = deque(maxlen=STRETCHES)

    def begin(self, now_s: float) -> None:
        """A reply begins. Pair it with `end`."""
        if self._sending == 0:
            self._since_s, self._bytes = now_s, 0
        self._sending += 1

    def sent(self, num_bytes: int) -> None:
        """So many have come where they were sent."""
        self._bytes += num_bytes

    def end(self, now_s: float) -> None:
        self._sending -= 1
        seconds = now_s - self._since_s
        if (
            self._sending == 0
            and self._bytes
            and seconds > 0
            and (self._bytes >= SMALLEST_BYTES or seconds >= SHORTEST_S)
        ):
            self._stretches.append((self._bytes, seconds))

    @property
    def is_sending(self) -> bool:
        return self._sending > 0

    @property
    def bps(self) -> float:
        """Bits a second over the last stretches; 0: nothing measured."""
        seconds = sum(each for _, each in self._stretches)
        return 8 * sum(each for each, _ in self._stretches) / seconds if seconds > 0 else 0.0
