"""What is served of whole states: the newest, older ones from disk, and each of those once for all who fetch it."""

import asyncio
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dilocox_peer.errors import ProtocolError
from dilocox_peer.events import Event, StateFetchFailed
from dilocox_peer.peer.state.backup import BackupStore
from dilocox_peer.peer.state.backup_exchange import BackupServer, Kept
from dilocox_peer.peer.state.checkpoint import write_checkpoint
from dilocox_peer.peer.state.statesync import StateServer, fetch_state
from dilocox_peer.peer.training.outer import AnchorState
from dilocox_peer.signing import verify
from dilocox_peer.types import PeerId
from tests.certified_stage import MANIFEST, STAGE, CertifiedStage, annals_of

ASKER = PeerId("asker")


def server_of(stage: CertifiedStage, folder: Path) -> StateServer:
    """At the last state, with those before it on disk."""
    for state in stage.states[:-1]:
        write_checkpoint(folder, MANIFEST.run_id, state, keep=100)
    newest = stage.states[-1]
    return StateServer(
        current=lambda: newest, checkpoints=folder, run_id=MANIFEST.run_id, layout=newest.layout, disk=ThreadPoolExecutor(1)
    )  # fmt: skip


async def test_the_newest_and_older_ones_are_served_and_nothing_is_an_empty_reply(tmp_path: Path) -> None:
    stage = CertifiedStage().rounds(4)
    server = server_of(stage, tmp_path)
    for height in (4, 2):
        reply = await server.serve(ASKER, {"head": stage.states[height].head})
        assert (reply.header["head"], reply.header["round"]) == (stage.states[height].head, stage.states[height].round)
        assert [bytes(part) async for part in reply.parts()] == [bytes(part) for part in stage.states[height].parts()]
    assert (await server.serve(ASKER, {"head": bytes(32)})).header == {}
    for bad in ({}, {"head": b"short"}, {"head": 2}):
        with pytest.raises(ProtocolError):
            await server.serve(ASKER, bad)


async def test_the_digest_alone_is_had_of_the_newest_and_no_disk_is_read_for_an_older_one(tmp_path: Path) -> None:
    stage = CertifiedStage().rounds(4)
    server = server_of(stage, tmp_path)
    newest = await server.serve(ASKER, {"head": stage.states[4].head, "want": "digest"})
    assert (newest.header["digest"], newest.body) == (stage.states[4].digest, [])
    assert (await server.serve(ASKER, {"head": stage.states[2].head, "want": "digest"})).header == {}


async def test_many_who_fetch_one_old_state_share_its_memory(tmp_path: Path) -> None:
    stage = CertifiedStage().rounds(4)
    server = server_of(stage, tmp_path)
    replies = await asyncio.gather(*(server.serve(ASKER, {"head": stage.states[1].head}) for _ in range(20)))
    assert len({id(reply) for reply in replies}) == 1
    last = weakref.ref(replies[0])
    del replies
    await asyncio.sleep(0)  # the tasks that gave them end
    gc.collect()
    assert last() is None, "and it is given back when the last has it"


async def test_many_who_fetch_a_kept_copy_share_its_memory(tmp_path: Path) -> None:
    stage, store = CertifiedStage().rounds(4), BackupStore(tmp_path, MANIFEST, STAGE, verify)
    store.save(annals_of(stage.certificates), stage.states[3])
    kept = {STAGE: Kept(store, annals_of(stage.certificates), 3)}
    server = BackupServer(0, certificates=tuple, kept=kept)
    replies = await asyncio.gather(*(server.serve(ASKER, {"stage": STAGE, "want": "state"}) for _ in range(20)))
    assert len({id(reply) for reply in replies}) == 1
    assert replies[0].header["digest"] == stage.states[3].digest


class Donors:
    """What a transport is to `fetch_state`: each donor replies with a state, and says of it what it likes."""

    def __init__(self, replies: dict[PeerId, tuple[AnchorState, dict[str, object]]]) -> None:
        self._replies = replies

    async def fetch(
        self, peer: PeerId, _kind: str, _request: object, **_limits: object
    ) -> tuple[dict[str, object], bytearray]:
        state, said = self._replies[peer]
        return {**state.header(), **said}, bytearray(b"".join(bytes(part) for part in state.parts()))


async def test_a_donor_that_gives_the_right_bytes_another_round_is_not_believed() -> None:
    """No digest covers the round: a state of a round after the last would end the run where it is installed."""
    state = CertifiedStage().rounds(3).states[3]
    liar, honest = PeerId("liar"), PeerId("honest")
    donors = Donors({liar: (state, {"round": 10**6}), honest: (state, {})})
    told: list[Event] = []
    found = await fetch_state(
        donors,  # type: ignore[arg-type]
        (liar, honest), {"head": state.head}, layout=state.layout, expected=state.digest, timeout_s=1.0,
        listener=told.append, round_number=3,
    )  # fmt: skip
    assert found is not None
    assert found.round == 3
    assert [event.donor for event in told if isinstance(event, StateFetchFailed)] == [liar]
