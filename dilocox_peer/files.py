"""Files that are whole or not there."""

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

PART = ".part-"
"""What the name of a file begins with while it is written; a process that is killed leaves it behind."""


def replace_file(path: Path, parts: Iterable[bytes]) -> None:
    """Writes parts one after another through a temporary file in the same folder, flushed to disk, readable by all: path is the
    old file or the new one, never a part. Raises OSError."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=PART)
    try:
        with os.fdopen(handle, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
