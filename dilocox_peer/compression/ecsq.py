"""`ecsq`: of every chunk of 4096 elements the whole multiples of one step that are nearest to them, entropy-coded.

    payload: sizes (u32) of all groups of 32 chunks | groups
    group: layers (u8) | steps (bfloat16) of all chunks | counts (u16): of all chunks in layer 1, in layer 2, ... | signs | positions
Layer 1 has the elements of at least one step, layer m, among those of layer m - 1, the ones of at least m. Where they stand in the layer
before is coded as topk codes positions (gaps.py), at most a bit for each element of the layer before. So zeros cost next to nothing where there are many,
and one codec serves sparse tensors and dense ones.

Made for means: n contributions of sign and one magnitude a chunk (topk) add up to whole multiples of nearly the same step. Relative error and
bits an element, and how runs learn with it: docs/decisions/0022.

The step. Sixteen are tried, from 0.35 to 64 times the root of the chunk's mean square, and the one with the least
    |x - decoded|**2 / |x|**2 + 0.1 * bits an element
is taken, its multiples kept, and the step set to what makes their error least: so |x - decoded| <= |x| for every chunk. Bits are reckoned
with multiples in unary. Sums are made half by half and all else is elementwise or in whole numbers: equal bytes on every machine. Steps are limited as in
blockwise.py; decoding places products of a bfloat16 and at most 8, which are exact.

Source: uniform scalar quantization with entropy coding is within a quarter of a bit of what any scalar quantizer can (Gish and Pierce, 1968).
Error feedback is not here (feedback.py).
"""

import math

import numpy as np
import numpy.typing as npt
from torch import Tensor

from dilocox_peer.compression.bfloat16 import MAX_MAGNITUDE, check_magnitudes, from_bfloat16, to_bfloat16
from dilocox_peer.compression.gaps import BitStreams, Ints, decode_gaps, encode_gaps, gaps_of, position_bits_of
from dilocox_peer.compression.reader import read_all
from dilocox_peer.compression.sizes import CHUNK, GROUP, MOST_LAYERS, payload_limits
from dilocox_peer.errors import MalformedBlob

_PRICE = np.float32(0.1)
"""Of a bit an element, in relative squared error. As high as it may be without runs learning less (benchmarks/learning.py): 0.04, 0.1 and 0.25 were tried."""

_TRIED = [np.float32(2.0 ** (half / 2)) for half in range(-3, 13)]
_PIECE_CHUNKS = 16
"""Chunks whose steps are searched at a time: what that takes stays in the caches."""

_Floats = npt.NDArray[np.float32]
_Levels = npt.NDArray[np.uint8]


