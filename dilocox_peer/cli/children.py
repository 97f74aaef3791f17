"""Child processes of the demo: started, read line by line, and always ended.

A child leaves by itself when its standard input ends, so it goes also when its parent was killed with -9; it is in a
session of its own, so that Ctrl-C in the terminal reaches the parent alone, which then ends its children in order.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_LINE_BYTES = 1 << 20
LEAVE_S = 8.0  # a peer's own orderly leave takes at most 5 s
TERMINATE_S = 3.0

OnEvent = Callable[[str, dict[str, Any]], None]


@dataclass
class Child:
    """One running child. `tail`: its last lines that were no events, for the error message."""

    label: str
    process: asyncio.subprocess.Process
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=20))
    reader: asyncio.Task[None] | None = None

    @property
    def last_words(self) -> str:
        """The last line it wrote that says something; a traceback's is its last, an abort's is not."""
        spoken = [line for line in self.tail if line.strip() and not line.startswith((" ", "Thread ", "Extension "))]
        return spoken[-1] if spoken else "no message"


class Children:
    """Starts children and owns them until `stop`."""

    def __init__(self, on_event: OnEvent) -> None:
        self._on_event = on_event
        self._children: dict[str, Child] = {}

    def __getitem__(self, label: str) -> Child:
        return self._children[label]

    async def start(
        self,
        label: str,
        arguments: Sequence[str],
        *,
        program: Sequence[str] = ("-m", "dilocox_peer"),
        prefix: Sequence[str] = (),
    ) -> Child:
        """Starts `dilocox-peer ARGUMENTS --log json --until-stdin-closes`; its events go to on_event as they come. program: what
        Python runs instead, for tests of peers that mean ill. prefix: a program and its arguments that runs Python, elsewhere."""
        process = await asyncio.create_subprocess_exec(
            *prefix, sys.executable, *program, *arguments, "--log", "json", "--until-stdin-closes",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=MAX_LINE_BYTES,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "DILOCOX_CONFIG": os.devnull},  # a volunteer's settings are not theirs
        )  # fmt: skip
        child = Child(label, process)
        child.reader = asyncio.create_task(self._read(child), name=f"read {label}")
        self._children[label] = child
        return child

    async def _read(self, child: Child) -> None:
        async for line in _lines(child.process):
            record = _as_event(line)
            if record is None:
                child.tail.append(line)
            else:
                self._on_event(child.label, record)

    async def stop(self) -> None:
        """Ends every child: asks (standard input ends), then SIGTERM, then SIGKILL; each with its deadline. Cancelled, it is SIGKILL at
        once for those that are left, and passes the cancellation on when they have ended."""
        ending, cancelled = asyncio.ensure_future(self._end()), None
        while not ending.done():
            try:
                await asyncio.shield(ending)
            except asyncio.CancelledError as error:
                cancelled = error  # Ctrl-C a second time: no goodbye is waited for, and nothing is to be left behind
                self._signal(signal.SIGKILL)
        if cancelled is not None:
            raise cancelled
        ending.result()

    async def _end(self) -> None:
        for child in self._children.values():
            if child.process.stdin is not None:
                child.process.stdin.close()
        await self._wait_all(LEAVE_S)
        for signal_number, wait_s in ((signal.SIGTERM, TERMINATE_S), (signal.SIGKILL, TERMINATE_S)):
            self._signal(signal_number)
            await self._wait_all(wait_s)
        for child in self._children.values():
            if child.reader is not None:
                child.reader.cancel()
        await asyncio.gather(
            *(child.reader for child in self._children.values() if child.reader), return_exceptions=True
        )

    def _signal(self, number: int) -> None:
        for child in self._running():
            with contextlib.suppress(ProcessLookupError):
                child.process.send_signal(number)

    def _running(self) -> list[Child]:
        return [child for child in self._children.values() if child.process.returncode is None]

    async def _wait_all(self, wait_s: float) -> None:
        waits = [asyncio.create_task(child.process.wait()) for child in self._running()]
        if waits:
            _done, pending = await asyncio.wait(waits, timeout=wait_s)
            for task in pending:
                task.cancel()


async def _lines(process: asyncio.subprocess.Process) -> AsyncIterator[str]:
    assert process.stdout is not None
    while True:
        try:
            raw = await process.stdout.readline()
        except ValueError:  # a line over the limit: not ours
            continue
        if not raw:
            return
        yield raw.decode(errors="replace").rstrip("\n")


def _as_event(line: str) -> dict[str, Any] | None:
    if not line.startswith('{"time"'):
        return None
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return None
    return record if isinstance(record, dict) else None
