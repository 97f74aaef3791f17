"""rounds.log on disk: the shell of durable.py. Appends and flushes; what has grown it compacts, with older certificates in rounds.past."""

import errno
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from dilocox_peer.files import fsync_folder, replace_file, sweep_parts
from dilocox_peer.peer.rounds.chain import Chain, Place
from dilocox_peer.peer.rounds.durable import (
    Durable,
    LoadedLog,
    Votes,
    base_of,
    encode_base,
    encode_record,
    load_log,
    newest_left,
)
from dilocox_peer.peer.rounds.past import Block, BlocksInMemory, BlockStore, Certificates, Past, blocks_in, write_blocks
from dilocox_peer.types import Digest
from dilocox_peer.wire.chain import Certificate

COMPACT_BYTES = 4 * 1024 * 1024  # by which the log has grown
KEPT = 640  # newest certificates that stay in the log, and in memory: more than are replayed (replay.py)
CLOSE_S = 5.0  # for a write that is under way
PAST = ".past"  # of the file of blocks beside the log


class BlockFile:
    """Blocks of certificates in a file that grows at its end. Any thread may read."""

    def __init__(self, folder: Path, file: int) -> None:
        """file: open in folder; from here on it is closed by this."""
        self._folder = folder
        self._lock = threading.Lock()
        self._file = file
        self._at_end = weakref.finalize(self, os.close, file)

    @classmethod
    def at(cls, path: Path) -> "BlockFile":
        """Opens or makes it. Raises OSError."""
        return cls(path.parent, os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))

    def aside(self) -> "BlockFile":
        """As of BlockStore: a file without a name, in the same folder."""
        with tempfile.TemporaryFile(dir=self._folder, buffering=0) as file:
            return BlockFile(self._folder, os.dup(file.fileno()))

    @property
    def size_bytes(self) -> int:
        return os.fstat(self._file).st_size

    def append(self, raw: bytes) -> int:
        """Where it lies. Raises OSError: the file is as long as it was."""
        with self._lock:
            at, view, done = self.size_bytes, memoryview(raw), 0
            try:
                while done < len(raw):
                    done += os.pwrite(self._file, view[done:], at + done)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._file, at)
                raise
            return at

    def read(self, at: int, size_bytes: int) -> bytes:
        """Raises OSError."""
        return os.pread(self._file, size_bytes, at)

    def cut(self, size_bytes: int) -> None:
        """What comes after is nobody's. Raises OSError."""
        if self.size_bytes > size_bytes:
            os.ftruncate(self._file, size_bytes)

    def sync(self) -> None:
        """What was appended outlives a power cut. Raises OSError."""
        os.fsync(self._file)

    def close(self) -> None:
        with self._lock:
            self._file = -1
        self._at_end()


