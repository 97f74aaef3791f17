"""What a stage's certificates count of each peer: the credit that volunteers have for their work. A fold over a verified chain. Pure.

A quorum signs which contributions a round's mean is made of and with how many micro-batches each: so who has the chain and the
run's settings can check every line without asking anybody.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

from dilocox_peer.compression.aggregate import capped_weights
from dilocox_peer.types import PeerId
from dilocox_peer.wire.chain import Certificate


@dataclass(slots=True)
class Credit:
    """Of one peer at one stage. rounds: with a contribution of its that counted. micro_batches: in them, as it claimed, a quorum let
    stand and the mean weighed: at most four times the median of a round, and of one contribution under
    several names a part. size_bytes: of these contributions, each once. first_round, last_round: the oldest and newest of them."""

    peer: PeerId
    first_round: int
    rounds: int = 0
    micro_batches: int = 0
    size_bytes: int = 0
    last_round: int = 0


@dataclass(slots=True)
class Ledger:
    """Give `count` each certificate of the chain once, in order. rounds: completed, void ones included."""

    by_peer: dict[PeerId, Credit] = field(default_factory=dict)
    rounds: int = 0
    micro_batches: int = 0

    @classmethod
    def of(cls, certificates: Iterable[Certificate]) -> Self:
        ledger = cls()
        for certificate in certificates:
            ledger.count(certificate)
        return ledger

    def count(self, certificate: Certificate) -> None:
        value = certificate.value
        if value.kind != "round":
            return
        self.rounds = value.round
        weights = capped_weights([entry.micro_batches for entry in value.entries])
        named = Counter(entry.blob for entry in value.entries)
        for entry, weight in zip(value.entries, weights, strict=True):
            micro_batches = weight // named[entry.blob]
            credit = self.by_peer.get(entry.peer)
            if credit is None:
                credit = self.by_peer[entry.peer] = Credit(entry.peer, value.round)
            credit.rounds += 1
            credit.micro_batches += micro_batches
            credit.size_bytes += entry.size_bytes
            credit.last_round = value.round
            self.micro_batches += micro_batches

    def ranked(self) -> list[Credit]:
        """The peer with most work counted comes first."""
        return sorted(self.by_peer.values(), key=lambda each: (-each.micro_batches, -each.rounds, each.peer))

    def share_of(self, peer: PeerId) -> float:
        """Of all micro-batches counted at the stage, 0.0 to 1.0."""
        credit = self.by_peer.get(peer)
        return credit.micro_batches / self.micro_batches if credit is not None and self.micro_batches else 0.0
