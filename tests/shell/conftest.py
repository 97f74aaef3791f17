"""Real p2pd processes on loopback, in this process and in others; every fixture leaves none behind."""

import asyncio
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil
import pytest

from dilocox_peer.network.transport import Transport
from dilocox_peer.peer.identity import Identity
from dilocox_peer.types import PeerId, RunId
from tests.shell import commands

RUN = RunId("ab" * 32)
PATIENCE_S = 60.0
"""Of a wait for what will come: other tests and other programs have the processors meanwhile."""
ENDS_S = 15.0
"""Within which a process ends that has nothing left to do: less than any time after which it would end by itself (p2pd's -idleTimeout)."""


async def until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    """Returns when condition holds. For what the operating system tells nobody about."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def stands_still(pid: int) -> bool:
    """Whether every thread of a process that was sent SIGSTOP is stopped: one that is not yet may still answer."""
    states = [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in Path(f"/proc/{pid}/task").iterdir()]
    return set(states) == {"T"}


class PutRuns(Protocol):
    def __call__(self, home: Path, *runs: list[str]) -> list[Path]: ...


@pytest.fixture(scope="session")
def put_runs(tmp_path_factory: pytest.TempPathFactory) -> PutRuns:
    """Puts run files, and the owner's key that signed them, into a home: each the name of a file and what else `init` is told. The
    command itself runs once for all tests that ask for the same, whichever of pytest-xdist's workers they are in."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    def put(home: Path, *runs: list[str]) -> list[Path]:
        folder = shared / f"runs-{hashlib.sha256(json.dumps(runs).encode()).hexdigest()[:16]}"
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                made = Path(tempfile.mkdtemp(dir=own))
                for name, *options in runs:
                    done = commands.peer(made, "init", str(made / name), *options)
                    assert done.returncode == 0, done.stderr
                made.rename(folder)
        shutil.copytree(folder, home, dirs_exist_ok=True)
        return [home / name for name, *_ in runs]

    return put


@pytest.fixture
def no_process_left() -> Iterator[None]:
    """The test's processes are gone when it ends."""
    before = set(psutil.Process().children(recursive=True))
    yield
    left = [child for child in psutil.Process().children(recursive=True) if child not in before]
    _, alive = psutil.wait_procs(left, timeout=ENDS_S)
    names = [" ".join(child.cmdline()) for child in alive]
    for child in alive:
        child.kill()
    assert not names


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder in which sockets can be named, as tmp_path is none in a worker of pytest-xdist: its name is too long."""
    with tempfile.TemporaryDirectory(prefix="dp-") as folder:
        yield Path(folder)


class MakeTransport(Protocol):
    def __call__(self, name: str = ..., **options: Any) -> Awaitable[tuple[Transport, Identity]]: ...


@pytest.fixture
async def make_transport(tmp_path: Path, no_process_left: None) -> AsyncIterator[MakeTransport]:
    """Makes transports in this process, by name; the same name is the same identity."""
    async with AsyncExitStack() as stack:

        async def make(name: str = "peer", **options: Any) -> tuple[Transport, Identity]:
            home = tmp_path / name
            identity = stack.enter_context(Identity.open(home / "identity.key"))
            usual: dict[str, Any] = {"namespace": RUN, "runtime_dir": home / "run"}
            transport = await Transport.create(identity.path, identity.peer_id, **(usual | options))
            stack.push_async_callback(transport.close)
            return transport, identity

        yield make


@dataclass
class PeerProcess:
    """A running tests/shell/peer_process.py."""

    process: subprocess.Popen[str]
    home: Path
    peer: PeerId
    addresses: list[str]
    p2pd: int
    sockets: Path

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        for pid in (self.process.pid, self.p2pd):
            os.kill(pid, signal.SIGSTOP)

    def is_frozen(self) -> bool:
        return all(stands_still(pid) for pid in (self.process.pid, self.p2pd))

    def thaw(self) -> None:
        for pid in (self.p2pd, self.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


class SpawnPeer(Protocol):
    def __call__(self, name: str = ..., **options: Any) -> Awaitable[PeerProcess]: ...


@pytest.fixture
async def spawn_peer(tmp_path: Path, no_process_left: None) -> AsyncIterator[SpawnPeer]:
    """Starts peers in processes of their own; options as those of peer_process.py."""
    running: list[PeerProcess] = []
    started: list[subprocess.Popen[str]] = []

    async def spawn(name: str = "remote", **options: Any) -> PeerProcess:
        home = tmp_path / name
        home.mkdir(exist_ok=True)
        command = [sys.executable, str(Path(__file__).with_name("peer_process.py")), str(home), RUN]
        for option, value in options.items():
            values = value if isinstance(value, list | tuple) else [value]
            command += [f"--{option.replace('_', '-')}", *map(str, values)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220
        assert process.stdout is not None
        started.append(process)
        line = await asyncio.to_thread(process.stdout.readline)
        assert line, f"{command} ended with {process.wait()}"
        ready = json.loads(line)
        peer = PeerProcess(
            process, home, PeerId(ready["peer"]), ready["addresses"], ready["p2pd"], Path(ready["sockets"])
        )
        running.append(peer)
        return peer

    yield spawn
    for peer in running:
        peer.thaw()
    for process in started:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()
