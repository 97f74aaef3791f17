"""How many bytes a contribution takes, by its layout and the names of its codecs alone. Needs no torch, so who only reckons (`init`,
`plan`, the planners) starts without it. What the bytes are stands in each codec's own module.
"""

import math
from collections.abc import Callable, Mapping
from functools import lru_cache

import numpy as np

from dilocox_peer.compression.gaps import MAX_B, Ints, most_bits, position_bits_of
from dilocox_peer.types import DIGEST_BYTES, Layout, TensorSpec
from dilocox_peer.wire.blobs import CONTRIBUTION_NAME

LENGTH_BYTES = 4
"""A contribution begins with the length of its header."""
MAX_CODEC_NAME_BYTES = 32

Shape = tuple[int, ...]
ByteLimits = tuple[int, int]
"""The smallest and the largest number of bytes."""

CodecNames = Callable[[TensorSpec], str]
"""The name of the codec that a tensor is encoded with."""

PLAIN: Mapping[str, int] = {"none": 4, "fp16": 2}
"""Bytes of an element."""
ABSMAX: Mapping[str, tuple[int, int]] = {"int8": (8, 64), "int4": (4, 128)}
"""Bits of an element, elements of a block."""
PLANES: Mapping[str, tuple[int, int]] = {"int2": (2, 256), "sign": (1, 256)}
"""Magnitudes of a block, elements of it."""

CHUNK = 4096
"""Elements of a chunk, of topk and ecsq."""
MOST_KEPT = 328
"""Of a whole chunk by topk: 8 %."""
GROUP = 32 * CHUNK
"""Elements that ecsq encodes and decodes at a time, so that nobody needs room for the indices of a whole tensor. Divides reader.PIECE."""
MOST_LAYERS = 8
"""Of ecsq."""

MAX_RANK = 4096
SHARING = 128
"""Codes of lowrank-int4 that share a scale, where the rank is below it."""


# -- a contribution ----------------------------------------------------------------------------------------------------


def blob_limits(layout: Layout, name_of: CodecNames | None = None) -> ByteLimits:
    """Smallest and largest size in bytes of a contribution; without names, of any that this version can decode."""
    smallest, largest = LENGTH_BYTES + 1, LENGTH_BYTES + max_header_bytes(layout)
    for spec in layout.tensors:
        limits = [payload_limits(name, spec.shape) for name in ([name_of(spec)] if name_of else _LIMITS)]
        smallest += min(low for low, _ in limits)
        largest += max(high for _, high in limits)
    return smallest, largest


def max_header_bytes(layout: Layout) -> int:
    per_tensor = MAX_CODEC_NAME_BYTES + 2 + 9  # str8 head and name, uint64
    return 64 + len(CONTRIBUTION_NAME) + DIGEST_BYTES + per_tensor * len(layout.tensors)


def raw_bytes(layout: Layout) -> int:
    """Size of the same pseudo-gradient as plain float32, to compare with."""
    return 4 * layout.num_elements


# -- a tensor ----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)  # asked of every tensor of whatever is fetched, on the event loop
def payload_limits(codec: str, shape: Shape) -> ByteLimits:
    """Smallest and largest number of bytes that encode a tensor of this shape; known before any is read. Raises KeyError for a codec that this
    version does not know."""
    return _LIMITS[codec](shape)


def most_kept(lengths: Ints) -> Ints:
    """Elements of chunks of these lengths that topk keeps at most."""
    return -(-lengths * MOST_KEPT // CHUNK)


def matrix_shape(shape: Shape) -> tuple[int, int]:
    """(rows, columns) that lowrank-int4 takes a tensor as; an empty one has no rows."""
    rows = shape[0] if shape else 1
    return (rows, math.prod(shape[1:])) if rows else (0, 0)


def largest_rank(shape: Shape) -> int:
    """Largest rank that is decoded for this shape, and the largest that takes less than two bits an element: 5 bits a
    factor's element (4 and scales) times r * (m + n) against 2 * m * n. At least 1, but 0 for an empty tensor."""
    rows, columns = matrix_shape(shape)
    if not rows * columns:
        return 0
    return max(1, min(rows, columns, MAX_RANK, 2 * rows * columns // (5 * (rows + columns))))


def num_groups(size: int, rank: int) -> int:
    """Scales of a factor of `size` rows (columns)."""
    return -(-size // max(1, SHARING // rank)) if rank else 0


def low_rank_bytes(rows: int, columns: int, rank: int) -> int:
    """Payload of lowrank-int4 at a rank: its own header, exponents, scales and codes."""
    return 2 + rank + sum(2 * num_groups(size, rank) + (rank * size + 1) // 2 for size in (rows, columns))


def _plain(name: str) -> Callable[[Shape], ByteLimits]:
    return lambda shape: _exactly(math.prod(shape) * PLAIN[name])


def _absmax(name: str) -> Callable[[Shape], ByteLimits]:
    bits, block = ABSMAX[name]
    return lambda shape: _exactly(2 * _ceil(math.prod(shape), block) + _ceil(math.prod(shape) * bits, 8))


def _planes(name: str) -> Callable[[Shape], ByteLimits]:
    num_levels, block = PLANES[name]
    return lambda shape: _exactly(num_levels * (2 * _ceil(math.prod(shape), block) + _ceil(math.prod(shape), 8)))


def _topk(shape: Shape) -> ByteLimits:
    n = math.prod(shape)
    whole, rest = divmod(n, CHUNK)
    bits = whole * _most_topk_bits(CHUNK) + (_most_topk_bits(rest) if rest else 0)
    smallest = 4 * _ceil(n, CHUNK)
    return smallest, smallest + _ceil(bits, 8) + MAX_B + 1  # every stream is filled up to a byte


def _most_topk_bits(length: int) -> int:
    """Most bits that signs and gaps of a chunk can take, over all counts."""
    counts = np.arange(int(most_kept(np.array([length]))[0]) + 1)
    return int((counts + position_bits_of(np.full_like(counts, length), counts)).max())


def _ecsq(shape: Shape) -> ByteLimits:
    whole, rest = divmod(math.prod(shape), GROUP)
    smallest, largest = _group_limits(GROUP)
    last = _group_limits(rest) if rest else (-4, -4)
    return whole * (4 + smallest) + 4 + last[0], whole * (4 + largest) + 4 + last[1]


def _group_limits(n: int) -> ByteLimits:
    chunks, rest = -(-n // CHUNK), n % CHUNK
    bits = n // CHUNK * most_bits(CHUNK, CHUNK) + (most_bits(rest, rest) if rest else 0)
    # A layer has no more elements than the one before, so none takes more bits for its positions than the first can.
    return 1 + 2 * chunks, 1 + 2 * chunks * (1 + MOST_LAYERS) - (-n // 8) - (-MOST_LAYERS * bits // 8) + MAX_B + 1


def _low_rank(shape: Shape) -> ByteLimits:
    return 2, low_rank_bytes(*matrix_shape(shape), largest_rank(shape))


def _exactly(size_bytes: int) -> ByteLimits:
    return size_bytes, size_bytes


def _ceil(n: int, divisor: int) -> int:
    return -(-n // divisor)


_LIMITS: Mapping[str, Callable[[Shape], ByteLimits]] = {
    **{name: _plain(name) for name in PLAIN},
    **{name: _absmax(name) for name in ABSMAX},
    **{name: _planes(name) for name in PLANES},
    "topk": _topk,
    "ecsq": _ecsq,
    "lowrank-int4": _low_rank,
}
