"""Whoever says that it keeps the run, and lies: what a newcomer takes over from it, and what it is told. The chains are forged from the
true one on, with keys that are in no roster of it, as anybody can who has the run's link."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest

from dilocox_peer.dht.records import Lease
from dilocox_peer.events_of_states import StageRestored
from dilocox_peer.network.transport import Reply
from dilocox_peer.peer.archivist import keeper_lease
from dilocox_peer.peer.farewell import hand_over
from dilocox_peer.peer.planning.plan import plan_bounds
from dilocox_peer.peer.rounds.chain import place_after
from dilocox_peer.peer.rounds.genesis import genesis_of
from dilocox_peer.peer.rounds.machine import RoundMachine
from dilocox_peer.peer.state import restore as restore_module
from dilocox_peer.peer.state.backup_exchange import BACKUP_SERVICE, BackupServer, Kept
from dilocox_peer.peer.state.restore import Own, Restoration, find_backup, newest_kept
from dilocox_peer.peer.state.statesync import STATE_SERVICE, States
from dilocox_peer.peer.training.anchor_state import AnchorState
from dilocox_peer.signing import SigningKey
from dilocox_peer.types import PeerId
from dilocox_peer.wire.chain import Certificate, encode_chain
from tests.certified_stage import MANIFEST, ROSTER, STAGE, CertifiedStage, annals_of, keep_in
from tests.hostile.forgery import branch, sybils
from tests.shell.test_backup import MakeNode, Node, make_node

__all__ = ["make_node"]

TRUE_ROUNDS = 4


def forged(stage: CertifiedStage, most: int = 1000, back: int = 0) -> tuple[list[Certificate], AnchorState]:
    """The agreed chain but for the newest `back` certificates, and strangers' own from there on; with a state of zeros, which it names
    as that of every round."""
    zeros = bytes(len(stage.states[-1].anchor))
    before = stage.certificates[: len(stage.certificates) - back]
    place = place_after(genesis_of(MANIFEST, STAGE), before)
    first = AnchorState.of(
        stage.states[0].layout, head=place.head, round_number=place.round, anchor=zeros, momentum=zeros
    )
    certificates = branch(
        place, insiders={}, outsiders=sybils(), bounds=plan_bounds(MANIFEST), max_peers=MANIFEST.limits.max_peers,
        state_digest=first.digest, most=most,
    )  # fmt: skip
    head = certificates[-2]
    state = AnchorState.of(first.layout, head=head.head, round_number=head.value.round, anchor=zeros, momentum=zeros)
    return [*before, *certificates], state


async def claim(node: Node, certificates: Sequence[Certificate], state: AnchorState, reached: int = 0) -> None:
    """Announces itself as a keeper with this chain and state."""
    keep_in(node.store, certificates, state)
    states = States(lambda: state, [node.folder])
    await node.presence.transport.serve(STATE_SERVICE, states.serve_digest)
    await node.serve(states)
    kept = {STAGE: Kept(annals_of(certificates), state.round, reached or certificates[-1].value.round)}
    await node.presence.transport.serve(BACKUP_SERVICE, BackupServer(None, certificates=tuple, kept=kept).serve)
    await node.directory.announce(keeper_lease(node.presence.transport, 1, state.round))


async def start(node: Node, own: Own | None = None) -> Restoration:
    return await find_backup(
        MANIFEST, STAGE, node.store, own or Own((), None, node.blobs), endpoint=node.presence.endpoint,
        directory=node.directory, listener=node.events.append,
    )  # fmt: skip


@pytest.mark.parametrize("most", [1000, 12])
async def test_a_strangers_chain_is_followed_to_where_it_leaves_the_true_one_alone_or_beside_a_keeper(
    make_node: MakeNode, most: int
) -> None:
    """To the run's last round, which nobody reached, or not so far, with a state of its own."""
    stage = CertifiedStage().rounds(TRUE_ROUNDS)
    bootstrap, liar = await make_node("bootstrap"), await make_node("liar")
    await bootstrap.directory.publish_manifest(MANIFEST)
    certificates, state = forged(stage, most)
    assert annals_of(certificates).is_over == (most == 1000)
    await claim(liar, certificates, state)
    newcomer = await make_node("newcomer")
    assert await start(newcomer) == Restoration(None), "nobody else is there"
    await claim(bootstrap, stage.certificates, stage.states[-2], TRUE_ROUNDS - 1)
    found = await start(newcomer)
    assert found.complete is None
    assert found.backup is not None
    assert found.backup.state == stage.states[-2]
    assert [event.donor for event in newcomer.told(StageRestored)] == [bootstrap.presence.me]  # type: ignore[attr-defined]


@pytest.mark.slow
async def test_who_comes_back_with_a_state_keeps_it(make_node: MakeNode) -> None:
    stage = CertifiedStage().rounds(TRUE_ROUNDS)
    bootstrap, liar = await make_node("bootstrap"), await make_node("liar")
    await bootstrap.directory.publish_manifest(MANIFEST)
    peer = await make_node("peer")
    own = Own(tuple(stage.certificates), stage.states[-1], peer.blobs)
    await claim(liar, *forged(stage))
    await claim(await make_node("another"), *forged(stage, back=2))
    assert await start(peer, own) == Restoration(None)


