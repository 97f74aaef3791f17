"""The older certificates of a chain: in blocks on a disk, read when somebody asks for them, so that memory does not grow with a run.

A store is written at its end alone. Which of its blocks count, rounds.log says: those in its first so many bytes; a block takes the place
of all that begin where it does, or later. So a branch that is left overwrites nothing that a log of before still names.
"""

import struct
import threading
import zlib
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, overload

from dilocox_peer.errors import ProtocolError
from dilocox_peer.types import DIGEST_BYTES, Digest
from dilocox_peer.wire.chain import Certificate, decode_chain, encode_chain

MOST_IN_BLOCK = 64
BLOCK_BYTES = 64 * 1024  # of certificates, about, before they are compressed: read and decoded in some milliseconds
MAX_BLOCK_BYTES = 4 << 20
BLOCKS_AT_HAND = 4  # decoded
_HEADER = struct.Struct(">QIII")  # certificates before it, how many, bytes and CRC-32 of what follows


@dataclass(frozen=True, slots=True)
class Block:
    """Certificates in a row. first: how many come before it in the chain. at, size_bytes: where it lies. last: the head of its last."""

    first: int
    count: int
    at: int
    size_bytes: int
    last: Digest

    @property
    def stop(self) -> int:
        return self.first + self.count


class BlockStore(Protocol):
    """Where blocks lie."""

    @property
    def size_bytes(self) -> int: ...

    def cut(self, size_bytes: int) -> None:
        """What comes after so many bytes is nobody's. Raises OSError."""
        ...

    def append(self, raw: bytes) -> int:
        """Where it lies now. Raises OSError."""
        ...

    def read(self, at: int, size_bytes: int) -> bytes:
        """Fewer bytes at the end. Raises OSError."""
        ...

    def aside(self) -> "BlockStore":
        """An empty one beside it, which is gone with who asked for it. Raises OSError."""
        ...


class BlocksInMemory:
    """For a chain that nothing is to outlive: compressed, it takes a fifth of the room."""

    def __init__(self) -> None:
        self._raw = bytearray()

    @property
    def size_bytes(self) -> int:
        return len(self._raw)

    def cut(self, size_bytes: int) -> None:
        del self._raw[size_bytes:]

    def append(self, raw: bytes) -> int:
        self._raw += raw
        return len(self._raw) - len(raw)

    def read(self, at: int, size_bytes: int) -> bytes:
        return bytes(self._raw[at : at + size_bytes])

    def aside(self) -> BlockStore:
        return BlocksInMemory()


def write_blocks(store: BlockStore, first: int, certificates: Sequence[Certificate]) -> list[Block]:
    """All of the certificates, of which the first has `first` before it in the chain. Raises OSError."""
    blocks, start = list[Block](), 0
    while start < len(certificates):
        stop, size_bytes, raw = start, 0, b""
        while stop < len(certificates) and stop - start < MOST_IN_BLOCK and size_bytes < BLOCK_BYTES:
            size_bytes += len(encode_chain([certificates[stop]]))
            stop += 1
        raw = zlib.compress(encode_chain(certificates[start:stop]), 1)
        frame = _HEADER.pack(first + start, stop - start, len(raw), zlib.crc32(raw)) + raw
        at = store.append(frame)
        blocks.append(Block(first + start, stop - start, at, len(frame), certificates[stop - 1].head))
        start = stop
    return blocks


def read_block(store: BlockStore, block: Block) -> list[Certificate]:
    """Raises ValueError where other bytes lie there, OSError."""
    raw = store.read(block.at, block.size_bytes)
    if len(raw) != block.size_bytes or _HEADER.unpack_from(raw)[:2] != (block.first, block.count):
        raise ValueError(f"no block of certificates at byte {block.at}")
    return _certificates(raw[_HEADER.size :], raw, block.at)


def blocks_in(store: BlockStore, size_bytes: int) -> Iterator[tuple[Block, list[Certificate]]]:
    """Each block in the first so many bytes with what it holds, in the order in which they were written. Raises ValueError at one
    that is damaged, OSError."""
    at = 0
    while at < size_bytes:
        head = store.read(at, _HEADER.size)
        if len(head) < _HEADER.size:
            raise ValueError(f"the blocks of certificates end at byte {at}")
        first, count, length, _ = _HEADER.unpack(head)
        if length > MAX_BLOCK_BYTES or at + _HEADER.size + length > size_bytes:
            raise ValueError(f"a block of certificates of {length} bytes at byte {at}")
        raw = head + store.read(at + _HEADER.size, length)
        certificates = _certificates(raw[_HEADER.size :], raw, at)
        if len(certificates) != count or not count:
            raise ValueError(f"a block of {len(certificates)} certificates at byte {at} that says it has {count}")
        yield Block(first, count, at, len(raw), certificates[-1].head), certificates
        at += len(raw)


def _certificates(payload: bytes, frame: bytes, at: int) -> list[Certificate]:
    _, _, length, checksum = _HEADER.unpack_from(frame)
    if len(payload) != length or zlib.crc32(payload) != checksum:
        raise ValueError(f"a damaged block of certificates at byte {at}")
    try:
        return decode_chain(zlib.decompress(payload), 16 * MAX_BLOCK_BYTES)
    except (zlib.error, ProtocolError) as error:
        raise ValueError(f"a block of certificates at byte {at}: {error}") from None


