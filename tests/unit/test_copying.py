"""When the copy of a state is left for another: never one that is nearly done, nor for a line that is slow for a moment."""

import pytest

from dilocox_peer.peer.rounds.copying import LONG_LOOK_S, LOOK_S, CopyPace, Farthest
from dilocox_peer.types import sha256


def looked_at(shares: list[float]) -> CopyPace:
    """One share a second, from the beginning on."""
    pace = CopyPace(0.0)
    for second, share in enumerate(shares):
        pace.came(share, float(second))
    return pace


def test_nothing_is_slow_before_it_was_looked_at_for_long_enough() -> None:
    assert not looked_at([0.0] * int(LOOK_S)).is_slow(LOOK_S - 1)
    assert looked_at([0.0] * int(LOOK_S + 1)).is_slow(LOOK_S)


@pytest.mark.parametrize(("takes_s", "is_slow"), [(50, False), (3600, True)])
def test_it_is_slow_as_long_as_the_rest_would_take_longer_than_it_has_taken(takes_s: int, is_slow: bool) -> None:
    assert looked_at([second / takes_s for second in range(31)]).is_slow(30.0) is is_slow
    half = takes_s // 2 + 1
    assert not looked_at([second / takes_s for second in range(half + 30)]).is_slow(half + 29.0)


def test_half_of_it_at_once_and_then_a_byte_now_and_then_is_slow() -> None:
    """By the pace of the whole it would look well for ever."""
    assert looked_at([0.5] * 100).is_slow(99.0)


@pytest.mark.parametrize(("minutes", "is_late"), [(30, False), (59, False), (110, False), (150, True)])
def test_it_is_late_where_twice_its_pace_does_not_bring_it_in_time(minutes: int, is_late: bool) -> None:
    pace = CopyPace(0.0, look_s=LONG_LOOK_S)
    for second in range(int(LONG_LOOK_S)):
        pace.came(second / (60 * minutes), float(second))
        assert not pace.is_late(float(second), 3600.0), "it was not looked at for long enough"
    assert pace.is_late(LONG_LOOK_S, 3600.0) is is_late


def test_the_state_of_which_most_has_come_is_gone_on_with_whoever_else_is_asked() -> None:
    begun, other, third = (sha256(bytes([number])) for number in range(3))
    farthest = Farthest({})
    assert farthest.digest is None
    for digest, share in ((other, 0.1), (begun, 0.4), (third, 0.2), (other, 0.3)):
        farthest.left(digest, share)
    assert farthest.digest == begun
    farthest.left(begun, 0.0)  # its file was damaged
    farthest.left(third, 0.2)
    assert farthest.digest == third


def test_what_had_come_before_stays_until_more_of_another_has() -> None:
    begun, other = sha256(b"begun"), sha256(b"other")
    farthest = Farthest({other: 0.1, begun: 0.4})
    assert farthest.digest == begun
    farthest.left(other, 0.3)
    assert farthest.digest == begun
    farthest.left(begun, 0.5)
    farthest.left(other, 0.9)
    assert farthest.digest == other
