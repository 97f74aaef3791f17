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

MAX_LATE_SCALE = 4.0
"""Movement that gathered over missed rounds may be that much larger than the group's, before clipping starts."""

_LANES = 16384
"""Squares are summed lane by lane, so in the same order on every machine; the lanes at the end by exact summation."""


@dataclass(frozen=True, slots=True)
class Mean:
    """mean_N: None when nothing was contributed (a void round). The rest in the certificate's order."""

    mean_N: Tensor | None
    norms: tuple[float, ...]
    clip_factors: tuple[float, ...]


def aggregate(layout: Layout, blobs: Sequence[Blob], micro_batches: Sequence[int], *, norm_clip: float) -> Mean:
    """Mean of the decoded blobs weighted by micro-batches, in the given order; equal bits on every peer.

    A contribution whose norm exceeds norm_clip times the group's median (scaled by its micro-batches, see
    clip_factors) is scaled down to that. Decodes each blob twice when there are several: its norm is needed before
    its values. Raises MalformedBlob; nothing is kept then.
    """
    assert len(blobs) == len(micro_batches), f"{len(blobs)} blobs, {len(micro_batches)} weights"
    assert all(count >= 0 for count in micro_batches), f"negative micro-batches in {micro_batches}"
    contributions = [open_contribution(raw, layout) for raw in blobs]
    total = sum(micro_batches)
    if total == 0:
        return Mean(None, (0.0,) * len(blobs), (1.0,) * len(blobs))
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


def clip_factors(norms: Sequence[float], micro_batches: Sequence[int], *, norm_clip: float) -> tuple[float, ...]:
    """Factor in (0, 1] for each contribution, in 1/64ths (2**-k/64ths below that), so exact in float32.

    The limit of contribution i is norm_clip * median norm * clamp(micro_batches_i / median, 1, 4): one that gathered
    over missed rounds may be larger, one of a slow peer is never held to less than the group's. Medians are lower
    ones, over what is not zero: idle peers cannot clip the others to nothing.
    """
    median_norm = _lower_median([norm for norm in norms if norm > 0.0])
    median_count = _lower_median([float(count) for count in micro_batches if count > 0])
    if median_norm == 0.0 or median_count == 0.0:
        return (1.0,) * len(norms)
    factors = []
    for norm, count in zip(norms, micro_batches, strict=True):
        limit = norm_clip * median_norm * min(max(count / median_count, 1.0), MAX_LATE_SCALE)
        factors.append(1.0 if norm <= limit else _rounded_down(limit / norm))
    return tuple(factors)


def contribution_norm(raw: Blob, layout: Layout) -> float:
    """Euclidean norm of the decoded blob, equal bits on every peer. Raises MalformedBlob: also a full check of raw."""
    return _norm(open_contribution(raw, layout), torch.empty(max((s.num_elements for s in layout.tensors), default=0)))


def _norm(contribution: Contribution, scratch_N: Tensor) -> float:
    lanes = torch.zeros(_LANES, dtype=torch.float64)
    for _spec, _start, _stop, values in contribution.decode_into(scratch_N):
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
