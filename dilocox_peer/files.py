"""Files that are whole or not there."""

import ctypes
import errno
import mmap
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

PART = ".part-"
"""What the name of a file begins with while it is written; a process that is killed leaves it behind (`sweep_parts`)."""

_OURS = f"{PART}{secrets.token_hex(4)}-"
_PIECE_BYTES = 4 << 20  # written at a time
_FLUSHED_BYTES = 64 << 20
_WRITE_AND_WAIT = 7  # SYNC_FILE_RANGE_WAIT_BEFORE | _WRITE | _WAIT_AFTER
_PASSING = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN))


def behind_links(path: Path) -> Path:
    """What a symbolic link leads to, there or not; path itself where it is none, or leads round in a circle."""
    return Path(os.path.realpath(path))


def replace_file(
    path: Path, parts: Iterable[bytes | bytearray | memoryview], *, mode: int = 0o644, durable: bool = True
) -> None:
    """Writes parts one after another through a temporary file in the same folder: path is the old file or the new one, never a part,
    and when this returns the new one outlives a power cut. mode: who may read it. durable: False for what may be lost in a power
    cut, though not with the process. A device or a pipe of that name is left as it is. Raises OSError."""
    temporary = _written_beside(path, parts, mode=mode, durable=durable)
    try:
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        fsync_folder(path.parent)


def replace_together(files: Mapping[Path, bytes]) -> None:
    """The same of several files that belong together: none is replaced before all are written, so that a disk that is full leaves all as they
    were; then one after another, in this order. Raises OSError."""
    beside = dict[Path, Path]()
    try:
        for path, content in files.items():
            beside[path] = _written_beside(path, [content], mode=0o644, durable=True)
        for path, temporary in beside.items():
            temporary.replace(path)
    except BaseException:
        for temporary in beside.values():
            temporary.unlink(missing_ok=True)
        raise
    for folder in {path.parent for path in files}:
        fsync_folder(folder)


def _written_beside(path: Path, parts: Iterable[bytes | bytearray | memoryview], *, mode: int, durable: bool) -> Path:
    """Where they lie, under a name that `sweep_parts` knows. Raises OSError, and nothing is left."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "it is a device or a pipe, no file", str(path))
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=_OURS)
    try:
        with os.fdopen(handle, "wb", buffering=0) as file:
            for part in parts:
                view = memoryview(part).cast("B")
                while view:
                    done = file.write(view[:_PIECE_BYTES])
                    let_go(view[:done])
                    view = view[done:]
            if durable:
                _write_out(file.fileno())
                os.fsync(file.fileno())
        Path(temporary).chmod(mode)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return Path(temporary)


def will_pass(error: Exception) -> bool:
    """Whether a file cannot be read for now alone: for want of file descriptors or of memory. What is here is not dropped for that."""
    return isinstance(error, OSError) and error.errno in _PASSING


class PartFile:
    """A file of known size that is written in any order by any threads, under another name until it is whole."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        """path: what it will be. Takes room for all of it. Raises OSError."""
        self._path = path
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=_OURS)
        self._temporary = Path(temporary)
        self._handle = handle
        try:
            os.ftruncate(handle, size_bytes)
            if size_bytes:
                take_room(handle, size_bytes)
        except BaseException:
            self.discard()
            raise

    def write(self, start: int, raw: bytes | bytearray | memoryview) -> None:
        """Raises OSError."""
        view = memoryview(raw).cast("B")
        while view.nbytes:
            done = os.pwrite(self._handle, view, start)
            view, start = view[done:], start + done

    def read(self, start: int, into: memoryview) -> None:
        """What was written from start on. Raises OSError."""
        while into.nbytes:
            done = os.preadv(self._handle, [into], start)
            if not done:
                raise OSError(errno.EIO, "it ends before what was written", str(self._path))
            into, start = into[done:], start + done

    def mapped(self) -> mmap.mmap:
        """All of it, to be read; it stays valid whatever becomes of the name."""
        return mmap.mmap(self._handle, 0, prot=mmap.PROT_READ)

    def finish(self, *, mode: int = 0o644) -> None:
        """Gives it its name. It outlives the process from here on; a power cut only once `make_durable` was called."""
        self._temporary.chmod(mode)
        self._temporary.replace(self._path)
        self._close()

    def discard(self) -> None:
        """It is not to be."""
        self._temporary.unlink(missing_ok=True)
        self._close()

    def _close(self) -> None:
        """What is written by mistake later fails, and does not go to whatever file has the number then."""
        handle, self._handle = self._handle, -1
        os.close(handle)


def make_durable(path: Path, go_on: Callable[[], bool] = lambda: True) -> bool:
    """Whether the file, which is there, outlives a power cut when this returns. go_on: asked now and then; False: it is left as it is.
    Where the system can (Linux) it goes to the disk in parts, so that others' writes come in between. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        if not _write_out(handle, go_on):
            return False
        os.fsync(handle)
    finally:
        os.close(handle)
    fsync_folder(path.parent)
    return True


