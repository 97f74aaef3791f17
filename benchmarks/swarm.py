"""What the benchmarks share: a real swarm on loopback for a while, its events, and a header that says where it ran."""

import asyncio
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from dilocox_peer.cli.children import Children
from dilocox_peer.cli.init import write_whole
from dilocox_peer.config import to_toml
from dilocox_peer.manifest import Manifest
from dilocox_peer.peer.identity import Identity

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
START_S = 90.0


def header() -> str:
    """Machine, versions, commit, command: what a figure needs beside it."""
    from importlib.metadata import version

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "hivemind"))
    load = os.getloadavg()[0]
    return (
        f"# {platform.machine()}, {os.cpu_count()} cores, load {load:.1f}, Python {platform.python_version()}, {versions}, "
        f"commit {commit or 'none'}\n# command: python {' '.join(sys.argv)}"
    )


def spread(values: Sequence[float], form: str = ".3f") -> str:
    """min / median / max."""
    return " / ".join(format(value, form) for value in (min(values), median(values), max(values)))


class Swarm:
    """`async with Swarm(manifest, replicas) as swarm`: peers train until the block ends. events: label -> its events."""

    def __init__(self, manifest: Manifest, replicas: int) -> None:
        self._replicas = replicas
        self.folder = Path(tempfile.mkdtemp(prefix="dilocox-bench-"))
        with Identity.open(self.folder / "owner.key") as owner:
            self.manifest = manifest.signed_by(owner.key)
        self.events: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.changed = asyncio.Event()
        self.children = Children(self._on_event)
        self.link = ""

    def _on_event(self, label: str, record: dict[str, Any]) -> None:
        self.events[label].append(record)
        self.changed.set()

    def of(self, label: str, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.events[label] if record["event"] == kind]

    @property
    def peers(self) -> list[str]:
        return [f"peer{index}" for index in range(self._replicas)]

    async def until(self, condition: Any, timeout_s: float) -> None:
        """Waits until condition() holds; TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def __aenter__(self) -> "Swarm":
        try:
            run_file = self.folder / "run.toml"
            write_whole(run_file, to_toml(self.manifest).encode())
            home = ("--home", str(self.folder), "--host-maddrs", LOOPBACK)
            await self.children.start("bootstrap", ["bootstrap", str(run_file), *home])
            await self.until(lambda: self.of("bootstrap", "BootstrapReady"), START_S)
            self.link = self.of("bootstrap", "BootstrapReady")[0]["link"]
            for label in self.peers:
                await self.children.start(label, ["join", self.link, "--name", label, *home])
                await self.until(lambda label=label: self.of(label, "PeerStarted"), START_S)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.children.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


def now_s() -> float:
    return time.time()
