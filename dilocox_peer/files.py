"""Files that are whole or not there."""

import os
import secrets
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

PART = ".part-"
"""What the name of a file begins with while it is written; a process that is killed leaves it behind (`sweep_parts`)."""

_OURS = f"{PART}{secrets.token_hex(4)}-"
_PIECE_BYTES = 4 << 20  # written at a time


def replace_file(
    path: Path, parts: Iterable[bytes | bytearray | memoryview], *, mode: int = 0o644, durable: bool = True
) -> None:
    """Writes parts one after another through a temporary file in the same folder: path is the old file or the new one, never a part,
    and when this returns the new one outlives a power cut. mode: who may read it. durable: False for what may be lost in a power
    cut, though not with the process. Raises OSError."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=_OURS)
    try:
        with os.fdopen(handle, "wb", buffering=0) as file:
            for part in parts:
                view = memoryview(part).cast("B")
                while view:
                    view = view[file.write(view[:_PIECE_BYTES]) :]
            if durable:
                os.fsync(file.fileno())
        Path(temporary).chmod(mode)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    if durable:
        fsync_folder(path.parent)


def sweep_parts(folder: Path) -> None:
    """Removes what other processes left in folder when they were killed in mid-write. For folders of one process at a time."""
    for leftover in folder.glob(f"{PART}*"):
        if not leftover.name.startswith(_OURS):
            with suppress(OSError):
                leftover.unlink()


def fsync_folder(folder: Path) -> None:
    """Makes renames and new names in folder durable. Not every platform lets a folder be opened; there it is the best there is."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
