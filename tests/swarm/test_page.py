"""The run's page beside a real run: what it shows is what the peers' own logs say."""

import asyncio
import json
import shlex
import socket
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from dilocox_peer.config import preset
from dilocox_peer.peer.control import ask, socket_path
from tests.swarm.watched import LONG_S, Watched

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
NAME = "<b>Ada</b>"
ROUNDS = 8  # that are compared, of many


def read(port: int) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/state", timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except OSError:
        return {}


async def test_the_page_says_what_the_peers_logs_say():
    manifest = preset("tiny", rounds={"start_peers": 2, "total": 500, "inner_steps": 8}, compression={"adapt": "off"})
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with Watched(manifest) as swarm:
        bootstrap = await swarm.start_bootstrap("--web-port", str(port), "--evaluate")
        peers = [await swarm.start_peer(label, more=["--public-name", NAME]) for label in "ab"]
        await swarm.until(lambda: all(swarm.round_of(label) >= ROUNDS for label in "ab"), peers, LONG_S)

        async def until(condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
            async with asyncio.timeout(LONG_S):
                while not (known := await asyncio.to_thread(read, port)) or not condition(known):
                    await swarm.next_change(0.5)
            return known

        known = await until(lambda known: known["now"]["round"] >= ROUNDS)
        paused = swarm.of("a", "PeerStarted")[0]["peer"]
        await ask(socket_path(swarm.folder / "peers" / "a"), "pause")
        now = await until(lambda known: known["now"]["peers_paused"] == 1)
        assert {each["name"] for each in now["stages"][0]["peers"]} == {NAME}
        assert [each["peer"] for each in now["stages"][0]["peers"] if each["paused"]] == [paused]
        await ask(socket_path(swarm.folder / "peers" / "a"), "resume")
        await until(lambda known: known["now"]["peers_paused"] == 0)
        assert bootstrap.process.returncode is None
    certified = {each["round"]: each for each in swarm.of("a", "RoundCertified")}
    tokens = manifest.inner.micro_batch * manifest.model.context
    counted = [certified[number]["micro_batches"] * tokens for number in range(1, ROUNDS + 1)]
    assert known["history"]["tokens"][:ROUNDS] == [sum(counted[:number]) for number in range(1, ROUNDS + 1)]
    compared = 0
    for number in range(1, ROUNDS + 1):
        # A round may be closed again after a view change: the last one is what was certified.
        closed = [
            next(each["train_loss"] for each in reversed(swarm.of(label, "RoundClosed")) if each["round"] == number)
            for label in "ab"
        ]
        if len(certified[number]["contributors"]) == len(closed):  # else one was too late
            assert known["history"]["loss"][number - 1] == pytest.approx(median(closed), abs=1e-3)
            compared += 1
    assert compared > ROUNDS // 2
    contributors = {each["peer"]: each["rounds"] for each in known["contributors"]["shown"]}
    assert set(contributors) == {each["peer"] for label in "ab" for each in swarm.of(label, "PeerStarted")}
    assert known["now"]["total_rounds"] == 500


async def test_when_everybody_has_left_the_page_says_so_and_its_line_gets_the_model(tmp_path: Path):
    manifest = preset("tiny", rounds={"start_peers": 1, "total": 4, "inner_steps": 4}, compression={"adapt": "off"})
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with Watched(manifest) as swarm:
        await swarm.start_bootstrap("--web-port", str(port))
        peer = await swarm.start_peer("a")
        async with asyncio.timeout(LONG_S):
            await peer.process.wait()
            while (known := await asyncio.to_thread(read, port)).get("now", {}).get("kept_round", 0) < 4:
                await swarm.next_change(0.5)
        assert known["now"]["standing"] == "complete"
        assert known["now"]["round"] == known["now"]["total_rounds"] == 4
        program, *line = shlex.split(known["run"]["export"])
        assert program == "dilocox-peer"
        done = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "dilocox_peer", *line, "--home", str(tmp_path / "home"), cwd=tmp_path
        )
        async with asyncio.timeout(LONG_S):
            assert await done.wait() == 0
        assert (tmp_path / "model" / "config.json").exists()
