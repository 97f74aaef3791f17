"""A run that has begun is not begun again, and one that is over stays over: real processes, some of them away."""

import asyncio
import sys

import pytest

from dilocox_peer.cli.home import PeerHome
from dilocox_peer.config import preset
from dilocox_peer.peer.state.keeper import Keeper
from tests.swarm.watched import LONG_S, Watched

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_a_newcomer_to_a_run_that_is_over_is_told_so_and_begins_nothing():
    async def scenario() -> None:
        async with Watched(preset("tiny", rounds={"total": 3, "inner_steps": 4})) as swarm:
            bootstrap = await swarm.start_bootstrap()
            peer = await swarm.start_peer("peer0")
            await swarm.until(lambda: swarm.of("peer0", "Left") != [], [bootstrap], LONG_S)
            assert await peer.process.wait() == 0
            assert [each["round"] for each in swarm.of("peer0", "RunComplete")] == [3]

            newcomer = await swarm.children.start("peer1", ["join", swarm.link, "--name", "peer1", *swarm.common])
            assert await asyncio.wait_for(newcomer.process.wait(), LONG_S) == 0
            assert newcomer.reader is not None
            await newcomer.reader
            assert [each["round"] for each in swarm.of("peer1", "RunIsOver")] == [3]
            assert swarm.of("peer1", "RoundCertified") == []
            assert swarm.of("peer1", "Left")[-1]["reason"] == "the run is complete"

            # Whoever holds the final model may come back: it is what it was.
            returned = await swarm.start_peer("peer0")
            assert await asyncio.wait_for(returned.process.wait(), LONG_S) == 0
            assert len({each["anchor_digest"] for each in swarm.of("peer0", "RunComplete")}) == 1

    asyncio.run(scenario())


def test_a_newcomer_waits_for_the_only_one_who_holds_the_state():
    async def scenario() -> None:
        rounds = {"total": 10_000, "inner_steps": 4, "checkpoint_every": 2}
        async with Watched(preset("tiny", rounds=rounds)) as swarm:
            bootstrap = await swarm.start_bootstrap("--no-keep")
            first = await swarm.start_peer("peer0")
            vouched = lambda: max((each["round"] for each in swarm.of("peer0", "RoundVouched")), default=0)  # noqa: E731
            await swarm.until(lambda: vouched() >= 2, [bootstrap, first], LONG_S)
            first.process.terminate()
            await first.process.wait()
            reached = swarm.round_of("peer0")

            newcomer = await swarm.start_peer("peer1")
            await swarm.until(lambda: swarm.of("peer1", "StateAwaited") != [], [bootstrap, newcomer], LONG_S)
            assert swarm.of("peer1", "StateAwaited")[0]["vouched_round"] >= 2
            assert swarm.of("peer1", "RoundCertified") == []

            back = await swarm.start_peer("peer0")
            both = [bootstrap, newcomer, back]
            await swarm.until(lambda: swarm.round_of("peer1") > reached, both, LONG_S)
            heads = {each["round"]: each["head"] for each in swarm.of("peer0", "RoundCertified")}
            of_before = [each for each in swarm.of("peer1", "RoundCertified") if each["round"] <= reached]
            assert all(each["head"] == heads[each["round"]] for each in of_before), "it began anew"

    asyncio.run(scenario())


async def recover(swarm: Watched, *arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "dilocox_peer", "recover", *arguments, "--name", "peer0", "--home", str(swarm.folder),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    said, _ = await process.communicate()
    assert process.returncode == 0, said
    return said.decode()


def test_with_the_owners_key_a_branch_that_was_left_is_gone_back_to_and_the_owner_follows():
    async def scenario() -> None:
        rounds = {"total": 10_000, "inner_steps": 4, "checkpoint_every": 2}
        async with Watched(preset("tiny", rounds=rounds)) as swarm:
            bootstrap = await swarm.start_bootstrap("--no-keep")  # which would know better than to go back

            async def train_until(round_number: int) -> int:
                peer = await swarm.start_peer("peer0")
                await swarm.until(lambda: swarm.round_of("peer0") >= round_number, [bootstrap, peer], LONG_S)
                peer.process.terminate()
                await peer.process.wait()
                assert peer.reader is not None
                await peer.reader
                return swarm.round_of("peer0")

            left_at = await train_until(3)
            folder = PeerHome.at(swarm.folder, "peer0", None).run_folder(swarm.manifest.run_id)
            keeper = Keeper(folder, swarm.manifest, 0, lambda _event: None)
            assert keeper.durable is not None
            chain, state = keeper.durable.appended, keeper.state
            keeper.left.keep(swarm.manifest.run_id, chain, chain[-2:], state)  # as if it had left it just now
            keeper.close()
            await train_until(left_at + 8)

            [line] = (await recover(swarm)).splitlines()
            said = await recover(swarm, line.split()[0])
            assert f"back at round {state.round}" in said
            assert "signed with the owner's key" in said  # it is in the swarm's home
            assert len((await recover(swarm)).splitlines()) == 2, "where it was is kept as well"

            vouched = len(swarm.of("bootstrap", "RoundVouched"))
            back = await swarm.start_peer("peer0")
            started = swarm.of("peer0", "PeerStarted")[-1]["time"]

            def since() -> list[int]:
                return [each["round"] for each in swarm.of("peer0", "RoundCertified") if each["time"] > started]

            await swarm.until(lambda: len(since()) >= 4, [bootstrap, back], LONG_S)
            assert since()[0] == state.round + 1

            def newest_vouched() -> int:
                return max((each["round"] for each in swarm.of("bootstrap", "RoundVouched")[vouched:]), default=0)

            await swarm.until(lambda: newest_vouched() > state.round, [bootstrap, back], LONG_S)
            assert newest_vouched() <= max(since())

    asyncio.run(scenario())