def _write_out(handle: int, go_on: Callable[[], bool] = lambda: True) -> bool:
    """Has the system write the file in parts, and waits for each: fsync then has little left to wait for, which nothing interrupts, not even
    the end of the process. A hint: fsync says whether it is there. go_on: asked before each part. Whether it always said so."""
    size_bytes = os.fstat(handle).st_size
    for start in range(0, size_bytes, _FLUSHED_BYTES):
        if not go_on():
            return False
        if _sync_file_range is not None and size_bytes > _FLUSHED_BYTES:  # fsync alone writes a single part as well
            _sync_file_range(handle, start, _FLUSHED_BYTES, _WRITE_AND_WAIT)
    return True


def let_go(view: memoryview) -> None:
    """The bytes of view, if they are those of a mapped file, need not stay in this process's memory: the system has them, or the
    disk, and they are there when they are read again. Nothing happens to other bytes."""
    mapped = view.obj
    if not isinstance(mapped, mmap.mmap) or not view.nbytes or not hasattr(mmap, "MADV_DONTNEED"):
        return
    begin, at = (np.frombuffer(each, np.uint8).ctypes.data for each in (mapped, view))
    first, last = -(-(at - begin) // mmap.PAGESIZE), (at - begin + view.nbytes) // mmap.PAGESIZE
    if first < last:
        mapped.madvise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE)


def _library_call() -> Callable[..., int] | None:
    """sync_file_range(2), which the standard library does not have; None where the system has none."""
    try:
        found: Callable[..., int] = ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError, TypeError):
        return None
    found.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]  # type: ignore[attr-defined]
    return found


_sync_file_range = _library_call()


def take_room(file: int, size_bytes: int) -> None:
    """Where the system can; elsewhere (macOS, some network disks) a full disk shows later. Raises OSError when it is full."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file, 0, size_bytes)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise


def sweep_parts(folder: Path) -> None:
    """Removes what other processes left in folder when they were killed in mid-write. For folders of one process at a time."""
    for leftover in folder.glob(f"{PART}*"):
        if not leftover.name.startswith(_OURS):
            with suppress(OSError):
                leftover.unlink()


def give_to_owner(folder: Path) -> None:
    """What root has made below folder goes to whom folder belongs to: a service's home is of another user, who could not open or replace it. Raises OSError
    where folder is not there."""
    owner = folder.stat()
    if os.geteuid() != 0 or owner.st_uid == 0:
        return
    for _, _, names, at in os.fwalk(folder):
        for name in (".", *names):
            with suppress(OSError):  # a link, a socket, or gone
                _give(name, at, owner)


def _give(name: str, at: int, owner: os.stat_result) -> None:
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
    try:
        found = os.fstat(file)
        # With a second name it may be root's own, which that user has linked there.
        is_alone = stat.S_ISDIR(found.st_mode) or (stat.S_ISREG(found.st_mode) and found.st_nlink == 1)
        if found.st_uid == 0 and is_alone:
            os.fchown(file, owner.st_uid, owner.st_gid)
    finally:
        os.close(file)


def fsync_folder(folder: Path) -> None:
    """Makes renames and new names in folder durable. Not every platform lets a folder be opened; there it is the best there is."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
