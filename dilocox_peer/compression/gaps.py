"""Positions within chunks, coded as gaps between them: what topk and ecsq have in common.

Gaps of scattered positions are geometric, for which Golomb-Rice is within a few percent of the entropy: gap = quotient * 2**b + remainder, the
quotient in unary (that many 0 bits, then a 1), the remainder in b bits; b follows from a chunk's length and count. All quotients form one bit
stream, and bit j of all remainders another: so everything is vectorised. A chunk of any length takes at most a bit for each of its places.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from dilocox_peer.errors import MalformedBlob

_PIECE_GAPS = 1 << 16
"""Gaps worked on at a time, where 8-byte integers are needed."""

_PIECE_CHUNKS = 256
"""Chunks whose gaps are given their bits at a time: of a large tensor at once, `repeat` holds every other thread for 60 ms."""

_PIECE_BYTES = 1 << 15
"""Of a stream, counted at a time."""

_ONES = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(1, dtype=np.uint8)
"""1 bits of each byte."""

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
    b_X = _remainder_bits(lengths, counts).astype(np.uint8)
    starts = range(0, len(counts), _PIECE_CHUNKS)
    b = np.concatenate([np.repeat(b_X[at : at + _PIECE_CHUNKS], counts[at : at + _PIECE_CHUNKS]) for at in starts])
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
    """Where in its chunk every kept element is, in order; all lie within their chunks. Reads the streams to their end. Raises MalformedBlob."""
    num_kept = int(counts.sum())
    if not num_kept:
        streams.take_ones(0)
        return np.empty(0, np.int64)
    b_X = _remainder_bits(lengths, counts)
    remainders = [streams.take(int(counts[b_X > bit].sum())) for bit in range(int(b_X[counts > 0].max()))]
    return _positions(streams.codec, remainders, streams.take_ones(num_kept), counts, lengths, b_X)


class GroupedGaps:
    """Positions in the chunks of a tensor, decoded by groups of so many chunks whenever they are asked for: of a tensor's all at once, and that of
    every contribution to a mean, would be as much as the tensor for every four of them. Keeps the streams, and where in them each group begins, which
    the number of 1 bits tells. Any thread, several at once.

    kept_before: of each group, the elements kept in those before it.
    """

    def __init__(self, streams: "BitStreams", counts: npt.NDArray[np.uint16], lengths: Ints, group: int) -> None:
        """Reads the streams to their end, and decodes none. counts: of the chunks, none above its length. Raises MalformedBlob."""
        self._codec, self._counts, self._lengths, self._group = streams.codec, counts, lengths, group
        firsts = np.arange(0, len(counts), group)
        kept_X = counts.astype(np.int64)
        b_X = _remainder_bits(lengths, kept_X)
        self.kept_before = _sums_before(kept_X)[firsts]
        self._remainders: list[tuple[_Bytes, Ints]] = []  # of each bit, and where in it the groups begin
        for bit in range(int(b_X[kept_X > 0].max(initial=0))):
            has_bit_X = np.where(b_X > bit, kept_X, 0)
            self._remainders.append((streams.take_packed(int(has_bit_X.sum())), _sums_before(has_bit_X)[firsts]))
        self._quotients, self._quotients_before = streams.take_ones_packed(int(kept_X.sum()), before=self.kept_before)

    def positions(self, index: int, groups: int) -> Ints:
        """Those of so many groups from that number on, in order, each within its chunk. Raises MalformedBlob."""
        chunks = slice(index * self._group, (index + groups) * self._group)
        counts, lengths = self._counts[chunks].astype(np.int64), self._lengths[chunks]
        num_kept = int(counts.sum())
        if not num_kept:
            return np.empty(0, np.int64)
        b_X = _remainder_bits(lengths, counts)
        remainders = [
            unpacked(stream, int(before[index]), int(counts[b_X > bit].sum()))
            for bit, (stream, before) in enumerate(self._remainders)
        ]
        most_bits = int((counts + ((lengths - counts) >> b_X))[counts > 0].sum())  # where no position lies outside
        quotients = unpacked(self._quotients, int(self._quotients_before[index]), most_bits)
        ones = np.flatnonzero(quotients.view(np.bool_))[:num_kept]
        if len(ones) < num_kept:
            raise _outside(self._codec)
        return _positions(self._codec, remainders, ones, counts, lengths, b_X)


def unpacked(stream: _Bytes, first: int, num_bits: int) -> _Bytes:
    """So many bits of it from bit first on as 0 and 1; fewer where it ends before."""
    skipped = first % 8
    bits = np.unpackbits(stream[first // 8 : -(-(first + num_bits) // 8)], bitorder="little")
    return bits[skipped : skipped + num_bits]


def _positions(codec: str, remainders: list[_Bytes], ones: Ints, counts: Ints, lengths: Ints, b_X: Ints) -> Ints:
    """remainders: bit by bit, of the chunks that have it. ones: where the 1 bits of their quotients stand; overwritten. b_X: of the chunks."""
    b = np.repeat(b_X.astype(np.uint8), counts)
    low = np.zeros(len(ones), np.uint16)
    for bit, bits in enumerate(remainders):
        if len(bits) == len(low):
            low |= bits.astype(np.uint16) << bit
        elif len(bits):
            low[b > bit] |= bits.astype(np.uint16) << bit
    # One vector of 8-byte integers, in place.
    reached = ones
    reached[1:] -= reached[:-1].copy() + 1  # quotients; of the first it is the position itself
    np.left_shift(reached, b, out=reached)
    reached += low
    reached += 1
    np.cumsum(reached, out=reached)
    stops = np.cumsum(counts)
    last = np.where(stops > 0, reached[stops - 1], 0)
    before = np.concatenate([[0], last[:-1]])  # what earlier chunks reached
    if (last - before > lengths).any():
        raise _outside(codec)
    reached -= np.repeat(before + 1, counts)
    return reached


def _sums_before(values: Ints) -> Ints:
    """Of all before each."""
    sums: Ints = np.cumsum(values) - values
    return sums


def _outside(codec: str) -> MalformedBlob:
    return MalformedBlob(f"{codec}: a position outside its chunk")


class BitStreams:
    """Bit streams one after another, each filled up to a whole byte with zeros."""

    def __init__(self, codec: str, data: memoryview) -> None:
        self.codec = codec
        self._bytes: _Bytes = np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)

    def take(self, num_bits: int) -> _Bytes:
        """The next num_bits bits as 0 and 1. Raises MalformedBlob for too few and for padding that is not 0."""
        return np.unpackbits(self.take_packed(num_bits), count=num_bits, bitorder="little")

    def take_packed(self, num_bits: int) -> _Bytes:
        """As `take`, eight in a byte."""
        num_bytes = -(-num_bits // 8)
        if num_bytes > len(self._bytes):
            raise MalformedBlob(f"{self.codec}: the payload ends within a stream")
        taken, self._bytes = self._bytes[:num_bytes], self._bytes[num_bytes:]
        if num_bits % 8 and int(taken[-1]) >> num_bits % 8:
            raise MalformedBlob(f"{self.codec}: padding bits that are not 0")
        return taken

    def take_ones(self, number: int) -> Ints:
        """Where the 1 bits of all that is left stand. Raises MalformedBlob unless so many, the last in the last byte."""
        # Counted before they are unpacked: where they stand takes 8 bytes of each, and strangers say how many there are.
        self._check_ones(sum(int(_ONES[piece].sum(dtype=np.int64)) for piece in self._pieces()), number)
        bits = np.unpackbits(self._bytes, bitorder="little")
        return np.flatnonzero(bits.view(np.bool_))  # of bytes it takes 15 times as long

    def take_ones_packed(self, number: int, *, before: Ints) -> tuple[_Bytes, Ints]:
        """As `take_ones`, the bits themselves; and behind which of them so many 1 bits lie, for each of `before`, which ascends to number at most."""
        ones, behind = 0, np.zeros(len(before), np.int64)
        for at, piece in enumerate(self._pieces()):
            counted = np.cumsum(_ONES[piece], dtype=np.int64) + ones
            here = np.flatnonzero((before > ones) & (before <= counted[-1]))
            places = np.searchsorted(counted, before[here])  # the bytes with the last of them
            missing = before[here] - counted[places] + _ONES[piece[places]]
            reached = np.cumsum(np.unpackbits(piece[places][:, None], axis=1, bitorder="little"), axis=1)
            behind[here] = 8 * (at * _PIECE_BYTES + places) + (reached >= missing[:, None]).argmax(1) + 1
            ones = int(counted[-1])
        self._check_ones(ones, number)
        return self._bytes, behind

    def _pieces(self) -> Iterator[_Bytes]:
        """Of all that is left."""
        return (self._bytes[at : at + _PIECE_BYTES] for at in range(0, len(self._bytes), _PIECE_BYTES))

    def _check_ones(self, ones: int, number: int) -> None:
        if ones != number or (len(self._bytes) and not self._bytes[-1]):
            raise MalformedBlob(f"{self.codec}: {ones} quotients for {number} kept elements")
