"""What is waited for, and how long: bounds that follow the run's own share for exchanges."""

from dilocox_peer.peer.planning.plan import TOLERANCE
from dilocox_peer.peer.rounds.timing import Pace, Timing


def test_contributions_on_their_way_are_waited_for_as_long_as_the_runs_plan_lets_an_exchange_take() -> None:
    for share in (0.6, 0.8):
        pace = Pace(Timing(exchange_share=share))
        for _ in range(5):
            pace.observe_round(100.0)
            pace.observe_offer(1.0)
        assert pace.offer_wait_s < 50.0, "for offers that have not come: what was seen"
        assert pace.exchange_wait_s == TOLERANCE * share * 100.0
