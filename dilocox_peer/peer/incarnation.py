"""The number by which others tell the lives of this peer apart: milliseconds at the start of its process, the newest counts.

A clock that was ahead and is set right would make a new life look older than the last, and who knew that one would heed
nothing of this peer until the clock is there again. So the last number is kept on disk, and the next is above it.
"""

from contextlib import suppress
from pathlib import Path

from dilocox_peer.files import replace_file, sweep_parts
from dilocox_peer.wire.declared import MAX_COUNT

_MAX_CHARS = 32


def next_incarnation(path: Path, now_ms: int) -> int:
    """now_ms, or what follows the number kept in path if that is higher; kept there in turn. A file that cannot be read or
    written is done without."""
    number = max(now_ms, _kept(path) + 1)
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        sweep_parts(path.parent)
        replace_file(path, [str(number).encode()], mode=0o600)
    return number


def _kept(path: Path) -> int:
    try:
        with path.open() as file:
            number = int(file.read(_MAX_CHARS))
    except (OSError, ValueError):
        return 0
    return number if 0 < number < MAX_COUNT else 0
