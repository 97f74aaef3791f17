"""A swarm on slow links changes codec and H by itself: alike at every peer, and the run keeps its length."""

import asyncio

import pytest

from dilocox_peer.config import preset
from tests.swarm.watched import LONG_S, Watched

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROUNDS, INNER_STEPS = 60, 8


def test_on_slow_uplinks_the_swarm_sends_less_and_ends_at_the_same_step():
    """fp16 contributions of 0.5 MB over 2 Mbit/s take two seconds; eight steps take a tenth of that."""

    async def scenario() -> None:
        manifest = preset(
            "tiny",
            rounds={"total": ROUNDS, "inner_steps": INNER_STEPS, "start_peers": 2},
            compression={"codec": "fp16", "times_fewer": 0.0},
        )
        async with Watched(manifest) as swarm:
            await swarm.start_bootstrap()
            peers = [await swarm.start_peer(f"peer{index}", more=["--max-upload", "2"]) for index in range(2)]
            await swarm.until(lambda: all(swarm.of(f"peer{each}", "RunComplete") for each in range(2)), peers, LONG_S)

            by_peer = [
                {
                    each["round"]: (each["codec"], each["inner_steps"], len(each["contributors"]))
                    for each in swarm.of(f"peer{index}", "RoundCertified")
                }
                for index in range(2)
            ]
            both = by_peer[0].keys() & by_peer[1].keys()
            assert all(by_peer[0][number] == by_peer[1][number] for number in both), "one plan for all"
            plans = [by_peer[0][number] for number in sorted(by_peer[0])]
            assert plans[0][:2] == ("fp16", INNER_STEPS)
            assert plans[-1][0] != "fp16" or plans[-2][1] > INNER_STEPS, "it went on as if the link were fast"
            assert sum(inner_steps for _, inner_steps, _ in plans) == ROUNDS * INNER_STEPS
            changes = swarm.of("peer0", "PlanChanged")
            assert changes
            assert "averaging took" in changes[0]["reason"]
            digests = {swarm.of(f"peer{index}", "RunComplete")[-1]["anchor_digest"] for index in range(2)}
            assert len(digests) == 1

    asyncio.run(scenario())
