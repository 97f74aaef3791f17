"""What the run's owner wants, in a real swarm: said with the command, in every chain, gone by at the same round, known to who comes late."""

import asyncio
import subprocess
import sys

import pytest

from dilocox_peer.cli.children import Child
from dilocox_peer.config import preset
from tests.swarm.watched import LONG_S, Watched

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROUNDS = {"total": 10_000, "inner_steps": 4, "checkpoint_every": 4}


async def owner(swarm: Watched, *said: str, code: int = 0) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "dilocox_peer", "owner", *said, "--run-file", str(swarm.folder / "run.toml"),
        "--home", str(swarm.folder), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    async with asyncio.timeout(LONG_S):
        out, _ = await process.communicate()
    assert process.returncode == code, out.decode()
    return out.decode()


def applied(swarm: Watched, label: str) -> list[int]:
    return [each["number"] for each in swarm.of(label, "OwnerDirected") if each["applies"]]


def test_a_run_pauses_goes_on_loses_whom_its_owner_bans_and_ends_where_he_says() -> None:
    async def scenario() -> None:
        manifest = preset("tiny", rounds=ROUNDS, stages={"count": 2})
        async with Watched(manifest) as swarm:
            bootstrap = await swarm.start_bootstrap()
            labels = ["one", "two", "three"]
            peers = {label: await swarm.start_peer(label, stage=number % 2) for number, label in enumerate(labels)}

            def all_at(number: int) -> bool:
                return all(swarm.round_of(label) >= number for label in labels)

            everybody: list[Child] = [bootstrap, *peers.values()]
            await swarm.until(lambda: all_at(3), everybody, LONG_S)

            assert "directive 1: paused" in await owner(swarm, "pause")
            await swarm.until(lambda: all(swarm.of(label, "Paused") for label in labels), everybody, LONG_S)
            for label in labels:
                assert "the run's owner has paused the run" in swarm.of(label, "Paused")[-1]["reason"]
            await asyncio.sleep(3)  # what was under way ends; asserted below is that nothing follows
            stood = {label: swarm.round_of(label) for label in labels}
            await asyncio.sleep(8)
            assert {label: swarm.round_of(label) for label in labels} == stood
            assert stood["one"] == stood["three"], "two peers of a stage stopped at different rounds"

            await owner(swarm, "resume")
            await swarm.until(lambda: all_at(max(stood.values()) + 3), everybody, LONG_S)
            assert all(applied(swarm, label)[-1] == 2 for label in labels)

            await owner(swarm, "say", "thank you all")
            await owner(swarm, "rate", "0.5")
            banned = swarm.of("three", "PeerStarted")[-1]["peer"]
            await owner(swarm, "ban", banned)
            async with asyncio.timeout(LONG_S):
                assert await peers["three"].process.wait() == 4
            assert any("has banned this peer" in line for line in peers["three"].tail)
            labels.remove("three")
            everybody = [bootstrap, peers["one"], peers["two"]]
            number = max(map(swarm.round_of, labels))
            await swarm.until(lambda: all_at(number + 4), everybody, LONG_S)
            for label in labels:
                certified = swarm.of(label, "RoundCertified")[-1]
                assert banned not in certified["roster"]

            late = await swarm.start_peer("late", stage=1)
            await swarm.until(lambda: applied(swarm, "late") != [], [*everybody, late], LONG_S)
            told = swarm.of("late", "OwnerDirected")[-1]
            assert (told["number"], told["said"]) == (5, "thank you all")
            assert "learning rate x 0.5" in told["wants"]

            last = max(map(swarm.round_of, labels)) + 12
            await owner(swarm, "stop", str(last), "--cool-down", "4")
            for peer in (peers["one"], peers["two"], late):
                async with asyncio.timeout(LONG_S):
                    assert await peer.process.wait() == 0
            for label in (*labels, "late"):
                assert [each["round"] for each in swarm.of(label, "RunComplete")] == [last]

            def vouched() -> int:
                return sum(each["round"] == last for each in swarm.of("bootstrap", "RoundVouched"))

            await swarm.until(lambda: vouched() == 2, [bootstrap], LONG_S)  # of both stages
            assert "the run is over" in await owner(swarm, "extend", "20000", "--link", swarm.link, code=2)

    asyncio.run(scenario())
