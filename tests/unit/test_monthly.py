"""A month's traffic: what is counted, what is kept, and what a peer does when its part is used up."""

import asyncio
import time
from collections.abc import Awaitable
from typing import Any

import pytest

from dilocox_peer.cli.month_kept import FILE_NAME, MonthKept, read_month, run_within, write_month
from dilocox_peer.cli.monthly import AHEAD_S, BEHIND_S, Month, MonthlyAllowance
from dilocox_peer.events import Left, PeerStarted, PipelineProgress, Remark, TrainingProgress
from dilocox_peer.events_of_costs import LineUsed, MonthCounted
from dilocox_peer.types import PeerId, RunId

NOVEMBER, DECEMBER = Month(2026, 11), Month(2026, 12)
A_DAY_IN_NOVEMBER = time.strptime("2026-11-23", "%Y-%m-%d")
A_DAY_IN_DECEMBER = time.strptime("2026-12-01", "%Y-%m-%d")


def progress(sent: int, received: int, *, daemon: tuple[int, int] = (0, 0)) -> TrainingProgress:
    return TrainingProgress(
        1, 1, 1, 1.0, 1.0, bytes_sent=sent, bytes_received=received, lag_ms_p99=0.0,
        daemon_bytes_sent=daemon[0], daemon_bytes_received=daemon[1],
    )  # fmt: skip


def of_links(sent: int, received: int) -> PipelineProgress:
    return PipelineProgress(1, 0.0, 0, 0, 1, 0, 0, bytes_sent=sent, bytes_received=received)


def test_a_counter_that_began_again_counts_from_there():
    allowance = MonthlyAllowance(NOVEMBER, None)
    allowance.take("rounds", 100, 10)
    allowance.take("rounds", 30, 12)
    assert (allowance.month.sent, allowance.month.received) == (130, 12)


def test_counters_begin_again_each_for_itself():
    allowance = MonthlyAllowance(NOVEMBER, None)
    allowance.take("rounds", 100, 100)
    allowance.take("links", 500, 500)
    allowance.take("links", 20, 20)
    allowance.take("rounds", 110, 110)
    assert (allowance.month.sent, allowance.month.received) == (630, 630)


def test_a_stay_that_moved_more_than_the_one_before_is_counted_whole(tmp_path):
    events: list[Any] = []
    counted = MonthKept(tmp_path, None, events.append, local=lambda: A_DAY_IN_NOVEMBER)
    started = PeerStarted(PeerId("me"), RunId("ab" * 32), 0, ())
    for number in (1, 2):
        counted.take(started)
        counted.take(progress(100 * number, 10 * number))
        counted.take(of_links(1000 * number, 1))
    counted.keep()
    assert (events[-1].sent, events[-1].received) == (3300, 32)


def test_what_the_line_carried_is_not_counted_again_with_a_new_stay(tmp_path):
    """Its counter goes on for the whole session."""
    events: list[Any] = []
    counted = MonthKept(tmp_path, None, events.append, local=lambda: A_DAY_IN_NOVEMBER)
    for moved in (500, 700):
        counted.take(PeerStarted(PeerId("me"), RunId("ab" * 32), 0, ()))
        counted.take(LineUsed(moved, moved))
    counted.keep()
    assert (events[-1].sent, events[-1].received) == (700, 700)


def test_it_is_used_up_by_both_ways_together_and_there_again_with_the_next_month():
    allowance = MonthlyAllowance(NOVEMBER, 1000)
    allowance.take("rounds", 600, 399)
    assert not allowance.is_used_up
    allowance.take("rounds", 600, 400)
    assert allowance.is_used_up
    assert "2026-12-01" in allowance.words()
    allowance.on_month(DECEMBER, 0.0)
    assert not allowance.is_used_up
    allowance.take("rounds", 700, 400)
    assert (allowance.month.sent, allowance.month.received) == (100, 0)


def test_a_clock_that_goes_back_gives_nothing_back():
    allowance = MonthlyAllowance(DECEMBER, 1000)
    allowance.take("rounds", 1000, 0)
    for at_s in (0.0, BEHIND_S - 1, 2 * BEHIND_S, 3 * BEHIND_S):
        allowance.on_month(NOVEMBER, at_s)
        assert allowance.is_used_up
    assert allowance.month == Month(2026, 11, 1000, 0), "it has stood for a day: the other was ahead"


