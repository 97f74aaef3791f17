"""`topk`: of every chunk of 4096 elements the largest 8 %, as sign and one magnitude; positions entropy-coded.

    payload: magnitudes (bfloat16) of all chunks | counts (u16) of all chunks | signs | remainders, bit by bit | quotients
Positions as gaps.py has them. 0.492 bits an element; measured where 328 of 4096 scattered ones are kept: positions 0.8 % over
their entropy log2(binomial(4096, 328)), the whole payload 2.3 % over that and a bit a sign (tests/unit/test_topk.py).

How many are kept. With the m largest at magnitude s / m (s the sum of their |x|) a chunk's error is |x|**2 - s**2 / m; the
m <= 328 with the least error is taken, so a chunk with one large element sends that one alone. Hence for every chunk
    |x - decoded|**2 <= |x|**2 - (1 - 2**-16) * s**2 / m <= |x|**2 - (1 - 2**-16) * max|x|**2,
a contraction. Magnitudes are limited as in blockwise.py. Decoding only places numbers: equal bits on every machine.

Source: SparseLoCo (arXiv 2508.15706), chunks of 4096 and error feedback; sign and one magnitude: chosen by measuring.
Error feedback is not here (feedback.py).
"""

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from torch import Tensor

from dilocox_peer.compression.bfloat16 import MAX_MAGNITUDE, check_magnitudes, from_bfloat16, to_bfloat16
from dilocox_peer.compression.gaps import BitStreams, GroupedGaps, Ints, encode_gaps, gaps_of, unpacked
from dilocox_peer.compression.lengths import Shares
from dilocox_peer.compression.reader import GRAIN, PIECE, read_all
from dilocox_peer.compression.sizes import CHUNK, most_kept, payload_limits
from dilocox_peer.errors import MalformedBlob

_PIECE_CHUNKS = 64
"""Chunks worked on at a time, 1 MiB."""
_GROUP = GRAIN
"""Elements whose positions can be decoded alone; PIECE of them are at a time: what that takes stays in the caches, and the interpreter is held by none of it for long."""


