"""`--max-gb-month`: what a peer sends and receives in a calendar month, over restarts. Pure; month_kept.py counts and acts."""

import time
from dataclasses import dataclass, replace
from typing import Self

GB = 1e9
AHEAD_S, BEHIND_S = 600.0, 86400.0  # that a clock says so before it is believed


@dataclass(frozen=True, slots=True)
class Month:
    """A calendar month, and what went over the line in it, in bytes."""

    year: int
    month: int
    sent: int = 0
    received: int = 0

    @classmethod
    def at(cls, now: time.struct_time) -> Self:
        """Nothing counted yet."""
        return cls(now.tm_year, now.tm_mon)

    @property
    def total(self) -> int:
        return self.sent + self.received

    def later(self, other: "Month") -> bool:
        return (self.year, self.month) > (other.year, other.month)

    def __str__(self) -> str:
        return f"{self.year}-{self.month:02}"

    @property
    def next_first(self) -> str:
        """The day on which the next one begins, for people."""
        year, month = (self.year + 1, 1) if self.month == 12 else (self.year, self.month + 1)
        return f"{year}-{month:02}-01"


class Grown:
    """What counters that only grow, but begin at 0 again now and then, have grown by in all: (sent, received)."""

    def __init__(self) -> None:
        self.total = (0, 0)
        self._last = (0, 0)

    def begin_again(self) -> None:
        """They are at 0 now: the next look may find more than the last, and all of it is growth."""
        self._last = (0, 0)

    def take(self, sent: int, received: int) -> tuple[int, int]:
        """What they stand at; the total by now."""
        before, self._last = self._last, (sent, received)
        gone = [now - then if now >= then else now for now, then in zip(self._last, before, strict=True)]
        self.total = (self.total[0] + gone[0], self.total[1] + gone[1])
        return self.total


class MonthlyAllowance:
    """The month by now, from counters that only grow but begin at 0 again with each stay of a peer. Pure."""

    def __init__(self, month: Month, allowed: int | None) -> None:
        """month: as it was left off. allowed: bytes a month, sent and received together; None: any number."""
        self.month = month
        self.allowed = allowed
        self._counters: dict[str, Grown] = {}
        self._other: tuple[Month, float] | None = None  # another month than ours, which the clock says since then

    def on_month(self, now: Month, at_s: float) -> None:
        """now: by the clock on the wall, which may be set. at_s: by one that only runs. The next month begins at once; what lies further ahead has to stand
        for AHEAD_S, so that a moment in another year forgets nothing; and an earlier one for BEHIND_S, with what was counted: a computer without a
        clock of its own starts years ago, and one whose clock was ahead would be away until then."""
        if (now.year, now.month) == (self.month.year, self.month.month):
            self._other = None
            return
        if self._other is None or self._other[0] != now:
            self._other = (now, at_s)
        is_later, stood_s = now.later(self.month), at_s - self._other[1]
        if is_later and (str(now) == self.month.next_first[:-3] or stood_s >= AHEAD_S):
            self.month, self._other = now, None
        elif not is_later and stood_s >= BEHIND_S:
            self.month, self._other = replace(now, sent=self.month.sent, received=self.month.received), None

    def begin_again(self, counter: str) -> None:
        """It is at 0 now."""
        self._counters.setdefault(counter, Grown()).begin_again()

    def take(self, counter: str, sent: int, received: int) -> None:
        """What one of several counters has come to."""
        grown = self._counters.setdefault(counter, Grown())
        before = grown.total
        after = grown.take(sent, received)
        self.month = replace(
            self.month,
            sent=self.month.sent + after[0] - before[0],
            received=self.month.received + after[1] - before[1],
        )

    @property
    def is_used_up(self) -> bool:
        return self.allowed is not None and self.month.total >= self.allowed

    def words(self) -> str:
        """Of an allowance that is used up."""
        assert self.allowed is not None
        return f"the {self.allowed / GB:g} GB of --max-gb-month are used up for {self.month}: this peer comes back on {self.month.next_first}"
