"""A stage between real peers: copied while it lives, found and taken over when nobody of it is left."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import pytest

from dilocox_peer.cli.visit import fetch_whole_model
from dilocox_peer.dht.directory import Directory
from dilocox_peer.errors import DilocoxError, ProtocolError
from dilocox_peer.events import Event, Failed
from dilocox_peer.events_of_states import StageCopied, StageRestored, StateFetchFailed
from dilocox_peer.invitation import Invitation
from dilocox_peer.peer import takeover as takeover_module
from dilocox_peer.peer.archivist import keeper_lease
from dilocox_peer.peer.dialback import DialbackVerdict
from dilocox_peer.peer.presence import Presence
from dilocox_peer.peer.state import guardian as guardian_module
from dilocox_peer.peer.state.backup import COPY_ROUNDS, Backup, copy_folder
from dilocox_peer.peer.state.backup_exchange import BACKUP_SERVICE, BackupServer, Kept
from dilocox_peer.peer.state.backup_store import BackupStore, backup_store
from dilocox_peer.peer.state.guardian import Guardian
from dilocox_peer.peer.state.restore import Own, find_backup
from dilocox_peer.peer.state.statesync import STATE_SERVICE, States
from dilocox_peer.peer.takeover import Move, Takeover
from dilocox_peer.peer.training.anchor_state import AnchorState
from dilocox_peer.store.pull import STORE_SERVICE
from dilocox_peer.store.shelf import Shelf
from dilocox_peer.store.store import Content, Source, Store
from dilocox_peer.types import Digest, PeerId
from tests.certified_stage import MANIFEST, STAGE, CertifiedStage, annals_of, keep_in
from tests.shell.conftest import MakeTransport, until

FIRST = 0  # the other stage


@dataclass
class Node:
    """A peer's network. events: what was told of it. folder: of its run."""

    presence: Presence
    directory: Directory
    events: list[Event]
    folder: Path

    @cached_property
    def blobs(self) -> Shelf:
        return Shelf(self.folder / "stage1" / "contributions")

    @property
    def store(self) -> BackupStore:
        return backup_store(self.folder, MANIFEST, STAGE)

    def told(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]

    async def answer(self, server: BackupServer, stage: int) -> None:
        await self.presence.transport.serve(BACKUP_SERVICE, server.serve)
        await self.directory.announce(self.presence.lease(stage))

    async def hold(self, stage: CertifiedStage, state: Callable[[], AnchorState], *, is_lying: bool = False) -> None:
        """As a peer of the stage, that has this state now. is_lying: it gives it to whoever asks for any."""
        states = States(state, [self.folder])
        await self.presence.transport.serve(STATE_SERVICE, states.serve_digest)
        await self.serve(_Lies(state()) if is_lying else states)
        await self.answer(BackupServer(stage.stage, certificates=lambda: stage.certificates, kept={}), stage.stage)

    async def serve(self, source: Source) -> None:
        await Store(self.presence.transport, [Shelf(self.folder / "things")], sources=[source]).serve()

    async def find(self) -> Backup | None:
        found = await find_backup(
            MANIFEST, STAGE, self.store, Own((), None, self.blobs), endpoint=self.presence.endpoint,
            directory=self.directory, listener=self.events.append,
        )  # fmt: skip
        return found.backup


MakeNode = Callable[[str], Awaitable[Node]]


@pytest.fixture
async def make_node(make_transport: MakeTransport, tmp_path: Path) -> AsyncIterator[MakeNode]:
    """The first is everybody's initial peer."""
    nodes: list[Node] = []
    async with AsyncExitStack() as stack:

        async def make(name: str) -> Node:
            peers = nodes[0].presence.transport.addresses if nodes else ()
            transport, identity = await make_transport(name, namespace=MANIFEST.run_id, initial_peers=peers)
            directory = await Directory.create(transport, MANIFEST.run_id, identity.key)
            stack.push_async_callback(directory.close)
            presence = Presence(identity.peer_id, 1, transport, DialbackVerdict(outgoing_only=False))
            nodes.append(Node(presence, directory, [], tmp_path / name / "run-folder"))
            return nodes[-1]

        yield make


class _Lies:
    """Gives the state it has, whichever is asked for."""

    def __init__(self, state: AnchorState) -> None:
        self._state = state

    def content(self, _name: Digest) -> Content:
        return self._state


