"""`--hours 22:00-07:00`: when a volunteer's machine may train. The schedule is pure; `keep_hours` pauses and resumes."""

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from dilocox_peer.errors import ConfigError

DAY_S = 24 * 3600
LOOK_S = 30.0  # the clock may be set, the machine may sleep
WHO = "hours"
_SPAN = re.compile(r"(\d{1,2}):(\d{2})-(\d{1,2}):(\d{2})")


@dataclass(frozen=True, slots=True)
class Hours:
    """A stretch of every day, local time, that may go over midnight; seconds since midnight, end not included."""

    begin_s: int
    end_s: int

    @classmethod
    def parse(cls, text: str) -> "Hours":
        """Raises ConfigError."""
        found = _SPAN.fullmatch(text.strip())
        if found is None:
            raise ConfigError(f"--hours {text!r}: write it as 22:00-07:00")
        numbers = [int(each) for each in found.groups()]
        begin, end = numbers[:2], numbers[2:]
        if any(hour > 24 or minute > 59 or (hour == 24 and minute) for hour, minute in (begin, end)):
            raise ConfigError(f"--hours {text!r}: hours go from 00:00 to 24:00")
        begin_s, end_s = (3600 * hour + 60 * minute for hour, minute in (begin, end))
        if begin_s % DAY_S == end_s % DAY_S:
            raise ConfigError(f"--hours {text!r} is empty or the whole day: leave it out to train at any time")
        return cls(begin_s % DAY_S, end_s)

    def has(self, second: float) -> bool:
        """Whether that second of the day is within."""
        second %= DAY_S
        if self.begin_s < self.end_s:
            return self.begin_s <= second < self.end_s
        return second >= self.begin_s or second < self.end_s

    def until_change_s(self, second: float) -> float:
        """Seconds from that second of the day until `has` changes."""
        second %= DAY_S
        edge = self.end_s if self.has(second) else self.begin_s
        return (edge - second) % DAY_S or DAY_S

    def __str__(self) -> str:
        clock = [f"{each // 3600:02}:{each % 3600 // 60:02}" for each in (self.begin_s, self.end_s)]
        return "-".join(clock)


class Pausable(Protocol):
    """The session's part in it."""

    def pause(self, who: str, why: str) -> None: ...

    def resume(self, who: str, why: str) -> None: ...


def second_of_day() -> float:
    """Of this machine's local time."""
    now = time.localtime()
    return now.tm_hour * 3600 + now.tm_min * 60 + now.tm_sec


async def keep_hours(hours: Hours, peer: Pausable, second: Callable[[], float] = second_of_day) -> None:
    """Pauses outside of the hours and resumes within, until cancelled."""
    was_within: bool | None = None
    while True:
        now = second()
        within = hours.has(now)
        if within != was_within:
            if within:
                peer.resume(WHO, f"it is within --hours {hours}")
            else:
                peer.pause(WHO, f"outside --hours {hours}")
            was_within = within
        await asyncio.sleep(min(LOOK_S, hours.until_change_s(now)))
