"""Who keeps a whole run, over real networks: what it has is served when all peers are gone, and liars give it nothing."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from dilocox_peer.cli import visit as visit_module
from dilocox_peer.cli.visit import fetch_whole_model
from dilocox_peer.compression.sizes import blob_limits
from dilocox_peer.errors import RunUnreachable
from dilocox_peer.events import Event
from dilocox_peer.events_of_states import KeepingStopped, RunKept, StageRestored, StateFetchFailed
from dilocox_peer.invitation import Invitation
from dilocox_peer.peer import archivist as archivist_module
from dilocox_peer.peer.archivist import Archivist, keeper_lease
from dilocox_peer.peer.state import keeping as keeping_module
from dilocox_peer.peer.state import survey as survey_module
from dilocox_peer.peer.state.backup import Backup
from dilocox_peer.peer.state.restore import Own, find_backup
from dilocox_peer.store.shelf import Shelf
from tests.certified_stage import MANIFEST, ROSTER, CertifiedStage
from tests.shell.conftest import until
from tests.shell.test_backup import MakeNode, Node, make_node

__all__ = ["make_node"]

pytestmark = pytest.mark.slow


@dataclass
class KeeperNode:
    """A keeper, and its network."""

    node: Node
    archivist: Archivist
    running: "asyncio.Task[None]"

    def told(self, kind: type[Event]) -> list[Event]:
        return self.node.told(kind)

    def another(self) -> Archivist:
        """As the next process has it, from the same disk."""
        return archivist_of(self.node, 1 << 30)

    async def stop(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)


def archivist_of(node: Node, quota_bytes: int) -> Archivist:
    transport = node.presence.transport
    return Archivist(
        MANIFEST, transport=transport, directory=node.directory, folder=node.folder, quota_bytes=quota_bytes,
        lease=lambda number: keeper_lease(transport, 1, number), listener=node.events.append,
    )  # fmt: skip


MakeKeeper = Callable[..., Awaitable[KeeperNode]]


@pytest.fixture
async def make_keeper(make_node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MakeKeeper]:
    """Everybody's initial peer, as a bootstrap is."""
    monkeypatch.setattr(keeping_module, "LOOK_FIRST_S", 0.05)
    monkeypatch.setattr(keeping_module, "LOOK_ALONE_S", 0.2)
    monkeypatch.setattr(archivist_module, "LOOK_LEAST_S", 0.01)
    monkeypatch.setattr(archivist_module, "FIND_S", 0.2)
    monkeypatch.setattr(survey_module, "DIRECTORY_EVERY_S", 0.2)
    async with AsyncExitStack() as stack:

        async def make(quota_bytes: int = 1 << 30) -> KeeperNode:
            node = await make_node("keeper")
            await node.directory.publish_manifest(MANIFEST)
            archivist = archivist_of(node, quota_bytes)
            await archivist.open()
            await archivist.serve()
            keeper = KeeperNode(node, archivist, asyncio.create_task(archivist.run()))
            stack.push_async_callback(keeper.stop)
            return keeper

        yield make


async def restored(node: Node, stage: int) -> Backup | None:
    own = Own((), None, Shelf(node.folder / f"stage{stage}" / "contributions"))
    found = await find_backup(
        MANIFEST, stage, node.store, own, endpoint=node.presence.endpoint, directory=node.directory,
        listener=node.events.append,
    )  # fmt: skip
    return found.backup


async def gone(*nodes: Node) -> None:
    for node in nodes:
        await node.directory.leave()
        await node.presence.transport.close()


async def test_of_a_run_that_nobody_has_begun_a_model_is_not_waited_for(
    make_keeper: MakeKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visit_module, "PROOF_S", 0.1)
    keeper = await make_keeper()
    invitation = Invitation(MANIFEST.run_id, keeper.node.presence.transport.addresses)
    entered: list[bool] = []
    with pytest.raises(RunUnreachable, match="nobody has begun the run, or all who had its state have left"):
        await fetch_whole_model(invitation, timeout_s=20.0, say=print, entered=lambda: entered.append(True))
    assert entered == [True], "whoever waits is told before"


async def test_what_two_stages_had_is_there_when_all_are_gone_and_after_a_restart(
    make_keeper: MakeKeeper, make_node: MakeNode
) -> None:
    keeper = await make_keeper()
    stages = [CertifiedStage(stage=0).rounds(4), CertifiedStage(stage=1).rounds(5)]
    peers = [await make_node(f"peer{stage.stage}") for stage in stages]
    for node, stage in zip(peers, stages, strict=True):
        await node.hold(stage, lambda stage=stage: stage.states[3])  # type: ignore[misc]
    await until(lambda: keeper.told(RunKept) != [])
    assert [stage.state_round for stage in keeper.archivist.stages] == [3, 3], "of one round in all stages"
    assert [len(stage.certificates) for stage in keeper.archivist.stages] == [5, 6]
    assert keeper.archivist.newest_round == 5
    assert not keeper.archivist.is_complete
    await gone(*peers)

    newcomer = await make_node("newcomer")
    for stage in stages:
        backup = await restored(newcomer, stage.stage)
        assert backup is not None
        assert backup.state == stage.states[3]
        assert backup.since == (), "nobody had the contributions to the rounds since"
    assert len(newcomer.told(StageRestored)) == 2

    said: list[str] = []
    invitation = Invitation(MANIFEST.run_id, keeper.node.presence.transport.addresses)
    model = await fetch_whole_model(invitation, timeout_s=30.0, say=said.append)
    assert model.origin.round == 3
    assert all("round 3" in line for line in said), said

    await keeper.stop()
    again = keeper.another()
    await again.open()
    assert [stage.state_round for stage in again.stages] == [3, 3]
    assert [len(stage.certificates) for stage in again.stages] == [5, 6]
    assert again.newest_round is None, "others may have gone on, and nobody was asked yet"
    await again.close()


