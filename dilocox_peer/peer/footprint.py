"""How much memory a peer holds, its helpers (p2pd, linkd) included, and how much the machine has left."""

import os
import re
from dataclasses import dataclass
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
    """Bytes of memory that may still be taken: the machine's, or what its control groups leave. Pages of files count as used there, and are given up
    when memory is asked for, as MemAvailable has it."""
    meminfo = _text(root / "proc/meminfo")
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    available = int(match[1]) * 1024 if match else _physical_memory()
    for group in _control_groups(root):
        if (limit := group.limit_bytes()) is not None and (used := group.used_bytes()) is not None:
            available = min(available, max(0, limit - used))
    return available


def whole_memory(root: Path = Path("/")) -> int:
    """Bytes that there would be if nobody else took any: the machine's, or what its control groups allow."""
    limits = [group.limit_bytes() for group in _control_groups(root)]
    return min([_physical_memory(), *(limit for limit in limits if limit is not None)])


@dataclass(frozen=True, slots=True)
class _ControlGroup:
    """Names of its files: limit, used; of memory.stat, what can be had back (version 2 counts what is below it as well, version 1 with total_)."""

    folder: Path
    limit: str
    used: str
    reclaimable: tuple[str, ...]

    def limit_bytes(self) -> int | None:
        return self._number(self.limit)

    def used_bytes(self) -> int | None:
        """Without pages that are given up first, those of files not used for long; and the kernel's own caches."""
        if (used := self._number(self.used)) is None:
            return None
        stat = dict(re.findall(r"^(\w+) (\d+)$", _text(self.folder / "memory.stat"), re.MULTILINE))
        return max(0, used - sum(int(stat.get(name, 0)) for name in self.reclaimable))

    def _number(self, name: str) -> int | None:
        text = _text(self.folder / name).strip()
        return int(text) if text.isdecimal() else None


def _control_groups(root: Path) -> list[_ControlGroup]:
    """Those of this process: its own, as a service has one, and all around it, up to a container's."""
    of_process, top = _text(root / "proc/self/cgroup"), root / "sys/fs/cgroup"
    second = (_own_group(top, re.search(r"^0::/(.*)$", of_process, re.MULTILINE)), top)
    old = top / "memory"
    first = (_own_group(old, re.search(r"^\d+:(?:\w+,)*memory(?:,\w+)*:/(.*)$", of_process, re.MULTILINE)), old)
    return [
        *(_ControlGroup(each, *_VERSION_2) for each in _with_those_around(*second)),
        *(_ControlGroup(each, *_VERSION_1) for each in _with_those_around(*first)),
    ]


_VERSION_2 = ("memory.max", "memory.current", ("inactive_file", "slab_reclaimable"))
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file",))


def _own_group(top: Path, match: re.Match[str] | None) -> Path:
    return top / match[1] if match is not None and ".." not in match[1] else top


def _with_those_around(own: Path, top: Path) -> list[Path]:
    return [own, *(each for each in own.parents if each.is_relative_to(top))]


def _physical_memory() -> int:
    """All of it; without /proc (macOS) what is free as well, which cannot be told without more."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
