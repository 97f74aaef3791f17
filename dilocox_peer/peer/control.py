"""The control socket of a running peer: one JSON object a line, over a Unix socket that its owner alone may open.

    {"command": "status"}      -> {"ok": true, "status": {...}}
    {"command": "pause"}       -> {"ok": true, "said": "..."}         also resume, leave, finish; "pause 3600": for so many seconds
    {"command": "subscribe"}   -> {"ok": true}, then an event a line: what matters of the past, and all that comes
    anything else              -> {"ok": false, "error": "..."}

Requests, connections and what a slow subscriber has not read yet are bounded; whoever goes beyond is hung up on. The
socket lies beside the runtime folder, which the transport sweeps of sockets at each of its starts.
"""

import asyncio
import errno
import hashlib
import itertools
import json
import os
import re
import socket
import stat
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dilocox_peer.errors import ConfigError, DilocoxError, not_written
from dilocox_peer.events import Event, Paused, PeerStarted, Resumed, RunJoined, StageSeen, SwarmSeen
from dilocox_peer.events_of_costs import MonthCounted, NeedsReckoned
from dilocox_peer.events_of_health import TroublesSeen
from dilocox_peer.events_of_rounds import OwnerDirected
from dilocox_peer.plain_json import plain_json

MAX_REQUEST_BYTES = 4096
MAX_REPLY_BYTES = 1 << 20
MAX_CONNECTIONS = 16
MAX_UNREAD = 2048  # lines a subscriber may be behind
KEPT, KEPT_ROUTINE = 400, 120  # events a newcomer is told of: those worth a line, and the rest
REQUEST_S = 10.0
ANSWER_S = 10.0
MAX_PAUSE_S = 366 * 86_400
_SOCKET_PATH_BYTES = 100  # sockaddr_un holds 104 on macOS
STAND_INS = Path("/tmp")  # where the folders of sockets with too long a path of their own are
_MOST_SWEPT, _NEW_S = 256, 60.0


class NotRunning(DilocoxError):
    """No peer answers at this socket."""

    exit_code = 3


class ControlRefused(DilocoxError):
    """The peer answered that it will not."""


@dataclass(frozen=True, slots=True)
class Controls:
    """What a peer lets its owner do; each returns what to say about it. pause(seconds): None: until it is told to go on."""

    status: Callable[[], dict[str, Any]]
    pause: Callable[[int | None], str]
    resume: Callable[[], str]
    leave: Callable[[], str]
    finish: Callable[[], str]


def socket_path(peer_folder: Path) -> Path:
    """Where the control socket of the peer with this folder is; short, however long the folder's name is."""
    path = Path(os.path.abspath(peer_folder)) / "control.sock"
    if len(os.fsencode(path)) <= _SOCKET_PATH_BYTES:
        return path
    name = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
    return STAND_INS / f"dilocox-{os.getuid()}-{name}" / "control.sock"


class Memory:
    """The events that a newcomer has to be told of to see what those see who were there from the start. Pure."""

    def __init__(self) -> None:
        self._serial = 0
        self._worth_a_line: deque[tuple[int, dict[str, Any]]] = deque(maxlen=KEPT)
        self._routine: deque[tuple[int, dict[str, Any]]] = deque(maxlen=KEPT_ROUTINE)
        self._latest: dict[object, tuple[int, dict[str, Any]]] = {}
        self._looks: dict[int, tuple[int, dict[str, Any]]] = {}  # of each stage, the newest look that it was part of

    def keep(self, event: Event, record: dict[str, Any]) -> None:
        """record: the event's."""
        self._serial += 1
        kept = (self._serial, record)
        if isinstance(event, SwarmSeen):  # a look may be at some stages alone
            self._looks |= dict.fromkeys(event.stages, kept)
        elif isinstance(event, Paused | Resumed):  # whichever was last holds, however many lines ago
            self._latest[Paused] = kept
        elif isinstance(
            event, RunJoined | PeerStarted | StageSeen | TroublesSeen | MonthCounted | NeedsReckoned | OwnerDirected
        ):
            self._latest[type(event)] = kept
        elif event.level == "debug":
            self._routine.append(kept)
        else:
            self._worth_a_line.append(kept)

    def records(self) -> list[dict[str, Any]]:
        """In the order in which they happened."""
        looks = {serial: (serial, record) for serial, record in self._looks.values()}
        kept = [*self._worth_a_line, *self._routine, *self._latest.values(), *looks.values()]
        return [record for _serial, record in sorted(kept, key=lambda each: each[0])]


