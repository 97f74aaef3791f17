"""The evaluation of a run that a bootstrap keeps: a child process reads the states as they are kept, and tells their losses.

In a process of its own, because a model takes memory and its arithmetic the interpreter, and because its crash must not be the
bootstrap's. It runs at low priority and where there is memory for it; nothing waits for it. What it has found stays on disk.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dilocox_peer.cli.children import Children
from dilocox_peer.cli.eventlog import append_line, read_event, read_event_file
from dilocox_peer.data.corpus import STDLIB
from dilocox_peer.errors import ConfigError
from dilocox_peer.events import Listener, Remark
from dilocox_peer.events_of_data import Evaluated, TextSampled
from dilocox_peer.manifest import SHARDS
from dilocox_peer.peer.archivist import Archivist
from dilocox_peer.peer.footprint import available_memory
from dilocox_peer.plain_json import plain_json

FILE = "evaluations.jsonl"
PROCESS_BYTES = 700 << 20  # of the child beside the model
LOOK_S = 5.0
AGAIN_S = 600.0
WRONG_SETTINGS = 2  # exit code: the run's text is not here, and will not be in ten minutes


class Evaluation:
    """`run` it beside the keeper."""

    def __init__(self, archivist: Archivist, folder: Path, arguments: Sequence[str], listener: Listener) -> None:
        """folder: of the run, that the keeper writes into. arguments: more of `evaluate`."""
        self._archivist = archivist
        self._folder = folder
        self._arguments = arguments
        self._listener = listener
        self._told = ""

    async def run(self) -> None:
        """Until cancelled, or the final model is evaluated; a fault of it is told and ends it alone."""
        try:
            await self._run()
        except Exception as error:  # a task boundary: the bootstrap goes on
            self._tell(f"{type(error).__name__}: {error}")

    async def _run(self) -> None:
        for event in await asyncio.to_thread(read_evaluations, self._folder / FILE):
            self._archivist.evaluations.append(event)
        if (what := self._data_elsewhere()) is not None:
            self._tell(
                f"its data are {what}, which a bootstrap does not hold; evaluate elsewhere: `dilocox-peer evaluate LINK --data FOLDER`"
            )
            return
        while not self._is_done():
            if not any(stage.state_round for stage in self._archivist.stages):
                await asyncio.sleep(LOOK_S)
                continue
            if (reason := self._why_not()) is None:
                reason = await self._follow()
            if reason is None:
                return
            self._tell(reason)
            await asyncio.sleep(AGAIN_S)

    def _data_elsewhere(self) -> str | None:
        """What the run trains on where that is on other machines; None where it is on every one."""
        source = self._archivist.manifest.data.source
        return None if source == STDLIB else "shards" if source == SHARDS else "its volunteers' own files"

    def _is_done(self) -> bool:
        """Whether there is nothing to evaluate any more."""
        return self._archivist.is_complete and self._newest >= self._archivist.round

    @property
    def _newest(self) -> int:
        return max((event.round for event in self._archivist.evaluations), default=-1)

    def _why_not(self) -> str | None:
        parameters = sum(stage.num_parameters for stage in self._archivist.stages)
        needed, free = PROCESS_BYTES + 12 * parameters, available_memory()
        if free >= 1.5 * needed:
            return None
        return f"that takes {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free"

    async def _follow(self) -> str | None:
        """Runs the child to its end; None: all is evaluated. Why it ended else."""
        children = Children(self._take)
        try:
            child = await children.start("evaluation", ["evaluate", str(self._folder), *self._arguments])
            ended = asyncio.create_task(child.process.wait())
            while not ended.done():
                await asyncio.wait({ended}, timeout=LOOK_S)
                if self._is_done():
                    return None
            if child.process.returncode == WRONG_SETTINGS:
                self._tell(child.last_words)
                return None
            return f"its process ended with {child.process.returncode}: {child.last_words}"
        finally:
            await children.stop()

    def _take(self, _label: str, record: dict[str, Any]) -> None:
        match read_event(record):
            case (TextSampled() as sampled, _):
                self._archivist.sampled = sampled
            case (Evaluated() as event, wall_time_s) if event.round > self._newest:
                self._archivist.evaluations.append(event)
                self._listener(event)
                with suppress(OSError):
                    append_line(self._folder / FILE, plain_json(event.record(wall_time_s)).encode())

    def _tell(self, reason: str) -> None:
        if reason != self._told:
            self._listener(Remark(f"run {self._archivist.manifest.run.name!r} is kept and not evaluated: {reason}"))
        self._told = reason


def read_evaluations(path: Path) -> list[Evaluated]:
    """What was found before; of a damaged file what can be read."""
    with suppress(ConfigError):
        return [event for event, _ in read_event_file(path) if isinstance(event, Evaluated)]
    return []
