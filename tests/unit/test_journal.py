"""The log of rounds on a disk that has no room: what could not be written leaves nothing, and goes in as soon as it can."""

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dilocox_peer.peer.rounds import journal as journal_module
from dilocox_peer.peer.rounds.durable import Durable, Votes, load_log
from dilocox_peer.peer.rounds.genesis import genesis_of
from dilocox_peer.peer.rounds.journal import Journal
from tests.certified_stage import MANIFEST, CertifiedStage


@contextmanager
def no_file_larger_than(size_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def record(stage: CertifiedStage, keep: int) -> Durable:
    appended = tuple(stage.certificates[keep:])
    return Durable(keep, appended, Votes(stage.certificates[-1].head))


@pytest.mark.parametrize("room", [0, 1, 7, 8, 100])
def test_a_record_that_has_no_room_leaves_the_log_as_it_was(tmp_path: Path, room: int) -> None:
    path, genesis, stage = tmp_path / "rounds.log", genesis_of(MANIFEST, 1), CertifiedStage()
    journal = Journal(path, genesis)
    journal.write(record(stage, 0))
    whole = path.read_bytes()
    stage.round()
    for _ in range(3):
        with no_file_larger_than(len(whole) + room), pytest.raises(OSError, match="File too large"):
            journal.write(record(stage, 1))
        assert path.read_bytes() == whole
    journal.write(record(stage, 1))
    journal.close()
    loaded = load_log(path.read_bytes(), genesis.head)
    assert not loaded.reason
    assert loaded.durable is not None
    assert loaded.durable.appended == tuple(stage.certificates)


def test_a_log_that_cannot_be_opened_again_when_it_has_been_compacted_is_opened_by_the_next_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For want of file descriptors, say, which others' connections take."""
    path, genesis, stage = tmp_path / "rounds.log", genesis_of(MANIFEST, 1), CertifiedStage()
    head, opened, open_ = stage.certificates[-1].head, 0, Path.open
    monkeypatch.setattr(journal_module, "COMPACT_BYTES", 0)  # it has grown
    journal = Journal(path, genesis)

    def refused(file: Path, *arguments: Any, **options: Any) -> Any:
        nonlocal opened
        if file == path and opened < 2:
            opened += 1
            raise OSError(errno.EMFILE, "Too many open files")
        return open_(file, *arguments, **options)

    monkeypatch.setattr(Path, "open", refused)
    journal.write(Durable(0, tuple(stage.certificates), Votes(head)))
    promised = Durable(len(stage.certificates), (), Votes(head, promised=7))
    with pytest.raises(OSError, match="Too many open files"):
        journal.write(promised)  # and is tried again (rounds/disk.py)
    journal.write(promised)
    journal.close()
    monkeypatch.undo()
    again = Journal(path, genesis)
    again.close()
    assert again.loaded.durable is not None
    assert again.loaded.durable.votes == promised.votes
