"""A thousand seeded runs of 1 to 16 peers, most of them brief; a failing one names its seed and how to replay it."""

import pytest

from .scenario import BRIEF, length_of, run_seed

BATCH = 50

STUCK = (
    1370,  # two waited for a state that there was no more, as a quorum of the roster that nobody could come to
    3535,  # who had promised a ballot to a member whose offers are late asked above it at once: eight ballots
    5758,  # a leader with a quorum of promises waited for that of a member that had gone on along another branch
)


@pytest.mark.parametrize("first", range(0, 1000, BATCH))
def test_every_invariant_holds_in_fifty_seeds(first: int) -> None:
    for seed in range(first, first + BATCH):
        run_seed(seed, length=length_of(seed))


@pytest.mark.parametrize("first", range(0, 200, BATCH))
def test_every_invariant_holds_where_machines_are_busy(first: int) -> None:
    """Inputs come in crowds there, and ticks late."""
    for seed in range(first, first + BATCH):
        run_seed(seed, length=BRIEF, crowded=True)


@pytest.mark.parametrize("seed", STUCK)
def test_histories_that_once_stood_still_heal(seed: int) -> None:
    run_seed(seed, length=BRIEF)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(0, 1000, BATCH))
def test_every_invariant_holds_in_fifty_whole_seeds(first: int) -> None:
    for seed in range(first, first + BATCH):
        run_seed(seed)


def test_a_seed_is_a_run() -> None:
    assert run_seed(17) == run_seed(17)
