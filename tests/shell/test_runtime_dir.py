"""The folder of a peer's sockets, and what killed peers leave beside it."""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dilocox_peer.errors import ConfigError
from dilocox_peer.network.runtime_dir import RuntimeDir
from dilocox_peer.types import PeerId

KILLED, ALIVE, NEW = (PeerId("12D3KooW" + letter * 44) for letter in "ABC")
HOLDER = """
import socket, sys, time
from pathlib import Path
from dilocox_peer.network.runtime_dir import RuntimeDir
held = RuntimeDir.open(Path(sys.argv[1]), sys.argv[2])
with socket.socket(socket.AF_UNIX) as one:
    one.bind(str(held.path / "p2pd.sock"))
    print(held.path, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def beside(tmp_path_factory, monkeypatch):
    """Where stand-ins are made: short, and this test's own."""
    folder = Path("/tmp", f"rt{os.getpid()}")
    folder.mkdir()
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    for left in sorted(folder.rglob("*"), reverse=True):
        left.rmdir() if left.is_dir() else left.unlink()
    folder.rmdir()


def _held(wanted: Path, peer: PeerId) -> tuple[subprocess.Popen[str], Path]:
    """Another process that has it open."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(wanted), peer], stdout=subprocess.PIPE, text=True, env=os.environ
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_what_killed_peers_left_is_taken_away_and_what_is_in_use_is_not(tmp_path, beside):
    wanted = tmp_path / ("long" * 30)
    killed, left = _held(wanted / "one", KILLED)
    alive, used = _held(wanted / "two", ALIVE)
    other = beside / f"dilocox-{os.getuid()}-0123456789abcdef"  # a control socket's: peer/control.py
    other.mkdir()
    try:
        killed.kill()
        killed.wait(10)
        assert (left / "p2pd.sock").exists()
        own = RuntimeDir.open(wanted / "three", NEW)
        assert {each.name for each in beside.iterdir()} == {used.name, own.path.name, other.name}
        assert (used / "p2pd.sock").exists()
        own.close()
        assert not own.path.exists()
    finally:
        for each in (killed, alive):
            each.kill()
            each.wait(10)
            assert each.stdout is not None
            each.stdout.close()


def test_a_folder_that_another_process_has_open_is_refused_by_name(tmp_path, beside):
    wanted = tmp_path / ("long" * 30)
    alive, used = _held(wanted, ALIVE)
    try:
        with pytest.raises(ConfigError, match=f"{used} is in use"):
            RuntimeDir.open(wanted, ALIVE)
        with socket.socket(socket.AF_UNIX) as one:
            one.settimeout(5.0)
            assert one.connect_ex(str(used / "p2pd.sock")) != 2, "it is still there"
    finally:
        alive.kill()
        alive.wait(10)
        assert alive.stdout is not None
        alive.stdout.close()
