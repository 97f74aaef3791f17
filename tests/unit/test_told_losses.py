"""Whose told losses count."""

import math
import random

import pytest

from dilocox_peer.pipeline.told_losses import FRESH, LEAST_TOLD, ToldLosses
from dilocox_peer.types import PeerId

HONEST = [PeerId(f"honest {number}") for number in range(3)]
LIAR, LIAR2 = PeerId("liar"), PeerId("another liar")


def counted(told: dict[PeerId, float], *, times: int = 100) -> dict[PeerId, int]:
    """How many of the last losses of each count, of as many as were told before. Those of honest ones differ as micro-batches do."""
    losses, rng, found = ToldLosses(), random.Random(1), dict.fromkeys(told, 0)
    for number in range(2 * times):
        for peer, loss in told.items():
            said = loss if peer in (LIAR, LIAR2) else loss * rng.lognormvariate(0.0, 0.15)
            is_counted = not math.isnan(losses.heard(peer, said, among=told))
            found[peer] += is_counted and number >= times
    return found


@pytest.mark.parametrize("told", [0.01, 0.0, 2.0, 22.0])
def test_a_callee_that_tells_other_losses_than_all_others_does_not_count(told: float) -> None:
    for honest in (2, 3):
        found = counted({LIAR: told, **dict.fromkeys(HONEST[:honest], 4.16)})
        assert found == {LIAR: 0, **dict.fromkeys(HONEST[:honest], 100)}


def test_of_two_callees_both_count_and_one_alone_does() -> None:
    assert counted({LIAR: 0.01, HONEST[0]: 4.16}) == {LIAR: 100, HONEST[0]: 100}
    assert counted({LIAR: 0.01}) == {LIAR: 100}


def test_two_of_five_do_not_have_the_others_left_out() -> None:
    found = counted({LIAR: 0.01, LIAR2: 0.01, **dict.fromkeys(HONEST, 4.16)})
    assert found == {LIAR: 0, LIAR2: 0, **dict.fromkeys(HONEST, 100)}


def test_small_losses_that_differ_by_little_all_count() -> None:
    told = {HONEST[0]: 0.02, HONEST[1]: 0.05, HONEST[2]: 0.09}
    assert counted(told) == dict.fromkeys(HONEST, 100)


def test_callees_that_are_gone_or_silent_leave_nobody_out() -> None:
    losses = ToldLosses()
    for peer in HONEST[1:]:
        for _ in range(LEAST_TOLD):
            losses.heard(peer, 8.0, among=HONEST)
    for _ in range(LEAST_TOLD):
        assert losses.heard(HONEST[0], 4.0, among=HONEST[:1]) == 4.0, "they are linked no more"
    assert math.isnan(losses.heard(HONEST[0], 4.0, among=HONEST))
    for _ in range(FRESH):
        last = losses.heard(HONEST[0], 4.0, among=HONEST)
    assert last == 4.0
