"""Files that are whole or not there."""

import os
import threading
from pathlib import Path

import pytest

from dilocox_peer.cli.init import write_whole
from dilocox_peer.files import give_to_owner, replace_file


def test_a_device_or_a_pipe_is_never_replaced(tmp_path: Path) -> None:
    """`demo --report /dev/stdout`, as root, left a file of that name."""
    os.mkfifo(pipe := tmp_path / "pipe")
    for path in (pipe, Path("/dev/null")):
        with pytest.raises(OSError, match="device or a pipe"):
            replace_file(path, [b"words"])
    assert pipe.is_fifo()
    assert Path("/dev/null").is_char_device()


def test_what_a_command_writes_goes_into_a_pipe_or_a_device(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write_whole(pipe, b"words")
    reader.join(10.0)
    assert read == [b"words"]
    write_whole(Path("/dev/null"), b"words")
    assert Path("/dev/null").is_char_device()


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone gives files away")
def test_what_root_made_in_a_services_folder_is_the_services(tmp_path: Path) -> None:
    home, outside = tmp_path / "home", tmp_path / "outside"
    (home / "run" / "left").mkdir(parents=True)
    outside.write_text("root's own")
    made = [home / "run" / "left" / "chain", home / "in_use"]
    for each in made:
        each.touch()
    linked, pointing = home / "run" / "linked", home / "run" / "pointing"
    os.link(outside, linked)
    pointing.symlink_to(outside)
    os.mkfifo(home / "pipe")
    os.chown(home, 65533, 65533)
    give_to_owner(home)
    assert {each.stat().st_uid for each in (home, home / "run", home / "run" / "left", *made)} == {65533}
    assert outside.stat().st_uid == linked.stat().st_uid == 0, "what the service's user has linked there stays root's"
