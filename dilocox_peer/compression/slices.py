"""A contribution in slices, each of which decodes alone, and the mean of one slice.

The vector is cut at rows of its tensors into slices of about equal length: so the parts of tensors make a layout of their own over the
same vector, and each slice is a run of its tensors, encoded as a contribution of that layout (contribution.py). All codecs can that
encode a part of a matrix as they encode the whole; low rank cannot. A table names the slices; its hash is the contribution's name.

The rules of a mean (aggregate.py) that need the whole vector are applied to the tables, which everybody has: norms, as the root of the slices'
squares, each of which whoever averages that slice has checked; weights; copies, as tables that are the same. How a contribution agrees with
the others is found slice by slice, in the slice's own sample. So whoever averages a slice needs nothing of the other slices.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from dilocox_peer.compression.aggregate import (
    TensorMean,
    capped_weights,
    contribution_squares,
    factors_of,
    reach_of,
    shares_of,
    squared_norm,
    weighed,
    weights_of_their_own,
)
from dilocox_peer.compression.agreement import parts_by_agreement
from dilocox_peer.compression.codec import CodecPolicy
from dilocox_peer.compression.contribution import (
    Blob,
    Contribution,
    ContributionEncoder,
    join_payloads,
    open_contribution,
)
from dilocox_peer.compression.decoded import DecodedContribution, decode_all, decoded_if_small
from dilocox_peer.compression.feedback import decay_by_codec, residual_after, with_feedback
from dilocox_peer.compression.lengths import Squares, length_of, scale, squares_of, unit_of, unit_sizes, units_of
from dilocox_peer.compression.reader import Payload
from dilocox_peer.errors import MalformedBlob
from dilocox_peer.types import Layout, TensorSpec, sha256
from dilocox_peer.wire import versions
from dilocox_peer.wire.blobs import SLICE_TABLE, SlicePart, SliceTable
from dilocox_peer.wire.declared import encode

RESULT_CODEC = {
    "none": "none", "fp16": "fp16", "int8": "int8", "int4": "int4", "int2": "int4", "sign": "int2", "topk": "ecsq",
}  # fmt: skip
"""Of a mean, by the codec of contributions. One of many deserves a finer code than each of them, as it is sent once. A mean of sparse
contributions has few zeros where there are many of them, and many where there are few: ecsq has a use for either."""


_ALL = 1 << 62  # elements of one unit


@dataclass(frozen=True)
class Cut:
    """A stage's vector in slices. layout: of the whole, its tensors cut. slices: of each its own; tensor i of it is tensor firsts + i of
    the whole. starts: where in the vector each begins."""

    layout: Layout
    slices: tuple[Layout, ...]
    firsts: tuple[int, ...]
    starts: tuple[int, ...]


def cut(layout: Layout, count: int) -> Cut:
    """The layout in count slices; of a small stage some are empty."""
    total = layout.num_elements
    ends = [total * (index + 1) // count for index in range(count)]
    parts: list[list[TensorSpec]] = [[] for _ in range(count)]
    index = 0
    for spec, first, _stop in layout.spans():
        rows = spec.shape[0] if spec.shape else 1
        width = spec.num_elements // rows if rows else 0
        row = 0
        while row < rows and width:
            while index < count - 1 and first + row * width >= ends[index]:
                index += 1
            until = rows if index == count - 1 else min(rows, -(-(ends[index] - first) // width))
            shape = (until - row, *spec.shape[1:]) if spec.shape else ()
            parts[index].append(TensorSpec(f"{spec.name}[{row}]", shape, spec.role))
            row = until
    slices = tuple(Layout(tuple(each)) for each in parts)
    whole = Layout(tuple(spec for each in slices for spec in each.tensors))
    assert whole.num_elements == total, "a tensor without elements"
    firsts = tuple(accumulate((len(each.tensors) for each in slices), initial=0))[:-1]
    starts = tuple(accumulate((each.num_elements for each in slices), initial=0))[:-1]
    return Cut(whole, slices, firsts, starts)


# ---- a contribution -------------------------------------------------------------------------------------------------


def sliced_payloads(cut_: Cut, codec_of: CodecPolicy, payloads: list[Payload]) -> tuple[memoryview, ...]:
    """The slices' blobs of a contribution whose tensors, as they are cut, were encoded to these payloads; takes them over."""
    blobs = []
    for layout, first in zip(cut_.slices, cut_.firsts, strict=True):
        blobs.append(join_payloads(layout, codec_of, payloads[first : first + len(layout.tensors)]))
        payloads[first : first + len(layout.tensors)] = [b""] * len(layout.tensors)
    return tuple(blobs)


