"""The run's page beside a real run: what it shows is what the peers' own logs say."""

import asyncio
import json
import socket
import urllib.request
from statistics import median
from typing import Any

import pytest

from dilocox_peer.config import preset
from tests.swarm.watched import LONG_S, Watched

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
ROUNDS = 8


def read(port: int) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/state", timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except OSError:
        return {}


async def test_the_page_says_what_the_peers_logs_say():
    manifest = preset(
        "tiny", rounds={"start_peers": 2, "total": ROUNDS, "inner_steps": 8}, compression={"adapt": "off"}
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with Watched(manifest) as swarm:
        bootstrap = await swarm.start_bootstrap("--web-port", str(port))
        peers = [await swarm.start_peer(label) for label in "ab"]
        await swarm.until(lambda: all(swarm.round_of(label) >= ROUNDS - 1 for label in "ab"), peers, LONG_S)
        async with asyncio.timeout(LONG_S):
            while (known := await asyncio.to_thread(read, port)).get("now", {}).get("round", 0) < ROUNDS - 1:
                await swarm.next_change(0.5)
        assert bootstrap.process.returncode is None
    certified = {each["round"]: each for each in swarm.of("a", "RoundCertified")}
    tokens = manifest.inner.micro_batch * manifest.model.context
    counted = [certified[number]["micro_batches"] * tokens for number in range(1, ROUNDS)]
    assert known["history"]["tokens"][: ROUNDS - 1] == [sum(counted[:number]) for number in range(1, ROUNDS)]
    for number in range(1, ROUNDS):
        # A round may be closed again after a view change: the last one is what was certified.
        closed = [
            next(each["train_loss"] for each in reversed(swarm.of(label, "RoundClosed")) if each["round"] == number)
            for label in "ab"
        ]
        assert known["history"]["loss"][number - 1] == pytest.approx(median(closed), abs=1e-3)
    contributors = {each["peer"]: each["rounds"] for each in known["contributors"]["shown"]}
    assert set(contributors) == {peer for each in certified.values() for peer in each["contributors"]}
    assert known["now"]["total_rounds"] == ROUNDS
