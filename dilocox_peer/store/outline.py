"""What a thing is made of: its size and the SHA-256 of each of its chunks, so that a part of it can be checked alone.

Two kinds of names. A file's is the SHA-256 of its bytes, as everybody computes it; an outline of it is what donors claim, and
shows itself as true or false when the whole is here (of a thing of one chunk: at once). An anchor state's is the root of its
outline: there every chunk is checked against the name.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from dilocox_peer.files import let_go
from dilocox_peer.types import DIGEST_BYTES, Digest, sha256

CHUNK_BYTES = 1 << 20
MAX_THING_BYTES = 1 << 44  # an outline of 2**24 chunks


@dataclass(frozen=True)
class Outline:
    """size_bytes: of the thing. chunks: of each of its chunks in order, at least one; all but the last are of CHUNK_BYTES."""

    size_bytes: int
    chunks: tuple[Digest, ...]

    @cached_property
    def root(self) -> Digest:
        """SHA-256 of the size (8 bytes, big-endian) and of the digests."""
        return sha256(self.size_bytes.to_bytes(8, "big"), *self.chunks)

    def span(self, index: int) -> tuple[int, int]:
        """Where a chunk begins and ends, in bytes."""
        return index * CHUNK_BYTES, min((index + 1) * CHUNK_BYTES, self.size_bytes)

    def packed(self) -> bytes:
        """The digests, one after another."""
        return b"".join(self.chunks)

    @classmethod
    def unpacked(cls, size_bytes: int, packed: bytes | bytearray) -> "Outline":
        """Of digests one after another. Raises ValueError when they are not as many as the size has chunks."""
        if not 0 <= size_bytes <= MAX_THING_BYTES or len(packed) != num_chunks(size_bytes) * DIGEST_BYTES:
            raise ValueError(f"an outline of {len(packed)} bytes for a thing of {size_bytes}")
        starts = range(0, len(packed), DIGEST_BYTES)
        return cls(size_bytes, tuple(Digest(bytes(packed[start : start + DIGEST_BYTES])) for start in starts))


def num_chunks(size_bytes: int) -> int:
    """Of a thing of that size; an empty one is one empty chunk."""
    return max(1, -(-size_bytes // CHUNK_BYTES))


def outline_of(parts: Sequence[bytes | bytearray | memoryview]) -> Outline:
    """The outline of the bytes of all parts one after another. Hashes without the GIL; call it from a worker thread."""
    digests = tuple(_digest(pieces) for pieces in chunks_of(parts))
    return Outline(sum(memoryview(part).nbytes for part in parts), digests)


def _digest(pieces: list[memoryview]) -> Digest:
    digest = sha256(*pieces)
    for piece in pieces:
        let_go(piece)
    return digest


def chunks_of(parts: Iterable[bytes | bytearray | memoryview]) -> Iterator[list[memoryview]]:
    """The chunks of all parts one after another, each as pieces of them that are not copied; one empty one of nothing."""
    pieces: list[memoryview] = []
    room, is_empty = CHUNK_BYTES, True
    for part in parts:
        view = memoryview(part).cast("B")
        while view.nbytes:
            pieces.append(view[:room])
            room -= pieces[-1].nbytes
            view = view[pieces[-1].nbytes :]
            if not room:
                yield pieces
                pieces, room, is_empty = [], CHUNK_BYTES, False
    if pieces or is_empty:
        yield pieces
