"""The folder of a peer's unix sockets: private, locked while in use, and swept of what a killed predecessor left. Stand-ins that
other peers of this user left in the temp folder when they were killed go too.

hivemind names its sockets after a class attribute and leaves them behind at kill -9 (179 files after a day of tests [m]);
with a folder of its own a peer may delete all of them without breaking another peer on the same host.
"""

import fcntl
import hashlib
import itertools
import os
import stat
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dilocox_peer.errors import ConfigError, not_written
from dilocox_peer.types import PeerId

# sockaddr_un holds 108 bytes on Linux, 104 on macOS, with the final zero; hivemind's names take up to 27 of them.
_SOCKET_PATH_BYTES = 103
_SOCKET_NAME_BYTES = 27
_PREFIX = "dilocox-"
_REST = (
    "?" * 12 + "-" + "[0-9a-f]" * 4
)  # of a stand-in's name, as `_stand_in` has it: other folders of ours are not swept here
_ATTEMPTS, _SWEPT_S = 8, 0.02
_MOST_SWEPT = 256  # folders at a time: a start does not wait for a temp folder full of them


@dataclass(slots=True)
class RuntimeDir:
    """A locked folder for sockets. `path` may be a short stand-in under the system's temp folder."""

    path: Path
    _fd: int | None
    _is_stand_in: bool

    @classmethod
    def open(cls, wanted: Path, peer: PeerId) -> "RuntimeDir":
        """wanted, or a short folder in its place if socket paths in it were too long, made, checked, locked and swept.

        Raises ConfigError: not ours, not private, in use.
        """
        wanted = Path(os.path.abspath(wanted))
        is_stand_in = not _fits(wanted)
        path = _stand_in(peer, wanted.name) if is_stand_in else wanted
        for attempt in range(_ATTEMPTS):
            # A stand-in may go between our open and our lock, and is locked for a moment by whoever sweeps.
            fd = _open_locked(path, is_last=not is_stand_in or attempt == _ATTEMPTS - 1)
            if fd is not None:
                directory = cls(path, fd, is_stand_in)
                directory._sweep()
                if is_stand_in:
                    _sweep_left_behind(path)
                return directory
        raise ConfigError(f"the runtime folder {path} keeps vanishing: pass another one")

    def close(self) -> None:
        """Deletes the sockets and gives the folder back. May be called twice."""
        if self._fd is None:
            return
        self._sweep()
        if self._is_stand_in:
            with suppress(OSError):
                self.path.rmdir()
        os.close(self._fd)
        self._fd = None

    def _sweep(self) -> None:
        _unlink_sockets(self.path)


def _unlink_sockets(path: Path) -> None:
    with suppress(OSError), os.scandir(path) as entries:
        for entry in entries:
            if stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode):
                os.unlink(entry.path)


def _sweep_left_behind(own: Path) -> None:
    """Stand-ins of this user beside own that nobody holds: their peers were killed. One with anything but sockets in it stays."""
    for path in itertools.islice(own.parent.glob(f"{_PREFIX}{os.getuid()}-{_REST}"), _MOST_SWEPT):
        if path == own:
            continue
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            with suppress(OSError):  # somebody's
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(fd).st_uid == os.getuid():
                    _unlink_sockets(path)
                    path.rmdir()
        finally:
            os.close(fd)


def _stand_in(peer: PeerId, wanted: str) -> Path:
    which = hashlib.sha256(os.fsencode(wanted)).hexdigest()[:4]  # a bootstrap of several runs has several
    name = f"{_PREFIX}{os.getuid()}-{peer[-12:]}-{which}"
    own = Path(tempfile.gettempdir(), name)  # TMPDIR may itself be long
    return own if _fits(own) else Path("/tmp", name)


def _fits(path: Path) -> bool:
    # p2pd takes the path inside a multiaddress: anything but plain characters has to be kept out of it.
    text = str(path)
    plain = text.isascii() and text.isprintable() and not set(text) & set(" ,%")
    return plain and len(os.fsencode(text)) + 1 + _SOCKET_NAME_BYTES <= _SOCKET_PATH_BYTES


def _open_locked(path: Path, *, is_last: bool) -> int | None:
    """A locked descriptor of the folder; None if the folder was removed meanwhile, or is locked and this is not the last attempt."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if isinstance(error, FileNotFoundError | FileExistsError) and not is_last:
            return None  # it went between two of these calls
        raise not_written(f"cannot use runtime folder {path}", error) from None
    try:
        status = os.fstat(fd)
        if status.st_uid != os.getuid():
            raise ConfigError(f"the runtime folder {path} belongs to another user: remove it or pass another one")
        if status.st_mode & 0o077:
            raise ConfigError(f"the runtime folder {path} is open to others: run `chmod 700 {path}`")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if is_last:
                raise ConfigError(
                    f"the runtime folder {path} is in use by another process: stop it or pass another one"
                ) from None
            time.sleep(_SWEPT_S)
        else:
            with suppress(FileNotFoundError):
                if os.path.samestat(os.stat(path), status):
                    return fd
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None
