import random

import pytest

from dilocox_peer.pipeline.routes import AnswerTimes, Callee, choose, expected_wait_s, make_plan, places
from dilocox_peer.types import PeerId
from dilocox_peer.wire.hops import Status


def status(service_s: float, *, place: tuple[float, float] = (0.0, 1.0), load: int = 0, width: float = 0.0) -> Status:
    return Status(1, 0, 0, 0, 0, service_s, load, 0.0, service_s, width, *place)


def times() -> AnswerTimes:
    return AnswerTimes(start_s=30.0, floor_s=2.0, cap_s=600.0, mad_factor=6.0)


def callee(name: str, known: Status | None) -> Callee:
    return Callee(PeerId(name), times(), times(), status=known)


def callees(*known: Status) -> dict[PeerId, Callee]:
    return {PeerId(f"c{number}"): callee(f"c{number}", each) for number, each in enumerate(known)}


def test_places_are_as_long_as_peers_are_fast_and_cover_everything() -> None:
    found = places({PeerId("a"): 0.1, PeerId("b"): 0.3})
    assert found[PeerId("a")] == pytest.approx((0.0, 0.75))
    assert found[PeerId("b")] == pytest.approx((0.75, 1.0))


def test_who_has_not_measured_counts_as_the_mean_of_the_others() -> None:
    found = places({PeerId("a"): 0.0, PeerId("b"): 0.25, PeerId("c"): 0.25})
    assert found[PeerId("a")] == pytest.approx((0.0, 1 / 3))


def test_equal_callers_of_as_many_equal_callees_pair_off() -> None:
    for number in range(4):
        place = (number / 4, (number + 1) / 4)
        plan = make_plan(callees(*[status(0.1, place=place, width=2.0)] * 4))
        assert plan.weights == {PeerId(f"c{number}"): pytest.approx(1.0)}
        assert plan.width == pytest.approx(3.0)


def test_one_caller_spreads_over_all_callees_by_their_speed() -> None:
    plan = make_plan(callees(status(0.1), status(0.2), status(0.2)))
    assert [plan.weights[PeerId(f"c{number}")] for number in range(3)] == pytest.approx([0.5, 0.25, 0.25])
    assert plan.width == pytest.approx(3.0)


def test_every_callee_is_fully_used_by_all_callers_together() -> None:
    rng = random.Random(5)
    for _ in range(50):
        callers = {PeerId(f"h{number}"): rng.uniform(0.05, 0.4) for number in range(rng.randrange(1, 8))}
        services = [rng.uniform(0.05, 0.4) for _ in range(rng.randrange(1, 8))]
        widths = 0.0
        for place in places(callers).values():
            widths += make_plan(callees(*(status(seconds, place=place) for seconds in services))).width
        assert widths == pytest.approx(len(services), abs=1e-3)


def test_the_callee_with_the_fewest_own_micro_batches_per_weight_is_taken() -> None:
    known = callees(status(0.1), status(0.2))
    plan = make_plan(known)
    taken = []
    for _ in range(6):
        peer, why = choose(known, plan, now=0.0, window=100)
        assert peer is not None
        assert why == "plan"
        known[peer].outstanding += 1
        taken.append(peer)
    assert taken.count(PeerId("c0")) == 4


def test_a_callee_whose_wait_is_half_a_window_longer_is_left_for_another() -> None:
    known = callees(status(0.1, place=(0.0, 0.5), load=5), status(0.1, place=(0.0, 0.5)))
    plan = make_plan(known)
    assert choose(known, plan, now=0.0, window=12) == (PeerId("c0"), "plan")
    assert choose(known, plan, now=0.0, window=8) == (PeerId("c1"), "wait")


def test_a_callee_that_refused_or_is_excluded_is_not_chosen() -> None:
    known = callees(status(0.1), status(0.1))
    plan = make_plan(known)
    known[PeerId("c0")].avoid_until = 5.0
    assert choose(known, plan, now=1.0, window=8)[0] == PeerId("c1")
    assert choose(known, plan, now=1.0, window=8, exclude=(PeerId("c1"),)) == (None, "nobody")
    assert choose(known, plan, now=5.0, window=8)[0] == PeerId("c0")


def test_a_callee_outside_the_plan_is_taken_when_it_is_the_only_one() -> None:
    known = callees(status(0.1, place=(0.0, 0.5)), status(0.1, place=(0.0, 0.5)))
    plan = make_plan(known)
    del known[PeerId("c0")]
    assert choose(known, plan, now=0.0, window=8) == (PeerId("c1"), "only")


def test_what_was_sent_since_the_last_status_counts_as_load() -> None:
    one = callee("c0", status(0.1, load=4))
    one.outstanding, one.known_outstanding = 5, 3
    assert one.load() == 6
    assert expected_wait_s(one) == pytest.approx(0.7)


def test_patience_starts_long_follows_the_median_and_keeps_its_floor_and_cap() -> None:
    patient = times()
    assert patient.patience_s == 30.0
    patient.observe(0.1)
    assert patient.patience_s == 2.0
    for _ in range(40):
        patient.observe(5.0)
    assert patient.patience_s == pytest.approx(20.0)
    for _ in range(40):
        patient.observe(500.0)
    assert patient.patience_s == 600.0
