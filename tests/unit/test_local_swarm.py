"""What a swarm that was killed with -9 leaves in the temporary folder, and that the next one removes it; one that hangs is not left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from dilocox_peer.cli.local_swarm import FOLDER, LocalSwarm, process_started, sweep
from dilocox_peer.manifest import Manifest

has_proc = pytest.mark.skipif(process_started(os.getpid()) is None, reason="no /proc here")


@pytest.fixture(scope="module")
def dead_pid() -> int:
    """Of a process that has ended and was waited for."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def folder_of(temporary: Path, pid: int, started: int) -> Path:
    folder = temporary / f"{FOLDER.format(pid=pid, started=started)}abc_12"
    (folder / "peer").mkdir(parents=True)
    (folder / "peer" / "anchor").write_bytes(b"pseudo_gradient")
    return folder


def test_folder_of_a_dead_process_is_swept(tmp_path: Path, dead_pid: int) -> None:
    folder = folder_of(tmp_path, dead_pid, 4711)
    assert sweep(tmp_path) == [folder]
    assert not folder.exists()


def test_folder_of_a_running_process_stays(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, os.getpid(), process_started(os.getpid()) or 0)
    assert sweep(tmp_path) == []
    assert (folder / "peer" / "anchor").exists()


@has_proc
def test_pid_that_another_process_has_by_now_is_not_mistaken(tmp_path: Path) -> None:
    started = process_started(os.getpid())
    assert started is not None
    folder = folder_of(tmp_path, os.getpid(), started + 1)
    assert sweep(tmp_path) == [folder]


def test_process_whose_start_is_not_known_counts_as_running(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, os.getpid(), 0)
    assert sweep(tmp_path) == []
    assert folder.exists()


def test_other_names_files_and_links_stay(tmp_path: Path, dead_pid: int) -> None:
    named = FOLDER.format(pid=dead_pid, started=1)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / f"{named}link").symlink_to(elsewhere, target_is_directory=True)
    (tmp_path / f"{named}file").write_bytes(b"")
    for name in ("dilocox-swarm-abcdefgh", f"x{named}abc", f"{named}abc-more", "dilocox-swarm-0-1-abc"):
        (tmp_path / name).mkdir()
    before = sorted(tmp_path.iterdir())
    assert sweep(tmp_path) == []
    assert sorted(tmp_path.iterdir()) == before


def test_folder_of_another_user_stays(tmp_path: Path, dead_pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path, dead_pid, 1)
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    assert sweep(tmp_path) == []
    assert folder.exists()


def test_no_temporary_folder_is_no_error(tmp_path: Path) -> None:
    assert sweep(tmp_path / "none") == []


async def test_swarm_sweeps_when_made_and_names_its_process(
    tmp_path: Path, dead_pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = folder_of(tmp_path, dead_pid, 1)
    async with LocalSwarm(Manifest(), lambda label, record: None) as swarm:
        assert not left.exists()
        assert swarm.folder.parent == tmp_path
        assert swarm.folder.name.startswith(f"dilocox-swarm-{os.getpid()}-{process_started(os.getpid()) or 0}-")
        assert sweep(tmp_path) == []
        assert swarm.folder.exists()
    assert not swarm.folder.exists()


HANGS = """
import signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('{"time": 0, "event": "up"}')
sys.stdin.read()
print('{"time": 0, "event": "asked"}')
while True:
    signal.pause()
"""


async def test_child_that_hangs_is_killed_when_the_swarm_is_cancelled_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def cancel(_label: str, _record: dict[str, Any]) -> None:
        running.cancel()  # once it is up, and once more when it was asked to leave, and stays

    swarm = LocalSwarm(Manifest(), cancel)

    async def run() -> None:
        async with swarm:
            await swarm.children.start("hangs", [], program=("-c", HANGS))
            await asyncio.Event().wait()

    running = asyncio.create_task(run())
    with pytest.raises(asyncio.CancelledError):
        await running
    assert swarm.children["hangs"].process.returncode == -signal.SIGKILL
    assert not swarm.folder.exists()
