"""How much memory a peer holds, its helpers (p2pd, linkd) included, and how much the machine has left."""

import os
import re
from pathlib import Path

import psutil


def resident_bytes() -> int:
    """Pages that several of them share are counted for each. 0 where the system does not say. Takes milliseconds."""
    try:
        me = psutil.Process()
        family = [me, *me.children(recursive=True)]
    except psutil.Error:
        return 0
    total = 0
    for process in family:
        try:
            total += process.memory_info().rss
        except psutil.Error:
            continue  # it has ended meanwhile
    return total


def available_memory(root: Path = Path("/")) -> int:
    """Bytes of memory that may still be taken: the machine's, or what the control group leaves."""
    meminfo = _text(root / "proc/meminfo")
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    available = int(match[1]) * 1024 if match else _physical_memory()
    limit, used = (_text(root / "sys/fs/cgroup" / name).strip() for name in ("memory.max", "memory.current"))
    if limit.isdecimal() and used.isdecimal():
        available = min(available, max(0, int(limit) - int(used)))
    return available


def _physical_memory() -> int:
    """Where there is no /proc (macOS): all of it, as what is free cannot be told without more."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
