"""What becomes of the contributions to a round, and what they add up to, as values."""

from dataclasses import dataclass

from dilocox_peer.events import Event, short
from dilocox_peer.types import PeerId


@dataclass(frozen=True, slots=True)
class ContributionsMissed(Event):
    """The mean of a round lacks contributions of peers that were here, ourselves included. missed: each with why, as we saw it."""

    round: int
    missed: tuple[tuple[PeerId, str], ...]

    def line(self) -> str:
        return f"round {self.round} without {'; '.join(f'{short(peer)}: {why}' for peer, why in self.missed)}"


@dataclass(frozen=True, slots=True)
class AveragesDiffer(Event):
    """Members came to different results of one slice of a round: one of them, or its machine, is wrong, and what the others say counts.
    said: peer, the statement that it signed (AverageSaid) and the signature, both in hex: the proof."""

    round: int
    slice: int
    said: tuple[tuple[PeerId, str, str], ...]

    def line(self) -> str:
        return f"slice {self.slice} of round {self.round}: {', '.join(short(peer) for peer, _, _ in self.said)} do not come to the same"


@dataclass(frozen=True, slots=True)
class OwnerDirected(Event):
    """The run's owner has signed what it wants of the run. applies: a certificate of our chain has it; else it is on its way there.
    wants: in words; said: to everybody, "": nothing."""

    number: int
    applies: bool
    wants: str
    said: str

    def line(self) -> str:
        said = f'; the owner says: "{self.said}"' if self.said else ""
        when = "applies" if self.applies else "is heard, and comes with one of the next rounds"
        return f"directive {self.number} of the run's owner {when}: {self.wants}{said}"


@dataclass(frozen=True, slots=True)
class RoundsFetched(Event):
    """All rounds from first to last were merged, in which this peer had no part. has_come: it had trained in one before."""

    first: int
    last: int
    has_come: bool

    def line(self) -> str:
        rounds = f"round {self.first}" if self.first == self.last else f"rounds {self.first} to {self.last}"
        return f"fetched {rounds}, made {'without this peer' if self.has_come else 'before this peer came'}"


@dataclass(frozen=True, slots=True)
class Credited(Event):
    """What the run's certificates count of this peer at its stage, over all its sessions. share: of the stage's, 0.0 to 1.0. has_trained:
    in this one."""

    stage: int
    rounds: int
    tokens: int
    share: float
    has_trained: bool = True

    def line(self) -> str:
        if not self.rounds and not self.has_trained:
            return "no contribution of this peer counts yet: nothing was trained this time"
        if not self.rounds:
            return "no contribution of this peer counts yet; the next `join` goes on with what it has trained"
        of_stage = f"{self.share:.0%} of what stage {self.stage} has trained"
        return f"thank you: {self.rounds} rounds have a contribution of yours, with {self.tokens:,} tokens, {of_stage}"


@dataclass(frozen=True, slots=True)
class ContributionRefused(Event):
    """What a peer offered to a round, or proposed as its leader, is malformed or not finite: no mean takes it."""

    peer: PeerId
    round: int
    reason: str
    LEVEL = "warning"

    def line(self) -> str:
        return f"contribution of {short(self.peer)} to round {self.round} refused: {self.reason}"


@dataclass(frozen=True, slots=True)
class ContributionClipped(Event):
    """A contribution weighs less in the mean than its work, by factor, below 1: it was too large beside the others' (limits.norm_clip)
    or agrees little with them (compression/agreement.py), or not at all: 0.
    norm: Euclidean, of all that it decodes to; median_norm: of the round's contributions, those of norm 0 left out."""

    peer: PeerId
    round: int
    norm: float
    median_norm: float
    factor: float
    LEVEL = "warning"

    def line(self) -> str:
        word, why = why_it_weighs_less(self.norm, self.median_norm, self.factor)
        return f"contribution of {short(self.peer)} to round {self.round} {word}: {why}"


def why_it_weighs_less(norm: float, median_norm: float, factor: float) -> tuple[str, str]:
    """(What became of a contribution, why), from the fields of ContributionClipped."""
    if factor == 0.0:
        return "left out of the mean", "it does not agree with most of the others"
    if norm <= median_norm:
        return "scaled", f"it agrees little with the others, and counts by {factor:.3g}"
    return "clipped", f"its norm {norm:.3g}, the group's median {median_norm:.3g}, scaled by {factor:.3g}"
