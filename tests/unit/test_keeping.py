"""What a keeper of a run copies next, whatever the rounds take and whatever the disk has room for."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox_peer.peer.state.keeping import (
    COPY_SHARE,
    GIVE_UP_S,
    LEAVING_S,
    LINE_SHARE,
    LOOK_ALONE_S,
    LOOK_FIRST_S,
    LOOK_LEAST_S,
    LOOK_MOST_S,
    MOST_SAVED,
    RETRY_S,
    Allowance,
    Keeping,
    KeepNext,
    LookPace,
    StageAccount,
    TailAccount,
    Tails,
    lines_bps,
)
from tests.certified_stage import ROSTER, CertifiedStage

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


def test_of_lines_that_can_spare_no_contributions_states_are_copied_once_they_can_be_spared():
    one, other = stage(9, kept=4, following_bytes=STATE, missing_bytes=STATE, spare_bytes=STATE - 1), stage(9, kept=4)
    assert Keeping(PLENTY).next([one, other], 2 * STATE, 0.0) == KeepNext()
    wanted = Keeping(PLENTY).next([replace(one, spare_bytes=STATE), other], 2 * STATE, 0.0)
    assert (wanted.copy, wanted.lacking) == (9, (0, 1))
    few = replace(one, following_bytes=100, missing_bytes=100, spare_bytes=99)
    assert Keeping(PLENTY).next([few], 2 * STATE, 0.0).follow == ()
    assert Keeping(PLENTY).next([replace(few, spare_bytes=100)], 2 * STATE, 0.0).follow == (0,)


def test_the_first_state_and_the_last_are_copied_whatever_lines_can_spare():
    assert Keeping(PLENTY).next([stage(3, spare_bytes=0)], 0, 0.0).copy == 3
    assert Keeping(PLENTY).next([stage(9, kept=4, is_over=True, spare_bytes=0)], STATE, 0.0).copy == 9


def certified(rounds: int, kbps: int) -> CertifiedStage:
    made = CertifiedStage()
    for _ in range(rounds):
        made.round(uplink_kbps=kbps)
    return made


def test_a_keeper_takes_a_tenth_of_what_lines_carry_or_of_what_peers_send_one_another():
    run, allowance = certified(1, 800), Allowance(1_000_000)
    peers = len(run.roster)
    line_bytes_s = peers * 800_000 / 8
    sent_bytes = 10 * peers * (peers - 1)  # of contributions of 10 bytes
    assert allowance.spare_bytes(run.certificates, 100.0) == int(LINE_SHARE * sent_bytes)
    assert allowance.spare_bytes(run.certificates, 101.0) == int(LINE_SHARE * (sent_bytes + line_bytes_s))
    allowance.taken(10_000_000)
    run.round(uplink_kbps=800)
    assert allowance.spare_bytes(run.certificates, 101.0) == int(LINE_SHARE * sent_bytes), "nothing is owed"
    assert allowance.spare_bytes(run.certificates, 1e9) == MOST_SAVED * 1_000_000, "and not for ever saved up for"


def test_nothing_is_held_back_where_lines_are_not_known_one_peer_is_left_or_one_is_about_to_leave():
    assert Allowance(1000).spare_bytes([], 0.0) is None
    assert Allowance(1000).spare_bytes(certified(2, 0).certificates, 0.0) is None
    assert lines_bps(certified(2, 100).certificates) == 100_000 * len(certified(0, 0).roster)
    alone = certified(2, 100).seized(ROSTER[0]).round(uplink_kbps=100)
    assert lines_bps(alone.certificates) is None
    allowance, run = Allowance(1000), certified(1, 1)
    assert allowance.spare_bytes(run.certificates, 0.0) is not None
    allowance.leaving(5.0)
    assert allowance.spare_bytes(run.certificates, 5.0 + LEAVING_S - 0.1) is None
    assert allowance.spare_bytes(run.certificates, 5.0 + LEAVING_S) is not None


def test_lines_are_those_of_the_newest_round_behind_view_changes():
    run = certified(2, 100).seized(*ROSTER)
    assert lines_bps(run.certificates) == 100_000 * len(ROSTER)


@pytest.mark.parametrize("quota", [3 * STATE, 3 * STATE - 1])
def test_beyond_the_quota_what_is_kept_stays_and_the_reason_is_told(quota: int):
    wanted = Keeping(quota).next([stage(9, kept=4, following_bytes=STATE)], STATE, 0.0)
    assert (wanted.copy is None) == (quota < 3 * STATE) == ("--keep-disk" in wanted.full)
    one = stage(9, kept=9, following_bytes=300, missing_bytes=300)
    assert Keeping(STATE + 299).next([one], STATE, 0.0).follow == ()
    assert "contributions" in Keeping(STATE + 299).next([one], STATE, 0.0).full


def test_what_a_copy_that_broke_off_has_left_is_room_for_the_next_and_for_nothing_else():
    first, quota = stage(9), 5 * STATE // 2
    assert Keeping(quota).next([first], STATE, 0.0, arriving_bytes=STATE).copy == 9
    kept = stage(9, kept=4, following_bytes=STATE, missing_bytes=200)
    wanted = Keeping(4 * STATE + 100).next([kept], 3 * STATE, 0.0, arriving_bytes=STATE)
    assert (wanted.copy, wanted.follow) == (9, ())
    whole = stage(9, kept=9, following_bytes=300, missing_bytes=300)
    assert Keeping(2 * STATE + 299).next([whole], 2 * STATE, 0.0, arriving_bytes=STATE).follow == ()
    too_much = Keeping(quota).next([first], 2 * STATE, 0.0, arriving_bytes=STATE)
    assert (too_much.copy, "--keep-disk" in too_much.full) == (None, True)


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
        spare_bytes=st.none() | st.integers(0, 3 * STATE),
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
        is_bounded = len(kept) == 1 and None not in kept and not all(each.is_over for each in stages)
        assert not is_bounded or all(each.can_spare(STATE) for each in stages)
    assert all(stages[number].can_spare(stages[number].missing_bytes) for number in wanted.follow)
    assert used + sum(stages[number].missing_bytes for number in wanted.follow) <= max(quota, used)


LOST = TailAccount(is_there=True, is_tried=True, is_left=True)


def test_a_tail_is_given_up_when_it_was_lost_for_a_while_without_a_break():
    tails = Tails()
    assert not tails.is_given_up(0, LOST, 100.0)
    assert not tails.is_given_up(0, LOST, 100.0 + GIVE_UP_S - 0.1)
    assert not tails.is_given_up(1, LOST, 100.0 + GIVE_UP_S), "each stage has its own"
    assert tails.is_given_up(0, LOST, 100.0 + GIVE_UP_S)
    assert not tails.is_given_up(0, replace(LOST, is_left=False), 120.0), "somebody is back"
    assert not tails.is_given_up(0, LOST, 121.0), "and the time begins anew"


@pytest.mark.parametrize(
    "changes", [{"is_there": False}, {"is_over": True}, {"is_tried": False}, {"is_under_way": True}, {"is_left": False}]
)
def test_a_tail_that_may_be_had_is_not_given_up(changes: dict[str, bool]):
    tails, tail = Tails(), replace(LOST, **changes)
    assert not any(tails.is_given_up(0, tail, 100.0 * number) for number in range(5))


def test_looks_come_four_times_a_round_within_bounds():
    pace, busy = LookPace(), {"is_complete": False, "is_alone": False}
    assert pace.pause_s(0, 0.0, **busy) == LOOK_FIRST_S
    assert pace.pause_s(1, 50.0, **busy) == LOOK_FIRST_S, "one round is no pace"
    for number in range(2, 12):
        found = pace.pause_s(number, 50.0 + 20.0 * (number - 1), **busy)
    assert found == pytest.approx(5.0, rel=0.01)
    for number in range(12, 22):
        found = pace.pause_s(number, 250.0 + 3600.0 * (number - 11), **busy)
    assert found == LOOK_MOST_S
    short = LookPace()
    for number in range(1, 12):
        found = short.pause_s(number, 0.4 * number, **busy)
    assert found == LOOK_LEAST_S, "what is kept of rounds as short is two rounds old at most"


def test_a_keeper_alone_looks_soon_for_the_first_and_seldom_once_the_run_is_complete():
    pace = LookPace()
    assert pace.pause_s(0, 0.0, is_complete=False, is_alone=True) == LOOK_FIRST_S
    assert pace.pause_s(3, 1.0, is_complete=False, is_alone=True) == LOOK_ALONE_S
    assert pace.pause_s(3, 2.0, is_complete=True, is_alone=True) == LOOK_MOST_S
