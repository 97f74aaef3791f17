"""The mean of a round's contributions: the one computation whose result must be equal to the bit on every peer.

Therefore: contributions in the certificate's order; float32; only elementwise operations, a multiplication and an
addition each on its own (a fused one rounds once instead of twice, and not on every processor); no reduction whose
order depends on threads or vector width; weights and clip factors computed in exact or integer steps before they touch
the data. Contributions are decoded piece by piece, by whatever number of threads: an element's bits depend on nothing else.

Shape letters: N elements of the stage's flat vector.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from dilocox_peer.compression.agreement import WHOLE, parts_by_agreement
from dilocox_peer.compression.contribution import Blob, Contribution, open_contribution
from dilocox_peer.compression.decoded import decoded_if_small
from dilocox_peer.compression.lengths import (
    CLIP_STEPS,
    LEAST_COMPARED,
    LEAST_FACTOR,
    Lengths,
    Shares,
    Squares,
    length_of,
    scale,
    squares_of,
    unit_factors,
    unit_of,
    unit_sizes,
    units_of,
)
from dilocox_peer.compression.reader import PIECE, TensorReader, pieces
from dilocox_peer.types import Layout

COMPARED_BYTES = 1 << 16  # at once, of two contributions
MAX_WEIGHT = 4
"""Of a contribution, times the group's median: micro-batches are what a peer says of itself."""

UNIT_CLIP = 0.5
"""Of norm_clip, what a unit may have: two of eight that put all they may into a few units for 24 rounds cost 3.6 to 4.0 % of the loss then, 5.1 % with all of it,
and of six honest ones none lost anything either way (benchmarks/hostile_learning.py)."""

REACH, UNIT_REACH = 2.0, 4.0
"""Times most_rms that a contribution may reach as a whole; and times as far, by its size, a unit, as what is sent in parts gathers there. Honest ones came to
0.03 to 0.3 as a whole, 0.9 in the first rounds of AdamW with topk, and to 3.2 in a unit then (benchmarks/hostile_learning.py, learning.py)."""

MAX_LATE_SCALE = 4.0
"""Pseudo-gradient that gathered over missed rounds may be that much larger than the group's, before clipping starts."""

UnitFactors = np.ndarray[Any, np.dtype[np.float64]]


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
        most_rms: float = math.inf,
        squares: Sequence[Squares | None] = (),
        beacon: bytes = b"",
    ) -> None:
        """Weights are micro-batches (capped); copies count once and nothing weighs nothing (weights_of_their_own). A contribution that agrees little
        with the others weighs less, down to nothing (agreement.py). A contribution whose norm exceeds norm_clip times the group's median (scaled by its
        micro-batches, see clip_factors) is scaled down to that, and each unit of a tensor to UNIT_CLIP of it beside what is usual there, if three have
        anything in it (lengths.py); and however few they are, to REACH times most_rms, the root mean square that the inner optimizer can come to in a round
        (reach_of), UNIT_REACH of it in a unit. clip_factors tell all of it. squares: what contribution_squares gave before, in order, None where it was not
        asked: that one is decoded for it here. beacon: what nobody knew before all had contributed, the same on all peers. Raises MalformedBlob, also for a value that is not finite."""
        assert len(blobs) == len(micro_batches), f"{len(blobs)} blobs, {len(micro_batches)} weights"
        assert all(count >= 0 for count in micro_batches), f"negative micro-batches in {micro_batches}"
        micro_batches = capped_weights(micro_batches)
        opened = [open_contribution(raw, layout) for raw in blobs]
        self._total = sum(micro_batches)
        self.norms: tuple[float, ...] = (0.0,) * len(blobs)
        self.clip_factors: tuple[float, ...] = (1.0,) * len(blobs)
        if self.is_void:
            return
        self._contributions = decoded_if_small(opened, layout)
        known = tuple(squares) or (None,) * len(blobs)
        self._squares = [
            squares_of(contribution, layout) if each is None else each
            for contribution, each in zip(self._contributions, known, strict=True)
        ]
        self._units, self._layout, self._sizes = tuple(units_of(layout)), layout, unit_sizes(layout)
        self._norm_clip, self._most_rms = norm_clip, most_rms
        self.norms = tuple(map(length_of, self._squares))
        counts = weights_of_their_own(blobs, self.norms, micro_batches)
        parts = parts_by_agreement(layout, self._contributions, counts, beacon)
        reach = reach_of(layout.num_elements, most_rms)
        self._factors, self._counts = weighed(self.norms, counts, parts, norm_clip=norm_clip, reach=reach)
        self._total = sum(self._counts)
        if self.is_void:
            return
        left = zip(self._lengths_left(), parts, strict=True)
        self.clip_factors = tuple(factor * part / WHOLE for factor, part in left)

    @property
    def is_void(self) -> bool:
        return self._total == 0

    def open(self, index: int) -> "TensorMean":
        """The mean of the tensor of that place in the layout. Raises MalformedBlob."""
        assert not self.is_void, "nothing was contributed"
        shares = shares_of(self._factors_of(self._units[index]), self._counts, self._total)
        readers = [contribution.open(index) for contribution in self._contributions]
        return TensorMean(readers, shares, unit_of(self._layout.tensors[index].num_elements))

    def let_go(self, index: int) -> None:
        """That tensor was read."""
        for contribution in self._contributions:
            contribution.let_go(index)

    def _factors_of(self, units: slice) -> UnitFactors:
        squares, sizes = [each[units] for each in self._squares], self._sizes[units]
        return factors_of(
            squares, self._counts, self._factors, sizes, norm_clip=self._norm_clip, most_rms=self._most_rms
        )

    def _lengths_left(self) -> Iterator[float]:
        """How long each is still, of what it was."""
        # By tensors, as all of them are large. Of ratios: squares of the smallest factors are no floats any more.
        factors = np.array(self._factors)[:, None]
        own = np.where(factors > 0.0, factors, 1.0)  # of nothing nothing is lost
        lost = [
            (1.0 - (self._factors_of(units) / own) ** 2, units) for units in self._units if units.stop > units.start
        ]
        for row, (factor, squares) in enumerate(zip(self._factors, self._squares, strict=True)):
            whole = math.fsum(squares)
            clipped = math.fsum(float((each[row] * squares[units]).sum()) for each, units in lost)
            yield factor * math.sqrt(max(1.0 - clipped / whole, 0.0)) if whole else factor


