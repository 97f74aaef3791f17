"""A keeper of whose stage everybody has gone but one that gives nothing: it is soon done with what nobody gives."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dilocox_peer.dht.directory import Directory
from dilocox_peer.network.transport import Transport
from dilocox_peer.peer import archivist as archivist_module
from dilocox_peer.peer.archivist import BLOBS_AT_ONCE, Archivist
from dilocox_peer.peer.state import keeping as keeping_module
from dilocox_peer.peer.state.archive import Archive
from dilocox_peer.peer.state.backup import Annals
from dilocox_peer.types import Digest, PeerId, sha256
from tests.certified_stage import MANIFEST, ROSTER, STAGE, CertifiedStage

KEPT, NEWEST = 3, 9


class Deserted:
    """A stage's survey: all voters are gone, and a stranger has a lease."""

    members_here = 0
    has_looked = True
    donors: Sequence[PeerId] = (PeerId("stranger"),)

    def __init__(
        self, _manifest: object, stage: int, *, annals: Annals, rng: random.Random, **_options: object
    ) -> None:
        self.stage, self.annals, self.rng = stage, annals, rng

    async def look(self) -> None:
        """Nobody has anything new."""

    async def tip(self) -> None:
        """Nobody says."""

    def is_left(self, _head: Digest) -> bool:
        return True

    def close(self) -> None:
        """Nothing is under way."""


async def nothing(*_arguments: object, **_options: object) -> None:
    """As a directory, or a transport, that has nothing to say."""


async def test_what_follows_a_contribution_that_nobody_gives_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stranger says that it has each of them and lets a byte come now and then: every fetch takes all its time."""
    certified, asked, lost = CertifiedStage(), list[Digest](), asyncio.Event()
    for number in range(1, NEWEST + 1):
        certified.round(blobs={peer: sha256(f"{number} {peer}".encode()) for peer in ROSTER})
    archive = Archive(tmp_path, MANIFEST, lambda _event: None)
    stage = archive.stages[STAGE]
    stage.annals.take(certified.certificates)
    growth = stage.log.unwritten()
    assert growth is not None
    stage.log.write(growth)
    stage.save(certified.states[KEPT])
    archive.close()

    class Trickling:
        def __init__(self, *_arguments: object, **_options: object) -> None:
            self.serve = nothing

        async def fetch(self, name: Digest, **_options: Any) -> Path:
            asked.append(name)
            await asyncio.sleep(0.02)
            raise TimeoutError

    monkeypatch.setattr(archivist_module, "Store", Trickling)
    monkeypatch.setattr(archivist_module, "Survey", Deserted)
    monkeypatch.setattr(archivist_module, "LOOK_LEAST_S", 0.01)
    monkeypatch.setattr(keeping_module, "LOOK_ALONE_S", 0.01)
    monkeypatch.setattr(keeping_module, "GIVE_UP_S", 0.0)
    archivist = Archivist(
        MANIFEST, transport=cast("Transport", SimpleNamespace(peer_id=PeerId("keeper"), serve=nothing)),
        directory=cast("Directory", SimpleNamespace(announce=nothing)), folder=tmp_path, quota_bytes=1 << 30,
        lease=cast("Any", lambda _number: None), listener=lambda _event: None,
    )  # fmt: skip
    archivist.on_tail_lost = lambda number, head: lost.set() if number == STAGE else None
    await archivist.open()
    await archivist.serve()
    running = asyncio.create_task(archivist.run())
    try:
        async with asyncio.timeout(20.0):
            await lost.wait()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert len(asked) <= BLOBS_AT_ONCE, f"{len(asked)} contributions were waited for, {BLOBS_AT_ONCE} at a time"
    assert archivist.head_of(STAGE) == certified.states[KEPT].head
