"""The links in the simulator: a thousand seeds of faults and strangers, the table of moves, and planted faults.

A failing seed names itself and the command that replays it.
"""

from collections import Counter

import pytest

from dilocox_peer.peer.links.sessions import MOVES

from .invariants import Violation
from .links_faults import FAULTS
from .links_scenario import run_links_seed

BATCH = 50
SEARCHED = 60  # seeds a fault gets to show itself in


@pytest.mark.parametrize("first", range(0, 1000, BATCH))
def test_fifty_seeds_of_links_keep_the_promises_and_make_the_moves_of_the_table_and_no_others(first: int) -> None:
    moves: Counter[object] = Counter()
    for seed in range(first, first + BATCH):
        moves.update(run_links_seed(seed).moves)
    assert set(moves) == set(MOVES)


def test_a_links_seed_is_a_run() -> None:
    assert run_links_seed(17) == run_links_seed(17)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_links_fault_is_caught(fault: str) -> None:
    for seed in range(SEARCHED):
        try:
            run_links_seed(seed, machine=FAULTS[fault])
        except Violation:
            return
    pytest.fail(f"{fault}: not caught in {SEARCHED} seeds")