class ControlServer:
    """`async with ControlServer(path, controls)`; `tell` it every event, in the loop's thread or any other."""

    def __init__(self, path: Path, controls: Controls, *, clock: Callable[[], float]) -> None:
        self._path = path
        self._controls = controls
        self._clock = clock
        self._memory = Memory()
        self.subscribers: set[asyncio.Queue[bytes | None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        listening = await asyncio.to_thread(_listen, self._path)
        self._server = await asyncio.start_unix_server(self._accept, sock=listening, limit=MAX_REQUEST_BYTES)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for queue in self.subscribers:
            _put(queue, None)
        _done, late = await asyncio.wait(self._tasks, timeout=0.5) if self._tasks else (set(), set())
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        with suppress(OSError):
            os.unlink(self._path)

    def tell(self, event: Event) -> None:
        """For subscribers, now and later; any thread."""
        record = event.record(self._clock())
        with suppress(RuntimeError):  # the loop has ended: nobody listens any more
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._publish, event, record)

    def _publish(self, event: Event, record: dict[str, Any]) -> None:
        self._memory.keep(event, record)
        if self.subscribers:
            line = _line(record)
            for queue in self.subscribers:
                _put(queue, line)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._tasks) >= MAX_CONNECTIONS:
            writer.close()
            return
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        except (OSError, TimeoutError, ValueError):
            pass  # it went away, or said nothing we read
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(REQUEST_S):
            raw = await _read_line(reader)
        if raw is None:
            return await _say(
                writer, {"ok": False, "error": f"a request is one line of at most {MAX_REQUEST_BYTES} bytes"}
            )
        command = command_of(raw)
        if command == "subscribe":
            return await self._stream(writer)
        await _say(writer, self._answer(command))

    def _answer(self, command: str | None) -> dict[str, Any]:
        try:
            match command:
                case "status":
                    return {"ok": True, "status": self._controls.status()}
                case "pause":
                    return {"ok": True, "said": self._controls.pause(None)}
                case str() if (seconds := pause_s(command)) is not None:
                    return {"ok": True, "said": self._controls.pause(seconds)}
                case "resume":
                    return {"ok": True, "said": self._controls.resume()}
                case "leave":
                    return {"ok": True, "said": self._controls.leave()}
                case "finish":
                    return {"ok": True, "said": self._controls.finish()}
        except DilocoxError as error:
            return {"ok": False, "error": str(error)}
        return {"ok": False, "error": "unknown command: use status, pause, resume, leave, finish or subscribe"}

    async def _stream(self, writer: asyncio.StreamWriter) -> None:
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(MAX_UNREAD)
        past = [_line(record) for record in self._memory.records()]
        self.subscribers.add(queue)
        try:
            await _say(writer, {"ok": True})
            writer.write(b"".join(past))
            while (line := await queue.get()) is not None:
                writer.write(line)
                async with asyncio.timeout(REQUEST_S):
                    await writer.drain()
        finally:
            self.subscribers.discard(queue)


async def ask(path: Path, command: str) -> dict[str, Any]:
    """The answer of the peer whose socket this is. Raises NotRunning, ControlRefused."""
    reader, writer = await _connect(path)
    try:
        async with asyncio.timeout(ANSWER_S):
            writer.write(_line({"command": command}))
            await writer.drain()
            return _checked(await reader.readline())
    except (OSError, TimeoutError, ValueError):
        raise NotRunning(f"the peer at {path} does not answer") from None
    finally:
        writer.close()


async def follow(path: Path, take: Callable[[dict[str, Any]], None]) -> None:
    """take(record) for every event of the peer, those of the past first; returns when it ends. Raises NotRunning,
    ControlRefused."""
    reader, writer = await _connect(path)
    try:
        writer.write(_line({"command": "subscribe"}))
        async with asyncio.timeout(ANSWER_S):
            _checked(await reader.readline())
        while raw := await reader.readline():
            record = json.loads(raw)
            if isinstance(record, dict):
                take(record)
    except (OSError, TimeoutError, ValueError):
        return
    finally:
        writer.close()


