"""Newcomers whose chain moves to what the owner has signed before they have a state: every invariant holds, among hostile peers too."""

import pytest

from .founding import latecomers
from .hostile_scenario import run_hostile_seed
from .scenario import run_seed


@pytest.mark.parametrize("first", range(0, 24, 4))
def test_every_invariant_holds_in_four_seeds(first: int) -> None:
    with latecomers():
        for seed in range(first, first + 4):
            run_seed(seed)


@pytest.mark.parametrize("first", range(0, 12, 3))
def test_every_invariant_holds_among_the_honest(first: int) -> None:
    with latecomers():
        for seed in range(first, first + 3):
            run_hostile_seed(seed)


def test_latecomers_do_found() -> None:
    with latecomers() as count:
        for seed in range(20000, 20005):
            run_hostile_seed(seed)
    assert count.foundings
