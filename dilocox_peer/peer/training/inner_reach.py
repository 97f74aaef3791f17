"""How far the inner optimizer can have come in a round: the one measure that a round of few contributions has.

Among three and more, what is usual tells who is far longer. One that is alone in a round, or one of two, would be its own measure, and no honest
peer's work is there to be set beside it; what a step moves an element by is known, though: by the learning rate, as a rule, of AdamW, and by
far less of Muon. How much further a contribution may reach is in compression/aggregate.py (REACH).
"""

import math
from dataclasses import dataclass

from dilocox_peer.manifest import Manifest


@dataclass(frozen=True, slots=True)
class InnerReach:
    """rate: the inner learning rate at its peak; inf: nothing is known of it. inner_steps: H of the manifest. longest: the largest H that a plan of the
    run may name."""

    rate: float = math.inf
    inner_steps: int = 1
    longest: int = 1

    @classmethod
    def of(cls, manifest: Manifest) -> "InnerReach":
        rounds = manifest.rounds
        return cls(manifest.inner.learning_rate, rounds.inner_steps, max(rounds.inner_steps, rounds.max_inner_steps))

    def most_rms(self, planned: int) -> float:
        """Of an element of a pseudo-gradient, as a root mean square. planned: H by the newest plan, of which the manifest's is the least that counts:
        the last round of a run is planned as long as is left of it, while longer ones are still to be merged."""
        return self.rate * max(planned, self.inner_steps)


UNKNOWN = InnerReach()
