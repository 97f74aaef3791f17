"""A peer as the map of a swarm has it. Pure."""

from dataclasses import dataclass

from dilocox_peer.types import PeerId


@dataclass(slots=True)
class MapPeer:
    """A peer of the swarm map. is_here: None unless it is of our stage or linked with us."""

    peer: PeerId
    stage: int
    tokens_per_s: float = 0.0
    round: int = 0
    reachability: str = "direct"
    is_here: bool | None = None
    is_paused: bool = False
    is_leader: bool = False
    is_listed: bool = False  # its lease was there at the last look

    @property
    def counts(self) -> bool:
        """Whether it holds its stage, as far as we know: heard, or not known to be gone and listed."""
        return self.is_here is True or (self.is_here is None and self.is_listed)
