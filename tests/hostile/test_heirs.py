"""Real processes: a stranger that says it keeps the run, and has it to its end, with a state of its own."""

import asyncio

import pytest

from tests.hostile.attacked import PATIENCE_S, STRANGER, Attacked, attacked_run
from tests.swarm.test_kept import kept, leave

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
LOOKED_S = (
    30.0  # in a third of which a keeper was seen to follow the stranger to the end, and to let go of the true state
)


def ended(swarm: Attacked, label: str) -> list[str]:
    return [kind for kind in ("RunComplete", "RunIsOver", "Left") if swarm.of(label, kind)]


def test_a_stranger_that_has_the_run_to_its_end_takes_it_from_nobody_who_has_it() -> None:
    """From a newcomer while peers train, from the keeper when these have gone, from a peer that comes back."""

    async def scenario() -> None:
        async with Attacked(attacked_run(1, rounds={"total": 4000})) as swarm:
            bootstrap = await swarm.start_bootstrap()
            peer = await swarm.start_peer("peer0")
            await swarm.start_stranger()
            await swarm.until(lambda: swarm.round_of("peer0") >= 6 and kept(swarm) > 0, [bootstrap, peer], PATIENCE_S)
            swarm.order("heir")
            await swarm.until(lambda: swarm.acts([STRANGER]) >= 3, [bootstrap, peer], PATIENCE_S)
            newcomer = await swarm.start_peer("newcomer")
            reached = swarm.round_of("peer0")
            await swarm.until(lambda: swarm.round_of("newcomer") > reached + 2, [bootstrap, peer, newcomer], PATIENCE_S)
            assert not ended(swarm, "newcomer")
            await leave(newcomer, peer)
            reached = swarm.round_of("peer0")
            swarm.order("heir")  # from the very tip
            acts = swarm.acts([STRANGER])
            await asyncio.sleep(LOOKED_S)
            await swarm.until(lambda: swarm.acts([STRANGER]) >= acts + 12, [bootstrap], PATIENCE_S)
            assert not any(each["is_last"] for each in swarm.of("bootstrap", "RunKept")), "the true state is gone"

            counted = len(swarm.of("peer0", "RoundCertified"))
            back = await swarm.start_peer("peer0")
            await swarm.until(
                lambda: len(swarm.of("peer0", "RoundCertified")) > counted + 3, [bootstrap, back], PATIENCE_S
            )
            assert swarm.of("peer0", "RoundCertified")[counted]["round"] <= reached + 1, "it goes on from its own"
            assert not swarm.of("peer0", "BranchSwitched")

    asyncio.run(scenario())
