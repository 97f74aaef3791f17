"""A stay that ends because p2pd died may leave its journal's thread at work: it does not replace the log that the next stay has opened."""

import threading
from pathlib import Path
from typing import Any

import pytest

from dilocox_peer import files
from dilocox_peer.peer.rounds import journal as journal_module
from dilocox_peer.peer.rounds.durable import Durable, Votes
from dilocox_peer.peer.rounds.genesis import genesis_of
from dilocox_peer.peer.rounds.journal import Journal
from tests.certified_stage import MANIFEST, CertifiedStage


def test_a_write_that_is_under_way_is_over_before_another_opens_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, genesis, stage = tmp_path / "rounds.log", genesis_of(MANIFEST, 1), CertifiedStage()
    head = stage.certificates[-1].head
    monkeypatch.setattr(journal_module, "COMPACT_BYTES", 0)  # it has grown
    first = Journal(path, genesis)
    begun, go_on = threading.Event(), threading.Event()
    replace = files.replace_file

    def slow(*arguments: Any, **options: Any) -> None:
        begun.set()
        go_on.wait(10)  # a disk that takes its time to flush what a compaction writes
        replace(*arguments, **options)

    monkeypatch.setattr(journal_module, "replace_file", slow)
    writing = threading.Thread(
        target=first.write, args=(Durable(0, tuple(stage.certificates), Votes(head)),)
    )  # the driver's own thread
    writing.start()
    assert begun.wait(5)
    # p2pd has died: driver.run is cancelled (shutdown(wait=False)), keeper.close() closes the journal, another stay opens it.
    closing = threading.Thread(target=first.close)
    closing.start()
    closing.join(0.5)
    if closing.is_alive():  # it waits for the write, as it should
        go_on.set()
        closing.join(5)
    monkeypatch.undo()
    second = Journal(path, genesis)
    assert second.loaded.durable is not None
    go_on.set()
    writing.join(5)
    promised = Votes(head, promised=7)
    second.write(Durable(len(stage.certificates), (), promised))  # durable, and told to others
    second.close()
    third = Journal(path, genesis)  # after kill -9
    third.close()
    first.close()
    assert third.loaded.durable is not None
    assert third.loaded.durable.votes == promised, (
        f"a vote that was durable is forgotten: {third.loaded.durable.votes.promised} for 7"
    )
