"""The time of a simulated world: one heap of what happens when, played in order. What all worlds have in common."""

import heapq
from collections.abc import Callable


class Clockwork:
    """now: seconds since the world began. tracing: is told of every line of `trace`."""

    def __init__(self, tracing: Callable[[str], None] | None = None) -> None:
        self.now = 0.0
        self.num_events = 0
        self.tracing = tracing
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0

    def at(self, time: float, act: Callable[[], None]) -> None:
        """act happens then; of two at one time the one that was asked for first."""
        self._sequence += 1
        heapq.heappush(self._heap, (time, self._sequence, act))

    def run(self, until: float, stop: Callable[[], bool] | None = None) -> bool:
        """Lets time pass; True if stop said so before then."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= until:
            self.now, _, act = pop(heap)
            self.num_events += 1
            act()
            if stop is not None and stop():
                return True
        self.now = until
        return False

    def trace(self, line: str) -> None:
        if self.tracing is not None:
            self.tracing(f"{self.now:9.4f} {line}")