async def test_a_liar_among_the_donors_gives_nothing_that_is_kept(make_keeper: MakeKeeper, make_node: MakeNode) -> None:
    keeper = await make_keeper()
    one, two = CertifiedStage(stage=0).rounds(4), CertifiedStage(stage=1).rounds(4)
    liar, good, other = [await make_node(name) for name in ("liar", "good", "other")]
    await other.hold(one, lambda: one.states[3])
    await liar.hold(two, lambda: two.states[1], is_lying=True)
    await until(lambda: keeper.told(StateFetchFailed) != [])
    assert keeper.told(RunKept) == []
    await good.hold(two, lambda: two.states[3])
    await until(lambda: keeper.told(RunKept) != [])
    assert {event.donor for event in keeper.told(StateFetchFailed)} == {liar.presence.me}  # type: ignore[attr-defined]
    await gone(liar, good, other)
    backup = await restored(await make_node("newcomer"), 1)
    assert backup is not None
    assert backup.state == two.states[3]


async def test_without_room_the_chain_is_followed_and_one_line_says_what_is_missing(
    make_keeper: MakeKeeper, make_node: MakeNode
) -> None:
    keeper = await make_keeper(quota_bytes=1000)
    stages = [CertifiedStage(stage=number).rounds(4) for number in (0, 1)]
    for stage in stages:
        node = await make_node(f"peer{stage.stage}")
        await node.hold(stage, lambda stage=stage: stage.states[3])  # type: ignore[misc]
    await until(lambda: keeper.told(KeepingStopped) != [])
    for number in range(6, 9):  # a look at the least for each
        for stage in stages:
            stage.round()
        await until(lambda: [len(stage.certificates) for stage in keeper.archivist.stages] == [number] * 2)  # noqa: B023
    [told] = keeper.told(KeepingStopped)
    assert "--keep-disk" in told.line()
    assert [stage.state_round for stage in keeper.archivist.stages] == [None, None]


async def test_the_same_folder_is_read_as_a_peers(make_keeper: MakeKeeper, make_node: MakeNode, tmp_path: Path) -> None:
    from dilocox_peer.peer.state.anchors import kept_manifest, load_from_disk, newest_states

    keeper = await make_keeper()
    stages = [CertifiedStage(stage=number).rounds(4) for number in (0, 1)]
    for stage in stages:
        node = await make_node(f"peer{stage.stage}")
        await node.hold(stage, lambda stage=stage: stage.states[3])  # type: ignore[misc]
    await until(lambda: keeper.told(RunKept) != [])
    manifest = kept_manifest(keeper.node.folder)
    assert manifest == MANIFEST
    assert load_from_disk([keeper.node.folder], MANIFEST).model.origin.round == 3
    assert newest_states(keeper.node.folder, MANIFEST, 2) == tuple(stage.states[3] for stage in stages)
    assert newest_states(keeper.node.folder, MANIFEST, 3) is None


async def test_contributions_that_are_larger_than_they_say_take_no_more_than_the_quota(
    make_keeper: MakeKeeper, make_node: MakeNode
) -> None:
    one, two = CertifiedStage(stage=0).rounds(4), CertifiedStage(stage=1).rounds(4)
    quota_bytes = 5 * one.states[0].size_bytes
    keeper = await make_keeper(quota_bytes=quota_bytes)
    other, member = await make_node("other"), await make_node("member")
    things = Shelf(member.folder / "things")
    size_bytes = blob_limits(one.states[0].layout)[1] // 2
    blobs = [
        {peer: things.put(bytes([number, index]) * (size_bytes // 2)) for index, peer in enumerate(ROSTER)}
        for number in range(8)
    ]
    await other.hold(two, lambda: two.states[3])
    await member.hold(one, lambda: one.states[3])
    await until(lambda: keeper.told(RunKept) != [])
    for each in blobs:
        one.round(blobs=each)
    assert 24 * size_bytes > quota_bytes
    await until(lambda: len(keeper.archivist.stages[0].certificates) == 13)
    for _ in range(24):  # a look at the least for each
        one.round()
        number = len(one.certificates)
        await until(lambda: len(keeper.archivist.stages[0].certificates) == number)  # noqa: B023
        taken = 0
        for path in keeper.node.folder.rglob("*"):
            with suppress(FileNotFoundError):  # let go of between the two
                taken += path.stat().st_size if path.is_file() else 0
        assert taken <= quota_bytes
