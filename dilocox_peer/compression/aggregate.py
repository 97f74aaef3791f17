"""The mean of a round's contributions: the one computation whose result must be equal to the bit on every peer.

Therefore: contributions in the certificate's order; float32; only elementwise operations, a multiplication and an
addition each on its own (a fused one rounds once instead of twice, and not on every processor); no reduction whose
order depends on threads or vector width; weights and clip factors computed in exact or integer steps before they touch
the data. Contributions are decoded piece by piece, by whatever number of threads: an element's bits depend on nothing else.

Shape letters: N elements of the stage's flat vector.
"""

import math
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dilocox_peer.compression.agreement import WHOLE, parts_by_agreement
from dilocox_peer.compression.contribution import Blob, Contribution, open_contribution
from dilocox_peer.compression.reader import PIECE, TensorReader, pieces
from dilocox_peer.types import Layout

CLIP_STEPS = 64
"""Clip factors are rounded down to 1/64ths: a difference in a norm's last bits cannot show in the result."""

COMPARED_BYTES = 1 << 16  # at once, of two contributions
MAX_WEIGHT = 4
"""Of a contribution, times the group's median: micro-batches are what a peer says of itself."""

MAX_LATE_SCALE = 4.0
"""Pseudo-gradient that gathered over missed rounds may be that much larger than the group's, before clipping starts."""

LEAST_COMPARED = 3  # contributions of which a tensor's norms tell who is unlike the others

_LANES = 16384
"""Squares are summed lane by lane, so in the same order on every machine; the lanes at the end by exact summation."""

_SCRATCH = ((_LANES, torch.float64), (PIECE, torch.float64), (PIECE, torch.float32))

Squares = Sequence[float]
"""Of a contribution the sum of squares of each tensor, in the layout's order."""


@dataclass(frozen=True, slots=True)
class Mean:
    """mean_N: None when nothing was contributed (a void round). The rest in the certificate's order."""

    mean_N: Tensor | None
    norms: tuple[float, ...]
    clip_factors: tuple[float, ...]


class WeighedContributions:
    """A round's contributions, opened and with their shares in the mean: which can then be taken piece by piece.

    norms, clip_factors: in the certificate's order.
    """

    def __init__(
        self,
        layout: Layout,
        blobs: Sequence[Blob],
        micro_batches: Sequence[int],
        *,
        norm_clip: float,
        squares: Sequence[Squares | None] = (),
        beacon: bytes = b"",
    ) -> None:
        """Weights are micro-batches (capped); copies count once and nothing weighs nothing (weights_of_their_own). A contribution that agrees little
        with the others weighs less, down to nothing (agreement.py). A contribution whose norm exceeds norm_clip times the group's median (scaled by its
        micro-batches, see clip_factors) is scaled down to that, and so is each tensor of it (tensor_factors). clip_factors tell all three. squares: what contribution_squares gave before, in order, None
        where it was not asked: that one is decoded for it here. beacon: what nobody knew before all had contributed, the
        same on all peers. Raises MalformedBlob, also for a value that is not finite."""
        assert len(blobs) == len(micro_batches), f"{len(blobs)} blobs, {len(micro_batches)} weights"
        assert all(count >= 0 for count in micro_batches), f"negative micro-batches in {micro_batches}"
        micro_batches = capped_weights(micro_batches)
        self._contributions = [open_contribution(raw, layout) for raw in blobs]
        self._total = sum(micro_batches)
        self.norms: tuple[float, ...] = (0.0,) * len(blobs)
        self.clip_factors: tuple[float, ...] = (1.0,) * len(blobs)
        if self.is_void:
            return
        known = tuple(squares) or (None,) * len(blobs)
        self._squares = tuple(
            squares_of(contribution, layout) if each is None else each
            for contribution, each in zip(self._contributions, known, strict=True)
        )
        self._factors: Sequence[float] = (1.0,) * len(blobs)
        self._counts, self._norm_clip = micro_batches, norm_clip
        if len(blobs) > 1:  # a group of one is its own median
            self.norms = tuple(math.sqrt(math.fsum(each)) for each in self._squares)
            counts = weights_of_their_own(blobs, self.norms, micro_batches)
            parts = parts_by_agreement(layout, self._contributions, counts, beacon)
            self._factors, self._counts = weighed(self.norms, counts, parts, norm_clip=norm_clip)
            self._total = sum(self._counts)
            if self.is_void:
                return
            self.clip_factors = tuple(
                factor * part / WHOLE for factor, part in zip(self._lengths_left(layout), parts, strict=True)
            )

    @property
    def is_void(self) -> bool:
        return self._total == 0

    def open(self, index: int) -> "TensorMean":
        """The mean of the tensor of that place in the layout. Raises MalformedBlob."""
        assert not self.is_void, "nothing was contributed"
        factors = self._factors_of(index)
        shares = [share_of(each, count, self._total) for each, count in zip(factors, self._counts, strict=True)]
        return TensorMean([contribution.open(index) for contribution in self._contributions], shares)

    def let_go(self, index: int) -> None:
        """That tensor was read."""
        for contribution in self._contributions:
            contribution.let_go(index)

    def _factors_of(self, index: int) -> Sequence[float]:
        squares = [each[index] for each in self._squares]
        return tensor_factors(squares, self._counts, self._factors, norm_clip=self._norm_clip)

    def _lengths_left(self, layout: Layout) -> tuple[float, ...]:
        """How long each is still, of what it was."""
        left = [array("d") for _ in self._squares]
        for index in range(len(layout.tensors)):
            for row, factor in enumerate(self._factors_of(index)):
                # A ratio: squares of factors that are as small as they may be are no floats any more.
                left[row].append((factor / self._factors[row]) ** 2 * self._squares[row][index])
        return tuple(
            factor * math.sqrt(math.fsum(parts) / whole) if (whole := math.fsum(squares)) else factor
            for factor, parts, squares in zip(self._factors, left, self._squares, strict=True)
        )