def command_of(raw: bytes) -> str | None:
    """The command in a request line; None for anything that is no request."""
    try:
        request = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    match request:
        case {"command": str(command)} if len(request) == 1:
            return command
        case _:
            return None


def pause_s(command: str) -> int | None:
    """The seconds of a pause that ends by itself; None of any other command."""
    name, _, number = command.partition(" ")
    if name != "pause" or not re.fullmatch(r"[1-9][0-9]{0,8}", number) or int(number) > MAX_PAUSE_S:
        return None
    return int(number)


async def _connect(path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    try:
        trusted = {os.getuid()} | (
            {path.parent.stat().st_uid} if os.getuid() == 0 else set()
        )  # root: who has the folder
        if os.lstat(path).st_uid not in trusted:  # at a path under /tmp anybody could answer
            raise NotRunning(f"{path} belongs to another user")
        return await asyncio.open_unix_connection(path, limit=MAX_REPLY_BYTES)
    except OSError:
        raise NotRunning(
            f"no peer is running here ({path}): start one with `dilocox-peer join`, or name another"
        ) from None


def _checked(raw: bytes) -> dict[str, Any]:
    answer = json.loads(raw)
    match answer:
        case {"ok": True}:
            return dict(answer)
        case {"ok": False, "error": str(error)}:
            raise ControlRefused(error)
        case _:
            raise ValueError("no answer of a peer")


def _listen(path: Path) -> socket.socket:
    """A listening socket there, for its owner alone. Raises ConfigError. What a killed predecessor left is replaced."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = path.parent.lstat()
        if not stat.S_ISDIR(folder.st_mode) or folder.st_uid != os.getuid():
            raise ConfigError(f"{path.parent} is not a folder of ours: remove it or pass another --home")
        if path.parent.parent == STAND_INS:
            _sweep_dead(path.parent)
        if is_answered(path):
            raise ConfigError(f"another process is this peer already ({path}): pass another --name")
        with suppress(FileNotFoundError):
            path.unlink()
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # The mode is right from the start where the system heeds it (Linux), and at once elsewhere.
            os.fchmod(listening.fileno(), 0o600)
            listening.bind(str(path))
            path.chmod(0o600)
            listening.listen(MAX_CONNECTIONS)
            listening.setblocking(False)
        except BaseException:
            listening.close()
            raise
        return listening
    except OSError as error:
        raise not_written(f"the control socket {path} cannot be made", error, "pass another --home") from None


def _sweep_dead(own: Path) -> None:
    """Stand-ins of this user's peers that were killed: nobody listens there, and not since a moment ago."""
    pattern = f"dilocox-{os.getuid()}-{'[0-9a-f]' * 16}"
    for folder in itertools.islice(STAND_INS.glob(pattern), _MOST_SWEPT):
        with suppress(OSError):
            status = folder.lstat()
            is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if folder == own or not is_ours or time.time() - status.st_mtime < _NEW_S:
                continue
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, suppress(FileNotFoundError):
                probe.settimeout(0.1)
                if probe.connect_ex(str(folder / "control.sock")) == errno.ECONNREFUSED:
                    (folder / "control.sock").unlink()
            folder.rmdir()  # not if there is anything in it


def is_answered(path: Path) -> bool:
    """Whether a process listens at this socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


async def _read_line(reader: asyncio.StreamReader) -> bytes | None:
    try:
        return await reader.readuntil(b"\n")
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return None


async def _say(writer: asyncio.StreamWriter, answer: dict[str, Any]) -> None:
    writer.write(_line(answer))
    async with asyncio.timeout(REQUEST_S):
        await writer.drain()


def _line(record: dict[str, Any]) -> bytes:
    return plain_json(record).encode() + b"\n"


def _put(queue: "asyncio.Queue[bytes | None]", line: bytes | None) -> None:
    """Without waiting; a queue that is full has a reader that is gone, or as good as: it is hung up on."""
    if queue.full():
        while not queue.empty():
            queue.get_nowait()
        line = None
    queue.put_nowait(line)
