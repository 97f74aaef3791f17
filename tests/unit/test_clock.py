from dilocox_peer.peer.training.clock import RoundClock, follows
from dilocox_peer.types import PeerId

A, B, C = (PeerId(name) for name in "abc")
ROSTER = (A, B, C)


def over(
    clock: RoundClock,
    own: int,
    now: float = 1.0,
    round_number: int = 1,
    alive: tuple[PeerId, ...] = ROSTER,
    **said: tuple[int, int],
) -> bool:
    reports = {PeerId(name): report for name, report in said.items()}
    return clock.is_over(round_number, me=A, own=own, roster=ROSTER, alive=alive, reports=reports, now=now)


def test_a_round_is_over_when_the_roster_together_did_its_shares() -> None:
    clock = RoundClock(lambda number: 10)
    assert not over(clock, 10, b=(1, 10), c=(1, 9))
    assert over(clock, 10, b=(1, 10), c=(1, 10))


def test_a_fast_peer_works_for_a_slow_one() -> None:
    assert over(RoundClock(lambda number: 10), 4, b=(1, 14), c=(1, 12))


def test_nobody_ends_the_round_of_all_by_what_it_claims() -> None:
    clock = RoundClock(lambda number: 53)
    assert not over(clock, 10, b=(1, 2**31), c=(1, 11))
    assert not over(clock, 26, b=(1, 2**31), c=(1, 26))
    assert over(clock, 27, b=(1, 2**31), c=(1, 27))


def test_two_peers_do_not_believe_each_other_more_than_that_either() -> None:
    clock = RoundClock(lambda number: 10)
    assert not clock.is_over(1, me=A, own=3, roster=(A, B), alive=(A, B), reports={B: (1, 100)}, now=1.0)
    assert clock.is_over(1, me=A, own=4, roster=(A, B), alive=(A, B), reports={B: (1, 100)}, now=1.0)
    other = RoundClock(lambda number: 10)
    assert not other.is_over(1, me=A, own=100, roster=(A, B), alive=(A, B), reports={B: (1, 3)}, now=1.0)


def test_a_dead_peer_leaves_the_target_with_its_share() -> None:
    clock = RoundClock(lambda number: 10)
    assert not over(clock, 10, b=(1, 10), c=(1, 2))
    assert over(clock, 10, alive=(A, B), b=(1, 10), c=(1, 2))


def test_nothing_done_is_never_over() -> None:
    clock = RoundClock(lambda number: 10)
    assert not over(clock, 0, b=(1, 40), c=(1, 40))
    assert not over(clock, 0, now=1e6, b=(2, 1), c=(2, 1))


def test_twice_the_usual_time_ends_a_round() -> None:
    clock = RoundClock(lambda number: 10)
    assert not over(clock, 1, now=0.0, round_number=1)
    assert not over(clock, 1, now=100.0, round_number=2)
    assert not over(clock, 1, now=299.0, round_number=2)
    assert over(clock, 1, now=300.0, round_number=2)


def test_a_skipped_round_is_no_measure_of_time() -> None:
    clock = RoundClock(lambda number: 10)
    over(clock, 1, now=0.0, round_number=1)
    over(clock, 1, now=1.0, round_number=9)
    assert clock.usual_s(10) is None


def test_a_member_that_went_on_counts_as_its_share() -> None:
    clock = RoundClock(lambda number: 10)
    assert not over(clock, 5, b=(1, 14), c=(1, 1))
    assert not over(clock, 5, b=(2, 0), c=(1, 10))
    assert over(clock, 6, b=(2, 0), c=(1, 10))


def test_most_others_having_gone_on_ends_the_round() -> None:
    assert over(RoundClock(lambda number: 10), 1, b=(2, 0), c=(2, 3))


def test_one_of_two_others_cannot_end_the_round_by_claiming_to_be_ahead() -> None:
    assert not over(RoundClock(lambda number: 10), 1, b=(99, 0), c=(1, 5))


