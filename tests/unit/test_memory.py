"""How much memory a stage takes, and what is said when there is no room for it."""

import pytest

from dilocox_peer.model.memory import BASE_BYTES, LINKD_BYTES, Room, device_bytes, stage_bytes

GB = 10**9
NEEDS = [4 * GB, 2 * GB, 4 * GB]


def test_a_stage_takes_what_the_table_says():
    assert stage_bytes(1_000, is_alone=True) == BASE_BYTES + 36_000
    assert stage_bytes(1_000, is_alone=False) == BASE_BYTES + LINKD_BYTES + 40_000


def test_a_tiny_peer_is_reckoned_with_no_less_than_it_was_measured_to_take():
    assert 444e6 <= stage_bytes(252_000, is_alone=True) <= 460e6


@pytest.mark.parametrize("is_alone", [True, False])
def test_an_accelerator_takes_over_what_training_needs(is_alone):
    host = stage_bytes(1_000, is_alone=is_alone, on_cpu=False)
    assert host == BASE_BYTES + (0 if is_alone else LINKD_BYTES) + 20_000
    both = host + device_bytes(1_000, is_alone=is_alone)
    assert both == BASE_BYTES + stage_bytes(1_000, is_alone=is_alone)


def test_only_stages_with_enough_room_fit():
    assert Room(4 * GB).fitting(NEEDS) == [0, 1, 2]
    assert Room(4 * GB - 1).fitting(NEEDS) == [1]
    assert Room(2 * GB - 1).fitting(NEEDS) == []


def test_what_is_allowed_bounds_what_is_free_and_the_other_way_round():
    assert Room(8 * GB, 2 * GB).fitting(NEEDS) == [1]
    assert Room(2 * GB, 8 * GB).fitting(NEEDS) == [1]


def test_a_limit_that_is_too_low_is_named_with_what_would_do():
    assert Room(8 * GB, 3 * GB).why_not(1, NEEDS) == ""
    assert Room(8 * GB, 3 * GB).why_not(0, NEEDS) == (
        "stage 0 needs 4.0 GB of memory, --max-memory allows 3.0 GB: allow 4.0, or join with --stage 1, which needs 2.0 GB"
    )
    assert Room(8 * GB, 1 * GB).why_not(1, NEEDS).endswith("--max-memory allows 1.0 GB: allow 2.0")


def test_the_limit_that_is_advised_is_enough():
    needs = [2_340_000_001]
    advised = float(Room(8 * GB, GB).why_not(0, needs).split("allow ")[-1])
    assert Room(8 * GB, int(advised * GB)).why_not(0, needs) == ""


def test_a_machine_that_is_too_small_is_told_so():
    assert Room(GB, 8 * GB).why_not(0, NEEDS) == (
        "stage 0 needs 4.0 GB of memory, 1.0 GB are free: close other programs, or use a machine with more memory"
    )
