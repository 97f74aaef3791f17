"""How late a peer's event loop runs, and how much of that its thread stood ready and another had the processor. Not run by hand.

A loop that is kept by its own process (a lock, a long step) is late wherever the peer runs. One that waits for a processor is late because
several peers of a benchmark share a machine. /proc/self/task/*/schedstat tells the two apart (Linux).
"""

import asyncio
import threading
from pathlib import Path

from dilocox_peer.peer.lag import INTERVAL_S, LoopLag

WORTH_NOTING_S = 0.05


def watch_into(path: Path) -> None:
    """From now on each loop that this process watches writes a line for what was late by more than WORTH_NOTING_S: seconds late, seconds of it
    that its thread waited for a processor."""

    async def watch(self: LoopLag) -> None:
        loop, stat = asyncio.get_running_loop(), Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        while True:
            due, waited_s = loop.time() + INTERVAL_S, _waited_s(stat)
            await asyncio.sleep(INTERVAL_S)
            late_s = max(0.0, loop.time() - due)
            self.late_s.append(late_s)
            if late_s > WORTH_NOTING_S:
                with path.open("a") as file:
                    file.write(f"{late_s} {min(late_s, _waited_s(stat) - waited_s)}\n")

    LoopLag.watch = watch  # type: ignore[method-assign]


def _waited_s(stat: Path) -> float:
    return int(stat.read_text().split()[1]) / 1e9


def told(path: Path) -> str:
    """In words."""
    lines = [tuple(map(float, line.split())) for line in path.read_text().splitlines()] if path.exists() else []
    if not lines:
        return f"never {1000 * WORTH_NOTING_S:.0f} ms late"
    late_s, waited_s = max(lines)
    kept_s = max(late - waited for late, waited in lines)
    return f"{1000 * late_s:.0f} ms late at most, {1000 * waited_s:.0f} of them for want of a processor; {1000 * kept_s:.0f} ms at most without that"
