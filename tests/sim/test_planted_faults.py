"""Every planted fault is caught: the simulator looks where such mistakes are."""

from contextlib import nullcontext

import pytest

from dilocox_peer.peer.rounds import RoundMachine

from .faults import FAULTS, QUORUM_FAULTS, wrong_quorum
from .invariants import Violation
from .scenario import run_seed

# First seed to try and how many: most faults show within a few, the rare ones start where they show.
SEARCH = {"a leader that ignores accepted values": 200, "no epoch after genesis": 200}


@pytest.mark.parametrize("fault", [*QUORUM_FAULTS, *FAULTS])
def test_planted_fault_is_caught(fault: str) -> None:
    rule = QUORUM_FAULTS.get(fault)
    machine = FAULTS.get(fault, RoundMachine)
    with nullcontext() if rule is None else wrong_quorum(rule):
        for seed in range(SEARCH.get(fault, 60)):
            try:
                run_seed(seed, machine=machine)
            except Violation:
                return
    pytest.fail(f"{fault}: not caught in {SEARCH.get(fault, 60)} seeds")
