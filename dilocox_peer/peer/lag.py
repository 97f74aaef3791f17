"""How late the event loop runs its callbacks: the number that says whether training starves the network."""

import asyncio
from collections import deque

INTERVAL_S = 0.02
WINDOW = 1500  # samples: the last half minute


class LoopLag:
    """Sleeps INTERVAL_S again and again and keeps how much later than asked it woke."""

    def __init__(self) -> None:
        self.late_s: deque[float] = deque(maxlen=WINDOW)

    async def watch(self) -> None:
        """Measures until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + INTERVAL_S
            await asyncio.sleep(INTERVAL_S)
            self.late_s.append(max(0.0, loop.time() - due))

    @property
    def p99_ms(self) -> float:
        """99th percentile of the window in milliseconds; 0 before the first sample."""
        if not self.late_s:
            return 0.0
        ordered = sorted(self.late_s)
        return 1000 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]

    @property
    def max_ms(self) -> float:
        """The longest standstill of the window in milliseconds; 0 before the first sample."""
        return 1000 * max(self.late_s, default=0.0)