class Journal:
    """The append-only log of one stage's rounds. Blocking: call it from a worker thread. One process owns the folder.

    chain: what the log had when it was opened, its older certificates on the disk. store: for those of whoever goes on with it."""

    def __init__(self, path: Path, genesis: Place) -> None:
        """Opens or makes the files; a torn, damaged or grown log is rewritten. Raises OSError."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        sweep_parts(path.parent)
        self._path = path
        self._writing, self._is_closed = threading.Lock(), False
        self.store = BlockFile.at(path.with_suffix(PAST))
        try:
            self._begin(genesis)
        except BaseException:
            self.store.close()
            raise

    def _begin(self, genesis: Place) -> None:
        path = self._path
        raw = path.read_bytes() if path.exists() else b""
        self.loaded, self.chain = _load(raw, genesis, self.store)
        self.store.cut(base.past_bytes if (base := base_of(raw)) is not None else 0)
        durable = self.loaded.durable
        self._past = Past(self.store, self.chain.blocks)
        self._newest: list[Certificate] = list(self.chain.certificates[self._past.count :])
        self._votes = durable.votes if durable is not None else Votes(genesis.head)
        self._checkpoint = durable.checkpoint if durable is not None else None
        self._left = durable.left if durable is not None else ()
        if self.loaded.reason:
            # Rewritten, not cut: after damage in the middle the loaded votes are sealed, and a second restart that found
            # a merely shorter file would not know it.
            replace_file(path, self._parts() if durable is not None else [], mode=0o600)  # else it begins anew
        self._open()
        self._compact_at = max(self._size_bytes, COMPACT_BYTES) if self._past.count else COMPACT_BYTES
        self.chain.seal(self._compact_if_grown())
        if durable is not None:
            self.loaded = replace(self.loaded, durable=replace(durable, appended=self.chain.as_it_is()))
        fsync_folder(path.parent)

    def write(self, durable: Durable) -> Sequence[Block]:
        """Appends one record; it is durable when this returns. Gives back the blocks that all older certificates are in, if more have
        gone into some: a chain need not keep them in memory. Raises OSError: the log is as it was, and it may be tried again."""
        with self._writing:
            try:
                self._check_open()
                return self._write(durable)
            finally:
                if self._is_closed:
                    self._shut()

    def _write(self, durable: Durable) -> Sequence[Block]:
        if isinstance(durable.appended, Certificates) and durable.appended.store is self.store:
            return self._become(durable, durable.appended)
        record = encode_record(durable)
        try:
            rest = memoryview(record)
            while rest:
                rest = rest[self._file.write(rest) :]
            os.fsync(self._file.fileno())
        except OSError:
            with suppress(OSError):  # a torn record at the end is dropped by who reads it
                os.ftruncate(self._file.fileno(), self._size_bytes)
            raise
        self._size_bytes += len(record)
        self._take(durable)
        return self._compact_if_grown()

    @property
    def height(self) -> int:
        """Certificates that the log has."""
        return self._past.count + len(self._newest)

    def held_of(self, height_of: Callable[[Digest], int | None]) -> int:
        """How many certificates of a chain the log has from the first on; of those in blocks, whole blocks are counted. height_of: of the
        chain."""
        for certificate in reversed(self._newest):
            if (height := height_of(certificate.head)) is not None:
                return height
        return next((block.stop for block in reversed(self._past.blocks) if height_of(block.last) is not None), 0)

    def forget(self) -> None:
        """What was loaded, which somebody else has by now: it holds the newest certificates, and an index."""
        self.chain = Chain(self.chain.place_at(0))
        self.loaded = LoadedLog(None, 0, "")

    def close(self) -> None:
        """A write that is under way is waited for, but not for ever: whoever opens the log next must not have it replaced by an older one, nor
        does a write that comes to that later."""
        self._is_closed = True
        if self._writing.acquire(timeout=CLOSE_S):
            try:
                self._shut()
            finally:
                self._writing.release()

    def _check_open(self) -> None:
        if self._is_closed:
            raise OSError(errno.EBADF, "the log of rounds is closed")

    def _replace(self) -> None:
        self._check_open()
        replace_file(self._path, self._parts(), mode=0o600)

    def _shut(self) -> None:
        self._file.close()
        self.store.close()

    def _become(self, durable: Durable, chain: Certificates) -> Sequence[Block]:
        """The log says this chain, whose blocks are in our store already. Raises OSError: it is as it was."""
        assert durable.keep == 0, f"a whole chain after {durable.keep} certificates"
        before = self._past, self._newest, self._votes, self._checkpoint, self._left
        self._past = Past(self.store, chain.blocks)
        self._newest = chain[self._past.count :]
        self._votes, self._checkpoint = durable.votes, durable.checkpoint or self._checkpoint
        self._left = newest_left(self._left, durable.left)
        try:
            self.store.sync()
            self._replace()
        except OSError:
            self._past, self._newest, self._votes, self._checkpoint, self._left = before
            raise
        self._file.close()
        self._open()
        self._compact_at = self._size_bytes + COMPACT_BYTES
        return self._past.copy().blocks

    def _open(self) -> None:
        self._file = self._path.open("ab", buffering=0)  # what could not be written must not come out later
        self._size_bytes = os.fstat(self._file.fileno()).st_size

    def _take(self, durable: Durable) -> None:
        """What the log says by now."""
        if durable.keep < self._past.count:
            self._newest = self._past.cut(durable.keep)
        self._newest[durable.keep - self._past.count :] = durable.appended
        self._votes = durable.votes
        self._checkpoint = durable.checkpoint or self._checkpoint
        self._left = newest_left(self._left, durable.left)

    def _parts(self) -> list[bytes]:
        """The log as it would be written anew."""
        count = self._past.count
        rest = Durable(count, self._newest, self._votes, self._checkpoint, self._left)
        base = [encode_base(count, self.store.size_bytes, self._past.blocks[-1].last)] if count else []
        return [*base, encode_record(rest)]

    def _compact_if_grown(self) -> Sequence[Block]:
        """A disk that refuses leaves the log as it was; it is tried again when it has grown as much once more."""
        if self._size_bytes < self._compact_at:
            return ()
        count = self._past.count
        with suppress(OSError):
            self._compact()
        self._compact_at = self._size_bytes + COMPACT_BYTES
        return self._past.copy().blocks if self._past.count != count else ()

    def _compact(self) -> None:
        before, newest = self._past.copy(), self._newest
        old = newest[:-KEPT]
        blocks = write_blocks(self.store, before.count, old)
        self.store.sync()
        try:
            for block in blocks:
                self._past.add(block)
            self._newest = newest[len(old) :]
            self._replace()
        except OSError:
            self._past, self._newest = before, newest
            raise
        self._file.close()
        self._open()


def read_log(path: Path, genesis: Place) -> LoadedLog:
    """What a log says, with all its certificates; nothing is written. Raises OSError."""
    raw = path.read_bytes()
    if (past := path.with_suffix(PAST)).exists() and base_of(raw) is not None:
        store = _ReadOnly(past)
        loaded, chain = _load(raw, genesis, store)
        durable = loaded.durable
        return replace(loaded, durable=replace(durable, appended=chain.as_it_is())) if durable is not None else loaded
    return load_log(raw, genesis.head)


class _ReadOnly:
    """A file of blocks of somebody else's."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def size_bytes(self) -> int:
        return self._path.stat().st_size

    def cut(self, size_bytes: int) -> None:
        raise AssertionError(f"a file that is only read, to be cut to {size_bytes} bytes")

    def append(self, raw: bytes) -> int:
        raise AssertionError(f"{len(raw)} bytes for a file that is only read")

    def read(self, at: int, size_bytes: int) -> bytes:
        with self._path.open("rb") as file:
            return os.pread(file.fileno(), size_bytes, at)

    def aside(self) -> BlockStore:
        return BlocksInMemory()


