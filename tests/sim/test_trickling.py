"""Members of whom a byte comes now and then cost the others some rounds, and none of their contributions."""

import pytest

from .trickling import play

pytestmark = pytest.mark.timeout(600)
UNDISTURBED = 26  # rounds in that time of eight honest peers, of the first three seeds the fewest


@pytest.mark.parametrize(
    ("hostile", "rounds", "first_s"),
    [
        pytest.param(0, UNDISTURBED, 40.0, marks=pytest.mark.slow),
        pytest.param(1, 0.75 * UNDISTURBED, 65.0, marks=pytest.mark.slow),
        (2, 0.45 * UNDISTURBED, 90.0),
    ],
)
def test_in_slices_who_trickles_is_soon_left_out(hostile: int, rounds: float, first_s: float) -> None:
    cost = play(0, 8, hostile, 16, 200.0)
    assert cost.rounds >= rounds
    assert cost.counted >= 0.95
    assert cost.first_s <= first_s


def test_all_to_all_who_trickles_costs_next_to_nothing() -> None:
    cost = play(0, 8, 2, 0, 200.0)
    assert cost.rounds >= 0.75 * UNDISTURBED
    assert cost.counted >= 0.95
