"""What the benchmarks share: a swarm with its events kept, and a header that says where and with what it ran."""

import os
import platform
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from dilocox_peer.cli.local_swarm import LocalSwarm
from dilocox_peer.config import preset
from dilocox_peer.manifest import Manifest


def header() -> str:
    """Machine, versions, commit, command: what a figure needs beside it."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "hivemind"))
    return (
        f"# {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"Python {platform.python_version()}, {versions}, commit {commit.stdout.strip() or 'none'}\n"
        f"# command: python {' '.join(sys.argv)}"
    )


def spread(values: Sequence[float], form: str = ".3f") -> str:
    """min / median / max."""
    return " / ".join(format(value, form) for value in (min(values), median(values), max(values)))


def of_equal_rounds(start_peers: int) -> Manifest:
    """A small run whose rounds are all alike: 48 steps, and contributions of one bit an element: 59 of them are a state."""
    steps = dict.fromkeys(("inner_steps", "min_inner_steps", "max_inner_steps"), 48)
    rounds = {"total": 100_000, "start_peers": start_peers, **steps}
    return preset("tiny", rounds=rounds, compression={"codec": "sign", "adapt": "off"})


class WatchedSwarm(LocalSwarm):
    """A local swarm that keeps every event: events[label]."""

    def __init__(self, manifest: Manifest, *, data: Sequence[Path] = ()) -> None:
        self.events: dict[str, list[dict[str, Any]]] = defaultdict(list)
        super().__init__(manifest, lambda label, record: self.events[label].append(record), data=data)

    def of(self, label: str, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.events[label] if record["event"] == kind]