class TensorMean:
    """The mean of one tensor, to be read piece by piece by any threads: a TensorReader (reader.py) but for its scratch vector."""

    def __init__(self, readers: Sequence[TensorReader], shares: Sequence[float]) -> None:
        self._readers = readers
        self._shares = shares

    def read(self, start: int, stop: int, out_X: Tensor, scratch_X: Tensor) -> None:
        """Writes the mean of the elements start to stop into out_X; equal bits on every peer. scratch_X: as long."""
        for index, (reader, share) in enumerate(zip(self._readers, self._shares, strict=True)):
            if not index:
                reader.read(start, stop, out_X)
                out_X.mul_(share).add_(0.0)  # a sum begins at 0.0, so that none is -0.0
                continue
            reader.read(start, stop, scratch_X)
            out_X.add_(scratch_X.mul_(share))


def aggregate(layout: Layout, blobs: Sequence[Blob], micro_batches: Sequence[int], *, norm_clip: float) -> Mean:
    """The whole mean of the decoded blobs as one vector: see WeighedContributions. Raises MalformedBlob."""
    weighed = WeighedContributions(layout, blobs, micro_batches, norm_clip=norm_clip)
    if weighed.is_void:
        return Mean(None, weighed.norms, weighed.clip_factors)
    mean_N, scratch_X = torch.empty(layout.num_elements), torch.empty(PIECE)
    for index, (spec, first, _stop) in enumerate(layout.spans()):
        mean = weighed.open(index)
        for start, stop in pieces(spec.num_elements):
            mean.read(start, stop, mean_N[first + start : first + stop], scratch_X[: stop - start])
    return Mean(mean_N, weighed.norms, weighed.clip_factors)