@pytest.mark.slow
async def test_a_run_that_is_over_is_believed_of_a_keeper_that_the_link_names_and_of_a_quorum(
    make_node: MakeNode,
) -> None:
    left = CertifiedStage().rounds(TRUE_ROUNDS).seized(ROSTER[1])  # its two companions have gone
    stage = CertifiedStage().rounds(TRUE_ROUNDS)
    for each in (left, stage):
        each.rounds(MANIFEST.rounds.total - TRUE_ROUNDS)
        assert annals_of(each.certificates).is_over
    bootstrap, other, third = [await make_node(name) for name in ("bootstrap", "other", "third")]
    await bootstrap.directory.publish_manifest(MANIFEST)
    newcomer = await make_node("newcomer")
    for keeper, chain, is_believed in ((other, left, False), (third, stage, True), (bootstrap, left, True)):
        await claim(keeper, chain.certificates, chain.states[-2])
        found = await start(newcomer)
        expected = (chain.place.round, chain.place.head) if is_believed else None
        assert found.complete == expected
        assert (found.backup is None) == is_believed
        await keeper.directory.leave()


@pytest.mark.slow
async def test_the_last_who_stayed_is_believed_where_nobody_else_can_be_asked(make_node: MakeNode) -> None:
    bootstrap, other = await make_node("bootstrap"), await make_node("other")
    await bootstrap.directory.publish_manifest(MANIFEST)
    stage = CertifiedStage().rounds(TRUE_ROUNDS).seized(ROSTER[1]).rounds(3)
    await claim(other, stage.certificates, stage.states[-2], stage.states[-2].round)
    newcomer = await make_node("newcomer")
    found = await start(newcomer)
    assert found.backup is not None
    assert found.backup.state == stage.states[-2]
    await claim(bootstrap, stage.certificates[:TRUE_ROUNDS], stage.states[1], stage.states[1].round)
    found = await start(newcomer)
    assert found.backup is not None
    assert found.backup.state == stage.states[1], "the link names somebody who knows less"


@pytest.mark.slow
async def test_liars_do_not_keep_a_keeper_from_being_asked_nor_a_start_from_ending(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fifty that say they keep the run, and are ahead of everybody: garbage, another run, endless pages, silence."""
    monkeypatch.setattr(restore_module, "GRACE_S", 0.2)
    stage = CertifiedStage().rounds(TRUE_ROUNDS)
    bootstrap = await make_node("bootstrap")
    await bootstrap.directory.publish_manifest(MANIFEST)
    await claim(bootstrap, stage.certificates, stage.states[-2], TRUE_ROUNDS - 1)
    liars = [await make_node(f"liar{number}") for number in range(4)]
    ends = asyncio.Event()

    async def lie(node: Node, page: Callable[[], Awaitable[Reply]]) -> None:
        async def answer(_peer: PeerId, header: dict[str, Any]) -> Reply:
            if header["want"] == "summary":
                return Reply({"height": 2**60, "round": 2**60, "weight": 2**60, "reached": 2**60}, [])
            return await page()

        await node.presence.transport.serve(BACKUP_SERVICE, answer)
        await node.directory.announce(keeper_lease(node.presence.transport, 1, 2**31))

    async def endless() -> Reply:
        return Reply({"more": True}, [encode_chain(stage.certificates[:1])])

    async def garbage() -> Reply:
        return Reply({"more": True}, [b"\xff" * 1000])

    async def another_run() -> Reply:
        other = CertifiedStage(stage=0).rounds(TRUE_ROUNDS)
        return Reply({"more": False}, [encode_chain(other.certificates)])

    async def silence() -> Reply:
        await ends.wait()
        return Reply({}, [])

    for node, page in zip(liars, (endless, garbage, another_run, silence), strict=True):
        await lie(node, page)
    newcomer = await make_node("newcomer")
    true = newcomer.directory.keepers

    async def keepers(timeout_s: float = 10.0) -> list[Lease]:
        fakes = [SigningKey(bytes([number]) * 32).peer_id for number in range(100, 150)]
        lease = keeper_lease(newcomer.presence.transport, 1, 2**31)
        return [
            *(replace(lease, peer=fake, addresses=(f"/ip4/127.0.0.1/tcp/9/p2p/{fake}",)) for fake in fakes),
            *await true(timeout_s),
        ]

    monkeypatch.setattr(newcomer.directory, "keepers", keepers)
    found = await start(newcomer)
    ends.set()
    assert found.complete is None
    assert found.backup is not None
    assert found.backup.state == stage.states[-2]


@dataclass
class LastOne:
    """What is asked of the rounds of a peer that leaves: it is alone."""

    round: int
    roster: tuple[PeerId, ...] = (PeerId("me"),)

    def alive(self, _now: float) -> set[PeerId]:
        return set(self.roster)


async def test_what_a_stranger_says_it_has_ends_no_farewell_and_no_wait(make_node: MakeNode) -> None:
    """Where a keeper that the link names is there, its word alone counts."""
    stage = CertifiedStage().rounds(TRUE_ROUNDS)
    bootstrap, liar, peer = [await make_node(name) for name in ("bootstrap", "liar", "peer")]
    await claim(liar, stage.certificates, stage.states[-2], 2**60)
    me = peer.presence.transport
    last = cast("RoundMachine", LastOne(TRUE_ROUNDS))
    async with asyncio.timeout(60):
        assert await newest_kept(STAGE, endpoint=peer.presence.endpoint, directory=peer.directory) == 2**60
        await hand_over(STAGE, last, me, peer.directory)  # nobody better is there
        await claim(bootstrap, stage.certificates, stage.states[-2], TRUE_ROUNDS - 1)
        assert await newest_kept(STAGE, endpoint=peer.presence.endpoint, directory=peer.directory) == TRUE_ROUNDS - 1
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await hand_over(STAGE, last, me, peer.directory)
