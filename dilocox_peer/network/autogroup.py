"""Giving way on Linux where the kernel shares processor time among sessions first (sched_autogroup).

There a process' niceness counts within its session alone: a program at nice 19 that has a session of its own takes as much as all
of another session. So the session's group gets the niceness too. Elsewhere these do nothing.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

AUTOGROUP = Path("/proc/self/autogroup")


def group_niceness() -> int | None:
    """Of this session's group; None where there are no such groups."""
    try:
        return int(AUTOGROUP.read_text().rsplit(maxsplit=1)[-1])
    except (OSError, ValueError, IndexError):
        return None


def follow_niceness() -> None:
    """Gives this session's group the niceness of this process, which leads the session."""
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    if nice > 0:
        _set(nice)


@contextmanager
def giving_way(nice: int) -> Iterator[None]:
    """This process, and what it starts, gives way. Its session is the terminal's as a rule: the group is put back at the end, if the kernel lets us
    (raising it again may take a privilege)."""
    if not nice:
        yield
        return
    os.nice(nice)
    before = group_niceness()
    if before is not None and before < nice:
        _set(nice)
    try:
        yield
    finally:
        if before is not None and before < nice:
            _set(before)


def _set(nice: int) -> None:
    with suppress(OSError):  # forbidden here, or none: niceness alone is what there is
        AUTOGROUP.write_text(str(nice))
