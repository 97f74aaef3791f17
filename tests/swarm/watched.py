"""A local swarm whose events are kept, and what tests ask of processes."""

import subprocess
import sys
from collections import defaultdict
from typing import Any

import psutil

from dilocox_peer.cli.local_swarm import LocalSwarm
from dilocox_peer.manifest import Manifest

LONG_S = 120


class Watched(LocalSwarm):
    def __init__(self, manifest: Manifest) -> None:
        self.events: dict[str, list[dict[str, Any]]] = defaultdict(list)
        super().__init__(manifest, lambda label, record: self.events[label].append(record))

    def of(self, label: str, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.events[label] if record["event"] == kind]

    def round_of(self, label: str) -> int:
        return max((record["round"] for record in self.of(label, "RoundCertified")), default=0)


def family(pid: int) -> list[psutil.Process]:
    """Every process below pid, whatever session it is in."""
    return list(psutil.Process(pid).children(recursive=True))


def assert_gone(processes: list[psutil.Process]) -> None:
    _gone, alive = psutil.wait_procs(processes, timeout=15)
    assert not alive, alive


def demo(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "dilocox_peer", "demo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )
