"""Fetches in the simulator: seeds of donors that lie, die and dawdle, and planted faults.

A failing seed names itself: `python -m tests.sim.test_fetch SEED` plays it and prints every action.
"""

import sys
from contextlib import suppress

import pytest

from .fetch_faults import FAULTS
from .fetch_world import FetchWorld, run_fetch_seed
from .invariants import Violation

BATCH = 100
SEARCHED = 300  # seeds a fault gets to show itself in


@pytest.mark.parametrize("first", range(0, 1000, BATCH))
def test_a_hundred_seeds_of_fetches_keep_the_promises(first: int) -> None:
    outcomes = [run_fetch_seed(seed) for seed in range(first, first + BATCH)]
    assert sum(outcome.finished for outcome in outcomes) > BATCH / 2
    assert any(outcome.accused for outcome in outcomes)


def test_a_crowd_of_which_some_have_given_a_chunk_keeps_nobody_from_giving() -> None:
    """One of them that had given something and was as slow as who held the places was asked first, in vain, and the honest one not at all: for ever. It
    comes to its end now, ten seconds later than promise 6 says of such a crowd."""
    world = FetchWorld(61161)
    with suppress(Violation):
        world.play()
    assert world.result == "finished"


def test_a_fetch_seed_is_a_run() -> None:
    assert run_fetch_seed(17) == run_fetch_seed(17)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fetch_fault_is_caught(fault: str) -> None:
    for seed in range(SEARCHED):
        try:
            run_fetch_seed(seed, machine=FAULTS[fault])
        except Violation:
            return
    pytest.fail(f"{fault}: not caught in {SEARCHED} seeds")


if __name__ == "__main__":
    print(FetchWorld(int(sys.argv[1]), trace=print).play())