def _load(raw: bytes, genesis: Place, store: BlockStore) -> tuple[LoadedLog, Chain]:
    """What a log says, and the chain. Raises OSError."""
    base, chain = base_of(raw), Chain(genesis, store=store)
    if base is not None:
        with suppress(ValueError):  # damaged: what is before it counts, and the log says that more is missing
            for block, certificates in blocks_in(store, base.past_bytes):
                _grow(chain, block, certificates)
            if (
                base.count < chain.height
            ):  # blocks of a branch that was left, and nothing written since took their place
                chain.truncate(base.count)
    loaded = load_log(raw, genesis.head, chain if base is not None else None)
    if (durable := loaded.durable) is None:
        return loaded, chain
    chain.truncate(durable.keep)
    for certificate in durable.appended:
        chain.append(certificate)
    return replace(loaded, durable=replace(durable, keep=0, appended=())), chain


def _grow(chain: Chain, block: Block, certificates: Sequence[Certificate]) -> None:
    """Raises ValueError for a block that does not follow."""
    if block.first > chain.height:
        raise ValueError(f"a block after {block.first} certificates, of which {chain.height} are here")
    chain.truncate(block.first)
    for certificate in certificates:
        if certificate.parent != chain.head:
            raise ValueError("a block whose certificates do not follow each other")
        chain.append(certificate)
    chain.seal([block])
