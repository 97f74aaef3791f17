"""The mean of a round's contributions: the one computation whose result must be equal to the bit on every peer.

Therefore: contributions in the certificate's order; float32; only elementwise operations, a multiplication and an
addition each on its own (a fused one rounds once instead of twice, and not on every processor); no reduction whose
order depends on threads or vector width; weights and clip factors computed in exact or integer steps before they touch
the data. Contributions are decoded one tensor at a time: extra memory is the result and one scratch tensor.

Shape letters: N elements of the stage's flat vector.
"""

import math
import struct
from collections.abc import Iterator, Sequence
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


class WeighedContributions:
    """A round's contributions, opened and with their shares in the mean: which can then be taken tensor by tensor.

    norms, clip_factors: in the certificate's order.
    """

    def __init__(
        self, layout: Layout, blobs: Sequence[Blob], micro_batches: Sequence[int], *, norm_clip: float
    ) -> None:
        """Weights are micro-batches (capped). A contribution whose norm exceeds norm_clip times the group's median (scaled by its
        micro-batches, see clip_factors) is scaled down to that: each is decoded once for its norm, and again for its values,
        unless all of them decoded are small. Raises MalformedBlob, also for a value that is not finite."""
        assert len(blobs) == len(micro_batches), f"{len(blobs)} blobs, {len(micro_batches)} weights"
        assert all(count >= 0 for count in micro_batches), f"negative micro-batches in {micro_batches}"
        micro_batches = capped_weights(micro_batches)
        self._layout = layout
        self._contributions = [open_contribution(raw, layout) for raw in blobs]
        self._scratch_N = torch.empty(max((spec.num_elements for spec in layout.tensors), default=0))
        self._kept: list[Tensor] | None = None
        self._total = sum(micro_batches)
        self.norms: tuple[float, ...] = (0.0,) * len(blobs)
        self.clip_factors: tuple[float, ...] = (1.0,) * len(blobs)
        if self._total == 0:
            return
        if len(blobs) * layout.num_elements <= KEPT_ELEMENTS:
            self._kept = [torch.empty(layout.num_elements) for _ in blobs]
        norms = tuple(self._read(index) for index in range(len(blobs)))
        if len(blobs) > 1:  # a group of one is its own median
            self.norms = norms
            self.clip_factors = clip_factors(norms, micro_batches, norm_clip=norm_clip)
        self._shares = [
            _float32(factor * count / self._total)
            for factor, count in zip(self.clip_factors, micro_batches, strict=True)
        ]

    @property
    def is_void(self) -> bool:
        return self._total == 0

    def means(self) -> Iterator[tuple[int, int, Tensor]]:
        """(start, stop, mean) of every tensor, in the layout's order, equal bits on every peer; the mean is flat, and another
        one's from the next step on."""
        assert not self.is_void, "nothing was contributed"
        mean_N = torch.empty_like(self._scratch_N)
        decoding = [] if self._kept is not None else [each.decode_in_turn() for each in self._contributions]
        for _spec, start, stop in self._layout.spans():
            mean = mean_N[: stop - start].zero_()
            for index, share in enumerate(self._shares):
                if self._kept is not None:
                    values = self._kept[index][start:stop]
                else:
                    values = next(decoding[index])(self._scratch_N)
                mean.add_(values.mul_(share))
            yield start, stop, mean

    def _read(self, index: int) -> float:
        keep_N = None if self._kept is None else self._kept[index]
        return _norm(self._contributions[index], self._scratch_N, keep_N=keep_N)


def aggregate(layout: Layout, blobs: Sequence[Blob], micro_batches: Sequence[int], *, norm_clip: float) -> Mean:
    """The whole mean of the decoded blobs as one vector: see WeighedContributions. Raises MalformedBlob."""
    weighed = WeighedContributions(layout, blobs, micro_batches, norm_clip=norm_clip)
    if weighed.is_void:
        return Mean(None, weighed.norms, weighed.clip_factors)
    mean_N = torch.empty(layout.num_elements)
    for start, stop, mean in weighed.means():
        mean_N[start:stop] = mean
    return Mean(mean_N, weighed.norms, weighed.clip_factors)


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
