"""`--hours 22:00-07:00`, `--hours "mon-fri 22:00-07:00, sat-sun 00:00-24:00"`: when a volunteer's machine may train. The schedule is pure;
`keep_hours` pauses and resumes."""

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from dilocox_peer.errors import ConfigError

DAY_S = 24 * 3600
WEEK_S = 7 * DAY_S
LOOK_S = 30.0  # the clock may be set, the machine may sleep
WHO = "hours"
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_SPAN = re.compile(r"(?:([a-z]{3})(?:-([a-z]{3}))? +)?([0-9]{1,2}):([0-9]{2})-([0-9]{1,2}):([0-9]{2})")


@dataclass(frozen=True, slots=True)
class Hours:
    """Stretches of a week, local time; spans: (begin, end) in seconds since Monday's midnight, in order, apart, end not included. One may
    go over the end of the week: then its end is beyond it."""

    spans: tuple[tuple[int, int], ...]
    text: str = ""

    @classmethod
    def parse(cls, text: str) -> "Hours":
        """Entries with commas between: a day or a range of days (none: every day), and a span that may go over midnight. Raises ConfigError."""
        stretches = [stretch for entry in text.lower().split(",") for stretch in _stretches(entry.strip(), text)]
        inside = sorted({(begin + week, end + week) for begin, end in stretches for week in (-WEEK_S, 0, WEEK_S)})
        joined: list[tuple[int, int]] = []
        for begin, end in inside:
            if joined and begin <= joined[-1][1]:
                joined[-1] = joined[-1][0], max(end, joined[-1][1])
            else:
                joined.append((begin, end))
        spans = tuple((begin, end) for begin, end in joined if 0 <= begin < WEEK_S)
        if not spans or any(end - begin >= WEEK_S for begin, end in joined):
            raise ConfigError(f"--hours {text!r} is the whole week: leave it out to train at any time")
        return cls(spans, text.strip())

    def has(self, second: float) -> bool:
        """Whether that second of the week is within."""
        second %= WEEK_S
        return any(begin <= second < end or begin <= second + WEEK_S < end for begin, end in self.spans)

    def until_change_s(self, second: float) -> float:
        """Seconds from that second of the week until `has` changes."""
        second %= WEEK_S
        edges = {edge % WEEK_S for span in self.spans for edge in span}
        return min((edge - second) % WEEK_S or WEEK_S for edge in edges)

    def __str__(self) -> str:
        return self.text


def _stretches(entry: str, text: str) -> list[tuple[int, int]]:
    """Of one entry, one for each day. Raises ConfigError naming the text that it is of."""
    found = _SPAN.fullmatch(entry)
    if found is None or any(day is not None and day not in DAYS for day in found.groups()[:2]):
        raise ConfigError(f"--hours {text!r}: write it as 22:00-07:00, or as mon-fri 22:00-07:00, sat-sun 00:00-24:00")
    first, last, *clock = found.groups()
    numbers = [int(each) for each in clock]
    if any(hour > 24 or minute > 59 or (hour == 24 and minute) for hour, minute in (numbers[:2], numbers[2:])):
        raise ConfigError(f"--hours {text!r}: hours go from 00:00 to 24:00")
    begin_s, end_s = 3600 * numbers[0] + 60 * numbers[1], 3600 * numbers[2] + 60 * numbers[3]
    if begin_s % DAY_S == end_s % DAY_S and (first is None or begin_s == end_s):
        raise ConfigError(f"--hours {text!r} is empty or the whole day: leave it out to train at any time")
    length_s = (end_s - begin_s) % DAY_S or DAY_S
    day = DAYS.index(first) if first is not None else 0
    count = 7 if first is None else 1 if last is None else (DAYS.index(last) - day) % 7 + 1
    # 24:00 is the next day's beginning.
    begins = [((day + number) * DAY_S + begin_s) % (7 * DAY_S) for number in range(count)]
    return [(begin, begin + length_s) for begin in begins]


class Pausable(Protocol):
    """The session's part in it."""

    def pause(self, who: str, why: str) -> None: ...

    def resume(self, who: str, why: str) -> None: ...


def second_of_week() -> float:
    """Of this machine's local time, since Monday's midnight."""
    now = time.localtime()
    return now.tm_wday * DAY_S + now.tm_hour * 3600 + now.tm_min * 60 + now.tm_sec


async def keep_hours(hours: Hours, peer: Pausable, second: Callable[[], float] = second_of_week) -> None:
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
