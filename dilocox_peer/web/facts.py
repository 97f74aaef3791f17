"""What is known of a run by somebody who watches it, as it is handed to the fold (document.py): values, nothing that changes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dilocox_peer.events_of_data import TextSampled
from dilocox_peer.events_of_health import Trouble
from dilocox_peer.types import PeerId
from dilocox_peer.wire.chain import Certificate

SeenReachability = Literal["direct", "relayed", "unknown"]


@dataclass(frozen=True, slots=True)
class Holder:
    """A peer that announces to hold a stage. tokens_per_s: of its training, 0.0 unknown. round: that it trains. answers: whether
    there is a connection with it from here; None: nobody tried."""

    peer: PeerId
    tokens_per_s: float
    round: int
    reachability: SeenReachability
    answers: bool | None = None
    is_paused: bool = False
    name: str = ""

    @property
    def is_here(self) -> bool:
        """Whether it holds its stage, as far as is known."""
        return self.answers is not False

    @property
    def works(self) -> bool:
        return self.is_here and not self.is_paused


@dataclass(frozen=True, slots=True)
class StageFacts:
    """certificates: all of the stage's chain, verified, from genesis on. roster: of the next round."""

    certificates: Sequence[Certificate]
    holders: Sequence[Holder]
    roster: Sequence[PeerId]
    is_over: bool = False

    @property
    def here(self) -> Sequence[Holder]:
        return [holder for holder in self.holders if holder.is_here]

    @property
    def tokens_per_s(self) -> float:
        """That those who train say they compute together."""
        return sum(holder.tokens_per_s for holder in self.holders if holder.works)


@dataclass(frozen=True, slots=True)
class RunFacts:
    """One look at a run. at_s: when (Unix seconds). link: that others join with. validation: losses by round, nats a token.
    kept_round: the newest that a bootstrap keeps, 0: none, None: not known. troubles: what is wrong, the worst first, told troubles_age_s ago."""

    at_s: float
    link: str
    stages: Sequence[StageFacts]
    validation: Mapping[int, float] = field(default_factory=dict)
    kept_round: int | None = 0
    sampled: TextSampled | None = None
    troubles: Sequence[Trouble] = ()
    troubles_age_s: float = 0.0
