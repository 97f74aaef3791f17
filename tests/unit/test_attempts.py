"""Whom a peer goes on heeding that asks for view changes of which nothing comes, and how high numbers may go."""

import pytest

from dilocox_peer.peer.rounds.attempts import MAX_DOUBLED, Attempts, Numbers, pause_s
from dilocox_peer.peer.rounds.chain import MAX_VIEWS
from dilocox_peer.peer.rounds.contract import PeerRefused, Received
from dilocox_peer.peer.rounds.view_changes import MAX_NUMBER_AHEAD
from dilocox_peer.types import PeerId
from dilocox_peer.wire.rounds import Heartbeat, ViewAnswer, ViewCall, ViewPropose, ViewSign
from tests.unit.test_rounds import Table

A, B = PeerId("a"), PeerId("b")


def test_attempts_of_one_that_come_to_nothing_leave_others_more_and_more_time_and_are_heeded_again() -> None:
    attempts, now, heeded_at = Attempts(3.0), 0.0, list[float]()
    while now < 1000.0:
        if attempts.may(A, now):
            attempts.heeded(A, now)
            heeded_at.append(now)
        assert attempts.may(B, now), "another's"
        now += 1.0
    assert heeded_at[:6] == [0.0, 6.0, 12.0, 24.0, 48.0, 96.0]
    assert heeded_at[-1] - heeded_at[-2] == pause_s(99, 3.0) == 6.0 * 2**MAX_DOUBLED


@pytest.mark.parametrize("late_s", [0.0, 5.0])
def test_an_honest_one_that_fails_is_heeded_each_time(late_s: float) -> None:
    """It says its proposal again for 6 s, and waits for as long as the others put it off before the next."""
    attempts, now = Attempts(3.0), 0.0
    for failed in range(1, 12):
        heard_at = next(moment for moment in (now + late_s, now + 6.0) if attempts.may(A, moment))
        attempts.heeded(A, heard_at)
        now += pause_s(failed, 3.0)


def test_no_sender_raises_the_number_further_than_its_part() -> None:
    numbers = Numbers(5, most=100)
    for number in range(105, 5, -1):
        assert numbers.reaches(A, number)
    assert not numbers.reaches(A, 106)
    numbers.seen(A, 105)
    assert numbers.reaches(A, 105)
    assert not numbers.reaches(A, 106)
    numbers.seen(B, 150)
    assert numbers.reaches(A, 150)
    assert numbers.highest == 150


def _left_of_six() -> tuple[Table, PeerId, PeerId, PeerId]:
    """The three whom a lost quorum leaves. The last one given back comes first by rank, and means ill: no machine speaks for it."""
    table = Table(*"abcdef").start()
    table.offer(*"abcdef")
    roster = table.machine("a").roster
    order = table.seat("a").order
    hostile, one, other = (peer for peer in order if peer in roster[3:])
    for gone in (*roster[:3], hostile):
        table.leave_the_room(gone)
    for peer in (one, other):
        for gone in roster[:3]:
            table.give(peer, PeerRefused(gone))
    for _ in range(3):
        _is_here(table, hostile)
        table.wait(1.0)
    return table, one, other, hostile


def _is_here(table: Table, hostile: PeerId) -> None:
    for peer in table.machines:
        place = table.seat(peer).place
        beat = Heartbeat(*table.seat(peer).at(), 1, place.height, place.round, 0, 2, 0, True, b"")
        table.give(peer, Received(hostile, beat))


def _propose(table: Table, to: PeerId, sender: PeerId, number: int) -> bool:
    """Whether it signs a roster of all three."""
    seat = table.seat(to)
    value = seat.place.view_change(sorted({*table.machines, sender}))
    before = len(_signed(table, to, number))
    table.give(to, Received(sender, ViewPropose(*seat.at(), number, value)))
    return len(_signed(table, to, number)) > before


def _signed(table: Table, peer: PeerId, number: int) -> list[ViewSign]:
    return [each for each in table.said(peer, ViewSign) if each.number == number]


def test_who_calls_first_and_proposes_nothing_stops_no_view_change() -> None:
    """Each of its calls ended those of whoever comes after it by rank."""
    table, one, other, hostile = _left_of_six()
    for number in range(1, 61):
        for peer in (one, other):
            machine = table.machine(peer)
            if machine.view == 1:
                table.give(peer, Received(hostile, ViewCall(*machine.sitting.seat.at(), number * 100)))
        _is_here(table, hostile)
        table.wait(1.0)
    assert [set(table.machine(peer).roster) for peer in (one, other)] == [{one, other}] * 2


def test_numbers_as_high_as_can_be_written_are_not_reached() -> None:
    """With numbers a million apart one message after the other came to the last that a head has; signed, no other follows."""
    table, one, _other, hostile = _left_of_six()
    seat = table.seat(one)
    number = seat.place.view
    for _ in range(50):
        number += MAX_NUMBER_AHEAD
        table.give(
            one, Received(hostile, ViewCall(*seat.at(), number)), Received(hostile, ViewAnswer(*seat.at(), number))
        )
    _propose(table, one, hostile, number)
    assert table.seat(one).votes.view_change_signed <= seat.place.view + 2 * MAX_NUMBER_AHEAD
    assert 255 * MAX_NUMBER_AHEAD < MAX_VIEWS, "all that a roster may have"