class Blocks(Sequence[Block]):
    """In a row from the first certificate on, in 52 bytes each: of large certificates a block has few, so there are many."""

    def __init__(self, blocks: Iterable[Block] = ()) -> None:
        self._firsts, self._at, self._sizes, self._lasts = array("Q"), array("Q"), array("I"), bytearray()
        self.stop = 0  # certificates
        for block in blocks:
            self.append(block)

    def append(self, block: Block) -> None:
        assert block.first == self.stop, f"a block after {block.first} certificates where {self.stop} are known"
        self._at.append(block.at)
        self._sizes.append(block.size_bytes)
        self._lasts += block.last
        self._firsts.append(block.first)
        self.stop = block.stop

    def pop(self) -> Block:
        block = self[-1]
        for values in (self._firsts, self._at, self._sizes):
            values.pop()
        del self._lasts[-DIGEST_BYTES:]
        self.stop = block.first
        return block

    def copy(self) -> "Blocks":
        copied = Blocks()
        copied._firsts, copied._at, copied._sizes = self._firsts[:], self._at[:], self._sizes[:]
        copied._lasts, copied.stop = self._lasts[:], self.stop
        return copied

    def index_of(self, number: int) -> int:
        """Where the block is that holds certificate `number`, from 0."""
        return bisect_right(self._firsts, number) - 1

    def __len__(self) -> int:
        return len(self._firsts)

    @overload
    def __getitem__(self, index: int) -> Block: ...
    @overload
    def __getitem__(self, index: slice) -> list[Block]: ...
    def __getitem__(self, index: int | slice) -> Block | list[Block]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        first = self._firsts[number]
        stop = self._firsts[number + 1] if number + 1 < len(self) else self.stop
        last = Digest(bytes(self._lasts[DIGEST_BYTES * number : DIGEST_BYTES * (number + 1)]))
        return Block(first, stop - first, self._at[number], self._sizes[number], last)


class Past:
    """The blocks of one chain, from its first certificate on. One thread adds and cuts; others may read what is there to stay."""

    def __init__(self, store: BlockStore | None = None, blocks: Iterable[Block] = ()) -> None:
        """store: None: in memory."""
        self.store = store if store is not None else BlocksInMemory()
        self._blocks = blocks.copy() if isinstance(blocks, Blocks) else Blocks(blocks)
        self._at_hand: OrderedDict[int, list[Certificate]] = OrderedDict()  # by their place in the store
        self._lock = threading.Lock()  # of what is at hand

    @property
    def count(self) -> int:
        """Certificates."""
        return self._blocks.stop

    @property
    def blocks(self) -> Sequence[Block]:
        return self._blocks

    def write(self, certificates: Sequence[Certificate]) -> list[Block]:
        """What follows, to be added. Raises OSError."""
        return write_blocks(self.store, self.count, certificates)

    def add(self, block: Block) -> None:
        self._blocks.append(block)

    def cut(self, count: int) -> list[Certificate]:
        """Only whole blocks of the first `count` certificates stay; gives back those of the first `count` that are in no block now."""
        rest: list[Certificate] = []
        while self._blocks.stop > count:
            block = self._blocks[-1]
            if block.first < count:
                rest = self._read(block)[: count - block.first]
            self._blocks.pop()
        return rest

    def index_of(self, number: int) -> int:
        """Where the block is that holds certificate `number`, from 0."""
        return self._blocks.index_of(number)

    def block(self, index: int) -> list[Certificate]:
        """What the block holds; do not modify. Raises OSError, ValueError."""
        return self._read(self._blocks[index])

    def between(self, start: int, stop: int) -> Iterator[Certificate]:
        """Certificates number start..stop-1, from 0."""
        while start < stop:
            block = self._blocks[self.index_of(start)]
            held = self._read(block)[start - block.first : stop - block.first]
            if not held:
                raise ValueError(f"certificate {start} is in no block any more: the chain was cut meanwhile")
            yield from held
            start += len(held)

    def copy(self) -> "Past":
        """As it is now, for another thread."""
        return Past(self.store, self._blocks)

    def _read(self, block: Block) -> list[Certificate]:
        with self._lock:
            held = self._at_hand.get(block.at)
            if held is None:
                held = self._at_hand[block.at] = read_block(self.store, block)
                if len(self._at_hand) > BLOCKS_AT_HAND:
                    self._at_hand.popitem(last=False)
            else:
                self._at_hand.move_to_end(block.at)
            return held


class Certificates(Sequence[Certificate]):
    """Of a chain whose older ones are sealed."""

    def __init__(self, past: Past, newest: list[Certificate], height_of: Callable[[Digest], int | None]) -> None:
        """height_of: of the chain as it is by now."""
        self._past = past
        self._newest = newest
        self._height_of = height_of

    @property
    def store(self) -> BlockStore:
        """Where the blocks lie."""
        return self._past.store

    @property
    def blocks(self) -> Sequence[Block]:
        return self._past.blocks

    def height_of(self, head: Digest) -> int | None:
        """As of Chain."""
        height = self._height_of(head)
        return height if height is not None and height <= len(self) else None

    def __len__(self) -> int:
        return self._past.count + len(self._newest)

    @overload
    def __getitem__(self, index: int) -> Certificate: ...
    @overload
    def __getitem__(self, index: slice) -> list[Certificate]: ...
    def __getitem__(self, index: int | slice) -> Certificate | list[Certificate]:
        sealed, length = self._past.count, len(self)
        if isinstance(index, slice):
            start, stop, step = index.indices(length)
            if step != 1:
                return [self[each] for each in range(start, stop, step)]
            return [
                *self._past.between(start, min(stop, sealed)),
                *self._newest[max(start - sealed, 0) : max(stop - sealed, 0)],
            ]
        number = index + length if index < 0 else index
        if not 0 <= number < length:
            raise IndexError(f"certificate {index} of {length}")
        return self._newest[number - sealed] if number >= sealed else next(self._past.between(number, number + 1))

    def __iter__(self) -> Iterator[Certificate]:
        yield from self._past.between(0, self._past.count)
        yield from self._newest
