"""Real processes: a peer of one stage sends its neighbours fifty times what it computed; they drop it, name it, and go on with the others."""

import asyncio

import pytest

from dilocox_peer.config import preset
from dilocox_peer.model.partition import with_cut
from tests.swarm.watched import LONG_S, Watched

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

AFTER = 100  # micro-batches; by then its neighbours know what is usual
ROUNDS = 6


async def play(what: str) -> Watched:
    """Two peers of the stage that is lied to, three of the other, of which one lies."""
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
        program = ("-m", "tests.hostile.distorter", what, "50", str(AFTER))
        stages = {"lied0": 1 - of_liar, "lied1": 1 - of_liar, "honest0": of_liar, "honest1": of_liar}
        peers = await asyncio.gather(
            *(swarm.start_peer(label, stage=stage) for label, stage in stages.items()),
            swarm.start_peer("liar", stage=of_liar, program=program),
        )
        await swarm.until(
            lambda: all(dropped_by(swarm, label, what) for label in ("lied0", "lied1")), peers, 3 * LONG_S
        )
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
    swarm = asyncio.run(play(what))
    liar = str(swarm.of("liar", "PeerStarted")[0]["peer"])
    for label in ("lied0", "lied1"):
        named = [each["reason"] for each in swarm.of(label, "Failed") if _names(each["reason"], what)]
        assert named
        assert all(liar in reason for reason in named), named
        assert dropped_by(swarm, label, what) == {liar}