class EcsqCodec:
    """See the module."""

    name = "ecsq"
    is_finite = True

    def encode(self, x: Tensor) -> bytes:
        flat_N = x.detach().reshape(-1).numpy()
        groups = [_encoded(flat_N[start : start + GROUP]) for start in range(0, len(flat_N), GROUP)]
        return b"".join([np.array([len(each) for each in groups], "<u4").tobytes(), *groups])

    def open(self, payload: memoryview, shape: tuple[int, ...]) -> "_EcsqReader":
        n = math.prod(shape)
        smallest, largest = payload_limits(self.name, shape)
        if not smallest <= len(payload) <= largest:
            raise MalformedBlob(f"ecsq: {len(payload)} bytes for shape {shape}, expected {smallest} to {largest}")
        num_groups = -(-n // GROUP)
        sizes = np.frombuffer(payload, "<u4", count=num_groups).tolist()
        if 4 * num_groups + sum(sizes) != len(payload):
            raise MalformedBlob(f"ecsq: groups of {sum(sizes)} bytes in {len(payload)}")
        groups, start = [], 4 * num_groups
        for index, size in enumerate(sizes):
            # One that claims nearly all bytes would be unpacked whole.
            least, most = payload_limits(self.name, (min(GROUP, n - index * GROUP),))
            if not least <= 4 + size <= most:
                raise MalformedBlob(f"ecsq: a group of {size} bytes, expected {least - 4} to {most - 4}")
            groups.append(payload[start : start + size])
            start += size
        return _EcsqReader(groups, n)

    def decode(self, payload: memoryview, out: Tensor) -> None:
        read_all(self.open(payload, tuple(out.shape)), out)


class _EcsqReader:
    """groups: each of GROUP elements and the last of what is left, decoded anew at each reading: kept it would be several times the tensor."""

    def __init__(self, groups: list[memoryview], num_elements: int) -> None:
        self._groups = groups
        self._num_elements = num_elements

    def read(self, start: int, stop: int, out_X: Tensor) -> None:
        out_X.zero_()
        for first in range(start, stop, GROUP):
            indices, values = _decoded(self._groups[first // GROUP], min(GROUP, self._num_elements - first))
            out_X.numpy()[first - start + indices] = values


def _encoded(flat_N: _Floats) -> bytes:
    """A group."""
    n, num_chunks, whole = len(flat_N), -(-len(flat_N) // CHUNK), len(flat_N) // CHUNK
    steps, levels_N = np.zeros(num_chunks, "<u2"), np.empty(n, np.uint8)
    for first in [*range(0, whole, _PIECE_CHUNKS), *([whole] if whole < num_chunks else [])]:
        stop = min(first + _PIECE_CHUNKS, whole) if first < whole else num_chunks
        values_XC = flat_N[first * CHUNK : stop * CHUNK].reshape(stop - first, -1)
        steps[first:stop], levels_XC = _quantized(values_XC)
        levels_N[first * CHUNK : stop * CHUNK] = levels_XC.reshape(-1)
    signs = np.packbits(flat_N[np.flatnonzero(levels_N)] < 0, bitorder="little").tobytes()
    chunks, levels = np.arange(n) // CHUNK, levels_N  # of the layer before: each element's chunk and multiple
    lengths, counts, gaps = [], [], []
    for layer in range(1, MOST_LAYERS + 1):
        inside = np.flatnonzero(levels >= layer)
        if not len(inside):
            break
        lengths.append(np.bincount(chunks, minlength=num_chunks))
        firsts = np.cumsum(lengths[-1]) - lengths[-1]
        positions = (inside - firsts[chunks[inside]]).astype(np.uint16)
        chunks, levels = chunks[inside], levels[inside]
        counts.append(np.bincount(chunks, minlength=num_chunks))
        gaps.append(gaps_of(positions, counts[-1]))
    if not counts:
        return bytes(1) + steps.tobytes()
    streams = encode_gaps(np.concatenate(gaps), np.concatenate(counts), np.concatenate(lengths))
    counted = np.concatenate(counts).astype("<u2").tobytes()
    return b"".join([bytes([len(counts)]), steps.tobytes(), counted, signs, *streams])


def _decoded(payload: memoryview, n: int) -> tuple[Ints, _Floats]:
    """Of a group of n elements: where what is not 0 stands, ascending, and its values. Raises MalformedBlob."""
    num_chunks = -(-n // CHUNK)
    head = 1 + 2 * num_chunks
    layers = payload[0] if len(payload) else MOST_LAYERS + 1
    if layers > MOST_LAYERS or len(payload) < head + 2 * layers * num_chunks:
        raise MalformedBlob(f"ecsq: {layers} layers in {len(payload)} bytes")
    bits = np.frombuffer(payload, "<u2", count=num_chunks, offset=1)
    counts = np.frombuffer(payload, "<u2", count=layers * num_chunks, offset=head).astype(np.int64)
    counts_LX = counts.reshape(layers, num_chunks)
    check_magnitudes(EcsqCodec.name, bits)
    whole_X = np.minimum(CHUNK, n - CHUNK * np.arange(num_chunks))
    lengths_LX = np.concatenate([whole_X[None], counts_LX])[:layers]
    kept_X = counts_LX[0] if layers else np.zeros(num_chunks, np.int64)
    is_wrong = (counts_LX > lengths_LX).any() or ((kept_X == 0) != (bits == 0)).any()
    if is_wrong or not counts_LX.any(1).all():
        raise MalformedBlob("ecsq: a count that does not fit its layer")
    streams = BitStreams(EcsqCodec.name, payload[head + 2 * layers * num_chunks :])
    negative = streams.take(int(kept_X.sum()))
    positions = decode_gaps(streams, counts, lengths_LX.reshape(-1))
    values = np.repeat(from_bfloat16(bits), kept_X)
    levels, within = (
        np.ones(len(values), np.uint8),
        np.arange(len(values)),
    )  # within: where a layer's elements are in the first
    reached = len(values)
    for layer in range(1, layers):
        firsts = np.cumsum(counts_LX[layer - 1]) - counts_LX[layer - 1]
        inside = positions[reached : reached + int(counts_LX[layer].sum())]
        reached += len(inside)
        within = within[inside + np.repeat(firsts, counts_LX[layer])]
        levels[within] += 1
    values *= levels
    indices = positions[: len(values)] + np.repeat(CHUNK * np.arange(num_chunks), kept_X)
    signs = values.view(np.uint32)
    signs ^= negative.astype(np.uint32) << 31  # np.negative of some of them takes 40 times as long
    return indices, values


def _quantized(values_XC: _Floats) -> tuple[npt.NDArray[np.uint16], _Levels]:
    """The step's bits of each chunk, and the multiples."""
    sizes_XC = np.minimum(np.abs(values_XC), np.float32(MAX_MAGNITUDE))
    largest_X = sizes_XC.max(1)
    is_nan = np.isnan(largest_X)
    _, exponents_X = np.frexp(np.where(is_nan | (largest_X == 0), np.float32(1), largest_X))
    scaled_XC = np.ldexp(sizes_XC, -exponents_X[:, None])  # a power of two: at most 1, and nothing is lost that counts
    scaled_XC[is_nan] = 0
    length = np.float32(values_XC.shape[1])
    energy_X = _sums(scaled_XC * scaled_XC)
    root_X = np.sqrt(energy_X / length)
    cost_X, step_X = np.full(len(root_X), np.inf, np.float32), np.ones(len(root_X), np.float32)
    scale_X = np.where(energy_X > 0, np.float32(1) / np.maximum(energy_X, np.float32(2.0**-40)), np.float32(0))
    for factor in _TRIED:
        tried_X = np.maximum(root_X * factor, np.float32(2.0**-20))
        levels_XC = _levels(scaled_XC, tried_X)
        away_XC = scaled_XC - levels_XC * tried_X[:, None]
        bits_X = _bits(levels_XC).astype(np.float32) / length
        new_X = _sums(away_XC * away_XC) * scale_X + _PRICE * bits_X
        is_less = new_X < cost_X
        cost_X, step_X = np.where(is_less, new_X, cost_X), np.where(is_less, tried_X, step_X)
    levels_XC = _levels(scaled_XC, step_X)
    times_X = _sums(scaled_XC * levels_XC.astype(np.float32))
    squares_X = (levels_XC * levels_XC).sum(1, dtype=np.int64)  # at most 64 each
    best_X = times_X / np.maximum(squares_X, 1).astype(np.float32)
    bits = to_bfloat16(np.ldexp(best_X.astype(np.float32), exponents_X))
    levels_XC[bits == 0] = 0
    bits[~levels_XC.any(1)] = 0
    if is_nan.any():  # nobody will decode this
        bits[is_nan] = to_bfloat16(np.array([np.nan], np.float32))[0]
        levels_XC[is_nan] = 0
        levels_XC[is_nan, 0] = 1
    return bits, levels_XC


def _levels(scaled_XC: _Floats, step_X: _Floats) -> _Levels:
    away_XC = scaled_XC * (np.float32(1) / step_X)[:, None]
    away_XC += np.float32(0.5)
    return np.minimum(away_XC, np.float32(MOST_LAYERS)).astype(np.uint8)


def _bits(levels_XC: _Levels) -> Ints:
    """About what each chunk takes: positions, signs and multiples in unary."""
    counts_X = np.count_nonzero(levels_XC, axis=1)
    unary_X = levels_XC.sum(1, dtype=np.int64)
    bits_X: Ints = position_bits_of(np.full_like(counts_X, levels_XC.shape[1]), counts_X) + counts_X + unary_X
    return bits_X


def _sums(squares_XC: _Floats) -> _Floats:
    """Of each row, added half to half: in the same order on every machine."""
    while (length := squares_XC.shape[1]) > 1:
        half = length // 2
        added_XC = squares_XC[:, :half] + squares_XC[:, half : 2 * half]
        if length % 2:
            added_XC[:, 0] += squares_XC[:, -1]
        squares_XC = added_XC
    return squares_XC[:, 0]
