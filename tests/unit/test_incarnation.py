"""A peer's lives are in order, whatever its clock says."""

import pytest

from dilocox_peer.peer.incarnation import next_incarnation


def test_a_clock_that_was_set_back_makes_no_older_life(tmp_path):
    path = tmp_path / "run" / "incarnation"
    assert next_incarnation(path, 5000) == 5000
    assert next_incarnation(path, 4000) == 5001
    assert next_incarnation(path, 4000) == 5002
    assert next_incarnation(path, 6000) == 6000


@pytest.mark.parametrize("content", ["", "-7", "five", str(2**53), "9" * 10_000, "\x00" * 8])
def test_a_damaged_file_is_as_none(tmp_path, content):
    path = tmp_path / "incarnation"
    path.write_text(content)
    assert next_incarnation(path, 4000) == 4000
    assert next_incarnation(path, 3000) == 4001


def test_a_folder_that_cannot_be_written_is_done_without(tmp_path):
    (tmp_path / "file").write_text("")
    assert next_incarnation(tmp_path / "file" / "incarnation", 4000) == 4000
