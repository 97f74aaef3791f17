"""The ledger of a real swarm says what its peers' event logs say, from the run and from a disk, over kills."""

import asyncio
import json
import signal
from collections import Counter
from typing import Any

import pytest

from dilocox_peer.config import preset
from tests.swarm.test_export import command
from tests.swarm.watched import Watched

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LONG_S = 240


def test_it_says_what_all_logs_say_after_two_kills() -> None:
    manifest = preset("tiny", rounds={"total": 10_000, "inner_steps": 16, "start_peers": 3})
    tokens = manifest.inner.micro_batch * manifest.model.context

    async def scenario() -> tuple[dict[str, Any], dict[str, Any], dict[str, list[dict[str, Any]]], dict[str, str]]:
        async with Watched(manifest) as swarm:
            await swarm.start_bootstrap()
            labels = ["ada", "bob", "eve"]
            more = {label: ["--public-name", label.title()] for label in labels}
            peers = {label: await swarm.start_peer(label, more=more[label]) for label in labels}

            async def reach(rounds: int, *alive: str) -> None:
                goal = max(swarm.round_of(label) for label in alive) + rounds
                await swarm.until(
                    lambda: min(swarm.round_of(label) for label in alive) >= goal,
                    [peers[label] for label in alive],
                    LONG_S,
                )

            await reach(3, *labels)
            for killed in ("bob", "eve"):
                peers[killed].process.send_signal(signal.SIGKILL)
                await reach(3, *(label for label in labels if label != killed))
                peers[killed] = await swarm.start_peer(killed, more=more[killed])
                await reach(3, *labels)
            live = json.loads((await command("ledger", swarm.link, "--json"))[0])
            for label in labels:
                peers[label].process.send_signal(signal.SIGINT)
            await asyncio.gather(*(peers[label].process.wait() for label in labels))
            disk = json.loads((await command("ledger", "--home", swarm.folder, "--name", "ada", "--json"))[0])
            names = {swarm.of(label, "PeerStarted")[0]["peer"]: label.title() for label in labels}
            return live, disk, dict(swarm.events), names

    live, disk, events, names = asyncio.run(scenario())
    logged = {
        record["round"]: record
        for label in ("ada", "bob", "eve")
        for record in events[label]
        if record["event"] == "RoundCertified"
    }
    for summary in (live, disk):
        (stage,) = summary["stages"]
        rounds = [logged[number] for number in range(1, stage["rounds"] + 1)]
        assert stage["tokens"] == tokens * sum(each["micro_batches"] for each in rounds)
        counted = Counter(peer for each in rounds for peer in each["contributors"])
        assert {each["peer"]: each["rounds"] for each in stage["peers"]} == counted
        assert sum(each["tokens"] for each in stage["peers"]) == stage["tokens"]
    assert {each["peer"]: each["name"] for each in live["stages"][0]["peers"]} == names
    for label in ("ada", "bob", "eve"):
        (last,) = [record for record in events[label] if record["event"] == "Credited"][-1:]
        assert last["rounds"] > 0, "what is said at leave is of all its sessions"
