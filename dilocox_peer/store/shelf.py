"""Things on a disk, named by the SHA-256 of their bytes: one folder, with a quota if it has one.

    folder/3f/3f9a...            a thing; whole if it is there, and durable unless it was put otherwise
    folder/3f/3f9a....outline    its size and chunks, of a thing of more than one
    folder/partial/3f9a...       what has come of one that is being fetched, and its outline

A thing is written beside, flushed and renamed, and checked chunk by chunk when it is first read: a damaged disk, or a power cut where it was not
flushed, shows as a missing thing, never as a wrong one. What is fetched in part stays for the next try, a week at most, of the newest few.
"""

import errno
import hashlib
import mmap
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final
from weakref import WeakSet, finalize

from dilocox_peer.errors import StateCorrupt
from dilocox_peer.files import PART, fsync_folder, make_durable, replace_file, sweep_parts, take_room, will_pass
from dilocox_peer.store.outline import CHUNK_BYTES, Outline, num_chunks
from dilocox_peer.store.partials import all_but, too_many
from dilocox_peer.types import DIGEST_BYTES, Digest, sha256

PARTIAL: Final = "partial"
PARTIAL_KEPT_S = 7 * 24 * 3600.0
_SIZE_BYTES = 8


class FileContent:
    """Bytes of a file as chunks, each checked when it is first read. offset: in bytes, where they begin. on_damaged: may raise OSError."""

    def __init__(
        self, path: Path, outline: Outline, offset: int = 0, on_damaged: Callable[[], None] = lambda: None
    ) -> None:
        """Raises OSError."""
        self.path = path
        self.outline = outline
        self._offset, self._on_damaged = offset, on_damaged
        self._file = os.open(path, os.O_RDONLY)
        finalize(self, os.close, self._file)
        self._right: set[int] = set()

    def chunk(self, index: int) -> bytes:
        """Blocking. Raises StateCorrupt when the file is no longer what it was, OSError."""
        start, stop = self.outline.span(index)
        raw = os.pread(self._file, stop - start, self._offset + start)
        is_known = index in self._right
        if len(raw) != stop - start or not (is_known or sha256(raw) == self.outline.chunks[index]):
            with suppress(OSError):
                if os.stat(self.path).st_ino == os.fstat(self._file).st_ino:  # else another was fetched since
                    self._on_damaged()
            raise StateCorrupt(f"{self.path} is damaged: chunk {index} is no longer what it was")
        self._right.add(index)
        return raw


