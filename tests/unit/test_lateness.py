"""How long a callee that was late or silent is left alone."""

import math

from dilocox_peer.pipeline.contract import HopTiming
from dilocox_peer.pipeline.lateness import LONGER, MAX_REMEMBERED, Lateness
from dilocox_peer.types import PeerId

A, B = PeerId("a"), PeerId("b")
TIMING = HopTiming()


def test_silence_is_left_alone_for_longer_each_time() -> None:
    lateness, now, paused = Lateness(TIMING), 0.0, []
    for _ in range(6):
        until = lateness.was_silent(A, now)
        paused.append(until - now)
        now = until
    assert paused[:3] == [TIMING.refused_s * LONGER**times for times in (1, 2, 3)]
    assert paused[-1] == TIMING.overdue_cap_s
    assert lateness.until(B) == -math.inf


def test_a_silence_is_forgiven_for_each_minute_of_work_and_not_for_one_gradient() -> None:
    lateness, now = Lateness(TIMING), 0.0
    for times in (1, 2, 3):
        now = lateness.was_silent(A, now)
        lateness.answered(A, now)
        assert lateness.until(A) == now, times
    until = lateness.was_silent(A, now + 2 * TIMING.leaving_s)
    assert until - now - 2 * TIMING.leaving_s == TIMING.refused_s * LONGER**2
    lateness.answered(A, until)
    lateness.answered(A, until + 1e6)
    assert lateness.was_silent(A, until + 1e6) - until - 1e6 == TIMING.refused_s * LONGER


def test_what_comes_in_the_pause_does_not_make_work_of_it() -> None:
    lateness, now, paused = Lateness(TIMING), 0.0, []
    for _ in range(5):
        until = lateness.was_silent(A, now)
        lateness.answered(A, now + 0.1)
        paused.append(until - now)
        now = until
    assert paused == [min(TIMING.refused_s * LONGER**times, TIMING.overdue_cap_s) for times in range(1, 6)]


def test_several_that_it_is_silent_about_at_once_count_as_one() -> None:
    lateness = Lateness(TIMING)
    assert {lateness.was_silent(A, now) for now in (0.0, 1.0, 2.0)} == {TIMING.refused_s * LONGER}


def test_a_short_silence_does_not_end_a_longer_pause() -> None:
    lateness = Lateness(TIMING)
    until = lateness.kept(A, 0.0)
    assert until == TIMING.leaving_s
    lateness.answered(A, 1.0)
    assert lateness.was_silent(A, 1.0) == lateness.until(A) == until
    assert lateness.kept(A, until) == until + 2 * TIMING.leaving_s


def test_being_late_is_forgiven_for_each_ten_minutes_of_work() -> None:
    lateness, now, paused = Lateness(TIMING), 0.0, []
    for _ in range(5):
        until = lateness.kept(A, now)
        paused.append(until - now)
        lateness.answered(A, until)
        now = until + TIMING.leaving_s
    assert paused == [60.0, 120.0, 240.0, 480.0, TIMING.overdue_cap_s], "a minute's work forgives nothing"
    lateness.answered(A, now)
    now += 4 * TIMING.overdue_cap_s
    assert lateness.kept(A, now) == now + 2 * TIMING.leaving_s
    now += 1e6
    assert lateness.kept(A, now) == now + 4 * TIMING.leaving_s, "time alone forgives nothing"


def test_several_that_it_is_late_with_at_once_count_as_one() -> None:
    lateness = Lateness(TIMING)
    assert {lateness.kept(A, now) for now in (0.0, 1.0, 2.0)} == {TIMING.leaving_s}
    lateness.was_silent(B, 0.0)
    assert lateness.kept(B, 1.0) == 1.0 + TIMING.leaving_s, "a silence is another thing"


def test_so_many_are_remembered() -> None:
    lateness = Lateness(TIMING)
    for number in range(MAX_REMEMBERED + 1):
        lateness.kept(PeerId(f"p{number}"), 0.0)
    assert lateness.until(PeerId("p0")) == -math.inf
    assert lateness.until(PeerId(f"p{MAX_REMEMBERED}")) > 0
