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
    except (psutil.Error, OSError):  # OSError: no file descriptor is left for /proc
        return 0
    total = 0
    for process in family:
        try:
            total += process.memory_info().rss
        except (psutil.Error, OSError):
            continue  # it has ended meanwhile
    return total


def available_memory(root: Path = Path("/")) -> int:
    """Bytes of memory that may still be taken: the machine's, or what its control groups leave."""
    meminfo = _text(root / "proc/meminfo")
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    available = int(match[1]) * 1024 if match else _physical_memory()
    for group in _control_groups(root):
        limit, used = (_text(group / name).strip() for name in ("memory.max", "memory.current"))
        if limit.isdecimal() and used.isdecimal():
            available = min(available, max(0, int(limit) - int(used)))
    return available


def whole_memory(root: Path = Path("/")) -> int:
    """Bytes that there would be if nobody else took any: the machine's, or what its control groups allow."""
    limits = [_text(group / "memory.max").strip() for group in _control_groups(root)]
    return min([_physical_memory(), *(int(limit) for limit in limits if limit.isdecimal())])


def _control_groups(root: Path) -> list[Path]:
    """Those of this process (cgroup v2): its own, as a service has one, and all around it, up to a container's."""
    top = root / "sys/fs/cgroup"
    match = re.search(r"^0::/(.*)$", _text(root / "proc/self/cgroup"), re.MULTILINE)
    own = top / match[1] if match is not None and ".." not in match[1] else top
    return [own, *(each for each in own.parents if each.is_relative_to(top))]


def _physical_memory() -> int:
    """All of it; without /proc (macOS) what is free as well, which cannot be told without more."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
