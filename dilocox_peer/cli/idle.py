"""`--only-idle`: whether others use this machine. The judgement is pure; `keep_idle` looks, pauses and resumes.

The load average counts our own training, so CPU time is counted: what all processors were busy, less what this process and
its helpers (p2pd, linkd) took. Time that nice processes take counts as others', and so does another peer on this machine.
"""

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from dilocox_peer.cli.hours import Pausable
from dilocox_peer.errors import ConfigError
from dilocox_peer.files import will_pass

LOOK_S = 5.0
BUSY_S, CALM_S = 10.0, 30.0  # others are looked at over the last so many seconds to pause, and to resume
BUSY_CORES, BUSY_SHARE = 0.5, 0.05  # others use more than so many processors, and that share of them: to pause
CALM_PART = 0.5  # they use less than that part of it: to resume
WHO = "only-idle"
NOT_BUSY = (3, 4, 7)  # of /proc/stat's columns: idle, waiting for disks, taken by other virtual machines
SUMMED_COLUMNS = 8  # what guests take, the two columns behind, is in the first two already


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds since some moment, of all processors and of this peer's processes. at_s: on the monotonic clock."""

    at_s: float
    busy_s: float
    own_s: float

    @property
    def others_s(self) -> float:
        return self.busy_s - self.own_s


class Idleness:
    """What the readings say, with hysteresis: idle until others were busy for BUSY_S, then busy until they were calm for
    CALM_S."""

    def __init__(self, num_cores: int) -> None:
        self.busy_cores = max(BUSY_CORES, BUSY_SHARE * num_cores)
        self.is_idle = True
        self._readings: deque[Usage] = deque()

    def take(self, usage: Usage) -> tuple[bool, float]:
        """(is_idle from now on, processors that others used of late)."""
        readings = self._readings
        readings.append(usage)
        while len(readings) > 2 and usage.at_s - readings[1].at_s >= CALM_S:
            readings.popleft()
        over_s = BUSY_S if self.is_idle else CALM_S
        since = next((reading for reading in reversed(readings) if usage.at_s - reading.at_s >= over_s), None)
        if since is None:
            return self.is_idle, 0.0
        cores = max(0.0, usage.others_s - since.others_s) / (usage.at_s - since.at_s)
        self.is_idle = cores <= self.busy_cores if self.is_idle else cores < CALM_PART * self.busy_cores
        return self.is_idle, cores


def read_usage(root: Path = Path("/")) -> Usage:
    """Takes milliseconds. Raises ConfigError where the system has no /proc/stat."""
    try:
        first = (root / "proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()
        columns = [int(each) for each in first[1 : SUMMED_COLUMNS + 1]]
    except (OSError, ValueError) as error:
        if will_pass(error):
            raise
        columns = []
    if len(columns) < SUMMED_COLUMNS:
        raise ConfigError("--only-idle needs /proc/stat, which this system lacks: use --hours or --nice 19 instead")
    busy = sum(columns) - sum(columns[column] for column in NOT_BUSY)
    return Usage(time.monotonic(), busy / os.sysconf("SC_CLK_TCK"), _own_seconds())


def _own_seconds() -> float:
    """Of this process and those below it; of those that have ended, what was counted when they were reaped."""
    me = psutil.Process()
    total = 0.0
    for process in (me, *me.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue  # it has ended meanwhile
        total += times.user + times.system + times.children_user + times.children_system
    return total


async def keep_idle(peer: Pausable, read: Callable[[], Usage] = read_usage, *, look_s: float = LOOK_S) -> None:
    """Pauses while others use the machine, until cancelled."""
    cores = os.cpu_count() or 1
    idleness = Idleness(cores)
    while True:
        was_idle = idleness.is_idle
        try:
            is_idle, used = idleness.take(await asyncio.to_thread(read))
        except (OSError, ConfigError):
            if not was_idle:  # whoever looks again begins anew
                peer.resume(WHO, "whether others use the machine cannot be told")
            raise
        if is_idle != was_idle:
            if is_idle:
                peer.resume(WHO, "the machine is idle again")
            else:
                peer.pause(WHO, f"others use {used:.1f} of {cores} processor cores (--only-idle)")
        await asyncio.sleep(look_s)
