"""The plans of the run's rounds as far as its chain has them, and when it ends by them. Pure."""

from dilocox_peer.peer.planning.plan import PlanBounds
from dilocox_peer.peer.rounds.chain import Chain
from dilocox_peer.wire.chain import Plan


class Schedule:
    """Of one chain, as it is by now."""

    def __init__(self, chain: Chain, bounds: PlanBounds, first: Plan) -> None:
        """first: the plan of round 1."""
        self._chain = chain
        self._bounds = bounds
        self._first = first

    def plan_for(self, round_number: int) -> Plan:
        """Of a round up to the one after next: what the certificate two rounds before it says."""
        if round_number <= 1:
            return self._first
        for certificate in reversed(self._chain.certificates):
            if certificate.value.kind == "round" and certificate.value.round <= round_number - 2:
                return certificate.value.plan
        return self._chain.place_at(0).plan

    @property
    def is_over(self) -> bool:
        """Whether the run's last round is certified."""
        done = self._chain.place.round
        return self._bounds.total_steps is not None and done > 0 and self._bounds.is_last(self.plan_for(done))

    @property
    def last_round(self) -> int | None:
        """The number of the run's last round; None while it is not planned yet."""
        done = self._chain.place.round
        numbers = range(max(done, 1), done + 3)
        return next((number for number in numbers if self._bounds.is_last(self.plan_for(number))), None)

    @property
    def expected_rounds(self) -> int | None:
        """How many rounds the run will have if H stays as it is; None: it does not end."""
        total, place = self._bounds.total_steps, self._chain.place
        if total is None or self.last_round is not None:
            return self.last_round
        return place.round + 2 - (place.plan.end - total) // place.plan.inner_steps
