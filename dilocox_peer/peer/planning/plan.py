"""A round's plan: what it sends, how long it is, and where in the run it lies. Decided in a certificate for the round
after next, so that nothing in flight changes shape. Pure values.

The run's length is a number of inner steps, not of rounds: the learning rate is a function of the step, and a run whose
rounds grow longer has fewer of them. Every plan begins where the one before ends; the last one ends with the run.
"""

from collections.abc import Collection
from dataclasses import dataclass

from dilocox_peer.compression.ladder import LOW_RANK, codecs_beside
from dilocox_peer.manifest import Manifest
from dilocox_peer.wire.chain import Plan

TOLERANCE = (
    1.25  # of the share of a round that an exchange may take: beyond, another plan is made and nothing is waited for
)

KEPT_ROUNDS = 16  # contributions and certificates of so many stay servable
MAX_RANK = 4096
SPARE_VIEWS = 4096  # in a chain, beside one a round: far more than a run has
MAX_CHANGE = 2  # of H from one round to the next, as a factor


@dataclass(frozen=True, slots=True)
class PlanBounds:
    """What a certificate may plan in this run, whoever proposes it.

    codecs: empty: any. total_steps: inner steps of the run, None: it does not end.
    """

    codecs: Collection[str] = ()
    max_rank: int = 1 << 20
    smallest_inner_steps: int = 1
    largest_inner_steps: int = 1 << 31
    total_steps: int | None = None

    @property
    def longest_chain(self) -> int | None:
        """Certificates that a chain of this run can have; None if it does not end."""
        rounds = self.most_rounds
        return None if rounds is None else 2 * rounds + SPARE_VIEWS

    @property
    def most_rounds(self) -> int | None:
        """Rounds of the run, were all as short as they may be; None: it does not end."""
        return None if self.total_steps is None else -(-self.total_steps // self.smallest_inner_steps)

    def is_last(self, plan: Plan) -> bool:
        """Whether the run is over after this round, or was before it."""
        return self.total_steps is not None and plan.end >= self.total_steps

    def after(self, before: Plan, *, codec: str, rank: int, inner_steps: int) -> Plan:
        """The plan after `before`: as wished, as far as the bounds allow. The last round ends with the run."""
        steps = min(max(inner_steps, -(-before.inner_steps // MAX_CHANGE)), before.inner_steps * MAX_CHANGE)
        steps = min(max(steps, self.smallest_inner_steps), self.largest_inner_steps)
        return Plan(codec, rank, self._within_run(before.end, steps), before.end)

    def why_not(self, plan: Plan, before: Plan) -> str | None:
        """Why plan may not follow `before`, or None."""
        if plan.first_step != before.end:
            return f"a plan from step {plan.first_step} after one to step {before.end}"
        if self.codecs and plan.codec not in self.codecs:
            return f"a plan with codec {plan.codec!r}, which this run does not use"
        if plan.rank > self.max_rank:
            return f"a plan with rank {plan.rank}; at most {self.max_rank}"
        if self.is_last(before):  # no round follows
            return None
        wished = self.after(before, codec=plan.codec, rank=plan.rank, inner_steps=plan.inner_steps)
        if wished.inner_steps != plan.inner_steps:
            return f"a plan of {plan.inner_steps} inner steps after {before.inner_steps}"
        return None

    def _within_run(self, first_step: int, inner_steps: int) -> int:
        if self.total_steps is None or first_step >= self.total_steps:
            return inner_steps
        return min(inner_steps, self.total_steps - first_step)


ANY_PLAN = PlanBounds()


def total_steps(manifest: Manifest) -> int:
    """Inner steps of the run, of each peer on average."""
    return manifest.rounds.total * manifest.rounds.inner_steps


def first_plan(manifest: Manifest) -> Plan:
    """Of round 1."""
    compression, rounds = manifest.compression, manifest.rounds
    return Plan(compression.codec, compression.rank, rounds.first_inner_steps or rounds.inner_steps)


def adapts_inner_steps(manifest: Manifest) -> bool:
    """Whether H may change with what is measured. Not with several stages: it belongs to all of them, and each has a chain
    of its own."""
    return manifest.compression.adapt != "off" and manifest.stages.count == 1


def adapts_rank(manifest: Manifest) -> bool:
    """Whether plans may name another rank than the manifest's."""
    return manifest.compression.adapt != "off" and manifest.compression.codec == LOW_RANK


def plan_bounds(manifest: Manifest) -> PlanBounds:
    """What certificates may plan in this run."""
    rounds, compression = manifest.rounds, manifest.compression
    smallest = min(rounds.first_inner_steps or rounds.inner_steps, rounds.inner_steps)
    largest = rounds.inner_steps
    if adapts_inner_steps(manifest):
        smallest, largest = min(smallest, rounds.min_inner_steps), max(largest, rounds.max_inner_steps)
    codecs = codecs_beside(compression.codec) if compression.adapt == "link" else (compression.codec,)
    max_rank = MAX_RANK if adapts_rank(manifest) else compression.rank
    return PlanBounds(codecs, max_rank, smallest, largest, total_steps(manifest))
