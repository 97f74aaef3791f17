"""A file that is damaged is kept beside what takes its place: it may be the only copy, and somebody may make more of it than this program does."""

import errno
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

from dilocox_peer.files import fsync_folder, make_durable

DAMAGED = ".damaged-"  # in the name, and then when
MOST_KEPT = 2  # of one file: they take room, and a disk that fails does so again and again
_NO_LINKS = frozenset((errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK))


def set_aside(path: Path) -> Path:
    """What the file is kept as from here on, on the disk when this returns; path stays until it is replaced. Beyond MOST_KEPT the smallest of
    the others go: after the first damage there is little in a log, which must not push the run's out. Raises OSError."""
    if there := next((each for each in kept_of(path) if each.samefile(path)), None):
        return there  # it could not be replaced last time
    kept = path.with_name(f"{path.name}{DAMAGED}{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}")
    kept.unlink(missing_ok=True)  # of the same second
    try:
        os.link(path, kept)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copyfile(path, kept)
        make_durable(kept)
    fsync_folder(path.parent)
    others = sorted((each for each in kept_of(path) if each != kept), key=lambda each: each.stat().st_size)
    for old in others[: max(0, len(others) - MOST_KEPT + 1)]:
        with suppress(OSError):  # it costs room
            old.unlink()
    return kept


def kept_of(path: Path) -> list[Path]:
    """What was set aside of the file, the oldest first."""
    return sorted(path.parent.glob(f"{path.name}{DAMAGED}*"))
