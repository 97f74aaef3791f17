"""`join --log-to`: a peer's figures for TensorBoard, Weights & Biases or trackio, from the events that everything else is shown from.

Off unless asked for, and the library is an extra. It works in a thread of its own: a disk that is full, or a service that is away,
stops the figures, with one line, and not the peer. wandb and trackio have one interface; what wandb gets leaves this machine.
"""

import math
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from dilocox_peer.cli.eventlog import Queued
from dilocox_peer.errors import ConfigError
from dilocox_peer.events import Event, Failed, Listener, RoundCertified, TrainingProgress
from dilocox_peer.events_of_data import Evaluated, ShardFetched
from dilocox_peer.extras import pip_install

PROGRESS_S = 10.0  # between two of what comes every second
FLUSH_S = 10.0
CLOSE_S = 10.0

_PROGRESS = ("train_loss", "tokens_per_s", "busy", "memory_bytes", "bytes_sent", "bytes_received", "lag_ms_p99")
_ROUND = ("train_loss", "micro_batches", "wait_s", "delay_s", "inner_steps", "rank")


class FigureSink(Protocol):
    def write(self, figures: Mapping[str, float], step: int, at_s: float) -> None:
        """figures: by name, `section/name`. step: of the axis that its section has. at_s: since 1970. Any exception ends it."""

    def close(self) -> None: ...


class Figures:
    """Events -> (figures, step): rounds by their number, what happens all the time by the tokens trained until then."""

    def __init__(self) -> None:
        self._tokens = 0
        self._next_s = 0.0

    def of(self, event: Event, at_s: float) -> tuple[dict[str, float], int] | None:
        match event:
            case TrainingProgress():
                self._tokens = event.tokens
                if at_s < self._next_s:
                    return None
                self._next_s = at_s + PROGRESS_S
                return _finite({f"training/{name}": getattr(event, name) for name in _PROGRESS}), event.tokens
            case RoundCertified():
                figures = {f"round/{name}": getattr(event, name) for name in _ROUND}
                figures["round/contributors"] = len(event.contributors)
                return _finite(figures), event.round
            case Evaluated():
                names = ("val_loss", "bits_per_byte", "average_loss")
                return _finite({f"validation/{name}": getattr(event, name) for name in names}), event.round
            case ShardFetched():
                speed = event.num_bytes / event.seconds if event.seconds > 0 else None
                return _finite({"data/shard_bytes_per_s": speed}), self._tokens
            case _:
                return None


def _finite(figures: Mapping[str, Any]) -> dict[str, float]:
    """Without what was not measured."""
    return {name: float(value) for name, value in figures.items() if value is not None and math.isfinite(value)}


@contextmanager
def sink_of(wish: str, *, run: str, peer: str, tell: Listener) -> Iterator[Listener]:
    """The listener that `--log-to KIND:WHERE` asks for, until the block ends. run, peer: their names. tell: of what goes wrong. Raises
    ConfigError."""
    sink = _opened(wish, run, peer)
    figures = Figures()
    is_over = False

    def write(event: Event, at_s: float) -> None:
        nonlocal is_over
        found = None if is_over else figures.of(event, at_s)
        if found is None or not found[0]:
            return
        try:
            sink.write(*found, at_s)
        except Exception as error:  # a library's own; whatever it is, the peer goes on
            is_over = True
            reason = " ".join(str(error).split())[:200]
            tell(Failed(f"--log-to {wish}", f"{type(error).__name__}: {reason}; nothing more is written there"))

    queued = Queued(write)
    try:
        yield queued
    finally:
        queued.close(CLOSE_S)
        # A service that is away may take as long as it likes; we leave.
        closing = threading.Thread(target=_close, args=(sink,), name="log-to", daemon=True)
        closing.start()
        closing.join(CLOSE_S)


def _close(sink: FigureSink) -> None:
    with suppress(Exception):  # a library's own, as it ends
        sink.close()


def _opened(wish: str, run: str, peer: str) -> FigureSink:
    kind, colon, where = wish.partition(":")
    makers: Mapping[str, Callable[[str, str, str], FigureSink]] = {
        "tensorboard": lambda folder, _run, _peer: TensorBoard(Path(folder)),
        "wandb": lambda project, of, name: Tracker("wandb", project, of, name),
        "trackio": lambda project, of, name: Tracker("trackio", project, of, name),
    }
    if kind not in makers or not colon or not where:
        raise ConfigError(f"--log-to {wish}: give tensorboard:FOLDER, wandb:PROJECT or trackio:PROJECT")
    return makers[kind](where, run, peer)


class TensorBoard:
    """A FigureSink: an event file in a folder, as TensorBoard reads it."""

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto.event_pb2 import Event as Record
            from tensorboardX.proto.summary_pb2 import Summary
        except ImportError:
            raise ConfigError(
                f"--log-to tensorboard:{folder}: `{pip_install('tensorboard')}` brings what writes it"
            ) from None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = EventsWriter(str(folder / "events"), ".dilocox")
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise ConfigError(f"--log-to tensorboard:{folder}: {reason}; name a folder that you may write") from None
        self._record, self._summary = Record, Summary
        self._flushed_s = 0.0

    def write(self, figures: Mapping[str, float], step: int, at_s: float) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        self._file.write_event(self._record(wall_time=at_s, step=step, summary=self._summary(value=values)))
        if at_s - self._flushed_s >= FLUSH_S:
            self._flushed_s = at_s
            self._file.flush()

    def close(self) -> None:
        self._file.close()


@contextmanager
def _without_arguments() -> Iterator[None]:
    """wandb keeps the command line, which has the invitation in it, and what the terminal shows: neither leaves this machine."""
    kept, sys.argv = sys.argv, sys.argv[:1]
    for name, value in (("WANDB_CONSOLE", "off"), ("WANDB_X_DISABLE_META", "true"), ("WANDB_DISABLE_GIT", "true")):
        os.environ.setdefault(name, value)
    try:
        yield
    finally:
        sys.argv = kept


class Tracker:
    """A FigureSink: a run of wandb, or of trackio, which has its interface."""

    def __init__(self, library: str, project: str, run: str, peer: str) -> None:
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,128}", project):
            raise ConfigError(f"--log-to {library}:{project[:80]}: a project is letters, digits, . _ -")
        try:
            self._library: Any = __import__(library)
        except ImportError:
            raise ConfigError(f"--log-to {library}:{project}: `pip install {library}` brings it") from None
        try:
            with _without_arguments():
                self._run = self._library.init(project=project, name=f"{run}-{peer}")
        except Exception as error:  # a library's own: no key, no network, a project that is another's
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(f"--log-to {library}:{project}: {reason}") from None

    def write(self, figures: Mapping[str, float], step: int, at_s: float) -> None:
        # Their steps must not go back; rounds and tokens are axes of their own, so each section brings its own.
        section = next(iter(figures)).partition("/")[0]
        self._library.log({**figures, f"{section}/step": step})

    def close(self) -> None:
        self._library.finish()
