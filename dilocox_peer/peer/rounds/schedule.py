"""The plans of the run's rounds as far as its chain has them, and when it ends by them or by its owner's directive. Pure."""

from dilocox_peer.peer.planning.plan import PlanBounds
from dilocox_peer.peer.rounds.chain import Chain
from dilocox_peer.wire.chain import Plan
from dilocox_peer.wire.directives import Directive


class Schedule:
    """Of one chain, as it is by now."""

    def __init__(self, chain: Chain, bounds: PlanBounds, first: Plan) -> None:
        """first: the plan of round 1."""
        self._chain = chain
        self._manifests = bounds
        self._first = first

    @property
    def _bounds(self) -> PlanBounds:
        return self._chain.place.bounds(self._manifests)

    @property
    def total_steps(self) -> int | None:
        """Inner steps of the run, by what its owner wants by now; None: it does not end."""
        return self._bounds.total_steps

    def plan_for(self, round_number: int) -> Plan:
        """Of a round up to the one after next: what the certificate two rounds before it says."""
        if round_number <= 1:
            return self._first
        for certificate in reversed(self._chain.certificates):
            if certificate.value.kind == "round" and certificate.value.round <= round_number - 2:
                return certificate.value.plan
        return self._chain.place_at(0).plan

    def directive_for(self, round_number: int) -> Directive | None:
        """The owner's that training in this round goes by: that of the certificate two rounds before it."""
        if self._chain.place.directive is None:
            return None
        height = self._chain.height
        while height > 0 and self._chain.place_at(height).round > round_number - 2:
            height -= 1
        return self._chain.place_at(height).directive

    @property
    def is_over(self) -> bool:
        """Whether the run's last round is certified."""
        done = self._chain.place.round
        if self._chain.place.is_stopped:
            return True
        return self._bounds.total_steps is not None and done > 0 and self._bounds.is_last(self.plan_for(done))

    @property
    def _stop(self) -> int | None:
        directive = self._chain.place.directive
        return (directive.stop_after or None) if directive is not None else None

    @property
    def last_round(self) -> int | None:
        """The number of the run's last round; None while it is not planned yet."""
        done, stop = self._chain.place.round, self._stop
        numbers = range(max(done, 1), done + 3)
        return next(
            (
                number
                for number in numbers
                if (stop is not None and number >= stop) or self._bounds.is_last(self.plan_for(number))
            ),
            None,
        )

    @property
    def expected_rounds(self) -> int | None:
        """How many rounds the run will have if H stays as it is; None: it does not end."""
        total, place, stop = self._bounds.total_steps, self._chain.place, self._stop
        if total is None or self.last_round is not None:
            return self.last_round or stop
        planned = place.round + 2 - (place.plan.end - total) // place.plan.inner_steps
        return planned if stop is None else min(stop, planned)


def ends_run(chain: Chain, height: int, plans: PlanBounds) -> bool:
    """Whether the run is over at height of chain: the plan of its round ends with the run, or its owner does."""
    place = chain.place_at(height)
    if place.is_stopped:
        return True
    plans = place.bounds(plans)
    if place.round <= 1:
        return (
            place.round == 1
            and plans.total_steps is not None
            and chain.place_at(0).plan.first_step >= plans.total_steps
        )
    for below in range(height, -1, -1):
        earlier = chain.place_at(below)
        if earlier.round <= place.round - 2:
            return plans.is_last(earlier.plan)
    return False
