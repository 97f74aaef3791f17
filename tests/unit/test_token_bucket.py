import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox_peer.token_bucket import TokenBucket

amounts = st.floats(0.1, 1e6)


def test_a_full_bucket_lets_its_burst_pass_at_once() -> None:
    bucket = TokenBucket(rate=10.0, burst=5.0, now=0.0)
    assert bucket.reserve(5.0, now=0.0) == 0.0
    assert bucket.reserve(1.0, now=0.0) == pytest.approx(0.1)
    assert bucket.reserve(1.0, now=0.0) == pytest.approx(0.2)  # behind the one before


def test_an_idle_bucket_fills_no_further_than_its_burst() -> None:
    bucket = TokenBucket(rate=10.0, burst=5.0, now=0.0)
    bucket.reserve(5.0, now=0.0)
    assert bucket.reserve(15.0, now=1000.0) == pytest.approx(1.0)


@given(st.floats(1, 1e6), st.floats(1, 1e6), st.lists(st.tuples(st.floats(0, 10), amounts), min_size=1, max_size=40))
def test_no_more_than_rate_and_burst_passes_in_any_time(
    rate: float, burst: float, calls: list[tuple[float, float]]
) -> None:
    bucket, now, passed = TokenBucket(rate, burst, now=0.0), 0.0, 0.0
    for pause, amount in calls:
        now += pause
        done = now + bucket.reserve(amount, now)
        passed += amount
        assert passed <= burst + rate * done * (1 + 1e-9) + 1e-3


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.1, 3.0)), max_size=40))
def test_what_is_refused_takes_nothing(calls: list[tuple[float, float]]) -> None:
    bucket, twin, now = TokenBucket(1.0, 2.0, now=0.0), TokenBucket(1.0, 2.0, now=0.0), 0.0
    for pause, amount in calls:
        now += pause
        if bucket.try_take(amount, now):
            assert twin.try_take(amount, now)
    assert bucket.reserve(5.0, now) == pytest.approx(twin.reserve(5.0, now))


def test_a_clock_that_goes_back_gives_nothing() -> None:
    bucket = TokenBucket(rate=1.0, burst=1.0, now=100.0)
    assert bucket.try_take(1.0, now=100.0)
    assert not bucket.try_take(0.5, now=50.0)
    assert bucket.try_take(0.5, now=100.5)


@pytest.mark.parametrize(("rate", "burst"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0)])
def test_a_bucket_that_lets_nothing_pass_is_refused(rate: float, burst: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        TokenBucket(rate, burst, now=0.0)
