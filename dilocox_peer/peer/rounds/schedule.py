"""The plans of the run's rounds as far as its chain has them, and when it ends by them or by its owner's directive. Pure."""

from typing import NamedTuple

from dilocox_peer.peer.planning.plan import PlanBounds
from dilocox_peer.peer.rounds.chain import Chain, Place
from dilocox_peer.wire.chain import Plan
from dilocox_peer.wire.directives import Directive


class _End(NamedTuple):
    """What the chain says of the run's end where it is at place."""

    place: Place
    is_over: bool
    last_round: int | None


class Schedule:
    """The schedule of one chain, as it is by now."""

    def __init__(self, chain: Chain, bounds: PlanBounds, first: Plan) -> None:
        """first: the plan of round 1."""
        self._chain = chain
        self._manifests = bounds
        self._first = first
        self._end: _End | None = None

    @property
    def _bounds(self) -> PlanBounds:
        return self._chain.place.bounds(self._manifests)

    @property
    def total_steps(self) -> int | None:
        """Inner steps of the run, by what its owner wants by now; None: it does not end."""
        return self._bounds.total_steps

    def plan_for(self, round_number: int) -> Plan:
        """The plan of a round up to the one after next: what the certificate two rounds before it says."""
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
        return self._reckoned().is_over

    @property
    def last_round(self) -> int | None:
        """The number of the run's last round; None while it is not planned yet."""
        return self._reckoned().last_round

    def _reckoned(self) -> _End:
        """Once for each place: all who decide something ask, and between two certificates the answer is the same."""
        place = self._chain.place
        if self._end is None or self._end.place is not place:
            self._end = _End(place, self._is_over(place), self._last_round(place))
        return self._end

    def _is_over(self, place: Place) -> bool:
        if place.is_stopped:
            return True
        bounds = self._bounds
        return bounds.total_steps is not None and place.round > 0 and bounds.is_last(self.plan_for(place.round))

    @property
    def _stop(self) -> int | None:
        directive = self._chain.place.directive
        return (directive.stop_after or None) if directive is not None else None

    def _last_round(self, place: Place) -> int | None:
        bounds, stop = self._bounds, self._stop
        for number in range(max(place.round, 1), place.round + 3):
            if (stop is not None and number >= stop) or bounds.is_last(self.plan_for(number)):
                return number
        return None

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
