"""What outsiders do with a run: export it, write text with it, look whether one could join. Real processes."""

import asyncio
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dilocox_peer.cli.local_swarm import LocalSwarm
from dilocox_peer.config import preset
from dilocox_peer.model.huggingface import read_folder
from dilocox_peer.peer.state.anchors import load_from_disk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


async def command(*arguments: object, code: int = 0) -> tuple[str, str]:
    """Standard output and error of a finished command."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "dilocox_peer", *map(str, arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    async with asyncio.timeout(120):
        out, err = await process.communicate()
    assert process.returncode == code, (process.returncode, out.decode(), err.decode())
    assert b"Traceback" not in err
    return out.decode(), err.decode()


@pytest.mark.parametrize(("stages", "replicas"), [(1, 2), (2, 1)])
def test_a_live_run_is_exported_generated_from_and_examined(tmp_path: Path, stages: int, replicas: int):
    heads: dict[tuple[int, str], str] = {}

    def take(_label: str, record: dict[str, Any]) -> None:
        if record["event"] == "RoundCertified":
            heads[record["round"], record["head"]] = record["anchor_digest"]

    async def scenario() -> None:
        rounds = {"total": 10_000, "inner_steps": 8, "start_peers": replicas}
        async with LocalSwarm(preset("tiny", stages={"count": stages}, rounds=rounds), take) as swarm:
            await swarm.start_bootstrap()
            peers = [await swarm.start_peer(f"peer{index}") for index in range(stages * replicas)]
            await swarm.until(lambda: any(number >= 2 for number, _head in heads), peers, 120)

            out, err = await command("export", swarm.link, "--out", tmp_path / "live")
            assert "wrote" in out
            model = read_folder(tmp_path / "live")
            assert model.origin.run_id == swarm.manifest.run_id
            assert len(model.origin.heads) == stages
            await swarm.until(
                lambda: all((model.origin.round, head) in heads for head in model.origin.heads), peers, 30
            )
            for stage in range(stages):
                proof = (
                    rf"stage {stage}: round {model.origin.round}, [0-9.]+ MB, as \d of {replicas} peers certified it"
                )
                assert re.search(proof, err), err

            text, _ = await command("generate", "import ", swarm.link, "--tokens", 40, "--seed", 1)
            assert text.startswith("import ")
            assert len(text.encode()) >= 47

            told = json.loads((await command("doctor", swarm.link, "--home", tmp_path / "home", "--json"))[0])
            assert told["ok"], told
            status = {check["name"]: check["status"] for check in told["checks"]}
            assert len(status) >= 12
            assert all(
                status[name] == "ok"
                for name in ("bootstrap", "directory", "manifest", "peers", "DHT round trip", "linkd")
            ), told
            assert not (tmp_path / "home").exists(), "nothing was made"

            await swarm.children.stop()
            disk = [path.parent for path in swarm.folder.glob("peers/*/runs/*/stage*")]
            newest = load_from_disk(sorted(set(disk)), swarm.manifest).model
            home = ["--home", swarm.folder, "--manifest", swarm.folder / "run.toml"]
            await command("export", *home, "--out", tmp_path / "disk")
            exported = read_folder(tmp_path / "disk")
            assert exported.origin == replace(newest.origin, cut=())  # of the run alone
            assert all(np.array_equal(exported.tensors[name], newest.tensors[name]) for name in newest.tensors)
            _, err = await command("export", swarm.link, "--out", tmp_path / "late", code=3)
            assert len(err.strip().splitlines()) == 1
            assert not (tmp_path / "late").exists()

    asyncio.run(scenario())
