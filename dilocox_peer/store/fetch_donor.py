"""What a fetch knows of one of its donors: what it was asked for, how fast it is, how often it failed. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dilocox_peer.store.outline import CHUNK_BYTES, Outline
from dilocox_peer.types import PeerId

UNMEASURED_S = 2.0  # a donor that has sent nothing yet is not called slow before


@dataclass(slots=True)
class FetchDonor:
    """at, stop: what is left of its range, stop 0: none. began_s, heard_s, got: of that range. retry_s: not to be asked before."""

    outline: Outline | None = None
    is_out: bool = False
    is_asked: bool = False  # for its outline
    asked_s: float = 0.0
    at: int = 0
    stop: int = 0
    began_s: float = 0.0
    heard_s: float = 0.0
    got: int = 0
    rate: float | None = None  # bytes a second; None: it has not been tried
    failures: int = 0
    failures_in_all: int = 0
    retry_s: float = 0.0
    reasons: list[str] = field(default_factory=list)

    @property
    def is_busy(self) -> bool:
        return self.stop > 0

    def is_unasked(self, now: float) -> bool:
        return self.outline is None and not self.is_out and not self.is_asked and now >= self.retry_s

    def is_resting(self, now: float) -> bool:
        return not self.is_out and now < self.retry_s

    def begin(self, at: int, stop: int, now: float) -> None:
        self.at, self.stop = at, stop
        self.began_s, self.heard_s, self.got = now, now, 0

    def heard(self, num_bytes: int, now: float) -> None:
        """So many bytes of its range have come."""
        self.got += num_bytes
        self.heard_s = now
        if self.rate is None or self.got >= CHUNK_BYTES or now - self.began_s >= UNMEASURED_S:  # a few bytes say little
            self.reckon(now)

    def reckon(self, now: float) -> None:
        """Its rate is that of this range so far: who began fast and then trickles, or sends nothing, is not asked before all others again."""
        self.rate = max(self.got / max(now - self.began_s, 1e-6), 1.0)

    def left_s(self, now: float) -> float:
        """Until it is done at its speed so far, and no less than it has been silent; 0 while its speed is not known."""
        waited = now - self.began_s
        if not self.got and waited < UNMEASURED_S:
            return 0.0
        return max((self.stop - self.at) / max(self.got / max(waited, 1e-6), 1.0), now - self.heard_s)


def why_nobody(donors: Mapping[PeerId, FetchDonor]) -> str:
    """Why none of them is asked any more."""
    if not donors:
        return "nobody to ask"
    said = (f"{peer}: {donor.reasons[-1]}" for peer, donor in donors.items() if donor.reasons)
    return "; ".join(said) or "nobody has it"
