"""Which beginnings of things stay on the disk while another is fetched: of a thing that nobody gave to its end a next try goes on with what has come."""

import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

MAX_PARTIALS = 16  # beside those that are being fetched: the newest are gone on with


def newest_first(partials: Sequence[Path]) -> list[Path]:
    """By when they were last written to; without those that are gone."""
    ages = {}
    for path in partials:
        with suppress(OSError):  # it has just been moved in
            ages[path] = path.stat().st_mtime_ns
    return sorted(ages, key=lambda path: ages[path], reverse=True)


def too_many(partials: Sequence[Path]) -> Sequence[Path]:
    """Those beyond the newest: one that names things which nobody has whole must not fill the disk with their beginnings."""
    return newest_first(partials)[2 * MAX_PARTIALS :]  # each may have its outline beside it


def all_but(partials: Sequence[Path], spared: str, size_bytes: int) -> Sequence[Path]:
    """Those whose names do not begin so; all, where there is no room for size_bytes more."""
    if not partials or shutil.disk_usage(partials[0].parent).free < size_bytes:
        return partials
    return [path for path in partials if path.name.partition(".")[0] != spared]
