"""How late a peer's event loop runs, how much of that its thread stood ready and another had the processor, and what kept it. Not run by hand.

A loop that is kept by its own process (a lock, a long step) is late wherever the peer runs. One that waits for a processor is late because
several peers of a benchmark share a machine. /proc/self/task/*/schedstat tells the two apart (Linux). What kept it: the step of the loop that took so long,
and what the other threads were at when it was over, which is the same as before where they held a lock that it waited for. (faulthandler, which looks at
threads while they run, ended a peer of a benchmark.)
"""

import asyncio
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from dilocox_peer.peer.lag import INTERVAL_S, LoopLag

WORTH_NOTING_S = 0.05
WAITS = {"_worker", "wait", "_do_waitpid", "_watch_stdin"}
"""Where threads stand that have nothing to do."""


def watch_into(path: Path) -> None:
    """From now on each loop that this process watches writes a line for what was late by more than WORTH_NOTING_S: seconds late, seconds of it
    that its thread waited for a processor, and what kept it."""
    slow = [""]  # the newest long step, since the last look
    run = asyncio.Handle._run

    def timed(self: asyncio.Handle) -> None:
        began = time.perf_counter()
        run(self)
        if time.perf_counter() - began > WORTH_NOTING_S:
            slow[0] = f"{_step_of(self)} beside {_others()}"

    async def watch(self: LoopLag) -> None:
        loop, stat = asyncio.get_running_loop(), Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        while True:
            due, waited_s = loop.time() + INTERVAL_S, _waited_s(stat)
            await asyncio.sleep(INTERVAL_S)
            late_s = max(0.0, loop.time() - due)
            self.late_s.append(late_s)
            if late_s > WORTH_NOTING_S:
                with path.open("a") as file:
                    file.write(
                        f"{late_s} {min(late_s, _waited_s(stat) - waited_s)} {slow[0] or f'no long step beside {_others()}'}\n"
                    )
            slow[0] = ""

    LoopLag.watch = watch  # type: ignore[method-assign]
    asyncio.Handle._run = timed  # type: ignore[method-assign]


def _step_of(handle: asyncio.Handle) -> str:
    """Its function, or the innermost coroutine of ours of its task, where it waits by now."""
    callback: Any = getattr(handle, "_callback", None)
    task = getattr(callback, "__self__", None)
    if not isinstance(task, asyncio.Task):
        return str(getattr(callback, "__qualname__", callback))
    coro: Any = task.get_coro()
    found = getattr(coro, "__qualname__", "a task")
    while (frame := getattr(coro, "cr_frame", None)) is not None:
        found = _place(frame) or found
        coro = coro.cr_await
    return found


def _others() -> str:
    """The innermost lines of ours of the other threads that do not wait for work."""
    found = []
    for thread, innermost in sys._current_frames().items():
        if thread == threading.get_ident() or innermost.f_code.co_name in WAITS:
            continue
        frame: FrameType | None = innermost
        while frame is not None and not _place(frame):
            frame = frame.f_back
        found += [_place(frame)] if frame is not None else []
    return ", ".join(found) or "nothing"


def _place(frame: FrameType) -> str:
    """Empty of a line that is not ours."""
    path = Path(frame.f_code.co_filename)
    return f"{path.name}:{frame.f_lineno} {frame.f_code.co_name}" if "dilocox_peer" in path.parts else ""


def _waited_s(stat: Path) -> float:
    return int(stat.read_text().split()[1]) / 1e9


def told(path: Path) -> str:
    """In words."""
    lines = [line.split(" ", 2) for line in path.read_text().splitlines()] if path.exists() else []
    if not lines:
        return f"never {1000 * WORTH_NOTING_S:.0f} ms late"
    found = [(float(late), float(waited), what) for late, waited, what in lines]
    late_s, waited_s, _ = max(found)
    kept_s, what = max((late - waited, what) for late, waited, what in found)
    return f"{1000 * late_s:.0f} ms late at most, {1000 * waited_s:.0f} of them for want of a processor; {1000 * kept_s:.0f} ms at most without that ({what})"
