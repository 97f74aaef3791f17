"""Which codecs contributions may be of in a run. Any that this version decodes would let a stranger choose the slowest: `ecsq`, in a run whose
contributions are int4, takes all who check it 15 times as long."""

from collections.abc import Collection
from dataclasses import dataclass

from dilocox_peer.compression.contribution import Contribution
from dilocox_peer.compression.ladder import LOW_RANK
from dilocox_peer.compression.lowrank import rank_of
from dilocox_peer.compression.names import codec_names
from dilocox_peer.compression.sizes import (
    LENGTH_BYTES,
    low_rank_bytes,
    matrix_shape,
    max_header_bytes,
    payload_limits,
)
from dilocox_peer.compression.slices import RESULT_CODEC
from dilocox_peer.errors import MalformedBlob
from dilocox_peer.types import Layout, TensorSpec


@dataclass(frozen=True, slots=True)
class AllowedCodecs:
    """What contributions of any round of a run may be: one by an earlier plan is still taken, and so are the leaner ones of a peer that missed
    rounds, which are the run's codecs too.

    codecs: that a plan may name. max_rank: of low rank, that it may name.
    """

    codecs: Collection[str]
    max_rank: int

    def check(self, contribution: Contribution) -> None:
        """Decodes nothing. Raises MalformedBlob with the reason."""
        tensors = zip(contribution.layout.tensors, contribution.codecs, contribution.payloads, strict=True)
        for spec, codec, payload in tensors:
            if codec.name not in (names := self._names(spec)):
                raise MalformedBlob(f"{spec.name} in {codec.name}; in this run it may be in {', '.join(sorted(names))}")
            if codec.name == LOW_RANK and (rank := rank_of(payload)) > self.max_rank:
                raise MalformedBlob(f"{spec.name} in rank {rank}; in this run at most {self.max_rank}")

    def max_bytes(self, layout: Layout) -> int:
        """That a contribution with these tensors may have: what a stranger may have us fetch before it is looked at."""
        tensors = (max(self._most_bytes(name, spec) for name in self._names(spec)) for spec in layout.tensors)
        return LENGTH_BYTES + max_header_bytes(layout) + sum(tensors)

    def _most_bytes(self, name: str, spec: TensorSpec) -> int:
        most = payload_limits(name, spec.shape)[1]
        if name != LOW_RANK:
            return most
        rows, columns = matrix_shape(spec.shape)
        return min(most, low_rank_bytes(rows, columns, min(self.max_rank, rows, columns)))

    def of_results(self) -> "AllowedCodecs":
        """What means of such contributions may be, where a run averages in slices."""
        return AllowedCodecs(
            frozenset(RESULT_CODEC[codec] for codec in self.codecs if codec in RESULT_CODEC), self.max_rank
        )

    def _names(self, spec: TensorSpec) -> frozenset[str]:
        """Whether low rank pays depends on the rank."""
        ranks = (1, max(self.max_rank, 1))
        return frozenset(codec_names(codec, rank=rank)(spec) for codec in self.codecs for rank in ranks)
