"""Decides the plan of the round after next: a peer asks its planner when it proposes. Pure.

A planner sees the certificates of its chain, in order, and nothing else: so peers with the same chain decide alike, after
a restart too. So a member can judge what a leader proposes (`JudgingPlanner`): a plan more than one step away from what its
own planner comes to is refused. Where planners are equal there is no step to allow for; one is allowed because a planner
that was restarted has seen the newest certificates only, and stays in a dead band where it came in.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dilocox_peer.compression.ladder import LADDER, LOW_RANK
from dilocox_peer.peer.planning.plan import MAX_CHANGE, PlanBounds
from dilocox_peer.types import Digest
from dilocox_peer.wire.chain import Certificate, Plan

SURE_AFTER = 32  # certificates in a row, of a chain whose beginning a planner has not seen; then it has left its start
RICHNESS: Sequence[str] = (*LADDER, LOW_RANK)
WARMUP_SHARE = 0.03  # of the run, after which H doubles for the first time


class Planner(Protocol):
    reason: str  # why it last decided otherwise than before, "" if it never did
    is_exact: bool  # it learns nothing: whoever has the same plan before comes to the same plan

    def observe(self, certificate: Certificate, bounds: PlanBounds | None = None) -> None:
        """The chain has grown by this certificate. bounds: as they are by it, as the run's owner may have made the run longer; None: as they were."""

    def next(self, before: Plan) -> Plan:
        """The plan after `before`, the plan of the next round."""


class FixedPlanner:
    """Codec and rank as they are; H as it is or, with a warm-up, doubling from its first value to its usual one.

    Rounds are worth most at the start, while parameters move fast.
    """

    reason = ""
    is_exact = True

    def __init__(self, bounds: PlanBounds, *, warmup: "Warmup | None" = None) -> None:
        self._bounds = bounds
        self._warmup = warmup

    def observe(self, certificate: Certificate, bounds: PlanBounds | None = None) -> None:
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


class Continuity:
    """Whether the certificates that were seen are of one chain, without a gap, and enough to know how it stands."""

    def __init__(self) -> None:
        self._head: Digest | None = None
        self._seen = 0
        self._from_the_start = True

    def observe(self, certificate: Certificate) -> None:
        if certificate.parent != self._head:
            self._seen = 0
            self._from_the_start = certificate.value.height == 1
        self._seen += 1
        self._head = certificate.head

    @property
    def is_sure(self) -> bool:
        return self._from_the_start or self._seen >= SURE_AFTER


def is_a_step(plan: Plan, wish: Plan) -> bool:
    """Whether plan is at most a step from wish: the next codec by richness, rank and H within a factor of 2."""
    return (
        _codecs_apart(plan.codec, wish.codec) <= 1
        and _is_within(plan.inner_steps, wish.inner_steps)
        and (plan.codec != LOW_RANK or wish.codec != LOW_RANK or _is_within(plan.rank, wish.rank))
    )


def _codecs_apart(one: str, other: str) -> int:
    if one == other:
        return 0
    known = one in RICHNESS and other in RICHNESS
    return abs(RICHNESS.index(one) - RICHNESS.index(other)) if known else len(RICHNESS)


def _is_within(one: int, other: int) -> bool:
    return one <= other * MAX_CHANGE and other <= one * MAX_CHANGE


class JudgingPlanner:
    """A planner, and its word on the plans of others. It has none while it has seen too little of the chain: after a switch
    to another branch its planner knows rounds that are no longer there."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._continuity = Continuity()

    @property
    def reason(self) -> str:
        return self._planner.reason

    def observe(self, certificate: Certificate, bounds: PlanBounds | None = None) -> None:
        """As of a Planner."""
        self._continuity.observe(certificate)
        self._planner.observe(certificate, bounds)

    def next(self, before: Plan, bounds: PlanBounds | None = None) -> Plan:
        """bounds: as they are by now, where they may be others than the planner's own: the run's owner may have made it longer."""
        wish = self._planner.next(before)
        if bounds is None:
            return wish
        return bounds.after(before, codec=wish.codec, rank=wish.rank, inner_steps=wish.inner_steps)

    def why_not(self, plan: Plan, before: Plan, bounds: PlanBounds | None = None) -> str | None:
        """Why plan, which is within the bounds, is not what comes after `before`; None if it may be."""
        wish = self.next(before, bounds)
        if plan == wish or (not self._planner.is_exact and (not self._continuity.is_sure or is_a_step(plan, wish))):
            return None
        return f"plans {_shown(plan)} where the certificates lead to {_shown(wish)}"


def _shown(plan: Plan) -> str:
    rank = f" of rank {plan.rank}" if plan.codec == LOW_RANK else ""
    return f"{plan.codec}{rank}, {plan.inner_steps} steps"
