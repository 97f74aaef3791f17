"""What stays on the disk of states that do not come whole, as a newcomer asks two keepers for theirs: that of which most has come, and in the end none."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from dilocox_peer.peer.state import restore as restore_module
from dilocox_peer.peer.state.backup import Annals
from dilocox_peer.peer.state.backup_store import backup_store
from dilocox_peer.peer.state.restore import Own, Restoration, find_backup
from dilocox_peer.peer.state.statesync import Agreed, Copying
from dilocox_peer.peer.training.anchor_state import AnchorState
from dilocox_peer.store.outline import CHUNK_BYTES, Outline
from dilocox_peer.store.pull import Pull
from dilocox_peer.store.shelf import Shelf
from dilocox_peer.types import Digest, PeerId, sha256
from tests.certified_stage import MANIFEST, STAGE, CertifiedStage
from tests.unit.test_rescue import BOOTSTRAP, ENDPOINT, directory_of, say
from tests.virtual_loop import run_virtually

STRANGER = PeerId("stranger")
FAR, NEAR = 8, 6  # rounds of which the stranger and the bootstrap say that they have the state


CHUNK, CHUNKS = b"x" * CHUNK_BYTES, 4
OUTLINE = Outline(CHUNKS * CHUNK_BYTES, (sha256(CHUNK),) * CHUNKS)


class Newcomer:
    """gives: how many chunks of a state's come at once, when it is asked for, before nothing more does; of one that is not named all do."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gives = dict[int, int]()
        self.came_before = list[tuple[int, int]]()  # of each round that was asked for, the chunks that were here
        self.stage = CertifiedStage().rounds(FAR + 1)
        self.store = backup_store(folder, MANIFEST, STAGE)
        self._contributions = Shelf(folder / "contributions")
        self._monkeypatch = monkeypatch

    async def _chain(self, _transport: object, _peer: PeerId, annals: Annals, _timeout_s: float) -> None:
        annals.take(self.stage.certificates)

    async def _state(
        self, _transport: object, _donors: object, agreed: Agreed, *, shelf: Shelf, copying: Copying, timeout_s: float,
        spared: Digest | None, **_options: object,
    ) -> AnchorState | None:  # fmt: skip
        state = self.stage.states[agreed.round]
        sink = shelf.partial(state.digest, size_bytes=OUTLINE.size_bytes, spared=spared)
        resumed = sink.resumed()
        held = set[int]() if resumed is None else set(resumed[1])
        self.came_before.append((agreed.round, len(held)))
        sink.begin(OUTLINE)
        for index in range(len(held), min(CHUNKS, len(held) + self.gives.get(agreed.round, CHUNKS))):
            sink.write(index * CHUNK_BYTES, CHUNK)
            held.add(index)
        copying.began(cast("Pull", SimpleNamespace(share=len(held) / CHUNKS)))
        try:
            if len(held) < CHUNKS:
                await asyncio.sleep(timeout_s)
                return None
            sink.mapped()
            return state
        finally:
            sink.close()

    def comes(self, within_s: float | None = None) -> Restoration | None:
        """within_s: or the process is killed."""

        async def main() -> Restoration | None:
            finding: Coroutine[object, object, Restoration] = find_backup(
                MANIFEST, STAGE, self.store, Own((), None, self._contributions), endpoint=ENDPOINT,
                directory=directory_of(keepers=[STRANGER, BOOTSTRAP]), listener=lambda _event: None,
            )  # fmt: skip
            try:
                async with asyncio.timeout(within_s):
                    return await finding
            except TimeoutError:
                return None

        self.came_before.clear()
        say(self._monkeypatch, {STRANGER: FAR, BOOTSTRAP: NEAR})
        self._monkeypatch.setattr(restore_module, "fetch_chain", self._chain)
        self._monkeypatch.setattr(restore_module, "fetch_state", self._state)
        return run_virtually(main(), self._monkeypatch)

    def on_disk(self) -> list[str]:
        return sorted(path.name for path in (self.store.arrivals.folder / "partial").iterdir())


@pytest.mark.parametrize("far_came", [1, 3])
def test_of_states_that_did_not_come_whole_nothing_stays_once_another_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, far_came: int
) -> None:
    """It took the room of a whole state, for a week, that the checkpoint of the other needs next."""
    newcomer = Newcomer(tmp_path, monkeypatch)
    newcomer.gives = {FAR: far_came}
    found = newcomer.comes()
    assert found is not None
    assert found.backup is not None
    assert found.backup.state == newcomer.stage.states[NEAR]
    assert newcomer.came_before == [(FAR, 0), (NEAR, 0)]
    assert not newcomer.on_disk()


def test_a_restart_keeps_that_of_which_most_has_come_and_not_what_came_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newcomer = Newcomer(tmp_path, monkeypatch)
    newcomer.gives = {FAR: 2, NEAR: 0}
    for times in range(3):
        assert newcomer.comes(within_s=200.0) is None
        assert newcomer.came_before == [(FAR, 2 if times else 0), (NEAR, 0)], "as its first was late"
        newcomer.gives = {FAR: 0, NEAR: 0}
    newcomer.gives = {FAR: 2}
    found = newcomer.comes()
    assert found is not None
    assert found.backup is not None
    assert found.backup.state == newcomer.stage.states[FAR]
    assert not newcomer.on_disk()