class TopKCodec:
    """See the module."""

    name = "topk"
    is_finite = True

    def encode(self, x: Tensor) -> bytes:
        flat_N = x.detach().reshape(-1).numpy()
        lengths = _chunk_lengths(len(flat_N))
        magnitudes, counts = np.zeros(len(lengths), "<u2"), np.zeros(len(lengths), "<u2")
        gaps, signs = [np.empty(0, np.uint16)], [np.empty(0, np.bool_)]
        whole = len(flat_N) // CHUNK
        firsts = [*range(0, whole, _PIECE_CHUNKS), *([whole] if whole < len(lengths) else [])]
        for first in firsts:
            stop = min(first + _PIECE_CHUNKS, whole) if first < whole else len(lengths)
            values_XC = flat_N[first * CHUNK : stop * CHUNK].reshape(stop - first, -1)
            magnitudes[first:stop], kept_counts, positions, negative = _largest(values_XC)
            counts[first:stop] = kept_counts
            gaps.append(gaps_of(positions, kept_counts))
            signs.append(negative)
        return b"".join(
            [
                magnitudes.tobytes(),
                counts.tobytes(),
                np.packbits(np.concatenate(signs), bitorder="little").tobytes(),
                *encode_gaps(np.concatenate(gaps), counts.astype(np.int64), lengths),
            ]
        )

    def open(self, payload: memoryview, shape: tuple[int, ...]) -> "_TopKReader":
        lengths = _chunk_lengths(math.prod(shape))
        smallest, largest = payload_limits(self.name, shape)
        if not smallest <= len(payload) <= largest:
            raise MalformedBlob(f"topk: {len(payload)} bytes for shape {shape}, expected {smallest} to {largest}")
        bits = np.frombuffer(payload, "<u2", count=len(lengths))
        counts = np.frombuffer(payload, "<u2", count=2 * len(lengths))[len(lengths) :]
        check_magnitudes(self.name, bits)
        if (counts > most_kept(lengths)).any() or ((counts == 0) != (bits == 0)).any():
            raise MalformedBlob("topk: a count that does not fit its chunk")
        streams = BitStreams(self.name, payload[smallest:])
        signs = streams.take_packed(int(counts.sum(dtype=np.int64)))
        return _TopKReader(bits, counts, signs, GroupedGaps(streams, counts, lengths, _GROUP // CHUNK))

    def decode(self, payload: memoryview, out: Tensor) -> None:
        read_all(self.open(payload, tuple(out.shape)), out)


class _TopKReader:
    """Views of the payload, and where its groups begin; positions are decoded anew at each reading."""

    def __init__(
        self, bits: npt.NDArray[np.uint16], counts: npt.NDArray[np.uint16], signs: npt.NDArray[np.uint8], gaps: GroupedGaps
    ) -> None:  # fmt: skip
        """bits: of the magnitudes. All checked but where the positions lie."""
        self._bits = bits
        self._counts = counts
        self._signs = signs
        self._gaps = gaps

    def read(self, start: int, stop: int, out_X: Tensor) -> None:
        out_X.zero_()
        for indices, values in self._kept(start, stop):
            out_X.numpy()[indices] = values

    def add(self, start: int, stop: int, shares_U: Shares, unit: int, out_X: Tensor) -> None:
        """See aggregate.py's SparseReader."""
        for indices, values in self._kept(start, stop):
            values *= shares_U[0] if (shares_U == shares_U[0]).all() else shares_U[indices // unit]
            out_X.numpy()[indices] += values

    def _kept(self, start: int, stop: int) -> Iterator[tuple[Ints, npt.NDArray[np.float32]]]:
        """Where what is not 0 stands, counted from start, and its values; of a piece at a time."""
        for first in range(start, stop, PIECE):
            last = min(first + PIECE, stop)
            group, groups = first // _GROUP, -(-(last - first) // _GROUP)
            chunks = slice(first // CHUNK, -(-last // CHUNK))
            counts = self._counts[chunks]
            indices = self._gaps.positions(group, groups)
            indices += np.repeat(np.arange(len(counts)) * CHUNK + (first - start), counts)
            values = np.repeat(from_bfloat16(self._bits[chunks]), counts)
            negative = unpacked(self._signs, int(self._gaps.kept_before[group]), len(values))
            signs = values.view(np.uint32)
            signs ^= negative.astype(np.uint32) << 31  # np.negative of some of them takes 40 times as long
            yield indices, values


def position_bits(shape: tuple[int, ...], payload: bytes) -> tuple[float, float]:
    """(bits that the positions in a payload take, their entropy: log2 of the number of choices of so many), summed."""
    lengths = _chunk_lengths(math.prod(shape))
    counts = np.frombuffer(payload, "<u2", count=2 * len(lengths))[len(lengths) :]
    choices = sum(
        math.lgamma(length + 1) - math.lgamma(count + 1) - math.lgamma(length - count + 1)
        for length, count in zip(lengths.tolist(), counts.tolist(), strict=True)
    )
    return 8.0 * (len(payload) - 4 * len(lengths) - -(-int(counts.sum()) // 8)), choices / math.log(2)


def _chunk_lengths(n: int) -> Ints:
    whole, rest = divmod(n, CHUNK)
    lengths = np.full(whole + (rest > 0), CHUNK, np.int64)
    if rest:
        lengths[-1] = rest
    return lengths


def _largest(
    values_XC: npt.NDArray[np.float32],
) -> tuple[npt.NDArray[np.uint16], Ints, npt.NDArray[np.uint16], npt.NDArray[np.bool_]]:
    """Magnitude bits and count of each chunk, positions within their chunks and signs of what is kept, in order."""
    length = values_XC.shape[1]
    most = int(most_kept(np.array([length]))[0])
    sizes_XC = np.minimum(np.abs(values_XC), np.float32(MAX_MAGNITUDE))
    largest_XK = np.sort(np.partition(sizes_XC, length - most, axis=1)[:, length - most :], axis=1)[:, ::-1]
    sums_XK = np.cumsum(largest_XK, axis=1, dtype=np.float64)
    best_X1 = (sums_XK**2 / np.arange(1, most + 1)).argmax(1)[:, None]
    magnitudes = to_bfloat16((np.take_along_axis(sums_XK, best_X1, 1) / (best_X1 + 1)).astype(np.float32)[:, 0])
    counts = np.where(magnitudes == 0, 0, best_X1[:, 0] + 1)
    kept_XC = sizes_XC >= np.take_along_axis(largest_XK, best_X1, 1)
    for row in np.flatnonzero(kept_XC.sum(1) != counts):  # as large as the smallest that is kept: the first ones stay
        if counts[row] == 0:
            kept_XC[row] = False
        elif np.isnan(sums_XK[row, -1]):  # any one element: the magnitude is NaN, and nobody will decode this
            kept_XC[row] = np.arange(length) < counts[row]
        else:
            equal = np.flatnonzero(sizes_XC[row] == largest_XK[row, counts[row] - 1])
            kept_XC[row, equal[len(equal) - (int(kept_XC[row].sum()) - counts[row]) :]] = False
    rows, positions = np.nonzero(kept_XC)
    return magnitudes, counts, positions.astype(np.uint16), values_XC[rows, positions] < 0
