"""How much of its work a run has done, by the certificates of a stage: the same to all who have the same chain. Pure.

Work is what a peer says of itself, so it counts as in the mean: at most four times the median of a round.
"""

from collections.abc import Sequence

from dilocox_peer.compression.aggregate import capped_weights
from dilocox_peer.types import Digest
from dilocox_peer.wire.chain import Certificate


class Worked:
    """A sum over a chain of certificates that is followed as it grows, or becomes another branch."""

    def __init__(self) -> None:
        self._heads: list[Digest] = []
        self._sums: list[tuple[int, int]] = []  # (round, micro-batches of all certificates until then)

    def follow(self, chain: Sequence[Certificate]) -> None:
        kept = len(self._heads)
        if kept > len(chain) or (kept and chain[kept - 1].head != self._heads[-1]):  # another branch: all anew
            self._heads, self._sums = [], []
        for certificate in chain[len(self._heads) :]:
            value = certificate.value
            before = self._sums[-1][1] if self._sums else 0
            self._heads.append(certificate.head)
            self._sums.append(
                (value.round, before + sum(capped_weights([entry.micro_batches for entry in value.entries])))
            )

    def by(self, round_number: int) -> int:
        """Micro-batches in the contributions of all rounds up to this one."""
        return next((done for number, done in reversed(self._sums) if number <= round_number), 0)
