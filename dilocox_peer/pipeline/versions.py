"""Which version of the parameters a micro-batch uses at this peer, and when the next one is made.

A forward and its backward use the same version. A step (or the outer shift) makes the next one; at most two are alive:

V1 every micro-batch in flight is bound to `current` or `current - 1`.
V2 a version is made only when nothing in flight is bound to `current - 1`, so that V1 goes on holding.
V3 a step takes all micro-batches completed since the last one, of whichever version.

`carry` steps while others are in flight; `flush` admits `accumulate` micro-batches, drains, steps (the paper's form).
A later stage of several columns admits up to twice as many: where routes have mixed once, its count is not its origins',
and one that stopped at exactly `accumulate` would drain at another moment than they do (8 stages x 4: .65 of the ideal
instead of .82). With one origin it comes to the same. Pure: no time, no torch.
"""

import math
from typing import Literal

Mode = Literal["carry", "flush"]


class Versions:
    """The versions of one peer's parameters, counted from 0."""

    def __init__(self, mode: Mode, accumulate: int, *, admit: int = 0, most: float = math.inf) -> None:
        """admit: micro-batches begun between two steps of a flush, at most; 0 for `accumulate`. most: in flight at once, what there is memory for."""
        assert accumulate >= 1, accumulate
        self._steps_admitted = (admit or accumulate) // accumulate
        self.mode = mode
        self._most = most
        self.accumulate = accumulate
        self.current = 0
        self.completed = 0  # since the last step
        self._young = 0  # in flight, bound to current
        self._old = 0  # in flight, bound to current - 1
        self._is_shifted = False

    @property
    def in_flight(self) -> int:
        return self._young + self._old

    @property
    def live(self) -> tuple[int, ...]:
        """The versions that somebody still needs."""
        return (self.current - 1, self.current) if self._old else (self.current,)

    @property
    def may_admit(self) -> bool:
        """Whether another forward may start. Counting what is in flight, not what was admitted: a cancelled
        micro-batch makes room for another, or a flush would wait for ever."""
        if self.in_flight >= self._most:
            return False
        admit = self._steps_admitted * self.accumulate
        return self.mode == "carry" or self.completed + self.in_flight < admit

    @property
    def step_is_due(self) -> bool:
        if self.completed < self.accumulate:
            return False
        return self._old == 0 if self.mode == "carry" else self.in_flight == 0

    @property
    def publish_is_due(self) -> bool:
        return self._is_shifted and self._old == 0

    def bind(self) -> int:
        """A forward starts: the version it and its backward use."""
        self._young += 1
        return self.current

    def complete(self, version: int) -> None:
        """The backward of a micro-batch bound to version is in the accumulated gradient."""
        self.release(version)
        self.completed += 1

    def release(self, version: int) -> None:
        """A micro-batch bound to version is given up."""
        if version == self.current:
            self._young -= 1
        else:
            assert version == self.current - 1, f"bound to version {version}, current is {self.current}"
            self._old -= 1
        assert self._young >= 0, self._young
        assert self._old >= 0, self._old

    def take_step(self) -> int:
        """A step begins; how many micro-batches are in it."""
        taken, self.completed = self.completed, 0
        self._is_shifted = False  # the step's version has the shift in it
        return taken

    def shifted(self) -> None:
        """The master parameters were changed from outside; `current` does not have it yet."""
        self._is_shifted = True

    def take_publish(self) -> None:
        self._is_shifted = False

    def made(self) -> None:
        """The next version exists."""
        assert self._old == 0, f"version {self.current + 1} made while {self._old} are bound to {self.current - 1}"
        self.current += 1
        self._old, self._young = self._young, 0