@runtime_checkable
class SparseReader(TensorReader, Protocol):
    """Of a tensor that is 0 nearly everywhere: what is added to a mean is what it has alone."""

    def add(self, start: int, stop: int, shares_U: Shares, unit: int, out_X: Tensor) -> None:
        """Adds the elements start to stop, each times its unit's share, to out_X, in which no 0 is a negative one: to the bits that reading, scaling and
        adding come to."""
        ...


class TensorMean:
    """The mean of one tensor, to be read piece by piece by any threads: a TensorReader (reader.py) but for its scratch vector."""

    def __init__(self, readers: Sequence[TensorReader], shares: Sequence[Shares], unit: int = PIECE) -> None:
        """shares: of each contribution, in each unit of so many elements."""
        self._readers = readers
        self._shares = shares
        self._unit = unit

    def read(self, start: int, stop: int, out_X: Tensor, scratch_X: Tensor) -> None:
        """Writes the mean of the elements start to stop into out_X; equal bits on every peer. scratch_X: as long."""
        units = slice(start // self._unit, -(-stop // self._unit))
        for index, (reader, shares) in enumerate(zip(self._readers, self._shares, strict=True)):
            if not index:
                reader.read(start, stop, out_X)
                scale(out_X, shares[units], self._unit).add_(0.0)  # a sum begins at 0.0, so that none is -0.0
                continue
            if isinstance(reader, SparseReader):
                reader.add(start, stop, shares[units], self._unit, out_X)
                continue
            reader.read(start, stop, scratch_X)
            out_X.add_(scale(scratch_X, shares[units], self._unit))


def aggregate(
    layout: Layout, blobs: Sequence[Blob], micro_batches: Sequence[int], *, norm_clip: float, most_rms: float = math.inf
) -> Mean:
    """The whole mean of the decoded blobs as one vector: see WeighedContributions. Raises MalformedBlob."""
    weighed = WeighedContributions(layout, blobs, micro_batches, norm_clip=norm_clip, most_rms=most_rms)
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
    norms: Sequence[float],
    micro_batches: Sequence[int],
    parts: Sequence[int],
    *,
    norm_clip: float,
    reach: float = math.inf,
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """(clip factors, weights) of contributions of which agreement leaves these parts: what it leaves nothing of has no say in how long
    the others may be, and neither have copies nor what an idle peer's residual comes to."""
    counts = tuple(count if part else 0 for count, part in zip(micro_batches, parts, strict=True))
    heard = [norm if count else 0.0 for norm, count in zip(norms, counts, strict=True)]
    factors = clip_factors(heard, counts, norm_clip=norm_clip, reach=reach)
    return factors, tuple(count * part for count, part in zip(counts, parts, strict=True))


def clip_factors(
    norms: Sequence[float], micro_batches: Sequence[int], *, norm_clip: float, reach: float = math.inf
) -> tuple[float, ...]:
    """Factor for each contribution, 1 or less, in 1/64ths (2**-k/64ths below that), so exact in float32; 0 below LEAST_FACTOR.

    The limit of contribution i is norm_clip * median norm * clamp(micro_batches_i / median, 1, 4): one that gathered
    over missed rounds may be larger, one of a slow peer is never held to less than the group's. Medians are lower
    ones, over what is not zero: idle peers cannot clip the others to nothing. reach: the limit of all, also of fewer than
    LEAST_COMPARED, which have no other: the lesser of two would hold the other to nothing.
    """
    if not any(micro_batches):
        return (1.0,) * len(norms)
    are_compared = sum(norm > 0.0 for norm in norms) >= LEAST_COMPARED
    usual = norm_clip * median_norm_of(norms) if are_compared else math.inf
    factors = []
    for norm, scale_ in zip(norms, _scales(micro_batches), strict=True):
        limit = min(usual * scale_, reach)
        factors.append(1.0 if norm <= limit else _rounded_down(limit / norm))
    return tuple(factors)


def reach_of(num_elements: int, most_rms: float) -> float:
    """How long a contribution to so many elements may be at most, whatever others come to. Without it a round of few has no measure: one that
    is alone in it would be its own."""
    return REACH * most_rms * math.sqrt(num_elements)


def _scales(micro_batches: Sequence[int]) -> list[float]:
    """How much longer each may be."""
    median_count = _lower_median([float(count) for count in micro_batches if count > 0])
    return [min(max(count / (median_count or 1.0), 1.0), MAX_LATE_SCALE) for count in micro_batches]


def factors_of(
    squares: Sequence[Squares],
    counts: Sequence[int],
    factors: Sequence[float],
    sizes_U: Lengths,
    *,
    norm_clip: float,
    most_rms: float = math.inf,
) -> UnitFactors:
    """(M, U): of units, the contributions' own factors or what their length there leaves (unit_factors), which is measured as that of the whole is,
    by UNIT_CLIP of its limit, and beside UNIT_REACH of what the inner optimizer can come to. sizes_U: their elements."""
    reach_U = UNIT_REACH * REACH * most_rms * np.sqrt(sizes_U)
    return unit_factors(squares, counts, factors, _scales(counts), norm_clip=UNIT_CLIP * norm_clip, reach_U=reach_U)


def shares_of(factors: UnitFactors, counts: Sequence[int], total: int) -> list[Shares]:
    """Those of each contribution in the mean of each unit."""
    return [(row * count / total).astype(np.float32) for row, count in zip(factors, counts, strict=True)]


def median_norm_of(norms: Sequence[float]) -> float:
    """The lower median of the norms that are not zero, which the limit is a multiple of; 0.0 without any."""
    return _lower_median([norm for norm in norms if norm > 0.0])


def contribution_norm(raw: Blob, layout: Layout) -> float:
    """Euclidean norm of the decoded blob, equal bits on every peer. Raises MalformedBlob: also a full check of raw."""
    return length_of(contribution_squares(raw, layout))


def contribution_squares(raw: Blob, layout: Layout) -> Squares:
    """What squares_of finds in the decoded blob. Raises MalformedBlob: also a full check of raw."""
    return squares_of(open_contribution(raw, layout), layout)


def squared_norm(contribution: Contribution) -> float:
    """The sum of them all. Raises MalformedBlob."""
    return math.fsum(squares_of(contribution, contribution.layout))


def _rounded_down(factor: float) -> float:
    """factor rounded down to 64ths of the power of two above it: 1/64ths for factors from 1/2 up."""
    if factor < LEAST_FACTOR:
        return 0.0
    mantissa, exponent = math.frexp(factor)  # mantissa in [1/2, 1)
    return math.ldexp(math.floor(mantissa * CLIP_STEPS) / CLIP_STEPS, exponent)


def _lower_median(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2] if ordered else 0.0
