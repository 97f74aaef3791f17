"""One hostile member of four, two of eight: rounds and honest contributions go on as if nobody had turned."""

import statistics

import pytest

from tests.hostile.machines import MODES

from .stalling import Measured, play, play_faulty

pytestmark = pytest.mark.timeout(600)

SEEDS = range(3)
SIZES = ((4, 1), pytest.param(8, 2, marks=pytest.mark.slow))
AT_LEAST = 0.9
NAMED = set(MODES) - {"ignores accepted", "promises and lies"}  # what these do shows only after a ballot that failed
_undisturbed: dict[tuple[int, int], list[Measured]] = {}


def undisturbed(num_peers: int, num_hostile: int) -> list[Measured]:
    key = (num_peers, num_hostile)
    if key not in _undisturbed:
        _undisturbed[key] = [play(seed, num_peers, num_hostile, None) for seed in SEEDS]
    return _undisturbed[key]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("num_peers", "num_hostile"), SIZES)
def test_a_minority_costs_no_more_than_a_tenth(mode: str, num_peers: int, num_hostile: int) -> None:
    quiet = undisturbed(num_peers, num_hostile)
    hostile = [play(seed, num_peers, num_hostile, mode) for seed in SEEDS]
    rates = [one.rounds_a_minute / other.rounds_a_minute for one, other in zip(hostile, quiet, strict=True)]
    given = [one.contributions_a_round / other.contributions_a_round for one, other in zip(hostile, quiet, strict=True)]
    assert statistics.median(rates) >= AT_LEAST, rates
    assert statistics.median(given) >= AT_LEAST, given
    if mode in NAMED:
        assert all(len(each.named & each.suspects) == num_hostile for each in hostile), hostile


@pytest.mark.parametrize(("num_peers", "num_hostile"), SIZES)
def test_nobody_is_doubted_where_all_are_honest(num_peers: int, num_hostile: int) -> None:
    assert [each.named for each in undisturbed(num_peers, num_hostile)] == [frozenset()] * len(SEEDS)


@pytest.mark.parametrize("first", range(0, 70, 10))
def test_the_honest_heal_and_keep_every_invariant_beside_hostile_members(first: int) -> None:
    for seed in range(first, first + 10):
        play_faulty(seed)
