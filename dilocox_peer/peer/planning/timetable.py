"""The plans of the rounds that training is in, as the torch thread reads them; the conductor keeps them up to date."""

from collections.abc import Mapping

from dilocox_peer.manifest import Manifest
from dilocox_peer.peer.planning.plan import first_plan, plan_bounds, total_steps
from dilocox_peer.wire.chain import Plan

REMEMBERED = 8


class Timetable:
    """Round number -> plan. One thread learns; any reads, as the mapping is replaced whole.

    Rounds that nothing was learned of continue the last known one before them; at first all are as the manifest says.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._accumulate = manifest.inner.accumulate
        self._total_steps = total_steps(manifest)
        self._bounds = plan_bounds(manifest)
        self._plans: Mapping[int, Plan] = {1: first_plan(manifest)}

    def learn(self, plans: Mapping[int, Plan]) -> None:
        if any(self._plans.get(number) != plan for number, plan in plans.items()):
            merged = {**self._plans, **plans}
            self._plans = {number: merged[number] for number in sorted(merged)[-REMEMBERED:]}

    def plan(self, round_number: int) -> Plan:
        plans = self._plans
        known = plans.get(round_number)
        if known is not None:
            return known
        number = max((each for each in plans if each < round_number), default=min(plans))
        plan, skipped = plans[number], max(0, round_number - number)
        first_step = plan.first_step + skipped * plan.inner_steps
        return self._bounds.after(
            Plan(plan.codec, plan.rank, plan.inner_steps, first_step - plan.inner_steps),
            codec=plan.codec, rank=plan.rank, inner_steps=plan.inner_steps,
        )  # fmt: skip

    def share(self, round_number: int) -> int:
        """Micro-batches a peer does in the round, on average."""
        return self.plan(round_number).inner_steps * self._accumulate

    def is_after_last(self, round_number: int) -> bool:
        """Whether the run is over before this round."""
        return self.plan(round_number).first_step >= self._total_steps

    def position(self, round_number: int, fraction: float) -> float:
        """Where the run is, in [0, 1], for a peer that has done `fraction` of its own work in the round. More than all of it
        does not count as the next round: a fast peer waits at the schedule of its end."""
        plan = self.plan(round_number)
        step = plan.first_step + min(max(fraction, 0.0), 1.0) * plan.inner_steps
        return min(step / self._total_steps, 1.0)