class Shelf:
    """A folder of things. Blocking: call it from worker threads; any of them may."""

    def __init__(self, folder: Path, *, quota_bytes: int | None = None) -> None:
        """quota_bytes: beyond it what was used least lately is dropped, unless it is pinned; None: nothing ever is. Creates the folder, and cleans it
        up: one process a folder. Raises OSError."""
        self.folder = folder
        self._quota_bytes = quota_bytes
        self._lock = threading.RLock()
        self._sizes: dict[Digest, int] = {}  # the least lately used first
        self._unflushed: set[Digest] = set()
        self._pinned: set[Digest] = set()
        self._in_making: WeakSet[PartialFile] = WeakSet()
        (folder / PARTIAL).mkdir(mode=0o700, parents=True, exist_ok=True)
        found: list[tuple[float, Digest, int]] = []
        for room in folder.iterdir():
            if room.is_dir():
                sweep_parts(room)
            for path in room.iterdir() if room.is_dir() and room.name != PARTIAL else ():
                if (name := _name_of(path.name)) is not None:
                    status = path.stat()
                    found.append((status.st_mtime, name, status.st_size))
        self._sizes = {name: size_bytes for _, name, size_bytes in sorted(found)}
        for path in (folder / PARTIAL).iterdir():
            if time.time() - path.stat().st_mtime > PARTIAL_KEPT_S:
                path.unlink(missing_ok=True)

    @property
    def held(self) -> frozenset[Digest]:
        with self._lock:
            return frozenset(self._sizes)

    def __contains__(self, name: Digest) -> bool:
        with self._lock:
            return name in self._sizes

    @property
    def size_bytes(self) -> int:
        with self._lock:
            return sum(self._sizes.values())

    # ---- in ----

    def put(self, raw: bytes | bytearray | memoryview, *, durable: bool = True) -> Digest:
        """Keeps the bytes; returns their name. durable: through a power cut, not only through the end of the process. Twice costs nothing.
        Raises OSError."""
        name = sha256(raw)
        if self._use(name):
            if durable:
                self.flush(name)
            return name
        self._make_room(len(raw))
        # its outline first: what is here counts as whole, also after a kill between the two
        self._keep_outline(
            name, [sha256(raw[start : start + CHUNK_BYTES]) for start in range(0, len(raw), CHUNK_BYTES)], len(raw)
        )
        _write(self._path(name), raw, durable=durable)
        self._held(name, len(raw), durable=durable)
        return name

    def flush(self, name: Digest) -> None:
        """From here on it outlives a power cut, if it is here: a result may be the very bytes of a slice. Raises OSError."""
        with self._lock:
            is_due = name in self._unflushed
        if is_due:
            make_durable(self._path(name))
            with self._lock:
                self._unflushed.discard(name)

    def add(self, source: Path) -> Digest:
        """Keeps a copy of a file, durably; returns its name. Raises OSError."""
        self._make_room(source.stat().st_size)

        def read(take: Callable[[bytes], object]) -> None:
            with source.open("rb") as file:
                while raw := file.read(CHUNK_BYTES):
                    take(raw)

        return self.write(read)

    def write(self, produce: Callable[[Callable[[bytes | memoryview], object]], object]) -> Digest:
        """Keeps the bytes that produce gives piece by piece to what it is called with, durably; returns their name. Raises OSError,
        and what produce raises: then nothing is kept."""
        whole, chunks, size_bytes = hashlib.sha256(), list[Digest](), 0
        chunk = bytearray()
        handle, part_name = tempfile.mkstemp(dir=self.folder / PARTIAL, prefix=PART)
        part = Path(part_name)
        try:
            with open(handle, "wb") as copy:

                def end_chunk() -> None:
                    nonlocal size_bytes
                    whole.update(chunk)
                    chunks.append(sha256(chunk))
                    size_bytes += len(chunk)
                    copy.write(chunk)
                    chunk.clear()

                def take(piece: bytes | memoryview) -> None:
                    view = memoryview(piece)
                    while view.nbytes:
                        room = CHUNK_BYTES - len(chunk)
                        chunk.extend(view[:room])
                        view = view[room:]
                        if len(chunk) == CHUNK_BYTES:
                            end_chunk()

                produce(take)
                if chunk:
                    end_chunk()
                copy.flush()
                os.fsync(copy.fileno())
            name = Digest(whole.digest())
            if not self._use(name):
                self._keep_outline(name, chunks, size_bytes)
                self._move_in(part, name, size_bytes)
        finally:
            part.unlink(missing_ok=True)
        return name

    # ---- out ----

    def get(self, name: Digest) -> bytes | None:
        """The whole of it, checked; None if it is not here, or no longer what its name says."""
        if not self._use(name):
            return None
        try:
            raw = self._path(name).read_bytes()
            if sha256(raw) == name:
                return raw
        except OSError as error:
            if will_pass(error):
                return None
        self.forget(name)
        return None

    def mapped(self, name: Digest) -> memoryview | None:
        """The whole of it, memory-mapped and checked; None if it is not here, or no longer what its name says. It can be read as long
        as the view is held, also when the thing is dropped meanwhile."""
        content = self.content(name)
        if content is None:
            return None
        try:
            for index in range(len(content.outline.chunks)):
                content.chunk(index)
            if not content.outline.size_bytes:
                return memoryview(b"")
            with content.path.open("rb") as file:
                return memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        except (OSError, StateCorrupt) as error:
            if not will_pass(error):
                self.forget(name)
            return None

    def path(self, name: Digest) -> Path | None:
        """Where it is; it stays there as long as it is pinned or the quota allows."""
        return self._path(name) if self._use(name) else None

    def content(self, name: Digest) -> FileContent | None:
        """It, to be read in parts; None if it is not here. Of a thing that is dropped meanwhile all can still be read; one with a damaged chunk is
        forgotten."""
        if not self._use(name):
            return None
        try:
            return FileContent(self._path(name), self._outline(name), on_damaged=lambda: self.forget(name))
        except (OSError, ValueError) as error:
            if not will_pass(error):
                self.forget(name)
            return None

    # ---- what stays ----

    def pin(self, names: Iterable[Digest]) -> None:
        """These are not dropped for the quota's sake until the process ends."""
        with self._lock:
            self._pinned |= set(names)

    def forget(self, name: Digest) -> None:
        """It is here no longer, whatever its file is. Raises OSError."""
        with self._lock:
            self._sizes.pop(name, None)
            self._unflushed.discard(name)
            self._pinned.discard(name)
        self._path(name).unlink(missing_ok=True)
        _outline_path(self._path(name)).unlink(missing_ok=True)

    def room_for(self, size_bytes: int) -> int | None:
        """How many things of so many bytes the quota allows beside what is pinned; None: any number."""
        if self._quota_bytes is None:
            return None
        with self._lock:
            pinned_bytes = sum(held_bytes for name, held_bytes in self._sizes.items() if name in self._pinned)
        return max(0, self._quota_bytes - pinned_bytes) // size_bytes

    def _use(self, name: Digest) -> bool:
        """Whether it is here; it is the most lately used now."""
        with self._lock:
            if (size_bytes := self._sizes.pop(name, None)) is None:
                return False
            self._sizes[name] = size_bytes
        with suppress(OSError):
            os.utime(self._path(name))
        return True

    def _make_room(self, size_bytes: int, *, is_certain: bool = True) -> None:
        """Raises OSError when so much cannot be kept at all."""
        if self._quota_bytes is None:
            return
        with self._lock:
            too_many = self.size_bytes + size_bytes - self._quota_bytes
            dropped = []
            for name, held_bytes in self._sizes.items():
                if too_many <= 0:
                    break
                if name not in self._pinned:
                    dropped.append(name)
                    too_many -= held_bytes
            if too_many > 0:
                raise OSError(
                    f"{size_bytes} bytes are more than the quota of {self._quota_bytes} in {self.folder} has room for"
                )
            for name in dropped if is_certain else ():
                self.forget(name)

    def _held(self, name: Digest, size_bytes: int, *, durable: bool) -> None:
        with self._lock:
            self._sizes[name] = size_bytes
            if not durable:
                self._unflushed.add(name)

    def _path(self, name: Digest) -> Path:
        return self.folder / name.hex()[:2] / name.hex()

    def _outline(self, name: Digest) -> Outline:
        """Raises OSError, ValueError."""
        path = self._path(name)
        size_bytes = path.stat().st_size
        if num_chunks(size_bytes) == 1:
            return Outline(size_bytes, (name,))
        outline = read_outline(_outline_path(path))
        if outline.size_bytes != size_bytes:
            raise ValueError(f"{path} is of another size than its outline")
        return outline

    def _keep_outline(self, name: Digest, chunks: Iterable[Digest], size_bytes: int) -> None:
        if num_chunks(size_bytes) > 1:
            write_outline(_outline_path(self._path(name)), Outline(size_bytes, tuple(chunks)))

    def _move_in(self, part: Path, name: Digest, size_bytes: int, *, durable: bool = True) -> None:
        path = self._path(name)
        _make_folder(path.parent)
        part.replace(path)
        if durable:
            fsync_folder(path.parent)
        self._held(name, size_bytes, durable=durable)

    # ---- on its way ----

    def partial(self, name: Digest, *, size_bytes: int | None = None, spared: Digest | None = None) -> "PartialFile":
        """Where a thing that is being fetched is put together, until it is closed; what came of it before is there. size_bytes: of one so large that what
        came of others is deleted, but of spared as long as there is room for both; else the oldest of too many are; of those that are being
        fetched nothing is."""
        with self._lock:
            kept = (PART, name.hex(), *(each.path.name for each in self._in_making))
            others = [path for path in (self.folder / PARTIAL).iterdir() if not path.name.startswith(kept)]
            besides = "" if spared is None else spared.hex()
            for path in too_many(others) if size_bytes is None else all_but(others, besides, size_bytes):
                path.unlink(missing_ok=True)
            partial = PartialFile(self, name)
            self._in_making.add(partial)
        return partial

    def begun(self) -> list[Digest]:
        """Of what something has come."""
        names = (_name_of(path.name) for path in (self.folder / PARTIAL).iterdir())
        return [name for name in names if name is not None]

    def drop_begun(self) -> None:
        """All that came of anything, while nothing is being fetched."""
        for name in self.begun():
            PartialFile(self, name).discard()

    def let_go(self, partial: "PartialFile") -> None:
        """It is not being fetched any more."""
        with self._lock:
            self._in_making.discard(partial)

    def take_in(self, partial: "PartialFile", outline: Outline, *, durable: bool = True) -> Path:
        """Makes the whole, checked partial file a thing of this shelf. Raises OSError."""
        self._keep_outline(partial.name, outline.chunks, outline.size_bytes)
        self._move_in(partial.path, partial.name, outline.size_bytes, durable=durable)
        _outline_path(partial.path).unlink(missing_ok=True)
        return self._path(partial.name)

    def make_room_for(self, size_bytes: int, *, is_certain: bool = True) -> None:
        """Drops what the quota asks for, if so much is certain to come. Raises OSError when so much cannot be kept at all."""
        self._make_room(size_bytes, is_certain=is_certain)


