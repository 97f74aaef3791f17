"""What a stage's rounds took, and what became of contributions that were not taken as they were. A fold over events. Pure."""

from collections import deque
from dataclasses import dataclass, field, replace

from dilocox_peer.events import RoundCertified
from dilocox_peer.events_of_rounds import ContributionClipped, ContributionRefused, ContributionsMissed
from dilocox_peer.types import PeerId

SHARE_OF = 32  # rounds
MAX_CENSURED = 64  # peers; a stage has no more at a time


@dataclass(frozen=True, slots=True)
class Round:
    """One certified outer round. raw_bytes: of our pseudo-gradient in float32. val_loss: None where nobody told. refused, clipped:
    of the contributions offered to it, and of those in its mean; None where that is not known, as in slices."""

    number: int
    at_s: float
    contributors: int
    roster: int
    own_included: bool
    train_loss: float
    codec: str
    rank: int
    inner_steps: int
    delay_s: float | None
    bytes_sent: int
    raw_bytes: int
    val_loss: float | None = None
    refused: int = 0
    clipped: int | None = 0

    @property
    def allreduce_bytes(self) -> float:
        """What a ring all-reduce of float32 gradients after every inner step would have had this peer send, 0 alone."""
        members = max(1, self.contributors)
        return 2 * (members - 1) / members * self.raw_bytes * self.inner_steps

    @property
    def times_less(self) -> float | None:
        """All-reduce's bytes for each byte sent; None where there is nothing to compare."""
        return self.allreduce_bytes / self.bytes_sent if self.bytes_sent > 0 and self.allreduce_bytes else None


@dataclass(frozen=True, slots=True)
class Censure:
    """What became of a peer's contributions that were not taken as they were: how many, and of the last of each kind the event."""

    num_refused: int = 0
    num_clipped: int = 0
    refused: ContributionRefused | None = None
    clipped: ContributionClipped | None = None


@dataclass(slots=True)
class Contributions:
    """by_peer: whose were refused or clipped, the latest last. weighed: norm and clip factor of those in the last round, if they are known.
    missed: the last that a round went without. counted: of the newest rounds, how many counted, and how many could have."""

    by_peer: dict[PeerId, Censure] = field(default_factory=dict)
    weighed: dict[PeerId, tuple[float, float]] = field(default_factory=dict)
    missed: ContributionsMissed | None = None
    counted: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=SHARE_OF))

    @property
    def share(self) -> float | None:
        """The share of the contributions to the newest 32 rounds that counted, among those that could. None before the first."""
        possible = sum(of for _, of in self.counted)
        return sum(count for count, _ in self.counted) / possible if possible else None

    def take(self, event: ContributionRefused | ContributionClipped | ContributionsMissed) -> None:
        if isinstance(event, ContributionsMissed):
            self.missed = event
            return
        known = self.by_peer.pop(event.peer, Censure())
        if isinstance(event, ContributionRefused):
            known = replace(known, refused=event, num_refused=known.num_refused + 1)
        else:
            known = replace(known, clipped=event, num_clipped=known.num_clipped + 1)
        self.by_peer[event.peer] = known
        while len(self.by_peer) > MAX_CENSURED:
            del self.by_peer[next(iter(self.by_peer))]

    def weigh(self, event: RoundCertified) -> None:
        measured = zip(event.norms, event.clip_factors, strict=False)  # a log that is replayed may be old, or damaged
        self.weighed = dict(zip(event.contributors, measured, strict=False))
        missed = self.missed
        without = len(missed.missed) if missed is not None and missed.round == event.round else 0
        self.counted.append((len(event.contributors), len(event.contributors) + without))

    def num_refused(self, round_number: int) -> int:
        """How many peers had their contribution to this round refused."""
        refused = (each.refused for each in self.by_peer.values())
        return sum(event is not None and event.round == round_number for event in refused)
