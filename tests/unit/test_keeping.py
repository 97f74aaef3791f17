"""What a keeper of a run copies next, whatever the rounds take and whatever the disk has room for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox_peer.peer.state.keeping import COPY_SHARE, RETRY_S, Keeping, KeepNext, StageAccount

STATE = 1000
PLENTY = 1_000_000


def stage(newest: int, kept: int | None = None, **fields: object) -> StageAccount:
    return StageAccount(STATE, frozenset(range(max(newest - 2, 1), newest + 1)), kept=kept, **fields)  # type: ignore[arg-type]


def test_nothing_is_to_be_done_before_a_round_is_proved():
    assert Keeping(PLENTY).next([stage(0), stage(0)], 0, 0.0) == KeepNext()


def test_the_first_states_are_of_the_newest_round_that_all_stages_name():
    wanted = Keeping(PLENTY).next([stage(7), stage(6)], 0, 0.0)
    assert (wanted.copy, wanted.lacking) == (6, (0, 1))


def test_a_copy_that_was_broken_off_goes_on_with_the_stages_that_lack_it():
    wanted = Keeping(PLENTY).next([stage(6, kept=6), stage(6)], STATE, 0.0)
    assert (wanted.copy, wanted.lacking) == (6, (1,))
    wanted = Keeping(PLENTY).next([stage(7, kept=6), stage(7, kept=4)], STATE, 0.0)
    assert (wanted.copy, wanted.lacking) == (7, (0, 1)), "of different rounds no whole model is put together"


def test_contributions_follow_as_long_as_they_are_less_than_half_a_state():
    one = stage(9, kept=4, following_bytes=STATE // 2, missing_bytes=100)
    assert Keeping(PLENTY).next([one, stage(9, kept=4)], 2 * STATE, 0.0) == KeepNext(follow=(0,))
    more = stage(9, kept=4, following_bytes=STATE // 2 + 1, missing_bytes=100)
    wanted = Keeping(PLENTY).next([more, stage(9, kept=4)], 2 * STATE, 0.0)
    assert (wanted.copy, wanted.lacking, wanted.follow) == (9, (0, 1), (0,))
    larger = stage(9, kept=4, following_bytes=STATE + 1, missing_bytes=100)
    assert Keeping(PLENTY).next([larger, stage(9, kept=4)], 2 * STATE, 0.0).follow == ()


def test_a_contribution_that_nobody_has_makes_the_next_state_due():
    one = stage(9, kept=4, following_bytes=10, missing_bytes=10, is_broken=True)
    wanted = Keeping(PLENTY).next([one], STATE, 0.0)
    assert (wanted.copy, wanted.follow) == (9, ())


def test_copies_take_a_tenth_of_the_time_but_for_the_last_state():
    keeping, grown = Keeping(PLENTY), stage(9, kept=4, following_bytes=STATE)
    keeping.copied(3.0, 100.0)
    assert keeping.next([grown], STATE, 100.0 + 3.0 / COPY_SHARE - 0.1).copy is None
    assert keeping.next([grown], STATE, 100.0 + 3.0 / COPY_SHARE).copy == 9
    assert keeping.next([stage(9, kept=4, is_over=True)], STATE, 100.0).copy == 9
    assert keeping.next([stage(9, kept=9, is_over=True)], STATE, 100.0) == KeepNext()


def test_what_failed_is_tried_again_after_a_while():
    keeping = Keeping(PLENTY)
    keeping.failed(10.0)
    assert keeping.next([stage(3)], 0, 10.0 + RETRY_S - 0.1).copy is None
    assert keeping.next([stage(3)], 0, 10.0 + RETRY_S).copy == 3


@pytest.mark.parametrize("quota", [3 * STATE, 3 * STATE - 1])
def test_beyond_the_quota_what_is_kept_stays_and_the_reason_is_told(quota: int):
    wanted = Keeping(quota).next([stage(9, kept=4, following_bytes=STATE)], STATE, 0.0)
    assert (wanted.copy is None) == (quota < 3 * STATE) == ("--keep-disk" in wanted.full)
    one = stage(9, kept=9, following_bytes=300, missing_bytes=300)
    assert Keeping(STATE + 299).next([one], STATE, 0.0).follow == ()
    assert "contributions" in Keeping(STATE + 299).next([one], STATE, 0.0).full


accounts = st.lists(
    st.builds(
        StageAccount,
        state_bytes=st.just(STATE),
        proven=st.frozensets(st.integers(1, 12), max_size=3),
        is_over=st.booleans(),
        kept=st.none() | st.integers(1, 12),
        following_bytes=st.integers(0, 3 * STATE),
        missing_bytes=st.integers(0, 3 * STATE),
        is_broken=st.booleans(),
    ),
    min_size=1,
    max_size=4,
)


@given(stages=accounts, used=st.integers(0, 10 * STATE), quota=st.integers(0, 12 * STATE))
def test_nothing_wanted_is_unproved_older_than_what_is_kept_or_beyond_the_quota(stages, used, quota):
    wanted = Keeping(quota).next(stages, used, 0.0)
    if wanted.copy is not None:
        assert all(wanted.copy in each.proven for each in stages)
        assert wanted.lacking
        assert all(stages[number].kept != wanted.copy for number in wanted.lacking)
        kept = {each.kept for each in stages}
        assert len(kept) > 1 or kept == {None} or max(kept) < wanted.copy
        assert used + (len(wanted.lacking) + 1) * STATE <= quota
    assert used + sum(stages[number].missing_bytes for number in wanted.follow) <= max(quota, used)
