"""Positions within chunks, coded as gaps between them: what topk and ecsq have in common.

Gaps of scattered positions are geometric, for which Golomb-Rice is within a few percent of the entropy: gap = quotient * 2**b + remainder, the
quotient in unary (that many 0 bits, then a 1), the remainder in b bits; b follows from a chunk's length and count. All quotients form one bit
stream, and bit j of all remainders another: so everything is vectorised. A chunk of any length takes at most a bit for each of its places.
"""

import numpy as np
import numpy.typing as npt

from dilocox_peer.errors import MalformedBlob

_PIECE_GAPS = 1 << 16
"""Gaps worked on at a time, where 8-byte integers are needed."""

MAX_B = 12

Ints = npt.NDArray[np.int64]
_Bytes = npt.NDArray[np.uint8]


def _remainder_bits(lengths: Ints, counts: Ints) -> Ints:
    """b of each chunk: 2**b is the power of two at or below ln 2 (here 11/16) times the mean distance; integers only."""
    target = lengths // np.maximum(counts, 1) * 11 // 16
    return np.searchsorted(2 ** np.arange(1, MAX_B + 1), target, side="right").astype(np.int64)


def position_bits_of(lengths: Ints, counts: Ints) -> Ints:
    """What the positions of so many elements in chunks of these lengths take at most, in bits."""
    b = _remainder_bits(lengths, counts)
    return (counts * (1 + b) + ((lengths - counts) >> b)) * (counts > 0)


def most_bits(length: int, most: int) -> int:
    """What the positions of at most so many elements of a chunk can take, over all counts."""
    counts = np.arange(most + 1)
    return int(position_bits_of(np.full_like(counts, length), counts).max())


def gaps_of(positions: npt.NDArray[np.uint16], counts: Ints) -> npt.NDArray[np.uint16]:
    """Elements left out before each kept one, since the one before it in its chunk or the chunk's start."""
    gaps = positions.copy()
    gaps[1:] -= positions[:-1] + np.uint16(1)  # wraps around at a chunk's first, which is set next
    firsts = (np.cumsum(counts) - counts)[counts > 0]
    gaps[firsts] = positions[firsts]
    return gaps


def encode_gaps(gaps: npt.NDArray[np.uint16], counts: Ints, lengths: Ints) -> list[bytes]:
    """The remainder streams, lowest bit first, and the quotient stream."""
    if not len(gaps):
        return []
    b = np.repeat(_remainder_bits(lengths, counts).astype(np.uint8), counts)
    remainders = [np.packbits((gaps[b > bit] >> bit) & 1, bitorder="little").tobytes() for bit in range(int(b.max()))]
    quotients = gaps >> b
    unary = np.zeros(int(quotients.sum(dtype=np.int64)) + len(gaps), np.bool_)
    reached = 0
    for start in range(0, len(gaps), _PIECE_GAPS):
        ends = np.cumsum(quotients[start : start + _PIECE_GAPS].astype(np.int64) + 1) + reached
        unary[ends - 1] = True
        reached = int(ends[-1])
    return [*remainders, np.packbits(unary, bitorder="little").tobytes()]


def decode_gaps(streams: "BitStreams", counts: Ints, lengths: Ints) -> Ints:
    """Where in its chunk every kept element is, in order; all lie within their chunks. Reads the streams to their end."""
    num_kept = int(counts.sum())
    if not num_kept:
        streams.take_ones(0)
        return np.empty(0, np.int64)
    b_X = _remainder_bits(lengths, counts)
    b = np.repeat(b_X.astype(np.uint8), counts)
    remainders = np.zeros(num_kept, np.uint16)
    for bit in range(int(b_X[counts > 0].max())):
        has_bit = b > bit
        remainders[has_bit] |= streams.take(int(has_bit.sum())).astype(np.uint16) << bit
    # One vector of 8-byte integers, in place: each more would be a sixth of the tensor's memory.
    reached = streams.take_ones(num_kept)
    reached[1:] -= reached[:-1].copy() + 1  # quotients; of the first it is the position itself
    np.left_shift(reached, b, out=reached)
    reached += remainders
    reached += 1
    np.cumsum(reached, out=reached)
    stops = np.cumsum(counts)
    last = np.where(stops > 0, reached[stops - 1], 0)
    before = np.concatenate([[0], last[:-1]])  # what earlier chunks reached
    if (last - before > lengths).any():
        raise MalformedBlob(f"{streams.codec}: a position outside its chunk")
    reached -= np.repeat(before + 1, counts)
    return reached


class BitStreams:
    """Bit streams one after another, each filled up to a whole byte with zeros."""

    def __init__(self, codec: str, data: memoryview) -> None:
        self.codec = codec
        self._bytes: _Bytes = np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)

    def take(self, num_bits: int) -> _Bytes:
        """The next num_bits bits as 0 and 1. Raises MalformedBlob for too few and for padding that is not 0."""
        num_bytes = -(-num_bits // 8)
        if num_bytes > len(self._bytes):
            raise MalformedBlob(f"{self.codec}: the payload ends within a stream")
        taken, self._bytes = self._bytes[:num_bytes], self._bytes[num_bytes:]
        if num_bits % 8 and int(taken[-1]) >> num_bits % 8:
            raise MalformedBlob(f"{self.codec}: padding bits that are not 0")
        return np.unpackbits(taken, count=num_bits, bitorder="little")

    def take_ones(self, number: int) -> Ints:
        """Where the 1 bits of all that is left stand. Raises MalformedBlob unless so many, the last in the last byte."""
        ones = np.flatnonzero(np.unpackbits(self._bytes, bitorder="little"))
        if len(ones) != number or len(self._bytes) != (int(ones[-1]) // 8 + 1 if number else 0):
            raise MalformedBlob(f"{self.codec}: {len(ones)} quotients for {number} kept elements")
        return ones
