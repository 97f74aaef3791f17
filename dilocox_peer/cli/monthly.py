"""`--max-gb-month`: what a peer sends and receives in a calendar month, over restarts. Pure; month_kept.py counts and acts."""

import time
from dataclasses import dataclass, replace
from typing import Self

GB = 1e9


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


class MonthlyAllowance:
    """The month by now, from counters that only grow but begin at 0 again with each stay of a peer. Pure."""

    def __init__(self, month: Month, allowed: int | None) -> None:
        """month: as it was left off. allowed: bytes a month, sent and received together; None: any number."""
        self.month = month
        self.allowed = allowed
        self._last: dict[str, tuple[int, int]] = {}

    def on_month(self, now: Month) -> bool:
        """Whether another month has begun; a clock that goes back begins none."""
        if not now.later(self.month):
            return False
        self.month = now
        return True

    def take(self, counter: str, sent: int, received: int) -> None:
        """What one of several counters has come to."""
        before = self._last.get(counter, (0, 0))
        gone = [now - then if now >= then else now for now, then in zip((sent, received), before, strict=True)]
        self._last[counter] = (sent, received)
        self.month = replace(self.month, sent=self.month.sent + gone[0], received=self.month.received + gone[1])

    @property
    def is_used_up(self) -> bool:
        return self.allowed is not None and self.month.total >= self.allowed

    def words(self) -> str:
        """Of an allowance that is used up."""
        assert self.allowed is not None
        return f"the {self.allowed / GB:g} GB of --max-gb-month are used up for {self.month}: this peer comes back on {self.month.next_first}"
