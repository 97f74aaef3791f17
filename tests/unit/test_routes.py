import random

import pytest

from dilocox_peer.pipeline.routes import (
    MEASURED_S,
    MOST_COUNTED,
    AnswerTimes,
    Callee,
    believe,
    choose,
    expected_wait_s,
    find_far,
    make_plan,
    places,
    planned_on,
)
from dilocox_peer.types import PeerId
from dilocox_peer.wire.declared import replaced
from dilocox_peer.wire.hops import HopStatus


def status(
    service_s: float, *, place: tuple[float, float] = (0.0, 1.0), load: int = 0, width: float = 0.0
) -> HopStatus:
    return HopStatus(1, 0, 0, 0, 0, service_s, load, 0.0, service_s, width, *place)


def times() -> AnswerTimes:
    return AnswerTimes(start_s=30.0, floor_s=2.0, cap_s=600.0, mad_factor=6.0)


def callee(name: str, known: HopStatus | None, *, way_s: float | None = 0.001) -> Callee:
    found = Callee(PeerId(name), times(), times(), status=known)
    if way_s is not None:
        found.transfers.observe(way_s, 0.0)
    return found


def callees(*known: HopStatus) -> dict[PeerId, Callee]:
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


def at(*ways: float | None, sites: str = "") -> dict[PeerId, Callee]:
    """Callees with these ways to them, and a letter each as their site."""
    found = {}
    for number, way_s in enumerate(ways):
        known = replaced(status(0.1), site=sites[number : number + 1])
        found[PeerId(f"c{number}")] = callee(f"c{number}", known, way_s=way_s)
    return found


def far(known: dict[PeerId, Callee], *, site: str = "", now: float = 1.0) -> list[bool]:
    find_far(known, site, now)
    return [each.is_far for each in known.values()]


def test_a_callee_over_a_slow_line_is_far_and_not_planned_on() -> None:
    known = at(0.002, 0.9, 0.004)
    assert far(known) == [False, True, False]
    assert PeerId("c1") not in make_plan(known).weights
    assert not any(far(at(0.5, 0.9))), "as far as one another"
    assert not any(far(at(0.001, 0.009))), "too short to tell apart"


def test_the_callee_s_word_and_round_trips_count_as_well() -> None:
    known = at(0.002, 0.002, 0.002)
    known[PeerId("c1")].status = replaced(status(0.1), body_s=0.5)
    known[PeerId("c2")].rtt_s = 0.3
    assert far(known) == [False, True, True]


def test_a_way_that_changes_a_little_changes_no_route() -> None:
    known = at(0.02, 0.1)
    assert far(known) == [False, True]
    known[PeerId("c1")].transfers = callee("", None, way_s=0.06).transfers
    assert far(known) == [False, True]
    known[PeerId("c1")].transfers = callee("", None, way_s=0.03).transfers
    assert far(known) == [False, False]


def test_what_volunteers_say_counts_before_what_is_measured() -> None:
    assert far(at(0.5, 0.001, sites="ab"), site="a") == [False, True]
    assert far(at(0.5, 0.001, sites="ab")) == [True, False], "we say nothing"
    known = at(0.5, 0.5, sites="bb")
    assert far(known, site="a") == [True, True]
    assert planned_on(known) == known, "nobody is near"


def test_until_it_is_measured_a_callee_has_one_micro_batch() -> None:
    known = at(None, None)
    plan = make_plan(known)
    for peer in ("c0", "c1"):
        assert choose(known, plan, now=0.0, window=8)[0] == PeerId(peer)
        known[PeerId(peer)].outstanding += 1
    assert choose(known, plan, now=0.0, window=8) == (None, "measured")
    known[PeerId("c1")].transfers.observe(0.01, 0.0)
    assert choose(known, plan, now=0.0, window=8)[0] == PeerId("c1")
    only = {PeerId("c0"): known[PeerId("c0")]}
    assert choose(only, make_plan(only), now=0.0, window=8)[0] == PeerId("c0"), "there is no choice"


def test_a_far_callee_is_measured_again_in_time() -> None:
    known = at(0.002, 0.9)
    assert far(known) == [False, True]
    known[PeerId("c0")].transfers.observe(0.002, MEASURED_S)
    assert far(known, now=MEASURED_S + 1) == [False, False]


def test_a_far_callee_is_taken_when_waiting_costs_more_than_its_line() -> None:
    known = at(0.002, 0.9)
    far(known)
    plan = make_plan(known)
    known[PeerId("c0")].status = status(0.1, load=15)
    assert choose(known, plan, now=1.0, window=8) == (PeerId("c0"), "plan")
    known[PeerId("c0")].status = status(0.1, load=40)
    assert choose(known, plan, now=1.0, window=8) == (PeerId("c1"), "wait")


def test_by_its_word_alone_no_callee_draws_the_work_of_all() -> None:
    """One of four and two of eight say that they take no time at all."""
    for count, liars in ((4, 1), (8, 2)):
        known = callees(*[status(1e-6)] * liars, *[status(0.1)] * (count - liars))
        believe(known)
        plan = make_plan(known)
        drawn = sum(plan.weights[PeerId(f"c{number}")] for number in range(liars))
        assert drawn == pytest.approx(MOST_COUNTED * liars / (MOST_COUNTED * liars + count - liars))
        assert expected_wait_s(known[PeerId("c0")]) == pytest.approx(0.1 / MOST_COUNTED)


def test_callees_that_are_as_fast_as_they_say_keep_their_shares() -> None:
    known = callees(status(0.1), status(0.2), status(0.05), status(0.0))
    believe(known)
    assert [each.service_s for each in known.values()] == [0.1, 0.2, 0.05, 0.0]