def test_a_moment_in_another_year_neither_forgets_nor_holds_what_was_counted():
    allowance = MonthlyAllowance(Month(2026, 11, 999, 0), 1000)
    allowance.on_month(Month(2037, 1), 0.0)
    allowance.take("rounds", 5, 0)
    allowance.on_month(NOVEMBER, 30.0)
    assert allowance.is_used_up
    allowance.on_month(Month(2037, 1), 60.0)
    assert allowance.is_used_up, "the time of before does not count"
    allowance.on_month(DECEMBER, 90.0)
    assert not allowance.is_used_up
    allowance.take("rounds", 1005, 0)
    for at_s in (100.0, 100.0 + AHEAD_S):
        allowance.on_month(Month(2027, 3), at_s)
    assert not allowance.is_used_up, "the machine was asleep, and the clock stands"


def test_a_computer_that_starts_with_its_clock_behind_goes_on_with_its_count(tmp_path):
    """At each start it had a fresh allowance."""
    now, ran = [time.struct_time((2025, 6, 15, 0, 0, 0, 0, 0, -1))], [0.0]
    write_month(tmp_path / FILE_NAME, Month(2026, 11, 99 * 10**6, 0))
    counted = MonthKept(tmp_path, 0.1, lambda _event: None, lambda: now[0], lambda: ran[0])
    assert not counted.is_used_up
    now[0], ran[0] = A_DAY_IN_NOVEMBER, 60.0
    counted.take(progress(10**6, 0))
    assert counted.is_used_up


def test_after_december_comes_january():
    assert DECEMBER.next_first == "2027-01-01"
    assert Month(2027, 1).later(DECEMBER)


def test_what_was_counted_is_there_after_a_restart_until_the_month_is_over(tmp_path):
    path = tmp_path / FILE_NAME
    assert read_month(path, NOVEMBER) == (NOVEMBER, "")
    write_month(path, Month(2026, 11, 5, 6))
    assert read_month(path, NOVEMBER) == (Month(2026, 11, 5, 6), "")
    assert read_month(path, DECEMBER) == (DECEMBER, "")


def test_what_was_counted_under_a_clock_that_was_ahead_counts_for_this_month(tmp_path):
    write_month(tmp_path / FILE_NAME, Month(2031, 2, 5, 6))
    ran = [0.0]
    counted = MonthKept(tmp_path, 1.0, lambda _event: None, lambda: A_DAY_IN_NOVEMBER, lambda: ran[0])
    for ran[0] in (0.0, BEHIND_S + 1):
        assert not counted.is_used_up
        counted.keep()
    assert read_month(tmp_path / FILE_NAME, NOVEMBER) == (Month(2026, 11, 5, 6), "")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"month": "xi", "sent": 1, "received": 1}',
        '{"month": "2026-13", "sent": 1, "received": 1}',
        '{"month": "2026-11", "sent": Infinity, "received": 1}',
        "\udcff",
        "[" * 4096,
    ],
)
def test_a_file_that_is_damaged_is_told_of_and_counted_anew(tmp_path, content):
    path = tmp_path / FILE_NAME
    path.write_bytes(content.encode(errors="surrogateescape"))
    month, wrong = read_month(path, NOVEMBER)
    assert month == NOVEMBER
    assert str(path) in wrong


def test_what_a_start_moves_counts_also_where_it_comes_to_nothing(tmp_path):
    counted = MonthKept(tmp_path, 3.0, lambda _event: None, lambda: A_DAY_IN_NOVEMBER)
    counted.take(LineUsed(10**6, 2 * 10**9))
    assert not counted.is_used_up
    counted.take(LineUsed(10**6, 3 * 10**9))
    assert counted.is_used_up, "it leaves before it trains"
    counted.keep()
    assert read_month(tmp_path / FILE_NAME, NOVEMBER)[0] == Month(2026, 11, 10**6, 3 * 10**9)


