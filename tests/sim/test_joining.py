"""Joiners at links where a state takes many rounds: in the roster after one state each time."""

import statistics

import pytest

from .joining import join


@pytest.mark.parametrize("members", [1, 2, 4])
@pytest.mark.parametrize(("state_rounds", "pace"), [(2, 1.0), (10, 1.0), (40, 1.0), (2, 0.075), (10, 0.075)])
def test_a_joiner_is_in_the_roster_after_one_state_and_a_few_rounds(
    members: int, state_rounds: float, pace: float
) -> None:
    for seed in range(2):
        joined = join(seed, members=members, state_rounds=state_rounds, pace=pace, within_rounds=120)
        assert joined.after_s is not None
        assert joined.states == 1


def test_a_joiner_whose_line_takes_no_more_than_the_rounds_is_told_what_it_would_need() -> None:
    joined = join(1, members=2, state_rounds=10, within_rounds=40, as_large_as=4)
    assert joined.after_s is None
    assert joined.needs
    assert min(joined.needs) > 1.5
    assert statistics.median(joined.needs) > 2, (
        "ten rounds of a quarter of a state each, in the time of one, or a few less"
    )
