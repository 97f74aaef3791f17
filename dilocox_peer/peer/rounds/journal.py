"""rounds.log on disk: the shell of durable.py. Appends and flushes; what has grown it compacts, with older certificates in rounds.past."""

import errno
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from dilocox_peer.errors import ConfigError
from dilocox_peer.files import fsync_folder, replace_file, sweep_parts
from dilocox_peer.peer.rounds.chain import Chain, Place
from dilocox_peer.peer.rounds.durable import (
    Durable,
    LoadedLog,
    Votes,
    another_version,
    base_of,
    encode_base,
    encode_record,
    load_log,
    newest_left,
    rest_of,
    sealed_votes,
)
from dilocox_peer.peer.rounds.past import Block, BlocksInMemory, BlockStore, Certificates, Past, blocks_in, write_blocks
from dilocox_peer.peer.rounds.set_aside import kept_of, set_aside
from dilocox_peer.types import Digest
from dilocox_peer.wire.chain import Certificate

COMPACT_BYTES = 4 * 1024 * 1024  # by which the log has grown
KEPT = 640  # newest certificates that stay in the log, and in memory: more than are replayed (replay.py)
CLOSE_S = 5.0  # for a write that is under way
PAST = ".past"  # of the file of blocks beside the log
_COPIED_BYTES = 4 << 20  # at a time


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

    chain: what the log had when it was opened, its older certificates on the disk. store: for those of whoever goes on with it. damage: what
    was found then, and what became of it, for people; "": none."""

    loaded: LoadedLog
    chain: Chain
    _past: Past
    _newest: list[Certificate]

    def __init__(self, path: Path, genesis: Place) -> None:
        """Opens or makes the files; a torn, damaged or grown log is rewritten, and what was damaged is kept beside (set_aside.py). Raises
        OSError; ConfigError for a log of another version, and nothing is touched."""
        raw = _read(path)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        sweep_parts(path.parent)
        self._path = path
        self.damage = ""
        self._writing, self._is_closed = threading.Lock(), False
        self.store = BlockFile.at(path.with_suffix(PAST))
        try:
            self._begin(genesis, raw)
        except BaseException:
            self.store.close()
            raise

    def _begin(self, genesis: Place, raw: bytes) -> None:
        path = self._path
        found = self._take_up(_load(raw, genesis, self.store))
        if self.loaded.is_damaged:
            # Rewritten, not cut: the loaded votes are sealed, and a second restart that found a merely shorter file would not know it.
            reason, kept = self.loaded.reason, self._keep_damaged(found)
            found = self._take_up(_load(path.read_bytes(), genesis, self.store))
            self.loaded = replace(self.loaded, reason=reason, is_damaged=True)
            names, height = " and ".join(each.name for each in kept), self.chain.height
            self.damage = f"{path} was damaged ({reason}): {height} certificates could be read; what was there is kept beside it as {names}"
        if not raw and self.store.size_bytes:
            beside = self._keep_past(0)
            found = self._take_up(_load(raw, genesis, self.store))
            self.damage = f"{path} is empty, and certificates lie beside it: it was lost, or a first copy of the run cut short; they are kept as {beside.name}"
        self.store.cut(found.past_bytes)
        if self.loaded.reason and not self.loaded.is_damaged:
            begun = self.loaded.durable is not None  # else it begins anew
            replace_file(path, self._parts() if begun else [], mode=0o600)
        self._open()
        self._compact_at = max(self._size_bytes, COMPACT_BYTES) if self._past.count else COMPACT_BYTES
        self.chain.seal(self._compact_if_grown())
        if (durable := self.loaded.durable) is not None:
            self.loaded = replace(self.loaded, durable=replace(durable, appended=self.chain.as_it_is()))
        fsync_folder(path.parent)

    def _take_up(self, found: "_Found") -> "_Found":
        self.loaded, self.chain = found.loaded, found.chain
        durable = found.loaded.durable
        self._past = Past(self.store, self.chain.blocks)
        self._newest = list(self.chain.certificates[self._past.count :])
        self._votes = durable.votes if durable is not None else Votes(self.chain.place.head)
        self._checkpoint = durable.checkpoint if durable is not None else None
        self._left = durable.left if durable is not None else ()
        return found

    def _keep_damaged(self, found: "_Found") -> list[Path]:
        """As what the damaged files are kept; those in their place are whole. Each is replaced at once, and only when what was there is kept:
        killed in between, the next start finds the damage again. Raises OSError."""
        parts = self._parts(found.whole_bytes)
        kept = [set_aside(self._path)]
        if found.whole_bytes < min(found.past_bytes, self.store.size_bytes):
            kept.append(self._keep_past(found.whole_bytes))
        replace_file(self._path, parts, mode=0o600)
        return kept

    def _keep_past(self, whole_bytes: int) -> Path:
        """As what the blocks are kept; those in their place are the first so many bytes. Raises OSError."""
        past = self._path.with_suffix(PAST)
        kept = set_aside(past)
        replace_file(past, _pieces(self.store, whole_bytes), mode=0o600)
        self.store.close()
        self.store = BlockFile.at(past)
        return kept

    @property
    def kept_aside(self) -> Sequence[Path]:
        """What was damaged at this start or an earlier one, and is kept."""
        return (*kept_of(self._path), *kept_of(self._path.with_suffix(PAST)))

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
        if self._file.closed:
            self._open()  # it could not be, when the log had been replaced
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

    def _parts(self, past_bytes: int | None = None) -> list[bytes]:
        """The log as it would be written anew. past_bytes: in which its blocks are, None: all that the store has."""
        count = self._past.count
        rest = Durable(count, self._newest, self._votes, self._checkpoint, self._left)
        past_bytes = self.store.size_bytes if past_bytes is None else past_bytes
        base = [encode_base(count, past_bytes, self._past.blocks[-1].last)] if count else []
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
    """What a log says, with all its certificates; nothing is written. Raises OSError; ConfigError for one of another version."""
    raw = path.read_bytes()
    _check_version(raw, path)
    store = _ReadOnly(path.with_suffix(PAST))
    if not store.size_bytes:
        return load_log(raw, genesis.head)
    found = _load(raw, genesis, store)
    if (durable := found.loaded.durable) is None:
        return found.loaded
    return replace(found.loaded, durable=replace(durable, appended=found.chain.as_it_is()))


def _read(path: Path) -> bytes:
    """b"" where there is no log. Raises OSError, ConfigError."""
    raw = path.read_bytes() if path.exists() else b""
    _check_version(raw, path)
    return raw


def _check_version(raw: bytes, path: Path) -> None:
    """Raises ConfigError: what a program cannot read it does not write over."""
    if (versions := another_version(raw)) is None:
        return
    theirs, ours = versions
    wrote, remedy = "a newer", "update this one"
    if theirs < ours:
        wrote, remedy = (
            "an older",
            f"go on with that one, or move {path.parent} away to begin with what other peers have",
        )
    raise ConfigError(
        f"{path} was written by {wrote} dilocox-peer (version {theirs}, this one reads {ours}): {remedy}; nothing was changed"
    )


class _ReadOnly:
    """A file of blocks of somebody else's."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def size_bytes(self) -> int:
        return self._path.stat().st_size if self._path.exists() else 0

    def cut(self, size_bytes: int) -> None:
        raise AssertionError(f"a file that is only read, to be cut to {size_bytes} bytes")

    def append(self, raw: bytes) -> int:
        raise AssertionError(f"{len(raw)} bytes for a file that is only read")

    def read(self, at: int, size_bytes: int) -> bytes:
        with self._path.open("rb") as file:
            return os.pread(file.fileno(), size_bytes, at)

    def aside(self) -> BlockStore:
        return BlocksInMemory()


