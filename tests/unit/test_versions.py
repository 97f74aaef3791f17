import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox_peer.pipeline.versions import Versions


def complete(versions: Versions, count: int) -> None:
    for _ in range(count):
        versions.complete(versions.bind())


def test_carry_steps_while_the_younger_are_in_flight() -> None:
    versions = Versions("carry", 4)
    open_ = versions.bind()
    complete(versions, 4)
    assert versions.step_is_due
    assert versions.take_step() == 4
    versions.made()
    assert versions.live == (0, 1)
    assert versions.bind() == 1
    complete(versions, 4)
    assert not versions.step_is_due  # open_ is older than the version before the next
    versions.complete(open_)
    assert versions.step_is_due
    assert versions.take_step() == 5  # all completed ones, of both versions


def test_flush_admits_exactly_so_many_and_drains() -> None:
    versions = Versions("flush", 3)
    bound = [versions.bind() for _ in range(3)]
    assert not versions.may_admit
    versions.complete(bound[0])
    assert not versions.may_admit
    versions.complete(bound[1])
    assert not versions.step_is_due
    versions.complete(bound[2])
    assert versions.step_is_due
    versions.take_step()
    versions.made()
    assert versions.may_admit


def test_a_later_stage_of_a_flush_may_admit_more_and_steps_when_drained() -> None:
    versions = Versions("flush", 2, admit=4)
    bound = [versions.bind() for _ in range(4)]
    assert not versions.may_admit
    for version in bound:
        assert not versions.step_is_due
        versions.complete(version)
    assert versions.take_step() == 4


def test_a_batch_that_grows_admits_more_from_then_on() -> None:
    versions = Versions("flush", 1, admit=2)
    versions.accumulate = 3
    bound = []
    while versions.may_admit:
        bound.append(versions.bind())
    assert len(bound) == 6
    for version in bound[:2]:
        versions.complete(version)
    assert not versions.step_is_due
    for version in bound[2:]:
        versions.complete(version)
    assert versions.step_is_due


def test_a_cancelled_micro_batch_makes_room_for_another_in_a_flush() -> None:
    versions = Versions("flush", 2)
    first, second = versions.bind(), versions.bind()
    versions.complete(first)
    versions.release(second)
    assert versions.may_admit


def test_a_shift_is_published_when_nothing_is_older_than_the_current_version() -> None:
    versions = Versions("carry", 1)
    old = versions.bind()
    complete(versions, 1)
    versions.take_step()
    versions.made()
    versions.shifted()
    assert not versions.publish_is_due
    versions.complete(old)
    assert versions.publish_is_due
    versions.take_publish()
    versions.made()
    assert versions.current == 2
    assert not versions.publish_is_due


def test_a_step_has_the_shift_in_it() -> None:
    versions = Versions("carry", 1)
    complete(versions, 1)
    versions.shifted()
    versions.take_step()
    versions.made()
    assert not versions.publish_is_due


def test_a_micro_batch_of_a_dead_version_is_a_fault_of_ours() -> None:
    versions = Versions("carry", 1)
    versions.made()
    versions.made()
    with pytest.raises(AssertionError):
        versions.release(0)


@given(st.sampled_from(["carry", "flush"]), st.integers(1, 5), st.lists(st.integers(0, 99), max_size=120))
def test_whatever_happens_at_most_two_versions_live(mode: str, accumulate: int, moves: list[int]) -> None:
    versions = Versions("carry" if mode == "carry" else "flush", accumulate)
    flying: list[int] = []
    for move in moves:
        if versions.step_is_due:
            assert versions.take_step() >= accumulate
            versions.made()
        elif versions.publish_is_due:
            versions.take_publish()
            versions.made()
        elif move < 10:
            versions.shifted()
        elif move < 60 or not flying:
            if versions.may_admit:
                flying.append(versions.bind())
        else:
            version = flying.pop(move % len(flying))
            (versions.complete if move < 90 else versions.release)(version)
        assert set(flying) <= {versions.current, versions.current - 1}
        assert versions.in_flight == len(flying)