def test_a_second_stay_counts_nothing_again(tmp_path):
    """Payload begins at 0 with each stay, the line's bytes with the session."""
    counted = MonthKept(tmp_path, None, lambda _event: None, lambda: A_DAY_IN_NOVEMBER)
    for event in (
        LineUsed(50, 50),
        progress(0, 0, daemon=(60, 60)),
        progress(100, 100, daemon=(90, 90)),
        LineUsed(95, 95),
        progress(0, 0, daemon=(96, 96)),
        progress(10, 10, daemon=(108, 112)),
    ):
        counted.take(event)
    counted.keep()
    assert read_month(tmp_path / FILE_NAME, NOVEMBER)[0] == Month(2026, 11, 110, 112)


def test_what_the_system_counts_is_taken_where_it_counts(tmp_path):
    events: list[Any] = []
    counted = MonthKept(tmp_path, None, events.append, lambda: A_DAY_IN_NOVEMBER)
    counted.take(progress(10, 20))
    counted.take(progress(50, 60, daemon=(80, 90)))
    counted.take(of_links(1000, 2000))
    counted.keep()
    assert events == [MonthCounted("2026-11", 1080, 2090, 0)]
    assert read_month(tmp_path / FILE_NAME, NOVEMBER)[0] == Month(2026, 11, 1080, 2090)


def test_a_damaged_file_is_said_once(tmp_path):
    (tmp_path / FILE_NAME).write_text("?")
    events: list[Any] = []
    MonthKept(tmp_path, 1.0, events.append, lambda: A_DAY_IN_NOVEMBER)
    assert [type(each) for each in events] == [Remark]


class Session:
    """One that stays until it is told to leave, and says why; busy(times it ran) moves something meanwhile."""

    def __init__(self, busy, listener=lambda _event: None):
        self.left: list[str] = []
        self._busy, self._listener = busy, listener

    async def run(self, leave: Awaitable[str]) -> None:
        leaving = asyncio.ensure_future(leave)
        self._busy(len(self.left))
        self.left.append(await leaving)
        self._listener(Left(self.left[-1]))


async def test_it_leaves_when_the_month_is_used_up_and_comes_back_with_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr("dilocox_peer.cli.month_kept.LOOK_S", 0.0)
    today, stop, events = [A_DAY_IN_NOVEMBER], asyncio.Event(), list[Any]()

    def listen(event):
        events.append(event)
        if isinstance(event, Left):
            today[0] = A_DAY_IN_DECEMBER  # the wait for it is over

    counted = MonthKept(tmp_path, 0.001, listen, lambda: today[0])

    def busy(times):
        if times == 0:
            counted.take(progress(600_000, 400_000))
        else:
            counted.take(progress(600_500, 400_000))
            stop.set()

    async def stopped() -> str:
        await stop.wait()
        return "asked to"

    session = Session(busy, listen)
    await asyncio.wait_for(run_within(counted, session, stopped, listen), 30.0)
    assert "2026-12-01" in session.left[0]
    assert session.left[1] == "asked to"
    assert [each.reason for each in events if isinstance(each, Left)] == session.left
    assert read_month(tmp_path / FILE_NAME, DECEMBER)[0] == Month(2026, 12, 500, 0)


async def test_who_waits_for_the_month_can_be_stopped(tmp_path):
    write_month(tmp_path / FILE_NAME, Month(2026, 11, 10**6, 0))
    events: list[Any] = []
    counted = MonthKept(tmp_path, 0.001, events.append, lambda: A_DAY_IN_NOVEMBER)

    async def stopped() -> str:
        return "asked to"

    session = Session(lambda _times: None)
    await asyncio.wait_for(run_within(counted, session, stopped, events.append), 30.0)
    assert session.left == []
    assert ["2026-12-01" in each.reason for each in events if isinstance(each, Left)] == [True]


async def test_a_run_that_is_complete_ends_it(tmp_path):
    class Complete:
        async def run(self, leave: Awaitable[str]) -> None:
            asyncio.ensure_future(leave).cancel()

    async def stopped() -> str:
        await asyncio.Event().wait()
        return ""

    counted = MonthKept(tmp_path, 1.0, lambda _event: None, lambda: A_DAY_IN_NOVEMBER)
    await asyncio.wait_for(run_within(counted, Complete(), stopped, lambda _event: None), 30.0)
