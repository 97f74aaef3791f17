"""Real processes: a peer of one stage sends its neighbours fifty times what it computed, or the opposite; they drop it, name it, and go on with the others."""

import asyncio
from collections.abc import Callable

import pytest

from dilocox_peer.config import preset
from dilocox_peer.model.partition import with_cut
from dilocox_peer.pipeline.checks import LEAST_AGREEMENT
from tests.swarm.watched import LONG_S, Watched

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

AFTER = 100  # micro-batches; by then its neighbours know what is usual
ROUNDS = 6


async def play(what: str, times: int, found: Callable[[Watched, str], bool]) -> Watched:
    """Two peers of the stage that is lied to, three of the other, of which one lies, until both have found that out."""
    of_liar = 1 if what == "gradient" else 0
    manifest = with_cut(
        preset(
            "tiny",
            model={"layers": 2},
            stages={"count": 2},
            rounds={"total": 10_000, "inner_steps": 16, "start_peers": 2},
        )
    )
    async with Watched(manifest) as swarm:
        await swarm.start_bootstrap()
        program = ("-m", "tests.hostile.distorter", what, str(times), str(AFTER))
        stages = {"lied0": 1 - of_liar, "lied1": 1 - of_liar, "honest0": of_liar, "honest1": of_liar}
        peers = await asyncio.gather(
            *(swarm.start_peer(label, stage=stage) for label, stage in stages.items()),
            swarm.start_peer("liar", stage=of_liar, program=program),
        )
        await swarm.until(lambda: all(found(swarm, label) for label in ("lied0", "lied1")), peers, 3 * LONG_S)
        last = max(map(swarm.round_of, stages)) + ROUNDS
        await swarm.until(lambda: min(map(swarm.round_of, stages)) >= last, peers, 2 * LONG_S)
        return swarm


def _names(reason: str, what: str) -> bool:
    return "of strength" in reason and ("a gradient" if what == "gradient" else "activations") in reason


def dropped_by(swarm: Watched, label: str, what: str) -> set[str]:
    """Neighbours whose links it has ended for bodies that are too strong."""
    return {each["peer"] for each in swarm.of(label, "NeighbourUnlinked") if _names(each["reason"], what)}


@pytest.mark.parametrize("what", ["gradient", "activations"])
def test_a_neighbour_that_lies_is_dropped_and_named_and_training_goes_on(what: str) -> None:
    swarm = asyncio.run(play(what, 50, lambda swarm, label: bool(dropped_by(swarm, label, what))))
    liar = str(swarm.of("liar", "PeerStarted")[0]["peer"])
    for label in ("lied0", "lied1"):
        named = [each["reason"] for each in swarm.of(label, "Failed") if _names(each["reason"], what)]
        assert named
        assert all(liar in reason for reason in named), named
        assert dropped_by(swarm, label, what) == {liar}


def test_a_callee_that_turns_its_gradients_round_is_found_out_by_all_its_callers() -> None:
    """They are as strong as they should be: only another replica's say that they are false."""
    swarm = asyncio.run(play("gradient", -1, lambda swarm, label: bool(swarm.of(label, "GradientsFalse"))))
    liar = str(swarm.of("liar", "PeerStarted")[0]["peer"])
    for label in ("lied0", "lied1"):
        assert {each["peer"] for each in swarm.of(label, "GradientsFalse")} == {liar}
        compared = swarm.of(label, "GradientsCompared")
        honest = [each["agreement"] for each in compared if liar not in (each["one"], each["other"])]
        assert all(each > LEAST_AGREEMENT for each in honest), sorted(honest)
        print(label, len(compared), sorted(round(each, 2) for each in honest))
