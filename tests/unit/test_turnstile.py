"""One body passes at a time, each when the limit lets its bytes in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox_peer.pipeline.turnstile import Turnstile
from dilocox_peer.token_bucket import TokenBucket


def test_without_a_limit_everybody_passes():
    entry = Turnstile(1000)
    assert all(entry.passes(0.0) for _ in range(100))
    assert entry.opens_at <= 0.0


def test_a_place_is_taken_once_however_often_it_is_asked():
    asked: list[int] = []

    def pace(num_bytes: int) -> float:
        asked.append(num_bytes)
        return 2.0

    entry = Turnstile(7, pace)
    assert [entry.passes(now) for now in (10.0, 11.0, 11.9)] == [False] * 3
    assert entry.opens_at == 12.0
    assert asked == [7]
    assert entry.passes(12.0)
    assert not entry.passes(12.0)
    assert asked == [7, 7]


@given(st.floats(1.0, 1e6), st.integers(1, 10**6), st.lists(st.floats(0.0, 5.0), min_size=1, max_size=60))
def test_no_more_passes_than_the_rate_allows(rate: float, num_bytes: int, pauses: list[float]):
    now = 0.0
    bucket = TokenBucket(rate, burst=rate / 4, now=now)
    entry = Turnstile(num_bytes, lambda amount: bucket.reserve(amount, now))
    passed = 0
    for pause in pauses:
        now += pause
        passed += entry.passes(now)
        assert passed * num_bytes <= (rate / 4 + rate * now) * (1 + 1e-9) + 1e-3


def test_a_busy_line_gets_all_of_the_rate():
    now = 0.0
    bucket = TokenBucket(1000.0, burst=250.0, now=now)
    entry = Turnstile(400, lambda amount: bucket.reserve(amount, now))
    passed = 0
    while now < 100.0:
        if entry.passes(now):
            passed += 1
        else:
            now = entry.opens_at
    assert passed * 400 == pytest.approx(100_000, rel=0.01)
