"""The volunteer's hours: which seconds of a day they hold, when that changes, and what is no schedule."""

import asyncio
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox_peer.cli.hours import DAY_S, Hours, keep_hours
from dilocox_peer.cli.join import keep_task
from dilocox_peer.cli.observer import Observer
from dilocox_peer.errors import ConfigError

HOUR = 3600


def test_hours_over_midnight():
    hours = Hours.parse("22:00-07:00")
    assert [hours.has(hour * HOUR) for hour in (21, 22, 0, 6, 7, 12)] == [False, True, True, True, False, False]
    assert hours.until_change_s(23 * HOUR) == 8 * HOUR
    assert hours.until_change_s(12 * HOUR) == 10 * HOUR


def test_hours_within_a_day_may_end_with_it():
    hours = Hours.parse("9:30-24:00")
    assert [hours.has(second) for second in (0, 9.4 * HOUR, 9.5 * HOUR, DAY_S - 1)] == [False, False, True, True]
    assert hours.until_change_s(DAY_S - 1) == 1
    assert str(hours) == "09:30-24:00"


@pytest.mark.parametrize("text", ["", "22-7", "22:00", "25:00-07:00", "22:60-07:00", "07:00-07:00", "00:00-24:00", "a:b-c:d", "24:30-07:00"])  # fmt: skip
def test_what_is_no_schedule_is_refused_in_one_line(text):
    with pytest.raises(ConfigError, match=r"--hours .*") as error:
        Hours.parse(text)
    assert "\n" not in str(error.value)


@given(begin=st.integers(0, 1439), end=st.integers(0, 1440), second=st.integers(0, DAY_S - 1))
def test_has_changes_exactly_when_it_says(begin, end, second):
    if begin % 1440 == end % 1440:
        return
    hours = Hours(60 * begin, 60 * end)
    wait_s = hours.until_change_s(second)
    assert 0 < wait_s <= DAY_S
    assert hours.has(second + wait_s) != hours.has(second)
    assert hours.has(second + wait_s - 1) == hours.has(second)


async def test_outside_of_them_the_peer_is_paused_for_that_reason_alone(monkeypatch):
    told: list[Any] = []

    class Peer:
        def pause(self, who, why):
            told.append(("pause", who))

        def resume(self, who, why):
            told.append(("resume", who))

    clock = iter([23 * HOUR, 23 * HOUR + 1, 8 * HOUR, 9 * HOUR, 22 * HOUR])

    async def no_wait(seconds):
        assert seconds <= 30

    monkeypatch.setattr("dilocox_peer.cli.hours.asyncio.sleep", no_wait)
    with suppress(RuntimeError):
        await keep_hours(Hours.parse("22:00-07:00"), Peer(), lambda: next(clock))
    assert told == [("resume", "hours"), ("pause", "hours"), ("resume", "hours")]
    assert asyncio.get_running_loop().is_running()


async def test_hours_that_fail_are_told_and_do_not_end_the_peer():
    events: list[Any] = []

    async def broken() -> None:
        raise OSError("no clock")

    observer = Observer([events.append])
    async with AsyncExitStack() as stack:
        keep_task(stack, broken(), "--hours", observer)
        for _ in range(3):  # turns of the loop: it begins, it fails, that is told
            await asyncio.sleep(0)
        assert [(event.where, "no clock" in event.reason) for event in events] == [("--hours", True)]