class PartialFile:
    """A thing in the making, in a file of its own. Blocking; one thread at a time."""

    def __init__(self, shelf: Shelf, name: Digest) -> None:
        self.name = name
        self.path = shelf.folder / PARTIAL / name.hex()
        self._shelf = shelf
        self._file = -1
        self._outline: Outline | None = None
        self._is_proven = False
        self._come_bytes = 0  # at most what lies on the disk, of an outline that the name does not prove

    def resumed(self) -> tuple[Outline, frozenset[int]] | None:
        """What is here from before: the outline gone by, and the chunks that are as it says."""
        try:
            outline = read_outline(_outline_path(self.path))
            content = FileContent(self.path, outline)
        except (OSError, ValueError):
            return None
        right = set()
        for index in range(len(outline.chunks)):
            with suppress(StateCorrupt, OSError):
                content.chunk(index)
                right.add(index)
        return outline, frozenset(right)

    def begin(self, outline: Outline) -> None:
        """Goes by this outline. Room for all of it is taken at once if the name proves it; if not, as it comes: nothing that is here goes for what
        a liar says. Raises OSError, also where there will be no room."""
        self._is_proven = outline.root == self.name or len(outline.chunks) == 1
        self._shelf.make_room_for(outline.size_bytes, is_certain=self._is_proven)
        if self._file < 0:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._file, outline.size_bytes)
        on_disk_bytes = _on_disk_bytes(self._file)
        if not self._is_proven:
            if shutil.disk_usage(self.path.parent).free + on_disk_bytes < outline.size_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            self._come_bytes = min(on_disk_bytes, outline.size_bytes)
        elif outline.size_bytes:
            take_room(self._file, outline.size_bytes)
        if len(outline.chunks) > 1:
            # Not durably: if it is torn, what is here is not gone on with.
            _outline_path(self.path).write_bytes(_packed(outline))
        self._outline = outline

    def write(self, start: int, raw: bytes | bytearray | memoryview) -> None:
        """Raises OSError."""
        view = memoryview(raw)
        if not self._is_proven and self._outline is not None:
            self._come_bytes = min(self._come_bytes + view.nbytes, self._outline.size_bytes)
            self._shelf.make_room_for(self._come_bytes)
        while view.nbytes:
            done = os.pwrite(self._file, view, start)
            view, start = view[done:], start + done

    def is_whole(self) -> bool:
        """Whether the bytes are what the name says."""
        assert self._outline is not None, "begin first"
        whole = hashlib.sha256()
        for index in range(len(self._outline.chunks)):
            start, stop = self._outline.span(index)
            whole.update(os.pread(self._file, stop - start, start))
        return whole.digest() == self.name

    def finish(self, *, durable: bool = True) -> Path:
        """The thing, on its shelf; durable: as for `Shelf.put`. Raises OSError."""
        assert self._outline is not None, "begin first"
        self._shelf.make_room_for(self._outline.size_bytes)
        if durable:
            os.fsync(self._file)
        path = self._shelf.take_in(self, self._outline, durable=durable)
        self.close()
        return path

    def mapped(self) -> memoryview:
        """The bytes, memory-mapped, of a thing that is to be on no shelf: they are on the disk as long as the view is held."""
        view = self.view()
        self.discard()
        return view

    def view(self) -> memoryview:
        """The bytes, memory-mapped."""
        size_bytes = os.fstat(self._file).st_size
        return memoryview(mmap.mmap(self._file, 0, prot=mmap.PROT_READ) if size_bytes else b"")

    def discard(self) -> None:
        """Forgets what has come."""
        self.path.unlink(missing_ok=True)
        _outline_path(self.path).unlink(missing_ok=True)

    def close(self) -> None:
        """What has come stays for another try."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._shelf.let_go(self)


def _on_disk_bytes(file: int) -> int:
    return 512 * os.fstat(file).st_blocks


def write_outline(path: Path, outline: Outline) -> None:
    _write(path, _packed(outline), durable=True)


def _packed(outline: Outline) -> bytes:
    return outline.size_bytes.to_bytes(_SIZE_BYTES, "big") + outline.packed()


def read_outline(path: Path) -> Outline:
    """Raises OSError, ValueError."""
    raw = path.read_bytes()
    return Outline.unpacked(int.from_bytes(raw[:_SIZE_BYTES], "big"), raw[_SIZE_BYTES:])


def _write(path: Path, raw: bytes | bytearray | memoryview, *, durable: bool) -> None:
    _make_folder(path.parent)
    replace_file(path, [raw], mode=0o600, durable=durable)


def _make_folder(folder: Path) -> None:
    """Durably: what is in it would be lost with it."""
    if not folder.is_dir():
        folder.mkdir(mode=0o700, exist_ok=True)
        fsync_folder(folder.parent)


def _outline_path(path: Path) -> Path:
    return path.with_name(path.name + ".outline")


def _name_of(text: str) -> Digest | None:
    is_name = len(text) == 2 * DIGEST_BYTES and all(char in "0123456789abcdef" for char in text)
    return Digest(bytes.fromhex(text)) if is_name else None
