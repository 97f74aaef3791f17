"""Events as lines: on standard output for people (time, level, sentence) or as JSON for programs, and in a log file that
is rotated; and back from such a file.

Lines are written by threads of their own: a pipe that nobody reads, or a disk that hangs, must not stop the network.
"""

import atexit
import errno
import json
import math
import os
import queue
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache, reduce
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import TypeAdapter, ValidationError
from rich.console import Console

from dilocox_peer.errors import ConfigError, not_written
from dilocox_peer.events import Event, Failed, Listener
from dilocox_peer.peer.status import printable_lines
from dilocox_peer.plain_json import plain_json
from dilocox_peer.wire.records import MAX_STAGES

MAX_LINE_BYTES = 1 << 20
MAX_WAITING = 4096  # events, for whoever writes them
CLOSE_S = 2.0
MAX_NUMBER = 1 << 64  # what is beyond has no meaning in any event
MAX_TIME_S = 4e9  # of the wall clock: what is later is no time
_MAY_DIVERGE = {"loss", "train_loss", "val_loss", "average_loss", "bits_per_byte", "norm", "norms", "median_norm"}
_STYLES = {"debug": "dim", "info": "", "warning": "yellow", "error": "bold red"}


class Queued:
    """A listener that has a thread do its work, in order. What comes when `most` events wait is dropped, counted and told."""

    def __init__(self, write: Callable[[Event, float], None], *, most: int = MAX_WAITING) -> None:
        """write: an event and its time (seconds since 1970); in the thread."""
        self._write = write
        self._waiting: queue.Queue[tuple[Event, float] | None] = queue.Queue(most)
        self._dropped = 0
        self._counting = threading.Lock()
        # A daemon: a pipe that nobody reads, or a disk that hangs, must not keep the process. `close` waits for the rest.
        self._thread = threading.Thread(target=self._work, name="event log", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        try:
            self._waiting.put_nowait((event, time.time()))
        except queue.Full:
            with self._counting:
                self._dropped += 1

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Waits for what is still to be written, at most so long. May be called twice."""
        with suppress(queue.Full):
            self._waiting.put(None, timeout=timeout_s)
            self._thread.join(timeout_s)

    def _work(self) -> None:
        while True:
            waiting = self._waiting.get()
            with self._counting:
                dropped, self._dropped = self._dropped, 0
            if dropped:
                self._write(
                    Failed("event log", f"{dropped} lines were lost: whoever reads it is too slow"), time.time()
                )
            if waiting is None:
                return
            self._write(*waiting)


def event_printer(*, as_json: bool, on_closed: Callable[[], None] = lambda: None) -> Listener:
    """A listener that writes each event as one line. Debug events (progress) are left out of the lines for people. on_closed: whoever read them is
    gone (`| head`), which standard error is told as well; in the thread, once."""
    out, console, is_closed = sys.stdout, _Lines(highlight=False, soft_wrap=True), False

    def write(event: Event, at_s: float) -> None:
        nonlocal is_closed
        if is_closed:
            return
        try:
            if as_json:
                out.write(plain_json(event.record(at_s)) + "\n")
                out.flush()
            else:
                write_line(event, at_s, console)
        except BrokenPipeError:  # a reader that ends must not end what it read of
            is_closed = True
            _let_stdout_go()
            on_closed()
        except (OSError, ValueError):
            pass

    queued = Queued(write)
    atexit.register(queued.close)
    return queued


class _Lines(Console):
    """Rich would end the thread."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def _let_stdout_go() -> None:
    with suppress(OSError, ValueError), open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 1)  # or the rest is tried again at exit
    with suppress(OSError, ValueError):  # it may be the same pipe
        print("dilocox-peer: nobody reads standard output any more; the work goes on", file=sys.stderr, flush=True)


class EventFile:
    """A listener that appends each event to a JSONL file; when it is `max_bytes` long it becomes FILE.1, FILE.1 becomes
    FILE.2, and at most `keep` old ones stay. A pipe or a device stays what it is."""

    def __init__(self, path: Path, *, max_bytes: int, keep: int) -> None:
        """Raises ConfigError when it cannot be written, or is a pipe that nobody reads."""
        self._path = path
        self._max_bytes = max_bytes
        self._keep = keep
        self._file: FileIO | None = None
        self._size, self._is_cut = 0, False  # of the file; whether its last line wants its end
        self._room: float = max_bytes
        try:
            self._open()
        except OSError as error:
            if error.errno == errno.ENXIO and path.is_fifo():
                raise ConfigError(f"--log-file {path} is a pipe that nobody reads: start its reader first") from None
            raise not_written(f"--log-file {path} cannot be written", error) from None
        self._queued = Queued(self._write)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._queued.close()
        if self._file is not None:
            self._file.close()

    def __call__(self, event: Event) -> None:
        self._queued(event)

    def _write(self, event: Event, at_s: float) -> None:
        line = plain_json(event.record(at_s)).encode() + b"\n"
        with suppress(OSError, ValueError):  # a full disk, or the end: the log must not stop the peer
            if self._file is not None and self._size and self._size + len(line) > self._room:
                self._file.close()
                self._file = None
                self._shift()
            # None also if it could not be opened again the last time: it was moved then, and what is older is not moved for its sake.
            file = self._open() if self._file is None else self._file
            written = file.write(b"\n" + line if self._is_cut else line)
            self._size += written
            self._is_cut = written < len(line)

    def _open(self) -> FileIO:
        """Raises OSError."""
        self._file = file = FileIO(self._path, "ab", opener=_at_once)
        status = os.fstat(file.fileno())
        self._size, self._room = status.st_size, self._max_bytes if stat.S_ISREG(status.st_mode) else math.inf
        self._is_cut = _ends_cut(self._path, self._size)
        return file

    def _shift(self) -> None:
        """FILE becomes FILE.1, and so on up to the first number that is free. What cannot be moved stays, and so does all that is newer: FILE is
        written on."""
        names = [self._path, *(self._path.with_name(f"{self._path.name}.{number + 1}") for number in range(self._keep))]
        with suppress(OSError):
            if self._keep == 0:
                self._path.unlink(missing_ok=True)
            free = next((number for number in range(1, self._keep) if not names[number].exists()), self._keep)
            for number in range(free, 0, -1):
                names[number - 1].replace(names[number])


