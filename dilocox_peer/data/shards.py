"""Shards on disk: written whole or not at all, and read where a batch needs them, after their hash was looked at once.

A file with another hash than the catalogue's is not read: it is as if it were not there.
"""

import errno
import hashlib
import math
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from weakref import finalize

import numpy as np
import numpy.typing as npt

from dilocox_peer.data.catalogue import MAX_DOCUMENT_TOKENS, UNIT_TOKENS, Catalogue, Shard, padded, read_catalogue
from dilocox_peer.data.held_out import HeldOut
from dilocox_peer.data.tokenizer import Counts, Ids, Tokenizer
from dilocox_peer.errors import ConfigError
from dilocox_peer.files import replace_file, will_pass
from dilocox_peer.manifest import Packing
from dilocox_peer.types import Digest

MAX_OPEN = 16
MAX_HELD_OUT = 1 << 24  # tokens that an evaluator holds in memory
_BLOCK_BYTES = 4 << 20


class ShardFile:
    """A file that is read, not mapped: where a mapped one becomes shorter, a signal ends the process that touches what is gone."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._path = path
        self._file = os.open(path, os.O_RDONLY)
        finalize(self, os.close, self._file)

    def read(self, dtype: npt.DTypeLike, offset: int, count: int) -> npt.NDArray[Any]:
        """Raises OSError, also where the file ends before that."""
        wanted = np.dtype(dtype).itemsize * count
        raw = bytearray()
        while len(raw) < wanted:  # the system gives 2 GiB at a time
            more = os.pread(self._file, wanted - len(raw), offset + len(raw))
            if not more:
                raise OSError(errno.EIO, "it has become shorter", str(self._path))
            raw += more
        return np.frombuffer(raw, dtype)


@dataclass(frozen=True, slots=True)
class OpenShard:
    """Where its documents start stays in the file: there may be as many as tokens. begun: how many start before each unit, and in all. bits_at:
    where in the file the bits are that say of each token whether it is trained on; None: all are."""

    shard: Shard
    dtype: npt.DTypeLike
    begun: npt.NDArray[np.uint32]
    file: ShardFile
    starts_at: int
    bits_at: int | None = None

    def documents(self, number: int) -> list[npt.NDArray[np.int64]]:
        """Those that start within a unit, each as `signed` has it. Raises OSError."""
        first, end = self.unit(number)
        starts = self._starts(int(self.begun[number]), int(self.begun[number + 1]))
        return np.split(self.signed(first, end), starts[1:] - first) if end > first else []

    def starts(self, before: int) -> npt.NDArray[np.int64]:
        """Where the documents start that do so before this token, ascending from 0. Raises OSError."""
        found = self._starts(0, int(self.begun[min(self.shard.units, -(-before // UNIT_TOKENS))]))
        return found[: np.searchsorted(found, before)]

    def _starts(self, first: int, end: int) -> npt.NDArray[np.int64]:
        """Of these documents, by number. Raises OSError."""
        return self.file.read("<u4", self.starts_at + 4 * first, end - first).astype(np.int64)

    def signed(self, first: int, end: int) -> npt.NDArray[np.int64]:
        """These tokens; one that is not trained on as -1 - token. Raises OSError."""
        tokens = self.tokens(first, end).astype(np.int64)
        if self.bits_at is not None:
            packed = self.file.read(np.uint8, self.bits_at + first // 8, -(-end // 8) - first // 8)
            bits = np.unpackbits(packed, bitorder="little")[first % 8 :][: end - first]
            np.invert(tokens, out=tokens, where=bits == 0)
        return tokens

    def tokens(self, first: int, end: int) -> Ids:
        """Raises OSError."""
        return self.file.read(self.dtype, first * np.dtype(self.dtype).itemsize, end - first)

    def unit(self, number: int) -> tuple[int, int]:
        """(first, end) in tokens of the documents that start within a unit; equal where none does. Raises OSError."""
        first, end = (
            self.shard.tokens if at == self.shard.documents else int(self._starts(at, at + 1)[0])
            for at in (int(self.begun[number]), int(self.begun[number + 1]))
        )
        return first, end


class KeptShards(Protocol):
    """Where shards are that were fetched, by their sha256; a Shelf is one."""

    def path(self, name: Digest, /) -> Path | None:
        """Where it is; from here on others are dropped before it."""
        ...

    def room_for(self, size_bytes: int, /) -> int | None:
        """How many of so many bytes may be here at a time; None: any number."""
        ...

    def forget(self, name: Digest, /) -> None:
        """What is at its path is damaged, or gone. Raises OSError."""


class ShardFolders:
    """Shards by their hash, in the folders given. Any thread, but one at a time."""

    def __init__(self, catalogue: Catalogue, folders: Sequence[Path], *, kept: KeptShards | None = None) -> None:
        """kept: is looked at too; what is damaged there is forgotten, so that it is fetched again."""
        self._catalogue = catalogue
        self._folders = tuple(folders)
        self._kept = kept
        self._open: OrderedDict[str, OpenShard] = OrderedDict()
        self._known: dict[tuple[str, int, int], str | None] = {}  # (path, size, mtime) -> what is wrong with it
        self._hopeless: set[str] = set()
        self.faults: dict[str, str] = {}  # path -> what is or was wrong with it

    def has(self, shard: Shard) -> bool:
        """Whether a file of its name is in a folder, or is open; `find` looks at what is in it."""
        return shard.sha256 in self._open or any(path.is_file() for path in self._paths(shard))

    def is_own(self, shard: Shard) -> bool:
        """Whether it is in one of the folders given."""
        return any((folder / shard.file_name).is_file() for folder in self._folders)

    @property
    def room(self) -> float:
        """How many shards that are fetched may be here at a time, at least one."""
        if self._kept is None:
            return math.inf
        largest = max(self._catalogue.shard_bytes(shard) for shard in self._catalogue.shards)
        room = self._kept.room_for(largest)
        return math.inf if room is None else max(1, room)

    def keep(self, shards: Sequence[Shard]) -> None:
        """These are needed next, in this order: what is fetched takes the place of others, then of the last of these. What is open and is none of them is
        closed, as its room on the disk is free only then."""
        needed = {shard.sha256 for shard in shards}
        for name in [name for name in self._open if name not in needed]:
            del self._open[name]
        if self._kept is not None:
            for shard in reversed(shards):
                self._kept.path(_name_of(shard))

    def look_again(self, shard: Shard) -> None:
        """It could not be read to its end: the next `find` looks at what is in it now."""
        self._open.pop(shard.sha256, None)
        paths = {str(path) for path in self._paths(shard)}
        self._known = {known: fault for known, fault in self._known.items() if known[0] not in paths}

    def is_hopeless(self, shard: Shard) -> bool:
        """Whether its bytes are of its name and no shard of this catalogue: nobody has a better one."""
        return shard.sha256 in self._hopeless

    def _paths(self, shard: Shard) -> Iterator[Path]:
        yield from (folder / shard.file_name for folder in self._folders)
        if self._kept is not None and (path := self._kept.path(_name_of(shard))) is not None:
            yield path

    def find(self, shard: Shard) -> OpenShard | None:
        """None: no folder has it, or not as the catalogue says (`faults`), or it cannot be read for now. The first time its hash is computed:
        20 ms or more."""
        if (opened := self._open.get(shard.sha256)) is not None:
            self._open.move_to_end(shard.sha256)
            return opened
        if self.is_hopeless(shard):
            return None
        for path in self._paths(shard):
            try:
                fault = self._looked_at(path, shard)
                if fault is None:
                    opened = self._open[shard.sha256] = self._opened(path, shard)
                    if len(self._open) > MAX_OPEN:
                        self._open.popitem(last=False)
                    return opened
            except FileNotFoundError:
                fault = None  # it is not here, which is no fault
            except OSError as error:
                if will_pass(error):
                    continue
                fault = str(error.strerror or error).lower()
            if fault is not None:
                self.faults[str(path)] = fault
            if self._kept is not None and path.parent not in self._folders:
                with suppress(OSError):
                    self._kept.forget(_name_of(shard))
        return None

    def _looked_at(self, path: Path, shard: Shard) -> str | None:
        """What is wrong with a file, None: nothing. Raises OSError."""
        status = path.stat()
        known = (str(path), status.st_size, status.st_mtime_ns)
        if known not in self._known:
            self._known[known] = self._fault(path, shard, status.st_size)
        return self._known[known]

    def _fault(self, path: Path, shard: Shard, size_bytes: int) -> str | None:
        expected = self._catalogue.shard_bytes(shard)
        if size_bytes != expected:
            return f"{size_bytes} bytes instead of {expected}"
        if (found := hash_of(path)) != shard.sha256:
            return f"its sha256 is {found[:16]}"
        if (fault := self._fault_within(ShardFile(path), shard)) is not None:
            self._hopeless.add(shard.sha256)
        return fault

    def _fault_within(self, file: ShardFile, shard: Shard) -> str | None:
        """Block by block: a stranger's file takes no more memory than one. Raises OSError."""
        longest, before = 0, -1
        for starts in self._blocks_of_starts(file, shard):
            lengths = np.diff(starts.astype(np.int64), prepend=before)
            if (before < 0 and starts[0] != 0) or int(lengths.min()) <= 0:
                return "its documents overlap"
            longest, before = max(longest, int(lengths.max())), int(starts[-1])
        if before >= shard.tokens:
            return "its documents overlap"
        if (longest := max(longest, shard.tokens - before)) > MAX_DOCUMENT_TOKENS:
            return f"it has a document of {longest:,} tokens, {MAX_DOCUMENT_TOKENS:,} are the most"
        dtype = self._catalogue.dtype
        for first in range(0, shard.tokens, _BLOCK_BYTES):
            count = min(_BLOCK_BYTES, shard.tokens - first)
            if int(file.read(dtype, first * dtype.itemsize, count).max()) >= self._catalogue.vocab_size:
                return "it has tokens outside the vocabulary"
        return None

    def _blocks_of_starts(self, file: ShardFile, shard: Shard) -> Iterator[npt.NDArray[np.uint32]]:
        """Where its documents start, as the file says. Raises OSError."""
        at, most = padded(shard.tokens * self._catalogue.dtype.itemsize), _BLOCK_BYTES // 4
        for first in range(0, shard.documents, most):
            yield file.read("<u4", at + 4 * first, min(most, shard.documents - first))

    def _opened(self, path: Path, shard: Shard) -> OpenShard:
        """Of a file without a fault. Raises OSError."""
        dtype, file = self._catalogue.dtype, ShardFile(path)
        starts_at = padded(shard.tokens * dtype.itemsize)
        begun = np.zeros(shard.units + 1, np.uint32)
        for starts in self._blocks_of_starts(file, shard):
            found = np.bincount(starts // UNIT_TOKENS, minlength=shard.units)
            if len(found) > shard.units:
                raise OSError(errno.EIO, "it has changed meanwhile", str(path))
            begun[1:] += found.astype(np.uint32)
        np.cumsum(begun, out=begun)
        bits_at = starts_at + 4 * shard.documents if self._catalogue.answers else None
        return OpenShard(shard, dtype, begun, file, starts_at, bits_at)


def _name_of(shard: Shard) -> Digest:
    return Digest(bytes.fromhex(shard.sha256))


def hash_of(path: Path) -> str:
    """sha256 of a file, hex. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def write_shard(
    folder: Path,
    documents: Sequence[Ids],
    *,
    text_bytes: int,
    held_out: bool,
    times: int = 1,
    counts: Sequence[Counts] | None = None,
) -> Shard:
    """Writes a shard of these documents' tokens, whole or not at all. times: how often an epoch goes over it. counts: which of them are
    trained on, None: all. Raises OSError."""
    lengths = np.array([len(each) for each in documents], np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype("<u4")
    tokens = np.concatenate(documents)
    raw = tokens.tobytes()
    parts = [raw, bytes(padded(len(raw)) - len(raw)), starts.tobytes()]
    if counts is not None:
        parts.append(np.packbits(np.concatenate(counts), bitorder="little").tobytes())
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    shard = Shard(
        sha256=digest.hexdigest(),
        tokens=len(tokens),
        documents=len(documents),
        text_bytes=text_bytes,
        held_out=held_out,
        times=times,
    )
    replace_file(folder / shard.file_name, parts)
    return shard


def held_out_of(
    folders: Sequence[Path], catalogue_name: str, tokenizer: Tokenizer, *, packing: Packing = "concatenate"
) -> HeldOut:
    """The beginning of what is held out in a folder of a run's shards, to be measured on as the run packs its documents. Raises ConfigError."""
    if len(folders) != 1:
        raise ConfigError("this run's data are shards: pass --data with the one folder of them that `tokenize` wrote")
    catalogue, _ = read_catalogue(folders[0], wanted=catalogue_name)
    shards = ShardFolders(catalogue, folders)
    pieces, starts, size = [], [], 0
    for shard in catalogue.held_out:
        if (opened := shards.find(shard)) is None:
            path = folders[0] / shard.file_name
            if str(path) not in shards.faults and path.is_file():
                raise ConfigError(
                    f"{path} cannot be read for now, for want of file descriptors or of memory; try again"
                )
            raise ConfigError(
                f"{path}: {shards.faults.get(str(path), 'is not there')}; make the shards anew, or copy it again"
            )
        end = min(shard.tokens, MAX_HELD_OUT - size)
        pieces.append(opened.signed(0, end))
        starts.append(opened.starts(end) + size)
        size += end
        if size == MAX_HELD_OUT:
            break
    signed = np.concatenate(pieces)
    tokens = np.where(signed < 0, ~signed, signed).astype(catalogue.dtype)
    return HeldOut(
        tokens,
        name=str(folders[0]),
        tokenizer=tokenizer,
        counts=signed >= 0 if catalogue.answers else None,
        starts=np.concatenate(starts) if packing == "best-fit" else None,
    )


def sizes_of(shards: Iterable[Shard]) -> Mapping[str, int]:
    """What a person wants to know of them."""
    listed = list(shards)
    return {
        "shards": len(listed),
        "documents": sum(shard.documents for shard in listed),
        "tokens": sum(shard.tokens for shard in listed),
        "tokens_an_epoch": sum(shard.tokens * shard.times for shard in listed),
        "text_bytes": sum(shard.text_bytes for shard in listed),
    }
