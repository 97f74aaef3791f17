"""A swarm on this machine: a bootstrap, peers, an evaluator, each a real process on loopback. What the demo, the swarm
tests and the benchmarks stand on."""

import asyncio
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from dilocox_peer.cli.children import Child, Children, OnEvent
from dilocox_peer.cli.eventlog import read_event
from dilocox_peer.cli.init import write_whole
from dilocox_peer.config import to_toml
from dilocox_peer.errors import DilocoxError
from dilocox_peer.events import BootstrapReady, PeerStarted
from dilocox_peer.manifest import Manifest
from dilocox_peer.peer.identity import Identity

LAST_WORDS_S = 2.0
START_S = 90.0  # importing torch and hivemind on a busy machine takes most of it
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
FOLDER = "dilocox-swarm-{pid}-{started}-"  # started: of the process in clock ticks since boot, 0 where nobody says
_FOLDER = re.compile(r"dilocox-swarm-(?P<pid>[1-9]\d{0,9})-(?P<started>\d{1,20})-[^-]+")


class ChildEnded(DilocoxError):
    """A process of the swarm ended that should not have. `tail`: its last lines."""

    def __init__(self, child: Child) -> None:
        super().__init__(f"{child.label} ended with status {child.process.returncode}: {child.last_words}")
        self.tail = [f"{child.label}: {line}" for line in child.tail]


class LocalSwarm:
    """`async with LocalSwarm(manifest) as swarm`, then start what is needed; everything ends with the block.

    manifest: signed here with a key of the swarm's own. on_event(label, record): every event of every process.
    """

    def __init__(self, manifest: Manifest, on_event: OnEvent, *, data: Sequence[Path] = ()) -> None:
        sweep(Path(tempfile.gettempdir()))
        prefix = FOLDER.format(pid=os.getpid(), started=process_started(os.getpid()) or 0)
        self.folder = Path(tempfile.mkdtemp(prefix=prefix))
        with Identity.open(self.folder / "owner.key") as owner:
            self.manifest = manifest.signed_by(owner.key)
        self.children = Children(self._take)
        self.link = ""
        self._on_event = on_event
        self._started: set[str] = set()
        self._changed = asyncio.Event()
        self.common = ("--home", str(self.folder), "--host-maddrs", LOOPBACK)
        self._data = [argument for path in data for argument in ("--data", str(path.resolve()))]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        try:
            await self.children.stop()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    async def start_bootstrap(self, *more: str, program: Sequence[str] = ("-m", "dilocox_peer")) -> Child:
        """Returns when its link is there; the one of a bootstrap before counts no more. It evaluates nothing unless it is told to.
        Raises ChildEnded, TimeoutError."""
        run_file = self.folder / "run.toml"
        write_whole(run_file, to_toml(self.manifest).encode())
        self.link = ""
        child = await self.children.start(
            "bootstrap", ["bootstrap", str(run_file), "--no-evaluate", *self.common, *more], program=program
        )
        await self.until(lambda: bool(self.link), [child], START_S)
        return child

    async def start_peer(
        self,
        label: str,
        *,
        stage: int | None = None,
        more: Sequence[str] = (),
        program: Sequence[str] = ("-m", "dilocox_peer"),
    ) -> Child:
        """Joins a peer of this name (again) and returns when it has started. Raises ChildEnded, TimeoutError."""
        wish = [] if stage is None else ["--stage", str(stage)]
        self._started.discard(label)
        child = await self.children.start(
            label, ["join", self.link, "--name", label, *wish, *more, *self.common, *self._data], program=program
        )
        await self.until(lambda: label in self._started, [child], START_S)
        return child

    async def start_evaluator(self) -> Child:
        return await self.children.start("evaluator", ["evaluate", self.link, *self.common, *self._data])

    async def until(self, condition: Callable[[], bool], needed: Sequence[Child], timeout_s: float) -> None:
        """Waits until condition holds, asked after every event. Raises ChildEnded when one of the needed processes ends
        before, TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                for child in needed:
                    if child.process.returncode is not None:
                        if child.reader is not None:  # what it said last may not have been read yet
                            await asyncio.wait({child.reader}, timeout=LAST_WORDS_S)
                        raise ChildEnded(child)
                await self.next_change(0.5)

    async def next_change(self, timeout_s: float) -> None:
        """Returns at the next event of any process, or after timeout_s."""
        self._changed.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return

    def _take(self, label: str, record: dict[str, Any]) -> None:
        match read_event(record):
            case (BootstrapReady(link=link), _):
                self.link = link
            case (PeerStarted(), _):
                self._started.add(label)
        self._on_event(label, record)
        self._changed.set()


def sweep(temporary: Path) -> list[Path]:
    """Removes the folders of our own swarms whose process is dead, as after kill -9; gives back which. Never raises."""
    swept = []
    try:
        folders = sorted(temporary.iterdir())
    except OSError:
        return []
    for folder in folders:
        named = _FOLDER.fullmatch(folder.name)
        if named and not _is_running(int(named["pid"]), int(named["started"])) and _is_ours(folder):
            shutil.rmtree(folder, ignore_errors=True)
            swept.append(folder)
    return swept


def process_started(pid: int) -> int | None:
    """When a process began, in clock ticks since boot; None where /proc does not say. Tells a pid from its next owner."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes()
        return int(fields[fields.rindex(b")") + 1 :].split()[19])  # the name before ")" may hold anything
    except (OSError, ValueError, IndexError):
        return None


def _is_running(pid: int, started: int) -> bool:
    """Whether the process that began then still runs; when in doubt it does."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass  # it runs and is somebody else's, perhaps by now
    now_there = process_started(pid)
    return not started or now_there is None or now_there == started


def _is_ours(folder: Path) -> bool:
    """A real folder of this user; no link to one."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
