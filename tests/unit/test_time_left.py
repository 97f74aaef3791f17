"""The time that a run still takes, from the rounds that were seen."""

import math
from dataclasses import replace

import pytest

from dilocox_peer.events_of_health import Trouble, TroublesSeen
from dilocox_peer.peer.contributions import Round
from dilocox_peer.peer.status import Status
from dilocox_peer.peer.time_left import time_left_s
from tests.unit.dashboard_data import certified, joined


def seen(number: int, at_s: float, inner_steps: int = 8) -> Round:
    return Round(number, at_s, 2, 2, True, 2.0, "int4", 0, inner_steps, None, 1, 1)


def test_it_is_the_rounds_left_at_the_pace_of_the_newest():
    rounds = [seen(number, 10.0 * number) for number in range(1, 31)]
    assert time_left_s(rounds, 100, 300.0) == pytest.approx(700.0)
    assert time_left_s(rounds, 100, 304.0) == pytest.approx(696.0), "it passes between two rounds"
    slower = [*rounds, *(seen(30 + number, 300.0 + 40.0 * number) for number in range(1, 14))]
    assert time_left_s(slower, 100, 820.0) == pytest.approx(57 * 40.0), "what was before counts no more"
    assert time_left_s(rounds, 30, 300.0) == 0.0


def test_rounds_that_become_longer_are_counted_by_their_steps():
    rounds = [*(seen(number, 10.0 * number) for number in range(1, 4)), seen(4, 50.0, inner_steps=16)]
    assert time_left_s(rounds, 14, 50.0) == pytest.approx(10 * 16 * 40.0 / 32)


def test_nothing_is_told_that_is_not_known():
    assert time_left_s([], 100, 0.0) is None
    assert time_left_s([seen(1, 10.0)], 100, 10.0) is None
    assert time_left_s([seen(1, 10.0), seen(2, 10.0)], 100, 10.0) is None, "both were taken over at one time"
    assert time_left_s([seen(1, 10.0), seen(2, 20.0)], 0, 20.0) is None, "it has no end"
    assert time_left_s([seen(1, 10.0), seen(9, 20.0)], 100, 20.0) is None, "it was away in between"
    assert time_left_s([seen(1, 10.0), seen(9, 20.0), seen(10, 25.0)], 100, 25.0) == pytest.approx(450.0)


def test_rounds_that_it_took_over_when_it_came_back_make_no_pace():
    taken_over = [replace(seen(number, 190.0 + 0.1 * number), train_loss=math.nan) for number in range(1, 8)]
    closed = [seen(number, 120.0 + 10.0 * number) for number in range(8, 11)]
    assert time_left_s([*taken_over, *closed], 100, 220.0) == pytest.approx(900.0)
    assert time_left_s([*taken_over, closed[0]], 100, 200.0) is None, "one of its own tells no pace"


def test_while_the_run_stands_nobody_is_told_a_time():
    found = Status()
    found.take(joined(), 0.0)
    for number in range(1, 6):
        found.take(certified(number), 60.0 * number)
    assert found.time_left_s(300.0) == pytest.approx(395 * 60.0)
    found.take(TroublesSeen((Trouble("empty", 0, stops=True),)), 301.0)
    assert found.time_left_s(301.0) is None