def table_of(cut_: Cut, blobs: Sequence[Blob]) -> bytes:
    """The table of a contribution whose slices these blobs are."""
    parts = tuple(
        SlicePart(sha256(blob), len(blob), squared_norm(open_contribution(blob, layout)))
        for blob, layout in zip(blobs, cut_.slices, strict=True)
    )
    return encode(SliceTable(versions.CONTRIBUTION, cut_.layout.digest(), parts))


def read_table(raw: Blob, cut_: Cut) -> SliceTable:
    """Raises MalformedBlob for what is no table of a contribution to this stage."""
    try:
        table = SLICE_TABLE.read(bytes(raw))
    except ValueError as error:
        raise MalformedBlob(str(error)) from None
    if table.layout != cut_.layout.digest() or len(table.parts) != len(cut_.slices):
        raise MalformedBlob("made for another layout, or other slices of it")
    return table


def check_part(blob: Blob, layout: Layout, part: SlicePart) -> Squares:
    """Its squares, where blob is what a table says of a slice. Decodes it. Raises MalformedBlob."""
    if len(blob) != part.size_bytes:
        raise MalformedBlob(f"a slice of {len(blob)} bytes, its table says {part.size_bytes}")
    found = contribution_squares(blob, layout)
    if math.fsum(found) != part.squared:
        raise MalformedBlob("a slice of another norm than its table says")
    return found


def joined(cut_: Cut, blobs: Sequence[Blob]) -> Contribution:
    """The contribution whose slices these blobs are. Raises MalformedBlob."""
    opened = [open_contribution(blob, layout) for blob, layout in zip(blobs, cut_.slices, strict=True)]
    return Contribution(
        cut_.layout,
        tuple(codec for each in opened for codec in each.codecs),
        tuple(payload for each in opened for payload in each.payloads),
    )


class CertifiedMean:
    """The mean that a certificate's results are, to be read as WeighedContributions are (aggregate.py). norms, clip_factors: of no contribution: whoever
    averages a slice sees what it weighs there, nobody what it does as a whole."""

    norms: tuple[float, ...] = ()
    clip_factors: tuple[float, ...] = ()

    def __init__(self, cut_: Cut, blobs: Sequence[Blob], *, is_void: bool = False) -> None:
        """is_void: nobody worked for it; what momentum there is would coast. Raises MalformedBlob."""
        self._whole, self.is_void = joined(cut_, blobs), is_void

    def open(self, index: int) -> TensorMean:
        """A tensor of the cut layout. Raises MalformedBlob."""
        return TensorMean([self._whole.open(index)], [np.ones(1, np.float32)], _ALL)

    def let_go(self, index: int) -> None:
        """That tensor was read."""
        self._whole.let_go(index)


# ---- the mean of a slice --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SliceInput:
    """One of the contributions: its table, as it is, and the slice's blob. squares: what check_part found in it; None: they are found anew."""

    table: bytes
    squared: tuple[float, ...]
    blob: Blob
    micro_batches: int
    squares: Squares | None = None


@dataclass(frozen=True, slots=True)
class AveragedSlice:
    """blob: the mean and the residual before, encoded. residual: what that lost, float32, little-endian. Neither is copied whole: that
    would hold the interpreter."""

    blob: memoryview
    residual: memoryview


