"""The volunteer's hours: which seconds of a week they hold, when that changes, and what is no schedule."""

import asyncio
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox_peer.cli.hours import DAY_S, WEEK_S, Hours, keep_hours
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
    assert str(hours) == "9:30-24:00"


def test_days_of_the_week_have_their_own():
    hours = Hours.parse("mon-fri 22:00-07:00, Sat-Sun 00:00-24:00")
    friday, saturday, sunday = (day * DAY_S for day in (4, 5, 6))
    at = {0: False, 7.5 * HOUR: False, 22 * HOUR: True, DAY_S: True, DAY_S + 7 * HOUR: False, friday + 21 * HOUR: False}
    assert {second: hours.has(second) for second in at} == {**at, 0: False}
    assert hours.has(friday + 23 * HOUR)
    assert hours.until_change_s(friday + 22 * HOUR) == 2 * HOUR + 2 * DAY_S, "the night and the weekend are one stretch"
    assert all(hours.has(second) for second in (saturday, saturday + 12 * HOUR, sunday, sunday + 23.9 * HOUR))
    assert not hours.has(WEEK_S), "Monday's first hours are not the weekend's"
    assert hours.until_change_s(0) == 22 * HOUR


def test_a_night_that_begins_on_sunday_ends_on_monday():
    hours = Hours.parse("fri-sun 23:00-05:00")
    assert [hours.has(day * DAY_S + second) for day, second in ((0, 4 * HOUR), (0, 5 * HOUR), (6, 23 * HOUR), (5, 4 * HOUR), (4, 4 * HOUR))] == [
        True, False, True, True, False,
    ]  # fmt: skip
    assert hours.until_change_s(6 * DAY_S + 23 * HOUR) == 6 * HOUR
    assert Hours.parse("sun-mon 1:00-2:00").has(HOUR)
    assert Hours.parse("sun-mon 1:00-2:00").has(6 * DAY_S + HOUR)
    assert not Hours.parse("sun-mon 1:00-2:00").has(2 * DAY_S + HOUR)


@pytest.mark.parametrize("text", ["", "\u0662\u0662:00-07:00", "22-7", "22:00", "25:00-07:00", "22:60-07:00", "07:00-07:00", "00:00-24:00", "a:b-c:d", "24:30-07:00", "mo 1:00-2:00", "mon-fri", "mon 1:00-1:00", "1:00-2:00,", "mon-sun 00:00-24:00", "00:00-12:00, 12:00-24:00"])  # fmt: skip
def test_what_is_no_schedule_is_refused_in_one_line(text):
    with pytest.raises(ConfigError, match=r"--hours .*") as error:
        Hours.parse(text)
    assert "\n" not in str(error.value)


@given(
    spans=st.lists(
        st.tuples(st.sampled_from(["", "mon ", "tue-thu ", "sat-mon "]), st.integers(0, 1439), st.integers(0, 1440)),
        min_size=1,
        max_size=4,
    ),
    second=st.integers(0, WEEK_S - 1),
)
def test_has_changes_exactly_when_it_says(spans, second):
    text = ", ".join(
        f"{days}{begin // 60:02}:{begin % 60:02}-{end // 60:02}:{end % 60:02}" for days, begin, end in spans
    )
    try:
        hours = Hours.parse(text)
    except ConfigError:
        return
    wait_s = hours.until_change_s(second)
    assert 0 < wait_s <= WEEK_S
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
        keep_task(stack, broken, "--hours", observer)
        for _ in range(3):  # turns of the loop: it begins, it fails, that is told
            await asyncio.sleep(0)
        assert [(event.where, "no clock" in event.reason) for event in events] == [("--hours", True)]
        assert "going on in 1 s" in events[0].reason


def test_midnight_at_the_beginning_of_a_span_is_the_end_of_its_day():
    hours = Hours.parse("sat 24:00-02:00")
    sunday = 6 * 86_400
    assert hours.has(sunday + 3600)
    assert not hours.has(5 * 86_400 + 3600)
    assert Hours.parse("sun 24:00-02:00").has(3600), "Monday's"
