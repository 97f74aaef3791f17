"""The command line in processes of its own, and what tests look for when it refuses."""

import fcntl
import os
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import IO

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


PORTS = range(20_000, 32_000)
"""Below those that systems hand out: nothing that listens at port 0 or dials gets one of them."""
_locks: list[IO[str]] = []  # of the ports that are this process's until it ends


def free_port(neighbours: int = 0) -> int:
    """A port that nobody listens at until the test does. neighbours: so many behind it are free as well.

    Locked against other processes that run tests: between a look and the use, theirs would take what ours has found.
    """
    folder = Path(tempfile.gettempdir(), f"dilocox-test-ports-{os.getuid()}")
    folder.mkdir(exist_ok=True)
    for first in range(PORTS.start, PORTS.stop - neighbours, 1 + neighbours):
        ports = range(first, first + 1 + neighbours)
        if all(_is_ours(folder, port) for port in ports):
            return first
    raise AssertionError("no free port")


def _is_ours(folder: Path, port: int) -> bool:
    """Whether nobody has it, and it is locked for us now."""
    with ExitStack() as stack:
        lock = stack.enter_context((folder / str(port)).open("w"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        stack.pop_all()
    _locks.append(lock)
    return True


def link_to(port: int, run_id: RunId = RUN) -> str:
    return format_invitation(Invitation(run_id, (f"/ip4/127.0.0.1/tcp/{port}/p2p/{SOMEBODY}",)))
