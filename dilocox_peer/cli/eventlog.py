"""Events as lines on standard output: for people (time, level, sentence) or as JSON for programs."""

import json
import sys
import threading
import time
from contextlib import suppress
from typing import TextIO

from rich.console import Console

from dilocox_peer.events import Event, Listener

_ONE_LINE = threading.Lock()
_STYLES = {"debug": "dim", "info": "", "warning": "yellow", "error": "bold red"}


def event_printer(*, as_json: bool) -> Listener:
    """A listener that writes each event as one line. Debug events (progress) are left out of the lines for people."""
    if as_json:
        return lambda event: _write_json(event, sys.stdout)
    console = Console(highlight=False, soft_wrap=True)
    return lambda event: _write_line(event, console)


def _write_json(event: Event, out: TextIO) -> None:
    line = json.dumps(event.record(time.time()), allow_nan=True) + "\n"
    # The checkpoint writer tells from its own thread; whoever read us may be gone, which must not stop us from leaving.
    with _ONE_LINE, suppress(BrokenPipeError):
        out.write(line)
        out.flush()


def _write_line(event: Event, console: Console) -> None:
    if event.level == "debug":
        return
    stamp = time.strftime("%H:%M:%S")
    console.print(f"{stamp} {event.line()}", style=_STYLES[event.level], markup=False)
