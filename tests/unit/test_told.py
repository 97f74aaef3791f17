"""Figures that peers tell of themselves: what a quarter of liars can make plans believe, and what it cannot."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox_peer.compression.aggregate import MAX_WEIGHT
from dilocox_peer.peer.planning.adaptive_planner import UNMEASURED_KBPS, measurement_of
from dilocox_peer.peer.planning.told import slow_link, told_by_most, usual_step_s
from dilocox_peer.wire.chain import MAX_QUANTITY, Certificate, Entry, Report
from dilocox_peer.wire.declared import replaced
from tests.unit.test_planner import BLOB_BYTES, HEAD, Run, exchange, manifest_with

ROUNDS = 80
LIARS = {4: 1, 8: 2}
Lie = Callable[[Report], Report]
LIES: dict[str, Lie] = {
    "a slow link": lambda told: replaced(told, uplink_kbps=1),
    "a fast link": lambda told: replaced(told, uplink_kbps=MAX_QUANTITY),
    "no link measured": lambda told: replaced(told, uplink_kbps=0),
    "fast steps": lambda told: replaced(told, step_us=1),
    "slow steps": lambda told: replaced(told, step_us=MAX_QUANTITY),
    "no steps measured": lambda told: replaced(told, step_us=0),
    "long exchanges": lambda told: replaced(told, exchange_ms=MAX_QUANTITY),
    "short exchanges": lambda told: replaced(told, exchange_ms=1),
    "all was lost": lambda told: replaced(told, lost_permille=1000),
    "losses and clocks": lambda told: replaced(told, loss_micronats=MAX_QUANTITY, closed_ms=MAX_QUANTITY),
    "all that asks for less": lambda told: Report(1, 1, MAX_QUANTITY, 1000, 0),
    "all that asks for more": lambda told: Report(MAX_QUANTITY, MAX_QUANTITY, 1, 0, 0),
}


def plans_of(seed: int, peers: int, lie: Lie | None, *, of_rank: bool = False) -> list[tuple[str, int, int]]:
    """(codec, rank, H) of ROUNDS rounds of equal peers, whose link changes twice, with the real planner; a quarter lie."""
    rng = random.Random(seed)
    links, step_s = [10 ** rng.uniform(4.8, 7.5) for _ in range(3)], 10 ** rng.uniform(-2.0, -0.3)
    compression = {"codec": "lowrank-int4", "rank": 16, "adapt": "rank"} if of_rank else {}
    run, planned = Run(manifest_with(rounds={"total": 4000}, **compression), peers=peers, planners=1), []
    for number in range(1, ROUNDS + 1):
        plan, uplink_bps = run.plans[number], links[3 * number // (ROUNDS + 1)]
        truth = exchange(plan, uplink_bps=uplink_bps, step_s=step_s, peers=peers)
        truth = replaced(truth, needed_rank=rng.randrange(4, 16) if of_rank else 0)
        told = [lie(truth) if lie and index < LIARS[peers] else truth for index in range(peers)]
        size = BLOB_BYTES.get(plan.codec, 500_000)
        entries = [Entry(peer, 1, HEAD, size, 32, b"", each) for peer, each in zip(run.peers, told, strict=True)]
        value = run.place.round_value(entries, run.peers, run.planners[0].next(run.place.plan))
        certificate = Certificate(0, run.place.head, 0, 0, value, ())
        run.planners[0].observe(certificate)
        run.place = run.place.then(certificate)
        run.plans[value.round + 2] = value.plan
        planned.append((value.plan.codec, value.plan.rank, value.plan.inner_steps))
    return planned


@pytest.mark.parametrize("peers", LIARS)
def test_a_quarter_that_lies_changes_neither_codec_nor_length_of_any_round(peers: int) -> None:
    kinds = set()
    for seed in range(3):
        honest = plans_of(seed, peers, None)
        kinds |= set(honest)
        for name, lie in LIES.items():
            assert plans_of(seed, peers, lie) == honest, f"seed {seed}, {LIARS[peers]} of {peers} tell {name}"
    assert len(kinds) > 3, "there is something to change"


@pytest.mark.parametrize("peers", LIARS)
def test_a_quarter_that_lies_does_not_change_the_rank(peers: int) -> None:
    honest = plans_of(1, peers, None, of_rank=True)
    assert len(set(honest)) > 1
    for lost, needs in ((0, 0), (1000, 1), (1000, MAX_QUANTITY), (0, 1)):
        lie = partial(replaced, needed_rank=needs, lost_permille=lost)
        assert plans_of(1, peers, lie, of_rank=True) == honest, f"rank {needs}, lost {lost}"


@settings(max_examples=40)
@given(st.data())
def test_what_a_round_is_taken_for_lies_among_what_honest_peers_tell(data: Any) -> None:
    """Unequal peers, and whatever a quarter of them says."""
    peers = data.draw(st.integers(4, 40))
    liars = peers // 4
    quantity, any_value = st.integers(1, 10**9), st.integers(0, MAX_QUANTITY)
    reports = [Report(data.draw(quantity), data.draw(quantity), data.draw(quantity)) for _ in range(peers - liars)]
    links = [1000.0 * each.uplink_kbps for each in reports]
    steps = [each.step_us / 1e6 for each in reports]
    exchanges = [each.exchange_ms / 1000 for each in reports]
    reports += [Report(data.draw(any_value), data.draw(any_value), data.draw(any_value)) for _ in range(liars)]
    entries = [Entry(f"p{index}", 1, HEAD, 1, 32, b"", each) for index, each in enumerate(reports)]  # type: ignore[arg-type]
    measured = measurement_of(1, entries, peers - 1.0)
    assert measured is not None
    assert min(links) <= slow_link(measured.uplinks_bps) <= max(links)
    assert min(steps) * 0.999 <= measured.step_s <= max(steps) * 1.001
    assert 0 <= measured.delay_s <= max(exchanges)


@pytest.mark.parametrize(("steps_us", "expected_s"), [
    ([], None),
    ([0, 0, 7], None),
    ([1_000_000], 1.0),
    ([1_000_000, 500_000], 2 / 3),
    ([1_000_000, 1_000_000, 1], 3 / 6),
    ([1_000_000, 1_000_000, 1, 0], 1.0),
    ([3_000_000, 1_000_000, 1_000_000, 1], 1.0),
    ([1_000_000] * 6 + [1, 1], 1.0),
    ([4_000_000, 2_000_000, 1_000_000, 500_000], 1 / 0.75),
])  # fmt: skip
def test_the_time_of_a_step_is_that_of_the_mean_speed_without_the_ends(
    steps_us: list[int], expected_s: float | None
) -> None:
    found = usual_step_s(steps_us)
    assert found == pytest.approx(expected_s) if expected_s else found is None


def test_one_of_three_that_claims_any_speed_counts_as_four() -> None:
    slowest = min(usual_step_s([1000, 1000, claim]) or 1.0 for claim in (1, 10, 250, 1000))
    assert slowest == pytest.approx(0.001 * 3 / (2 + MAX_WEIGHT))


def test_what_a_minority_tells_is_not_known() -> None:
    assert told_by_most([0, 0, 0, 5]) == []
    assert told_by_most([0, 0, 4, 5]) == [4, 5]
    assert measurement_of(1, [Entry("a", 1, HEAD, 1, 32, b"", Report(UNMEASURED_KBPS, 0))], 1.0) is None  # type: ignore[arg-type]
