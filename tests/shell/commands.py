"""The command line in processes of its own, and what tests look for when it refuses."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from dilocox_peer.invitation import Invitation, format_invitation
from dilocox_peer.signing import SigningKey
from dilocox_peer.types import RunId

RUN = RunId("ab" * 32)
SOMEBODY = SigningKey(b"x" * 32).peer_id


def peer(home: Path, *arguments: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    return run(*arguments, "--home", str(home), timeout_s=timeout_s)


def run(*arguments: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dilocox_peer", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "COLUMNS": "200"},
    )


def assert_refused(done: subprocess.CompletedProcess[str], code: int, *needles: str) -> None:
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr + done.stdout
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    for needle in needles:
        assert needle in lines[0], lines[0]


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def link_to(port: int, run_id: RunId = RUN) -> str:
    return format_invitation(Invitation(run_id, (f"/ip4/127.0.0.1/tcp/{port}/p2p/{SOMEBODY}",)))
