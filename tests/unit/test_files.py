"""Files that are whole or not there."""

import os
import threading
from pathlib import Path

import pytest

from dilocox_peer.cli.init import write_whole
from dilocox_peer.files import replace_file


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
