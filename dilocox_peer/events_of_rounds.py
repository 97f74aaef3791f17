"""What becomes of the contributions to a round, as values."""

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