def test_alone_a_round_is_the_own_share() -> None:
    clock = RoundClock(lambda number: 10)
    assert not clock.is_over(1, me=A, own=9, roster=(A,), alive=(A,), reports={}, now=1.0)
    assert clock.is_over(1, me=A, own=10, roster=(A,), alive=(A,), reports={}, now=1.0)


def test_a_joiner_follows_the_rosters_work() -> None:
    clock = RoundClock(lambda number: 10)
    roster = (B, C)
    said = {B: (1, 10), C: (1, 9)}
    assert not clock.is_over(1, me=A, own=50, roster=roster, alive=roster, reports=said, now=1.0)
    assert clock.is_over(1, me=A, own=1, roster=roster, alive=roster, reports={**said, C: (1, 10)}, now=1.0)


FROM_A, FROM_B, FROM_C = (A, A), (B, B), (C, C)  # caller and origin


def test_a_later_stage_closes_when_most_of_its_recent_work_is_of_the_next_round():
    origins = {FROM_A: (4, 30), FROM_B: (3, 4), FROM_C: (3, 30)}
    assert not follows(3, own=10, origins=origins, certified_at_stage_0=2)
    assert follows(3, own=10, origins={**origins, FROM_B: (4, 4)}, certified_at_stage_0=2)
    assert follows(3, own=10, origins={FROM_A: (4, 22), FROM_B: (4, 21), FROM_C: (3, 21)}, certified_at_stage_0=2)
    assert follows(3, own=10, origins={FROM_A: (4, 64)}, certified_at_stage_0=2)


def test_one_that_sends_more_than_the_others_does_not_end_their_round():
    liar = {FROM_A: (1000, 60)}
    assert not follows(3, own=10, origins={**liar, FROM_B: (3, 4)}, certified_at_stage_0=2)
    assert not follows(3, own=10, origins={**liar, FROM_B: (3, 2), FROM_C: (3, 2)}, certified_at_stage_0=2)
    assert follows(3, own=10, origins={**liar, FROM_B: (4, 2), FROM_C: (3, 2)}, certified_at_stage_0=2)


def test_two_names_of_one_liar_through_honest_callers_do_not_end_the_round():
    origins = {(caller, PeerId(f"honest {each}")): (3, 1) for caller in (B, C) for each in range(8)}
    origins |= {(caller, PeerId(f"liar {each}")): (1000, 12) for caller in (B, C) for each in range(2)}
    assert not follows(3, own=10, origins=origins, certified_at_stage_0=2)


def test_a_caller_that_invents_origins_does_not_end_ours():
    """Many small ones, beside those of an honest caller of a stage before."""
    invented = {(A, PeerId(f"made up {index}")): (1000, 1) for index in range(40)}
    assert not follows(3, own=10, origins={**invented, (B, B): (3, 12), (B, C): (3, 12)}, certified_at_stage_0=2)
    assert follows(3, own=10, origins={**invented, (B, B): (4, 12), (B, C): (4, 12)}, certified_at_stage_0=2)


def test_an_origin_that_sends_much_through_honest_callers_does_not_end_the_round():
    through = {
        (caller, origin): (1000 if origin == A else 3, 20 if origin == A else 4)
        for caller in (B, C)
        for origin in (A, B, C)
    }
    assert not follows(3, own=10, origins=through, certified_at_stage_0=2)


def test_a_later_stage_closes_when_stage_0_has_certified_the_round():
    origins = {FROM_A: (3, 64)}
    assert follows(3, own=1, origins=origins, certified_at_stage_0=3)
    assert not follows(3, own=1, origins=origins, certified_at_stage_0=2)


def test_a_later_stage_that_did_nothing_closes_only_what_stage_0_has_certified():
    """All of the round's work may have gone to a newcomer that is in no roster yet: the origins then wait two rounds ahead, and
    nothing would come ever again."""
    assert not follows(3, own=0, origins={FROM_A: (5, 64)}, certified_at_stage_0=2)
    assert follows(3, own=0, origins={FROM_A: (5, 64)}, certified_at_stage_0=3)
    assert not follows(3, own=5, origins={}, certified_at_stage_0=2)