async def keep(node: Node, stage: CertifiedStage, height: int, *, is_lying: bool = False) -> None:
    """A peer of the other stage that has a copy of the state at height. is_lying: it hands out another one."""
    state = stage.states[height - 1]
    keep_in(node.store, stage.certificates, state)
    zeros = bytes(len(state.anchor))
    lie = AnchorState.of(state.layout, head=state.head, round_number=state.round, anchor=zeros, momentum=zeros)
    folders = [copy_folder(node.folder, STAGE) / "checkpoints"]
    await node.serve(_Lies(lie) if is_lying else States(None, folders))
    kept = {STAGE: Kept(annals_of(stage.certificates), state.round, state.round)}
    await node.answer(BackupServer(FIRST, certificates=tuple, kept=kept), FIRST)


@pytest.fixture
def looks_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guardian copies as often as it can."""
    monkeypatch.setattr(guardian_module, "FIRST_COPY_S", 0.05)
    monkeypatch.setattr(guardian_module, "LOOK_S", 0.05)


async def guarding(node: Node, stack: AsyncExitStack) -> asyncio.Task[None]:
    """The node keeps a copy of the other stage until the task is cancelled, and serves it until the stack is left."""
    guardian = Guardian(
        node.presence.endpoint, FIRST, manifest=MANIFEST, count=1, run_folder=node.folder, directory=node.directory,
        certificates=tuple, listener=node.events.append,
    )  # fmt: skip
    await guardian.serve(stack)
    await node.serve(States(None, [copy_folder(node.folder, STAGE) / "checkpoints"]))
    await node.directory.announce(node.presence.lease(FIRST))
    return asyncio.create_task(guardian.run())


async def test_a_copy_is_kept_while_the_stage_lives_and_found_when_it_is_gone(
    make_node: MakeNode, looks_soon: None
) -> None:
    head, later = await make_node("head"), await make_node("later")
    stage = CertifiedStage().rounds(4)
    await later.hold(stage, lambda: stage.states[-2])

    async with AsyncExitStack() as stack:
        copying = await guarding(head, stack)
        await until(lambda: len(head.told(StageCopied)) == 1)
        newcomer = await make_node("newcomer")
        assert await newcomer.find() is None, "somebody of the stage lives"
        stage.rounds(COPY_ROUNDS)
        await until(lambda: len(head.told(StageCopied)) == 2)
        copying.cancel()
        assert head.told(Failed) == []

        await later.directory.leave()
        await later.presence.transport.close()
        backup = await newcomer.find()
        assert backup is not None
        assert backup.state == stage.states[-2]
        assert backup.certificates == tuple(stage.certificates[:-1])
        restored = newcomer.told(StageRestored)
        assert [event.donor for event in restored] == [head.presence.me]  # type: ignore[attr-defined]


async def test_a_copy_stays_when_the_chain_goes_on_elsewhere_and_nobody_gives_a_state_of_that(
    make_node: MakeNode, looks_soon: None
) -> None:
    head, later = await make_node("head"), await make_node("later")
    stage, other = CertifiedStage().rounds(4), CertifiedStage().rounds(2).round(closed_ms=5).rounds(COPY_ROUNDS)
    asked = []

    def state() -> AnchorState:
        asked.append(stage.certificates[-1].value.round)
        return stage.states[3]

    await later.hold(stage, state)

    async with AsyncExitStack() as stack:
        copying = await guarding(head, stack)
        await until(lambda: len(head.told(StageCopied)) == 1)
        before = list(stage.certificates)
        stage.certificates[:] = other.certificates  # of which it has no state
        await until(lambda: 19 in asked)
        await later.presence.transport.close()
        await until(lambda: head.told(Failed) != [])  # a look in vain: none is at work on what was kept
        newcomer = await make_node("newcomer")
        backup = await newcomer.find()
        assert backup is not None
        assert backup.state == stage.states[3]
        assert backup.certificates == tuple(before[:4])
        copying.cancel()


async def test_a_copy_whose_chain_is_damaged_is_told(make_node: MakeNode) -> None:
    head = await make_node("head")
    stage = CertifiedStage().rounds(4)
    keep_in(head.store, stage.certificates, stage.states[3])
    log = copy_folder(head.folder, STAGE) / "chain.log"
    raw = bytearray(log.read_bytes())
    raw[20] ^= 1
    log.write_bytes(raw)
    async with AsyncExitStack() as stack:
        copying = await guarding(head, stack)
        copying.cancel()
        assert [f"copy of another stage: {log} was damaged" in event.line() for event in head.told(Failed)] == [True]


async def test_who_lies_is_passed_over_and_the_longest_copy_is_taken(make_node: MakeNode) -> None:
    stage = CertifiedStage().rounds(6)
    longer = CertifiedStage().rounds(8)  # the same, and two rounds more
    liar, old, good = await make_node("liar"), await make_node("old"), await make_node("good")
    await keep(liar, longer, 8, is_lying=True)
    await keep(old, stage, 3)
    await keep(good, stage, 6)
    newcomer = await make_node("newcomer")
    backup = await newcomer.find()
    assert backup is not None
    assert backup.state == stage.states[5]
    told = newcomer.told(StateFetchFailed)
    assert [event.donor for event in told] == [liar.presence.me], [e.line() for e in newcomer.events]  # type: ignore[attr-defined]


async def test_our_own_copy_serves_too_and_a_stage_that_is_lost_is_told(make_node: MakeNode) -> None:
    stage = CertifiedStage().rounds(4)
    head, newcomer = await make_node("head"), await make_node("newcomer")
    begun = CertifiedStage().rounds(1)
    await head.answer(BackupServer(FIRST, certificates=lambda: begun.certificates, kept={}), FIRST)
    assert await newcomer.find() is None
    assert ["nobody kept a copy" in event.line() for event in newcomer.told(Failed)] == [True]
    keep_in(newcomer.store, stage.certificates, stage.states[2])
    backup = await newcomer.find()
    assert backup is not None
    assert backup.state == stage.states[2]


async def test_a_run_that_begins_asks_and_goes_on_without_a_word(make_node: MakeNode) -> None:
    head, newcomer = await make_node("head"), await make_node("newcomer")
    await head.answer(BackupServer(FIRST, certificates=tuple, kept={}), FIRST)
    assert await newcomer.find() is None
    assert newcomer.events == []


async def exported(node: Node, said: list[str], timeout_s: float = 30.0) -> None:
    """Takes the whole model from the run that node is in. said: on the way."""
    await node.directory.publish_manifest(MANIFEST)
    invitation = Invitation(MANIFEST.run_id, node.presence.transport.addresses)
    model = await fetch_whole_model(invitation, timeout_s=timeout_s, say=said.append)
    assert model.origin.round == 3


async def test_a_model_is_exported_with_the_proof_of_every_stage(make_node: MakeNode) -> None:
    head, later = await make_node("head"), await make_node("later")
    for node, number in ((head, 0), (later, 1)):
        stage = CertifiedStage(stage=number).rounds(4)
        await node.hold(stage, lambda stage=stage: stage.states[3])  # type: ignore[misc]
    said: list[str] = []
    await exported(head, said)
    assert [line.split(",")[0] for line in said] == [f"stage {number}: round 3" for number in (0, 1)]
    assert all(line.endswith("as 3 of 3 peers certified it") for line in said)


async def test_a_state_that_was_never_certified_is_not_exported(make_node: MakeNode) -> None:
    head, later = await make_node("head"), await make_node("later")
    honest, stage = CertifiedStage(stage=0).rounds(4), CertifiedStage(stage=1).rounds(4)
    await head.hold(honest, lambda: honest.states[3])
    await later.hold(stage, lambda: stage.states[1], is_lying=True)
    said: list[str] = []
    with pytest.raises(DilocoxError, match="no round of which all stages are served"):
        await exported(head, said, timeout_s=8.0)
    assert any("not the thing of that name" in line or "of another thing" in line for line in said), said


@pytest.mark.parametrize(
    "request_",
    [{}, {"stage": 1}, {"stage": "1", "want": "chain"}, {"stage": 1, "want": "chain", "locator": [b"short"]},
     {"stage": 1, "want": "chain", "locator": [bytes(32)] * 65}, {"stage": 1, "want": "all"}],
)  # fmt: skip
async def test_a_request_that_is_none_is_refused(request_: dict[str, object]) -> None:
    server = BackupServer(STAGE, certificates=tuple, kept={})
    with pytest.raises(ProtocolError):
        await server.serve(PeerId("stranger"), request_)


async def test_a_reader_that_speaks_of_a_newer_round_is_no_member_that_leaves() -> None:
    stage = CertifiedStage().rounds(2)
    said: list[bool] = []
    server = BackupServer(
        None,
        certificates=tuple,
        kept={STAGE: Kept(annals_of(stage.certificates), 1, 2)},
        on_newer=lambda _stage, is_member: said.append(is_member),
    )
    member = annals_of(stage.certificates).place.roster[0]
    for peer, its_round in ((PeerId("reader"), 2**40), (member, 2), (member, 3)):
        await server.serve(peer, {"stage": STAGE, "want": "summary", "round": its_round})
    assert said == [False, True]


async def test_the_newest_moves_to_a_stage_that_stays_empty(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(takeover_module, "LOOK_S", 0.02)
    monkeypatch.setattr("dilocox_peer.dht.assignment.PATIENCE_S", 0.3)
    old, new = await make_node("old"), await make_node("new")
    await old.directory.announce(replace(old.presence.lease(FIRST), reachability="direct"))
    await new.directory.announce(replace(new.presence.lease(FIRST), incarnation=2, reachability="direct"))
    linked, paused = {PeerId("somebody"): STAGE}, False

    def takeover_of(node: Node) -> asyncio.Task[Move]:
        takeover = Takeover(
            node.presence, FIRST, num_stages=2, start_peers=1, fits=(0, 1), linked=lambda: linked, is_paused=lambda: paused,
            mates=lambda: [each.presence.me for each in (old, new)], directory=node.directory,
        )  # fmt: skip
        return asyncio.create_task(takeover.run())

    moving, staying = takeover_of(new), takeover_of(old)
    await asyncio.wait({moving, staying}, timeout=1.0)
    assert not moving.done(), "it is linked with a peer of that stage"
    linked, paused = {}, True
    await asyncio.wait({moving, staying}, timeout=1.0)
    assert not moving.done(), "it is paused"
    paused = False
    async with asyncio.timeout(60):
        assert (await moving).stage == STAGE
    assert not staying.done(), "the oldest stays"
    staying.cancel()


async def test_the_newest_moves_to_a_stage_that_has_too_few_peers_to_begin(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where two chose at one moment, and the first had looked for the last time before the second announced itself."""
    monkeypatch.setattr(takeover_module, "LOOK_S", 0.02)
    nodes = [await make_node(name) for name in ("old", "new", "newest", "there")]
    for number, node in enumerate(nodes):
        stage = STAGE if number == 3 else FIRST
        lease = replace(node.presence.lease(stage), incarnation=1 + number, reachability="direct", round=1)
        await node.directory.announce(lease)

    def takeover_of(node: Node, start_peers: int) -> asyncio.Task[Move]:
        takeover = Takeover(
            node.presence, FIRST, num_stages=2, start_peers=start_peers, fits=(0, 1), linked=lambda: {PeerId("somebody"): STAGE},
            mates=lambda: [each.presence.me for each in nodes], is_paused=lambda: False, directory=node.directory,
        )  # fmt: skip
        return asyncio.create_task(takeover.run())

    begun = takeover_of(nodes[2], 1)
    staying = takeover_of(nodes[0], 2)
    await asyncio.wait({begun, staying}, timeout=1.0)
    assert not begun.done(), "that stage has as many as it begins with"
    async with asyncio.timeout(60):
        assert (await takeover_of(nodes[2], 2)).stage == STAGE
    assert not staying.done(), "the oldest stays"
    for task in (begun, staying):
        task.cancel()


async def test_where_the_stage_lives_who_says_it_has_more_than_its_chain_leads_to_is_not_waited_for(
    make_node: MakeNode,
) -> None:
    """A stranger with the true chain that says it keeps the run, and gives the state a byte at a time, held each start up for an hour."""
    stage = CertifiedStage().rounds(4)
    member, stranger = await make_node("member"), await make_node("stranger")
    await member.hold(stage, lambda: stage.states[-1])
    asked = asyncio.Event()

    async def trickle(_peer: PeerId, _header: dict[str, object]) -> object:
        asked.set()
        await asyncio.sleep(600.0)
        raise AssertionError("nobody waits so long")

    await stranger.presence.transport.serve(STORE_SERVICE, trickle)  # type: ignore[arg-type]
    kept = {STAGE: Kept(annals_of(stage.certificates), stage.states[-2].round, 10**9)}
    server = BackupServer(None, certificates=tuple, kept=kept)
    await stranger.presence.transport.serve(BACKUP_SERVICE, server.serve)
    await stranger.directory.announce(keeper_lease(stranger.presence.transport, 1, 10**9))
    newcomer = await make_node("newcomer")
    async with asyncio.timeout(30.0):
        assert await newcomer.find() is None
    assert not asked.is_set()