def _at_once(path: str, flags: int) -> int:
    """Opens without waiting for who reads a pipe; what is written there waits, in the thread that writes. Raises OSError."""
    handle = os.open(path, flags | os.O_NONBLOCK, 0o666)
    os.set_blocking(handle, True)
    return handle


def append_line(path: Path, line: bytes) -> None:
    """Writes line and its end at the end of a file of lines, however the last one there ends. Raises OSError."""
    with path.open("ab", buffering=0) as file:
        file.write((b"\n" if _ends_cut(path, os.fstat(file.fileno()).st_size) else b"") + line + b"\n")


def _ends_cut(path: Path, size_bytes: int) -> bool:
    """Whether the last line was not written to its end, as by kill -9 or on a full disk: what is appended to it would be lost with it."""
    if not size_bytes:  # nothing yet; or a pipe, of which nothing is read
        return False
    with suppress(OSError), path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
    return False


def read_event(record: Mapping[str, Any]) -> tuple[Event, float] | None:
    """The event of a JSONL record and its time; None for one of a kind, or with fields, that this version does not know."""
    kind, at_s = record.get("event"), record.get("time")
    found = _kinds().get(kind) if isinstance(kind, str) else None
    if found is None or not isinstance(at_s, int | float) or not 0 <= at_s < MAX_TIME_S:
        return None
    event = _validated(found, record)
    return (event, float(at_s)) if event is not None and _is_bounded("", event) else None


def _validated(kind: TypeAdapter[Any], record: Mapping[str, Any]) -> Event | None:
    """null stands for a number that was not finite, where a field has no other meaning for it."""
    try:
        event: Event = kind.validate_python(dict(record))
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_context=False)
        if any(each["type"] != "float_type" or each["input"] is not None for each in wrong):
            return None
        filled = json.loads(json.dumps(record))
        for each in wrong:
            *way, last = each["loc"]
            reduce(lambda value, step: value[step], way, filled)[last] = math.nan
        event = kind.validate_python(filled)
    return event


def _is_bounded(name: str, value: object) -> bool:
    """Whether a number may stand there: one damaged digit makes a run of a billion stages, which a picture of them has no memory for, or
    a time that no calendar has. What has diverged may be infinite; NaN may stand anywhere."""
    if isinstance(value, bool):
        return True
    if isinstance(value, int) and name in {"stage", "stages"}:
        return 0 <= value <= MAX_STAGES
    if isinstance(value, int | float):
        return value != value or abs(value) < MAX_NUMBER or (isinstance(value, float) and name in _MAY_DIVERGE)
    if isinstance(value, tuple):
        return all(_is_bounded(name, each) for each in value)
    return not is_dataclass(value) or all(_is_bounded(each.name, getattr(value, each.name)) for each in fields(value))


def read_event_file(path: Path) -> Iterator[tuple[Event, float]]:
    """The events of a JSONL file, in its order; lines that are none are passed over. Raises ConfigError."""
    try:
        with path.open("rb") as lines:
            while line := lines.readline(MAX_LINE_BYTES):
                with suppress(ValueError, RecursionError):
                    record = json.loads(line)
                    event = read_event(record) if isinstance(record, dict) else None
                    if event is not None:
                        yield event
    except IsADirectoryError:
        raise ConfigError(f"{path} is a directory: pass a file that `join --log-file` wrote") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from None


@cache
def _kinds() -> dict[str, TypeAdapter[Any]]:
    import dilocox_peer.events_of_costs
    import dilocox_peer.events_of_data
    import dilocox_peer.events_of_health
    import dilocox_peer.events_of_reach
    import dilocox_peer.events_of_rounds
    import dilocox_peer.events_of_states
    import dilocox_peer.pipeline.contract  # noqa: F401  their events are of the family

    return {kind.__name__: TypeAdapter(kind) for kind in Event.__subclasses__()}


def write_line(event: Event, at_s: float, console: Console) -> None:
    if event.level == "debug":
        return
    stamp = time.strftime("%H:%M:%S", time.localtime(at_s))
    text = printable_lines(event.line(), MAX_LINE_BYTES)
    console.print(f"{stamp} {text}", style=_STYLES[event.level], markup=False)
