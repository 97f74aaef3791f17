"""Who decides the plan of the round after next: a peer asks its planner when it proposes. Pure.

A planner sees the certificates of its chain, in order, and nothing else: so peers with the same chain decide alike, after
a restart too. What a leader proposes otherwise, within the run's bounds, is followed all the same.
"""

import math
from dataclasses import dataclass
from typing import Protocol

from dilocox_peer.manifest import Manifest
from dilocox_peer.peer.rounds.chain import Certificate, Place
from dilocox_peer.peer.rounds.plan import Plan, PlanBounds, first_plan, plan_bounds

WARMUP_SHARE = 0.03  # of the run, after which H doubles for the first time


class Planner(Protocol):
    reason: str  # why it last decided otherwise than before, "" if it never did

    def observe(self, certificate: Certificate) -> None:
        """The chain has grown by this certificate."""

    def next(self, before: Plan) -> Plan:
        """The plan after `before`, the plan of the next round."""


class FixedPlanner:
    """Codec and rank as they are; H as it is or, with a warm-up, doubling from its first value to its usual one.

    Rounds are worth most at the start, while parameters move fast.
    """

    reason = ""

    def __init__(self, bounds: PlanBounds, *, warmup: "Warmup | None" = None) -> None:
        self._bounds = bounds
        self._warmup = warmup

    def observe(self, certificate: Certificate) -> None:
        """Nothing is learned from it."""

    def next(self, before: Plan) -> Plan:
        steps = before.inner_steps if self._warmup is None else self._warmup.inner_steps_at(before.end)
        return self._bounds.after(before, codec=before.codec, rank=before.rank, inner_steps=steps)


@dataclass(frozen=True, slots=True)
class Warmup:
    """Of H: `first` until 3 % of the run, twice that until 6 %, four times until 12 %, and so on, to `usual`."""

    first: int
    usual: int
    total_steps: int

    def inner_steps_at(self, step: int) -> int:
        share = step / self.total_steps
        doublings = 0 if share < WARMUP_SHARE else 1 + math.floor(math.log2(share / WARMUP_SHARE))
        return min(self.first << min(doublings, 31), self.usual)

    def is_over_at(self, step: int) -> bool:
        return self.inner_steps_at(step) >= self.usual


def genesis_of(manifest: Manifest, stage: int) -> Place:
    """Where the chain of a stage of this run begins: its first roster is the run's owner's to sign."""
    second_plan = FixedPlanner(plan_bounds(manifest)).next(first_plan(manifest))
    return Place.genesis(stage, manifest.genesis(stage), second_plan, manifest.owner_peer)
