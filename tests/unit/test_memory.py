"""How much memory a stage takes."""

from dilocox_peer.pipeline.memory import BASE_BYTES, stage_bytes, stages_that_fit


def test_a_stage_of_several_needs_room_for_a_second_version():
    assert stage_bytes(1_000, is_alone=True) == BASE_BYTES + 36_000
    assert stage_bytes(1_000, is_alone=False) == BASE_BYTES + 40_000


def test_only_stages_with_enough_room_fit():
    sizes = [100_000_000, 50_000_000, 100_000_000]
    assert stages_that_fit(sizes, BASE_BYTES + 40 * 100_000_000) == [0, 1, 2]
    assert stages_that_fit(sizes, BASE_BYTES + 40 * 100_000_000 - 1) == [1]
    assert stages_that_fit(sizes, BASE_BYTES) == []
