"""How much of its work a run has done, by the certificates of a stage: the same to all who have the same chain. Pure.

Work is what a peer says of itself, so it counts as in the mean: at most four times the median of a round.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from dilocox_peer.compression.aggregate import capped_weights
from dilocox_peer.peer.planning.folded import Folded
from dilocox_peer.wire.chain import Certificate

ROUNDS = 64  # whose sums are remembered: those that are asked for are the newest two


@dataclass(slots=True)
class _Sums:
    """(round, micro-batches of all certificates until it had its last), of the newest rounds."""

    newest: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=ROUNDS))


class Worked:
    """A sum over a chain of certificates that is followed as it grows, or becomes another branch."""

    def __init__(self) -> None:
        self._sums = Folded(_Sums, _add)

    def follow(self, chain: Sequence[Certificate]) -> None:
        self._sums.follow(chain)

    def by(self, round_number: int) -> int:
        """Micro-batches in the contributions of all rounds up to this one, which is among the newest."""
        newest = self._sums.value.newest
        return next((done for number, done in reversed(newest) if number <= round_number), 0)


def _add(sums: _Sums, certificate: Certificate, _before: Certificate | None) -> None:
    value = certificate.value
    number, done = sums.newest[-1] if sums.newest else (-1, 0)
    if number == value.round:
        sums.newest.pop()
    sums.newest.append((value.round, done + sum(capped_weights([entry.micro_batches for entry in value.entries]))))
