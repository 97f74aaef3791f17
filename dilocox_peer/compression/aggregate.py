"""The mean of a round's contributions: the one computation whose result must be equal to the bit on every peer.

Therefore: contributions in the certificate's order; float32; only elementwise operations, a multiplication and an
addition each on its own (a fused one rounds once instead of twice, and not on every processor); no reduction whose
order depends on threads or vector width; weights and clip factors computed in exact or integer steps before they touch
the data. Contributions are decoded one tensor at a time: extra memory is the result and one scratch tensor.

Shape letters: N elements of the stage's flat vector.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dilocox_peer.compression.contribution import Blob, Contribution, open_contribution
from dilocox_peer.types import Layout

CLIP_STEPS = 64
"""Clip factors are rounded down to 1/64ths: a difference in a norm's last bits cannot show in the result."""

MAX_WEIGHT = 4
"""Of a contribution, times the group's median: micro-batches are what a peer says of itself."""

MAX_LATE_SCALE = 4.0
"""Pseudo-gradient that gathered over missed rounds may be that much larger than the group's, before clipping starts."""

KEPT_ELEMENTS = 1 << 24  # decoded contributions kept at once: 64 MB
_LANES = 16384
"""Squares are summed lane by lane, so in the same order on every machine; the lanes at the end by exact summation."""


@dataclass(frozen=True, slots=True)
class Mean:
    """mean_N: None when nothing was contributed (a void round). The rest in the certificate's order."""

    mean_N: Tensor | None
    norms: tuple[float, ...]
    clip_factors: tuple[float, ...]


def aggregate(layout: Layout, blobs: Sequence[Blob], micro_batches: Sequence[int], *, norm_clip: float) -> Mean:
    """Mean of the decoded blobs weighted by micro-batches (capped), in the given order; equal bits on every peer.

    A contribution whose norm exceeds norm_clip times the group's median (scaled by its micro-batches, see
    clip_factors) is scaled down to that. Where the decoded blobs would take much memory each is decoded twice: its norm is
    needed before its values. Raises MalformedBlob; nothing is kept then.
    """
    assert len(blobs) == len(micro_batches), f"{len(blobs)} blobs, {len(micro_batches)} weights"
    assert all(count >= 0 for count in micro_batches), f"negative micro-batches in {micro_batches}"
    micro_batches = capped_weights(micro_batches)
    contributions = [open_contribution(raw, layout) for raw in blobs]
    total = sum(micro_batches)
    if total == 0:
        return Mean(None, (0.0,) * len(blobs), (1.0,) * len(blobs))
    if len(blobs) * layout.num_elements <= KEPT_ELEMENTS:
        return _aggregate_kept(layout, contributions, micro_batches, norm_clip=norm_clip)
    scratch_N = torch.empty(max((spec.num_elements for spec in layout.tensors), default=0))

    norms: tuple[float, ...] = (0.0,)
    factors: tuple[float, ...] = (1.0,)
    if len(contributions) > 1:  # a group of one is its own median
        norms = tuple(_norm(contribution, scratch_N) for contribution in contributions)
        factors = clip_factors(norms, micro_batches, norm_clip=norm_clip)

    mean_N = torch.zeros(layout.num_elements)
    for index, contribution in enumerate(contributions):
        weight = _float32(factors[index] * micro_batches[index] / total)
        for _spec, start, stop, values in contribution.decode_into(scratch_N):
            values.mul_(weight)
            mean_N[start:stop].add_(values)
    return Mean(mean_N, norms, factors)


def _aggregate_kept(
    layout: Layout, contributions: Sequence[Contribution], micro_batches: Sequence[int], *, norm_clip: float
) -> Mean:
    """As aggregate, with all decoded at once: the same operations on the same values in the same order."""
    decoded = torch.empty(len(contributions), layout.num_elements)
    scratch_N = torch.empty(max((spec.num_elements for spec in layout.tensors), default=0))
    norms = []
    for row_N, contribution in zip(decoded, contributions, strict=True):
        norms.append(_norm(contribution, scratch_N, keep_N=row_N))
    is_alone = len(contributions) == 1
    factors = (1.0,) if is_alone else clip_factors(norms, micro_batches, norm_clip=norm_clip)
    total = sum(micro_batches)
    mean_N = torch.zeros(layout.num_elements)
    for row_N, factor, count in zip(decoded, factors, micro_batches, strict=True):
        mean_N.add_(row_N.mul_(_float32(factor * count / total)))
    return Mean(mean_N, (0.0,) if is_alone else tuple(norms), factors)


def capped_weights(micro_batches: Sequence[int]) -> tuple[int, ...]:
    """Each at most MAX_WEIGHT times the upper median of those that are not zero, so that no single one of three can say
    that it has done nearly all the work. A peer that really has counts as four usual peers; of two peers none is usual."""
    ordered = sorted(count for count in micro_batches if count > 0)
    most = MAX_WEIGHT * ordered[len(ordered) // 2] if ordered else 0
    return tuple(min(count, most) for count in micro_batches)


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


def median_norm_of(norms: Sequence[float]) -> float:
    """The lower median of the norms that are not zero, which the limit is a multiple of; 0.0 without any."""
    return _lower_median([norm for norm in norms if norm > 0.0])


def contribution_norm(raw: Blob, layout: Layout) -> float:
    """Euclidean norm of the decoded blob, equal bits on every peer. Raises MalformedBlob: also a full check of raw."""
    return _norm(open_contribution(raw, layout), torch.empty(max((s.num_elements for s in layout.tensors), default=0)))


def _norm(contribution: Contribution, scratch_N: Tensor, *, keep_N: Tensor | None = None) -> float:
    """keep_N: takes the decoded values on the way."""
    lanes = torch.zeros(_LANES, dtype=torch.float64)
    for _spec, start, stop, values in contribution.decode_into(scratch_N):
        if keep_N is not None:
            keep_N[start:stop] = values
        for chunk in torch.split(values, _LANES):
            wide = chunk.to(torch.float64)
            lanes[: len(wide)].add_(wide.mul_(wide))  # the square of a float32 is exact in float64
    return math.sqrt(math.fsum(lanes.tolist()))


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