def average_slice(
    layout: Layout,
    inputs: Sequence[SliceInput],
    *,
    norm_clip: float,
    codec_of: CodecPolicy,
    residual: Blob,
    beacon: bytes,
    most_rms: float = math.inf,
    num_elements: int = 0,
    longest_residual: float = math.inf,
) -> AveragedSlice:
    """Equal bytes on every machine, from equal inputs in equal order. residual: what was lost before, b"": nothing. beacon: known to nobody
    before all had contributed. most_rms: of what contributes, as in aggregate.py. num_elements: of the whole vector, where this is not all of it.
    longest_residual: what check_residual lets pass; what is lost is carried on within it. Raises MalformedBlob."""
    residual_N = _residual(residual, layout)
    sent_N = torch.zeros_like(residual_N)
    if not any(each.micro_batches for each in inputs):
        # Such a round moves nothing (CertifiedMean.is_void): what was lost before waits for the next.
        return AveragedSlice(ContributionEncoder(layout, codec_of).blob_of(sent_N), _bytes_of(residual_N))
    _mean(
        layout, inputs, norm_clip=norm_clip, most_rms=most_rms, num_elements=num_elements or layout.num_elements, beacon=beacon, out_N=sent_N,
    )  # fmt: skip
    for (_spec, start, stop), decay in zip(layout.spans(), decay_by_codec(layout, codec_of), strict=True):
        with_feedback(sent_N[start:stop], residual_N[start:stop], decay, out=sent_N[start:stop])
    blob = ContributionEncoder(layout, codec_of).blob_of(sent_N)
    decode_all(open_contribution(blob, layout), residual_N)
    lost_N = residual_after(sent_N, residual_N)
    if longest_residual < math.inf and (length := _length_of(lost_N, layout)) > longest_residual:
        # A power of two: exact.
        lost_N.mul_(2.0 ** -math.frexp(length / longest_residual)[1])
    return AveragedSlice(blob, _bytes_of(lost_N))


def _bytes_of(values_N: Tensor) -> memoryview:
    return values_N.numpy().astype("<f4", copy=False).data.cast("B").toreadonly()


def check_residual(raw: Blob, layout: Layout, longest: float = math.inf) -> None:
    """Raises MalformedBlob for what cannot be what an encoding of this slice lost. longest: the norm that it may have. Bitwise: who refuses it averages
    without it, and all that average are to come to the same."""
    values_N = _residual(raw, layout)
    if longest < math.inf and _length_of(values_N, layout) > longest:
        raise MalformedBlob("a residual further than any encoding can lose")


def _length_of(values_N: Tensor, layout: Layout) -> float:
    return length_of(squares_of(DecodedContribution.of_values(values_N, layout), layout))


def _residual(raw: Blob, layout: Layout) -> Tensor:
    if not len(raw):
        return torch.zeros(layout.num_elements)
    if len(raw) != 4 * layout.num_elements:
        raise MalformedBlob(f"a residual of {len(raw)} bytes for {layout.num_elements} elements")
    values = torch.from_numpy(np.frombuffer(raw, "<f4").astype(np.float32))
    if not bool(torch.isfinite(values).all()):
        raise MalformedBlob("a residual that is not finite")
    return values


def _mean(
    layout: Layout,
    inputs: Sequence[SliceInput],
    *,
    norm_clip: float,
    most_rms: float,
    num_elements: int,
    beacon: bytes,
    out_N: Tensor,
) -> None:
    """As aggregate.py has it, of one slice: in the inputs' order, a multiplication and an addition each on its own."""
    out_N.zero_()
    norms = [math.sqrt(math.fsum(each.squared)) for each in inputs]
    counts = capped_weights([each.micro_batches for each in inputs])
    opened = [open_contribution(each.blob, layout) for each in inputs]
    contributions = decoded_if_small(opened, layout)
    counts = weights_of_their_own([each.table for each in inputs], norms, counts)
    parts = parts_by_agreement(layout, contributions, counts, beacon)
    reach = reach_of(num_elements, most_rms)
    factors, counts = weighed(norms, counts, parts, norm_clip=norm_clip, reach=reach)
    if not (total := sum(counts)):
        return
    squares = [
        squares_of(contribution, layout) if each.squares is None else each.squares
        for each, contribution in zip(inputs, contributions, strict=True)
    ]
    left_MU = factors_of(squares, counts, factors, unit_sizes(layout), norm_clip=norm_clip, most_rms=most_rms)
    shares = shares_of(left_MU, counts, total)
    scratch_N = torch.empty(0 if isinstance(contributions[0], DecodedContribution) else layout.num_elements)
    for row, contribution in enumerate(contributions):
        if isinstance(contribution, DecodedContribution):
            decoded_N = contribution.values_N
        else:
            decoded_N = decode_all(contribution, scratch_N)
        for (spec, start, stop), units in zip(layout.spans(), units_of(layout), strict=True):
            unit = unit_of(spec.num_elements)
            out_N[start:stop].add_(scale(decoded_N[start:stop], shares[row][units], unit))