def capped_weights(micro_batches: Sequence[int]) -> tuple[int, ...]:
    """Each at most MAX_WEIGHT times the upper median of those that are not zero, so that no single one of three can say
    that it has done nearly all the work. A peer that really has counts as four usual peers; of two peers none is usual."""
    ordered = sorted(count for count in micro_batches if count > 0)
    most = MAX_WEIGHT * ordered[len(ordered) // 2] if ordered else 0
    return tuple(min(count, most) for count in micro_batches)


def weights_of_their_own(
    blobs: Sequence[Blob], norms: Sequence[float], micro_batches: Sequence[int]
) -> tuple[int, ...]:
    """The weights without what nobody worked for: of contributions that are the same to the byte the first of those with the
    least claim counts, as nobody can tell whose it was, and one whose norm is 0 counts nothing."""
    weights = [count if norm > 0.0 else 0 for count, norm in zip(micro_batches, norms, strict=True)]
    by_norm: dict[tuple[float, int], list[int]] = {}
    for index, (raw, norm) in enumerate(zip(blobs, norms, strict=True)):
        if weights[index]:
            by_norm.setdefault((norm, len(raw)), []).append(index)
    for alike in by_norm.values():
        kept: list[int] = []
        for index in sorted(alike, key=lambda index: (weights[index], index)):
            if any(_are_equal(blobs[index], blobs[other]) for other in kept):
                weights[index] = 0
            else:
                kept.append(index)
    return tuple(weights)


def _are_equal(one: Blob, other: Blob) -> bool:
    """Whether two blobs of one length are equal. By the piece: memoryviews of 31 MB that are compared whole hold every other thread for 60 ms."""
    first, second = memoryview(one), memoryview(other)
    starts = range(0, len(first), COMPARED_BYTES)
    return all(bytes(first[at : at + COMPARED_BYTES]) == bytes(second[at : at + COMPARED_BYTES]) for at in starts)


def weighed(
    norms: Sequence[float], micro_batches: Sequence[int], parts: Sequence[int], *, norm_clip: float
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """(clip factors, weights) of contributions of which agreement leaves these parts: what it leaves nothing of has no say in how long
    the others may be."""
    counts = tuple(count if part else 0 for count, part in zip(micro_batches, parts, strict=True))
    heard = [norm if part else 0.0 for norm, part in zip(norms, parts, strict=True)]
    factors = clip_factors(heard, counts, norm_clip=norm_clip)
    return factors, tuple(count * part for count, part in zip(counts, parts, strict=True))


def clip_factors(norms: Sequence[float], micro_batches: Sequence[int], *, norm_clip: float) -> tuple[float, ...]:
    """Factor in (0, 1] for each contribution, in 1/64ths (2**-k/64ths below that), so exact in float32.

    The limit of contribution i is norm_clip * median norm * clamp(micro_batches_i / median, 1, 4): one that gathered
    over missed rounds may be larger, one of a slow peer is never held to less than the group's. Medians are lower
    ones, over what is not zero: idle peers cannot clip the others to nothing.
    """
    median_norm = median_norm_of(norms)
    median_count = _lower_median([float(count) for count in micro_batches if count > 0])
    if median_norm == 0.0 or median_count == 0.0:
        return (1.0,) * len(norms)
    factors = []
    for norm, count in zip(norms, micro_batches, strict=True):
        limit = norm_clip * median_norm * min(max(count / median_count, 1.0), MAX_LATE_SCALE)
        factors.append(1.0 if norm <= limit else _rounded_down(limit / norm))
    return tuple(factors)


def tensor_factors(
    squares: Squares, counts: Sequence[int], factors: Sequence[float], *, norm_clip: float
) -> Sequence[float]:
    """The factors of a tensor: the contributions' own, or what its norm leaves where it is norm_clip times the median of the tensor's, whichever is less.
    Signs and the length of the whole let one contribution put all of its length into one small tensor. squares: of that tensor, of each contribution.
    Of fewer than LEAST_COMPARED that have anything there and weigh anything, nobody is unlike the others."""
    norms = [math.sqrt(each) if count else 0.0 for each, count in zip(squares, counts, strict=True)]
    if sum(norm > 0.0 for norm in norms) < LEAST_COMPARED:
        return factors
    return tuple(map(min, factors, clip_factors(norms, counts, norm_clip=norm_clip)))


def median_norm_of(norms: Sequence[float]) -> float:
    """The lower median of the norms that are not zero, which the limit is a multiple of; 0.0 without any."""
    return _lower_median([norm for norm in norms if norm > 0.0])


def contribution_norm(raw: Blob, layout: Layout) -> float:
    """Euclidean norm of the decoded blob, equal bits on every peer. Raises MalformedBlob: also a full check of raw."""
    return math.sqrt(math.fsum(contribution_squares(raw, layout)))


def contribution_squares(raw: Blob, layout: Layout) -> Squares:
    """Of the decoded blob, equal bits on every peer. Raises MalformedBlob: also a full check of raw."""
    return squares_of(open_contribution(raw, layout), layout)


class Opened(Protocol):
    """A contribution, or what it decodes to."""

    def open(self, index: int) -> TensorReader: ...
    def let_go(self, index: int) -> None: ...


def squares_of(contribution: Opened, layout: Layout) -> Squares:
    """The sums of the squares of what it decodes to, equal bits on every peer. Raises MalformedBlob: also a full check of it."""
    lanes, wide_X, decoded_X = (torch.empty(size, dtype=kind) for size, kind in _SCRATCH)
    found = array("d")
    for index, spec in enumerate(layout.tensors):
        reader, used = contribution.open(index), lanes[: min(spec.num_elements, _LANES)].zero_()
        for start, stop in pieces(spec.num_elements):
            reader.read(start, stop, decoded_X[: stop - start])
            wide = wide_X[: stop - start].copy_(decoded_X[: stop - start])
            for squared in torch.split(wide, _LANES):
                # The square of a float32 is exact in float64, so a fused operation rounds as two do.
                used[: len(squared)].addcmul_(squared, squared)
        found.append(math.fsum(used.tolist()))
        contribution.let_go(index)
    return found


def squared_norm(contribution: Contribution) -> float:
    """The sum of them all. Raises MalformedBlob."""
    return math.fsum(squares_of(contribution, contribution.layout))


def share_of(factor: float, count: int, total: int) -> float:
    """The share of a contribution in the mean, as a float32."""
    return _float32(factor * count / total)


def _rounded_down(factor: float) -> float:
    """factor rounded down to 64ths of the power of two above it: 1/64ths for factors from 1/2 up."""
    mantissa, exponent = math.frexp(factor)  # mantissa in [1/2, 1)
    return math.ldexp(math.floor(mantissa * CLIP_STEPS) / CLIP_STEPS, exponent)


def _lower_median(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2] if ordered else 0.0


def _float32(value: float) -> float:
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded
