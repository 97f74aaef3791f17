"""The plans of the rounds that training is in, as the torch thread reads them; the conductor keeps them up to date."""

from collections.abc import Mapping
from dataclasses import replace

from dilocox_peer.manifest import Manifest
from dilocox_peer.model.inner import micro_batches_a_step
from dilocox_peer.peer.planning.plan import first_plan, plan_bounds, total_steps
from dilocox_peer.wire.chain import Plan
from dilocox_peer.wire.directives import Directive

REMEMBERED = 8


class Timetable:
    """Round number -> plan. One thread learns; any reads, as the mapping is replaced whole.

    Rounds that nothing was learned of continue the last known one before them; at first all are as the manifest says.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._inner = manifest.inner
        self._total_steps = total_steps(manifest)
        self._bounds = plan_bounds(manifest)
        self._plans: Mapping[int, Plan] = {1: first_plan(manifest)}
        self._total_micro_batches = self._inner.tokens / (self._inner.micro_batch * manifest.model.context)
        self._directives: Mapping[int, Directive | None] = {}
        self._is_lifted = False
        self._worked = (0, 0, 0)  # the certified round, micro-batches until then, those of that round

    def learn(self, plans: Mapping[int, Plan]) -> None:
        if any(self._plans.get(number) != plan for number, plan in plans.items()):
            merged = {**self._plans, **plans}
            self._plans = {number: merged[number] for number in sorted(merged)[-REMEMBERED:]}

    def learn_directives(
        self, directives: Mapping[int, Directive | None], total_steps: int, *, is_lifted: bool
    ) -> None:
        """What the run's owner wants of training in these rounds, and how long the run is by now. is_lifted: it has said since that
        nobody is to pause."""
        if any(self._directives.get(number) != each for number, each in directives.items()):
            merged = {**self._directives, **directives}
            self._directives = {number: merged[number] for number in sorted(merged)[-REMEMBERED:]}
        if total_steps != self._total_steps:
            self._total_steps = total_steps
            self._bounds = replace(self._bounds, total_steps=total_steps)
        self._is_lifted = is_lifted

    def directive(self, round_number: int) -> Directive | None:
        """That training in this round goes by."""
        known = self._directives
        number = max((each for each in known if each <= round_number), default=None)
        return None if number is None else known[number]

    def is_held(self, round_number: int) -> bool:
        """Whether the run's owner wants nobody to train in this round."""
        directive = self.directive(round_number)
        return directive is not None and directive.paused and not self._is_lifted

    def rate(self, round_number: int, fraction: float) -> float:
        """What the owner has the learning rate multiplied by, `fraction` of the way through the round."""
        directive = self.directive(round_number)
        return 1.0 if directive is None else directive.rate(round_number, fraction)

    @property
    def goes_by_tokens(self) -> bool:
        """Whether `position` is reckoned in tokens (manifest inner.tokens)."""
        return self._total_micro_batches > 0

    def learn_work(self, certified: int, micro_batches: int, of_that_round: int) -> None:
        """What the contributions of all rounds up to the certified one, and of that one, are of."""
        self._worked = (certified, micro_batches, of_that_round)

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
        return self.plan(round_number).inner_steps * self.micro_batches_a_step(round_number)

    def micro_batches_a_step(self, round_number: int) -> int:
        """Of an inner step in the round: by where the run is when the round begins."""
        return micro_batches_a_step(self.position(round_number, 0.0), self._inner)

    def is_after_last(self, round_number: int) -> bool:
        """Whether the run is over before this round."""
        directive = self.directive(round_number)
        is_stopped = directive is not None and 0 < directive.stop_after < round_number
        return is_stopped or self.plan(round_number).first_step >= self._total_steps

    def position(self, round_number: int, fraction: float) -> float:
        """Where the run is, in [0, 1], for a peer that has done `fraction` of its own work in the round. More than all of it
        does not count as the next round: a fast peer waits at the schedule of its end.

        By tokens: those of the certified rounds, and for the one or two after them as many as the last one had."""
        plan = self.plan(round_number)
        fraction = min(max(fraction, 0.0), 1.0)
        if self.goes_by_tokens:
            certified, done, of_one = self._worked
            coming = (round_number - certified - 1 + fraction) * (of_one or plan.inner_steps * self._inner.accumulate)
            return min((done + max(0.0, coming)) / self._total_micro_batches, 1.0)
        step = plan.first_step + fraction * plan.inner_steps
        return min(step / self._total_steps, 1.0)
