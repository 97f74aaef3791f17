"""Which stage a peer comes back to: the one that it claimed last, whatever the times of its files say."""

import errno
import os
from pathlib import Path

import pytest

from dilocox_peer.peer.arrival import STAGE_FILE, held_stage, remember_stage


def put(folder: Path, stage: int, number: int, at: float) -> None:
    """A state of that round, of which the file is so old."""
    path = folder / f"stage{stage}" / "checkpoints" / f"anchor-{number:08d}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"a state")
    os.utime(path, (at, at))


@pytest.fixture
def moved(tmp_path: Path) -> Path:
    """The folder of a peer that held stage 0, and then stage 1; while it held the first its clock was ahead, or the folder was copied since."""
    put(tmp_path, 0, 10, at=2e9)
    put(tmp_path, 1, 500, at=1e9)
    return tmp_path


def test_a_peer_comes_back_to_the_stage_that_it_claimed_last(moved: Path) -> None:
    for stage in (1, 0, 1):
        remember_stage(moved, stage)
        assert held_stage(moved) == stage


def test_a_stage_of_which_no_state_has_come_is_not_held(moved: Path) -> None:
    remember_stage(moved, 2)
    put(moved, 2, 0, at=3e9)  # what every peer of it begins with
    assert held_stage(moved) == 0


@pytest.mark.parametrize("written", [b"", b"x", b"\xff\xfe1", b"-1", b"1" * 9, "\u0661".encode(), b"7"])
def test_without_a_word_of_a_stage_that_is_here_the_newest_file_counts(moved: Path, written: bytes) -> None:
    assert held_stage(moved) == 0, "of a folder of before"
    (moved / STAGE_FILE).write_bytes(written)
    assert held_stage(moved) == 0


def test_what_is_no_file_is_not_read(moved: Path) -> None:
    os.mkfifo(moved / STAGE_FILE)
    assert held_stage(moved) == 0


def test_who_has_no_state_holds_no_stage(tmp_path: Path) -> None:
    assert held_stage(tmp_path) is None
    remember_stage(tmp_path / "run", 1)
    assert held_stage(tmp_path / "run") is None


def test_where_it_cannot_be_written_it_does_not_name_the_one_before(
    moved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    put(moved, 1, 501, at=3e9)
    remember_stage(moved, 0)
    monkeypatch.setattr("dilocox_peer.peer.arrival.replace_file", full)
    remember_stage(moved, 1)
    assert held_stage(moved) == 1
