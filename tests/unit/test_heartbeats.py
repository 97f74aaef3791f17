"""A beat is left out for who has just been told something else, and never two running."""

from collections import Counter

import pytest

from dilocox_peer.peer.rounds.contract import PeerFound, Received, RoundProgress, Send
from dilocox_peer.types import PeerId
from dilocox_peer.wire.rounds import GetChain, Heartbeat, Offer
from tests.unit.test_rounds import GENESIS, Table

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


@pytest.fixture
def table() -> Table:
    """Three peers, one round done."""
    table = Table("a", "b", "c").start()
    table.offer("a", "b", "c")
    table.wait(3.0)
    return table


def asked_for_pages(table: Table, seconds: float) -> Counter[PeerId]:
    """To whom a's heartbeats go, while b asks it for its chain again and again."""
    table.done[A].clear()
    machine = table.machine("a")
    at = (0, machine.head, machine.sitting.seat.place.view)
    for _ in range(round(seconds / 0.25)):
        table.give(A, Received(B, GetChain(*at, (GENESIS,))))
        table.wait(0.25)
    return Counter(each.to for each in table.did("a", Send) if isinstance(each.message, Heartbeat))


def test_who_is_told_something_hears_half_as_many_beats(table: Table) -> None:
    beats = asked_for_pages(table, 40.0)
    assert beats[C] >= 35
    assert abs(beats[B] - beats[C] / 2) <= 1


def test_none_is_left_out_for_what_is_long_past(table: Table) -> None:
    table.done[A].clear()
    table.wait(40.0)
    beats = Counter(each.to for each in table.did("a", Send) if isinstance(each.message, Heartbeat))
    assert beats[B] == beats[C] >= 35


def test_a_late_beat_leaves_out_nobody(table: Table) -> None:
    table.done[A].clear()
    machine = table.machine("a")
    at = (0, machine.head, machine.sitting.seat.place.view)
    for _ in range(20):  # each time something is handled, the beat is half a second late, or more
        table.now = max(table.now, machine.deadline() or 0.0) + 0.7
        for _ in range(2):
            table.give(A, Received(B, GetChain(*at, (GENESIS,))))
    beats = Counter(each.to for each in table.did("a", Send) if isinstance(each.message, Heartbeat))
    assert beats[B] == beats[C] > 5


def test_news_of_ourselves_are_said_to_all(table: Table) -> None:
    """That it pauses, or trains again, or is asked to be told at once."""
    paused = False
    for number in range(12):
        paused = not paused if number % 2 else paused
        asked_for_pages(table, 0.25)
        table.done[A].clear()
        table.give(A, RoundProgress(number, paused=paused, tell_now=number % 2 == 0))
        told = [each for each in table.did("a", Send) if isinstance(each.message, Heartbeat)]
        assert [each.to for each in told] == [B, C]
        assert {(each.message.micro_batches, each.message.paused) for each in told} == {(number, paused)}


@pytest.mark.parametrize(("after_s", "rides"), [(0.2, False), (0.7, True)])
def test_a_beat_of_which_half_the_wait_is_over_goes_with_what_all_are_told(
    table: Table, after_s: float, rides: bool
) -> None:
    machine = table.machine("a")

    def beats() -> list[PeerId]:
        return [each.to for each in table.did("a", Send) if isinstance(each.message, Heartbeat)]

    table.done[A].clear()
    while not beats():
        table.wait(0.05)
    table.wait(after_s)
    table.done[A].clear()
    table.offer("a")
    assert {each.to for each in table.did("a", Send) if isinstance(each.message, Offer)} == {B, C}
    assert beats() == ([B, C] if rides else [])
    at = table.now
    table.done[A].clear()
    while not beats():
        table.wait(0.05)
    assert table.now - at == pytest.approx(1.0 if rides else 1.0 - after_s, abs=0.2)
    assert machine.round == 1


def test_a_newcomer_hears_from_us_at_once(table: Table) -> None:
    table.done[A].clear()
    table.give(A, PeerFound(PeerId("d")))
    assert [type(each.message) for each in table.did("a", Send) if each.to == "d"] == [Heartbeat]
