"""Every planted fault is caught: the simulator looks where such mistakes are."""

from contextlib import AbstractContextManager, nullcontext

import pytest

from dilocox_peer.peer.rounds.machine import RoundMachine

from .faults import FAULTS, PATCHES, QUORUM_FAULTS, wrong_quorum
from .invariants import Violation
from .scenario import run_seed

SEARCHED = 60  # seeds a fault gets to show itself in
RARE = {  # where the search begins for these
    "no view change after genesis": 70,
    "any branch is better": 102,
    "pseudo-gradient kept over every switch": 116,
    "votes in a view change after it signed a newer one": 35,
}


def planted(fault: str) -> AbstractContextManager[None]:
    if fault in QUORUM_FAULTS:
        return wrong_quorum(QUORUM_FAULTS[fault])
    return PATCHES[fault]() if fault in PATCHES else nullcontext()


@pytest.mark.parametrize("fault", [*QUORUM_FAULTS, *FAULTS, *PATCHES])
def test_planted_fault_is_caught(fault: str) -> None:
    first = RARE.get(fault, 0)
    with planted(fault):
        for seed in range(first, first + SEARCHED):
            try:
                run_seed(seed, machine=FAULTS.get(fault, RoundMachine))
            except Violation:
                return
    pytest.fail(f"{fault}: not caught in {SEARCHED} seeds from {first} on")