@dataclass(frozen=True, slots=True)
class _Found:
    """What files say. past_bytes: of the blocks, those that count; the rest is nobody's. whole_bytes: up to where they could be read."""

    loaded: LoadedLog
    chain: Chain
    past_bytes: int
    whole_bytes: int


def _load(raw: bytes, genesis: Place, store: BlockStore) -> _Found:
    """Raises OSError."""
    base, chain, whole_bytes = base_of(raw), Chain(genesis, store=store), 0
    if base is not None:
        with suppress(ValueError):  # damaged: what is before it counts, and the log says that more is missing
            for block, certificates in blocks_in(store, base.past_bytes):
                _grow(chain, block, certificates)
                whole_bytes = block.at + block.size_bytes
            if (
                base.count < chain.height
            ):  # blocks of a branch that was left, and nothing written since took their place
                chain.truncate(base.count)
    loaded = load_log(raw, genesis.head, chain if base is not None else None)
    # Of blocks it says nothing, also not that there are none.
    if loaded.is_damaged and base is None and not loaded.valid_bytes:
        if (mended := _with_beginning(raw, genesis, store)) is not None:
            return _sealed(_load(mended, genesis, store), "its beginning was damaged, and is known from what follows")
        return _Found(loaded, chain, store.size_bytes, 0)
    past_bytes = base.past_bytes if base is not None else 0
    if (durable := loaded.durable) is None:
        return _Found(loaded, chain, past_bytes, whole_bytes)
    chain.truncate(durable.keep)
    for certificate in durable.appended:
        chain.append(certificate)
    loaded = replace(loaded, durable=replace(durable, keep=0, appended=()))
    return _Found(loaded, chain, past_bytes, whole_bytes)


def _with_beginning(raw: bytes, genesis: Place, store: BlockStore) -> bytes | None:
    """A log whose beginning cannot be read, with another that names the blocks which lead to the rest of it; None if none do."""
    if (rest := rest_of(raw)) is None:
        return None
    start, count, head = rest
    chain = Chain(genesis, store=store)
    with suppress(ValueError):
        for block, certificates in blocks_in(store, store.size_bytes):
            _grow(chain, block, certificates)
            if count and chain.height_of(head) == count:
                return encode_base(count, block.at + block.size_bytes, head) + raw[start:]
    return None


def _sealed(found: _Found, reason: str) -> _Found:
    """As after any damage: what was lost with it may have been a vote."""
    durable, place = found.loaded.durable, found.chain.place
    assert durable is not None, "a log with a record behind its beginning"
    loaded = replace(
        found.loaded,
        durable=replace(durable, votes=sealed_votes(place.head, place.view)),
        reason=reason,
        is_damaged=True,
    )
    return replace(found, loaded=loaded)


def _pieces(store: BlockFile, size_bytes: int) -> Iterator[bytes]:
    """Its first so many bytes. Raises OSError."""
    for at in range(0, size_bytes, _COPIED_BYTES):
        yield store.read(at, min(_COPIED_BYTES, size_bytes - at))


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
