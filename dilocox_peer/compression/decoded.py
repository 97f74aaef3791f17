"""Contributions of a round, each decoded once and for all, where that takes little memory: what is compared, measured and averaged then is read from there.

A small tensor costs more to open than to read: of 252,384 elements in topk eight contributions took 100 ms to be compared, a third of what their members
trained in eight steps (benchmarks/hostile_learning.py), and were then opened again for their mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dilocox_peer.compression.contribution import Contribution
from dilocox_peer.compression.reader import TensorReader, pieces
from dilocox_peer.types import Layout

DECODED_BYTES = 1 << 26
"""A mean whose contributions take no more than this decoded decodes each once; of a larger one, what is compared is decoded a second time."""


@dataclass(frozen=True, slots=True)
class DecodedContribution:
    """A contribution's values, to be read as the contribution is. starts: of its tensors. values_N: (N,) float32, CPU."""

    starts: tuple[int, ...]
    values_N: Tensor

    @classmethod
    def of(cls, contribution: Contribution) -> "DecodedContribution":
        """Raises MalformedBlob."""
        layout = contribution.layout
        return cls.of_values(decode_all(contribution, torch.empty(layout.num_elements)), layout)

    @classmethod
    def of_values(cls, values_N: Tensor, layout: Layout) -> "DecodedContribution":
        return cls(tuple(start for _spec, start, _stop in layout.spans()), values_N)

    def open(self, index: int) -> TensorReader:
        return _ValuesReader(self.values_N[self.starts[index] :])

    def let_go(self, index: int) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _ValuesReader:
    values_N: Tensor

    def read(self, start: int, stop: int, out_X: Tensor) -> None:
        out_X.copy_(self.values_N[start:stop])


def decoded_if_small(
    contributions: Sequence[Contribution], layout: Layout
) -> Sequence[Contribution | DecodedContribution]:
    """Them, or what they decode to where all of that is DECODED_BYTES at most. Raises MalformedBlob."""
    if 4 * layout.num_elements * len(contributions) > DECODED_BYTES:
        return contributions
    return [DecodedContribution.of(each) for each in contributions]


def decode_all(contribution: Contribution, out_N: Tensor) -> Tensor:
    """out_N ((N,) float32, CPU), with all that the contribution decodes to. Raises MalformedBlob; out_N is then unspecified."""
    for index, (spec, start, _stop) in enumerate(contribution.layout.spans()):
        reader = contribution.open(index)
        for first, last in pieces(spec.num_elements):
            reader.read(first, last, out_N[start + first : start + last])
        contribution.let_go(index)
    return out_N
