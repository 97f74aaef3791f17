"""Hostile members and strangers in seeded worlds: what honest peers agreed on stays, whatever is sent."""

import pytest

from .faults import HOSTILE_FAULTS
from .hostile_scenario import run_hostile_seed
from .invariants import Violation

BATCH = 10
SEARCHED = 40  # seeds a planted fault gets to show itself in


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 30, BATCH))
def test_every_invariant_holds_among_the_honest(first: int) -> None:
    for seed in range(first, first + BATCH):
        run_hostile_seed(seed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(30, 1000, 97))
def test_every_invariant_holds_among_the_honest_in_a_thousand_seeds(first: int) -> None:
    for seed in range(first, first + 97):
        run_hostile_seed(seed)


@pytest.mark.nightly
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("first", range(1000, 10_000, 500))
def test_every_invariant_holds_among_the_honest_in_ten_thousand_seeds(first: int) -> None:
    for seed in range(first, first + 500):
        run_hostile_seed(seed)


@pytest.mark.parametrize("fault", HOSTILE_FAULTS)
def test_a_planted_weakness_is_found_by_the_hostile(fault: str) -> None:
    with HOSTILE_FAULTS[fault]():
        for seed in range(SEARCHED):
            try:
                run_hostile_seed(seed)
            except Violation:
                return
    pytest.fail(f"{fault}: not found in {SEARCHED} seeds")
