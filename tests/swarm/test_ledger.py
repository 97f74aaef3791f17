"""The ledger of a real swarm says what its peers' event logs say, from the run and from a disk, over kills and a fork."""

import asyncio
import json
import signal
from collections import Counter
from typing import Any

import psutil
import pytest

from dilocox_peer.cli.home import PeerHome
from dilocox_peer.config import preset
from dilocox_peer.peer.state.keeper import Keeper
from tests.swarm.test_export import command
from tests.swarm.watched import Watched

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
LONG_S = 240
LABELS = ("ada", "bob", "eve")


def heads_on_disk(swarm: Watched, label: str) -> set[str]:
    """Of the chain's certificates. The peer has left."""
    folder = PeerHome.at(swarm.folder, label, None).run_folder(swarm.manifest.run_id)
    keeper = Keeper(folder, swarm.manifest, 0, lambda _event: None)
    try:
        assert keeper.durable is not None
        return {certificate.head.hex() for certificate in keeper.durable.appended}
    finally:
        keeper.close()


def test_it_says_what_all_logs_say_after_two_kills_and_a_fork() -> None:
    manifest = preset("tiny", rounds={"total": 10_000, "inner_steps": 16, "start_peers": 3})
    tokens = manifest.inner.micro_batch * manifest.model.context
    orphans: set[str] = set()

    async def scenario() -> tuple[dict[str, Any], dict[str, Any], dict[str, list[dict[str, Any]]], dict[str, str]]:
        async with Watched(manifest) as swarm:
            await swarm.start_bootstrap()
            more = {label: ["--public-name", label.title()] for label in LABELS}
            peers = {label: await swarm.start_peer(label, more=more[label]) for label in LABELS}

            async def reach(rounds: int, *alive: str) -> None:
                goal = max(swarm.round_of(label) for label in alive) + rounds
                await swarm.until(
                    lambda: min(swarm.round_of(label) for label in alive) >= goal,
                    [peers[label] for label in alive],
                    LONG_S,
                )

            def stop(*labels: str) -> None:
                for label in labels:
                    psutil.Process(peers[label].process.pid).suspend()

            def resume(*labels: str) -> None:
                for label in labels:
                    psutil.Process(peers[label].process.pid).resume()

            await reach(3, *LABELS)
            for killed in ("bob", "eve"):
                peers[killed].process.send_signal(signal.SIGKILL)
                await reach(3, *(label for label in LABELS if label != killed))
                peers[killed] = await swarm.start_peer(killed, more=more[killed])
                await reach(3, *LABELS)

            stop("bob", "eve")
            await reach(3, "ada")  # alone, on a branch of its own
            stop("ada")
            resume("bob", "eve")
            await reach(3, "bob", "eve")
            resume("ada")
            latest = lambda label: swarm.of(label, "RoundCertified")[-1]  # noqa: E731
            await swarm.until(
                lambda: all(set(latest(label)["contributors"]) == everybody(swarm) for label in LABELS),
                list(peers.values()),
                LONG_S,
            )
            live = json.loads((await command("ledger", swarm.link, "--json"))[0])
            for label in LABELS:
                peers[label].process.send_signal(signal.SIGINT)
            await asyncio.gather(*(peers[label].process.wait() for label in LABELS))
            disk = json.loads((await command("ledger", "--home", swarm.folder, "--name", "ada", "--json"))[0])
            on_chain = heads_on_disk(swarm, "ada")
            orphans.update(head for label in LABELS for head in heads_in_log(swarm, label) - on_chain)
            names = {swarm.of(label, "PeerStarted")[0]["peer"]: label.title() for label in LABELS}
            return live, disk, dict(swarm.events), names

    live, disk, events, names = asyncio.run(scenario())
    assert len(orphans) >= 3, "rounds of the branch that was left"
    logged = {
        record["round"]: record
        for label in LABELS
        for record in events[label]
        if record["event"] == "RoundCertified" and record["head"] not in orphans
    }
    for summary in (live, disk):
        (stage,) = summary["stages"]
        rounds = [logged[number] for number in range(1, stage["rounds"] + 1)]
        assert stage["tokens"] == tokens * sum(each["micro_batches"] for each in rounds)
        counted = Counter(peer for each in rounds for peer in each["contributors"])
        assert {each["peer"]: each["rounds"] for each in stage["peers"]} == counted
        assert sum(each["tokens"] for each in stage["peers"]) == stage["tokens"]
    assert {each["peer"]: each["name"] for each in live["stages"][0]["peers"]} == names
    for label in LABELS:
        (last,) = [record for record in events[label] if record["event"] == "Credited"][-1:]
        assert last["rounds"] > 0, "what is said at leave is of all its sessions"


def everybody(swarm: Watched) -> set[str]:
    return {swarm.of(label, "PeerStarted")[0]["peer"] for label in LABELS}


def heads_in_log(swarm: Watched, label: str) -> set[str]:
    return {record["head"] for record in swarm.of(label, "RoundCertified")}
