"""When connections are made anew, and which are tried out."""

from itertools import pairwise

from dilocox_peer.peer.line_watch import PAUSES_S, SILENT_S, SLEPT_S, LineWatch
from dilocox_peer.peer.rounds.timing import Timing
from dilocox_peer.types import PeerId

A, B = PeerId("a"), PeerId("b")
HOME, CAFE = ["192.168.1.2"], ["10.0.0.7"]


def test_the_first_line_is_no_change_and_another_address_is_one():
    watch = LineWatch()
    assert not watch.is_another(HOME, 0.0, 1000.0)
    assert not watch.is_another(HOME, 2.0, 1002.0)
    assert watch.is_another(CAFE, 4.0, 1004.0)
    assert not watch.is_another(CAFE, 6.0, 1006.0)


def test_a_cable_that_is_out_for_a_moment_changes_nothing_until_another_line_is_there():
    watch = LineWatch()
    watch.is_another(HOME, 0.0, 1000.0)
    assert not watch.is_another([], 2.0, 1002.0)
    assert not watch.is_another(HOME, 4.0, 1004.0)
    assert not watch.is_another([], 6.0, 1006.0)
    assert watch.is_another(CAFE, 8.0, 1008.0)


def test_an_address_more_breaks_nothing_and_one_that_is_gone_may():
    watch = LineWatch()
    watch.is_another(HOME, 0.0, 1000.0)
    assert not watch.is_another([*HOME, *CAFE], 2.0, 1002.0)
    assert watch.is_another(HOME, 4.0, 1004.0)


def test_addresses_of_ipv6_come_and_go_beside_one_of_ipv4():
    """With privacy extensions all connections were made anew once a day."""
    watch = LineWatch()
    watch.is_another([*HOME, "2a01:100::5"], 0.0, 1000.0)
    assert not watch.is_another([*HOME, "2a01:100::6"], 2.0, 1002.0)
    assert not watch.is_another(HOME, 4.0, 1004.0)
    assert watch.is_another(["2a01:100::7"], 6.0, 1006.0), "IPv4 is gone"
    assert watch.is_another(["2a01:200::7"], 8.0, 1008.0), "it has no other"


def test_a_computer_that_slept_is_told_by_either_clock():
    watch = LineWatch()
    watch.is_another(HOME, 0.0, 1000.0)
    assert watch.is_another(HOME, 1.0, 1000.0 + 600.0)  # asleep: its monotonic clock stood still
    assert watch.is_another(HOME, 1.0 + SLEPT_S + 1, 1600.0 + SLEPT_S + 1)  # stopped
    assert not watch.is_another(HOME, 3.0 + SLEPT_S, 900.0)  # somebody has set the clock back


def test_a_sleep_is_not_forgotten_where_the_line_comes_back_later():
    watch = LineWatch()
    watch.is_another(HOME, 0.0, 1000.0)
    told = [watch.is_another(own, 2.0 + n, 1602.0 + n) for n, own in enumerate(([], [], HOME, HOME))]
    assert told == [False, False, True, False]


def test_who_is_silent_is_tried_out_and_ever_more_seldom():
    watch, heard, times = LineWatch(), {A: 0.0, B: 0.0}, []
    for second in range(400):
        heard[B] = float(second)
        found = watch.silent([A, B], heard, float(second))
        assert B not in found
        if A in found:
            times.append(second)
            watch.tried(A, is_there=False)
    assert SILENT_S < times[0] <= SILENT_S + 2
    gaps = [after - before for before, after in pairwise(times)]
    assert gaps == sorted(gaps)
    assert gaps[-1] == PAUSES_S[-1]


def test_who_is_heard_again_is_tried_out_at_once_when_it_is_silent_again():
    watch, heard = LineWatch(), {A: 0.0}
    assert watch.silent([A], heard, 10.0) == [A]
    watch.tried(A, is_there=False)
    heard[A] = 11.0
    assert watch.silent([A], heard, 12.0) == []
    assert watch.silent([A], heard, 12.0 + SILENT_S) == [A]


def test_who_was_never_heard_or_is_not_connected_is_not_tried_out():
    watch = LineWatch()
    assert watch.silent([B], {A: 0.0}, 100.0) == []
    assert watch.silent([], {A: 0.0}, 100.0) == []


def test_our_relays_are_doubted_only_where_nobody_is_heard():
    assert LineWatch.is_silent([A, B], {A: 0.0, B: 1.0}, SILENT_S + 2)
    assert not LineWatch.is_silent([A, B], {A: 0.0, B: SILENT_S}, SILENT_S + 2)
    assert not LineWatch.is_silent([], {A: 0.0}, SILENT_S + 2)
    assert not LineWatch.is_silent([A], {}, SILENT_S + 2)


def test_of_many_that_beat_more_seldom_none_is_tried_out_between_two_beats():
    many = [PeerId(f"peer {number}") for number in range(11)]
    beat_s, absent_s = Timing().beat_s(12), Timing().absent_s(12)
    watch, heard = LineWatch(), dict.fromkeys(many, 0.0)
    assert 2 * beat_s > SILENT_S
    assert not watch.silent(many, heard, 2 * beat_s)  # every second beat may be left out
    heard[many[0]] = absent_s
    assert watch.silent(many, heard, absent_s + 1) == many[1:]
