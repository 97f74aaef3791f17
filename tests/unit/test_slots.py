from dilocox_peer.pipeline.slots import AnswerCache, CallKey, Slots, num_slots, origin_window
from dilocox_peer.types import PeerId

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def take(slots: Slots, key: CallKey) -> list[CallKey]:
    slots.reserve(key)
    return slots.grant()


def test_slots_are_two_windows_a_caller_share() -> None:
    assert num_slots(window=4, callers=4, replicas=4, max_slots=100) == 8
    assert num_slots(window=4, callers=5, replicas=2, max_slots=100) == 24


def test_a_window_has_two_micro_batches_a_stage_and_two_for_the_way() -> None:
    assert origin_window(stations=2.0, way_s=0.0, slowest_s=0.1, accumulate=64) == 6
    assert origin_window(stations=2.0, way_s=0.21, slowest_s=0.1, accumulate=64) == 10, (
        "two more for each work's time on the way"
    )
    assert origin_window(stations=5.5, way_s=0.0, slowest_s=0.1, accumulate=64) == 13, (
        "of peers behind that work for it"
    )
    assert origin_window(stations=2.0, way_s=9.0, slowest_s=0.1, accumulate=8) == 8, "no more than a step takes"


def test_slots_are_capped_by_memory_and_at_least_one_a_caller() -> None:
    assert num_slots(window=4, callers=5, replicas=1, max_slots=7) == 7
    assert num_slots(window=1, callers=9, replicas=9, max_slots=100) == 9
    assert num_slots(window=1, callers=9, replicas=9, max_slots=0) == 1


def test_slots_are_granted_first_come_first_served() -> None:
    slots = Slots(2)
    for caller in (A, B, C):
        slots.link(caller)
    assert take(slots, (A, 1)) == [(A, 1)]
    assert take(slots, (B, 1)) == [(B, 1)]
    assert take(slots, (A, 2)) == []
    assert take(slots, (B, 2)) == []
    assert slots.position((B, 2)) == 2
    slots.release((A, 1))
    assert slots.grant() == [(A, 2)]
    assert slots.in_use == 2


def test_a_place_in_the_line_can_be_given_up() -> None:
    slots = Slots(1)
    take(slots, (A, 1))
    take(slots, (A, 2))
    take(slots, (B, 1))
    slots.release((A, 2))
    slots.release((A, 1))
    assert slots.grant() == [(B, 1)]
    assert slots.outstanding(A) == 0


def test_callers_of_which_no_body_has_come_hold_half_of_the_slots_at_most() -> None:
    """Many that reserve and send nothing would hold them all."""
    slots = Slots(8)
    strangers = [PeerId(f"s{number}") for number in range(20)]
    slots.link(B)
    for caller in (A, *strangers):
        slots.link(caller)
        slots.reserve((caller, 1))
    for caller in (A, B):
        slots.used(caller, is_used=True)
    granted = slots.grant()
    assert (A, 1) in granted
    assert len(granted) == 1 + 4
    assert take(slots, (A, 2)) == [(A, 2)]
    slots.used(A, is_used=False)
    assert take(slots, (A, 3)) == []


def test_a_caller_that_reserves_without_end_leaves_slots_for_the_others() -> None:
    slots = Slots(16)
    for caller in (A, B, C):
        slots.link(caller)
    granted = [key for call in range(100) for key in take(slots, (A, call))]
    assert len(granted) == 14
    assert take(slots, (B, 1)) == [(B, 1)]
    assert take(slots, (C, 1)) == [(C, 1)]
    assert slots.in_use == 16


def test_releasing_what_is_unknown_does_nothing() -> None:
    slots = Slots(1)
    slots.release((A, 1))
    take(slots, (A, 1))
    slots.release((A, 2))
    assert slots.in_use == 1


def test_a_caller_without_anything_is_forgotten() -> None:
    slots = Slots(4)
    slots.link(A)
    take(slots, (A, 1))
    slots.unlink(A)
    assert slots.outstanding(A) == 1
    slots.release((A, 1))
    slots.unlink(A)
    assert slots.outstanding(A) == 0


def test_a_smaller_capacity_takes_nothing_back_and_grants_nothing() -> None:
    slots = Slots(4)
    for call in range(4):
        take(slots, (A, call))
    slots.capacity = 2
    take(slots, (A, 9))
    slots.release((A, 0))
    assert slots.grant() == []
    assert slots.in_use == 3


def test_answers_are_kept_until_acknowledged_the_oldest_goes_first() -> None:
    cache: AnswerCache[str] = AnswerCache()
    for number in range(5):
        cache.keep(number, f"answer {number}", at_most=3)
    assert [cache.get(number) for number in range(5)] == [None, None, "answer 2", "answer 3", "answer 4"]
    cache.forget(3)
    cache.forget(3)
    assert len(cache) == 2
