"""How long the dashboard takes to draw: the picture, its escape codes, and folding an event. No assertion, a table.

    python benchmarks/dashboard.py

Wall time counts what other processes take in between; CPU time of the thread does not, so where their maxima differ the
processor was somebody else's. first: the first time in this process, caches empty.

Napkin: 40 lines of 120 cells are some 200 spans; at 2 us a span for cutting and 3 us for its escape codes, about 1 ms.
"""

import argparse
import io
import platform
import statistics
import sys
import time
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1]))

from dilocox_peer.cli.screen import Size, render
from dilocox_peer.cli.terminal import as_text
from dilocox_peer.events import Event
from dilocox_peer.peer.status import Status
from tests.unit.dashboard_data import events, status

TIMES = 300


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, {TIMES} times each\n")
    print(f"{'ms':<34}{'wall':^24}{'CPU':^32}")
    print(f"{'':<34}{'min':>8}{'median':>8}{'max':>8}{'first':>8}{'min':>8}{'median':>8}{'max':>8}")
    found, now = status()
    for size in (Size(80, 24), Size(120, 40), Size(200, 60)):
        console = Console(file=io.StringIO(), force_terminal=True, color_system="256")
        _row(f"picture {size.width}x{size.height}", lambda size=size: render(found, size, now))
        _row(
            f"picture and codes {size.width}x{size.height}",
            lambda size=size, console=console: as_text(render(found, size, now), size, console),
        )
    happened = list(events())
    _row(f"fold of {len(happened)} events", lambda: _fold(happened))


def _fold(happened: list[tuple[float, Event]]) -> None:
    found = Status()
    for at_s, event in happened:
        found.take(event, at_s)


def _row(name: str, work) -> None:
    wall, cpu = [], []
    for _ in range(TIMES):
        at, used = time.perf_counter(), time.thread_time()
        work()
        cpu.append(1000 * (time.thread_time() - used))
        wall.append(1000 * (time.perf_counter() - at))
    figures = [f(times) for times in (wall, cpu) for f in (min, statistics.median, max)]
    figures.insert(3, cpu[0])
    print(f"{name:<34}" + "".join(f"{each:>8.2f}" for each in figures))


if __name__ == "__main__":
    main()
