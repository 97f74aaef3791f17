"""Peers that send back false gradients: found out by all that call them, and nobody honest with them."""

import pytest

from .invariants import Violation
from .lying import run_lying_seed
from .lying_faults import FAULTS

pytestmark = pytest.mark.timeout(600)

FIRST_SEED = {
    "nothing is checked": 0,
    "the second is blamed": 0,
    "no patience with who is deceived": 23,
    "named and not left out": 0,
}


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.slow] if seed % 20 else []) for seed in range(60)]
)
def test_liars_are_found_out_and_nobody_else(seed: int) -> None:
    run_lying_seed(seed)


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_of_the_checks_is_caught(fault: str) -> None:
    with pytest.raises(Violation):
        run_lying_seed(FIRST_SEED[fault], machine=FAULTS[fault])


def test_a_lying_seed_is_a_run() -> None:
    assert run_lying_seed(7) == run_lying_seed(7)
