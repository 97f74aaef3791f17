"""Real p2pd processes: who floods is turned away and hung up on, whom we belong with is heard all the while."""

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from dilocox_peer.errors import PeerUnavailable
from dilocox_peer.events import Event
from dilocox_peer.events_of_reach import TurnedAway
from dilocox_peer.network import doorkeeper, doors, serving
from dilocox_peer.network.bulk import Reply
from dilocox_peer.network.doorkeeper import Budget, Budgeted, Budgets, Trespass
from dilocox_peer.network.transport import Transport, TransportLimits
from dilocox_peer.peer.identity import Identity
from dilocox_peer.types import PeerId

from .conftest import PATIENCE_S, MakeTransport, until

LITTLE = Budgets(Budget(1e6, 1e6), Budget(0.001, 5.0), Budget(1e6, 1e6), Budget(1e6, 1e6))


async def trio_of(make_transport: MakeTransport, **limits: Any) -> tuple[Transport, Transport, Transport]:
    """A server, a member of its roster and a stranger, all connected."""
    server, _ = await make_transport("server", limits=TransportLimits(**limits))
    member, _ = await make_transport("member", initial_peers=server.addresses)
    stranger, _ = await make_transport("stranger", initial_peers=server.addresses)
    roster = {server.peer_id, member.peer_id}
    server.set_members(roster.__contains__)
    return server, member, stranger


async def connected(server: Transport) -> set[PeerId]:
    return {peer for peer, _ in await server.daemon.connections()}


async def test_a_stranger_that_floods_is_turned_away_and_named_and_a_member_is_heard(
    make_transport: MakeTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doorkeeper, "BANNED_AT", 20.0)
    server, member, stranger = await trio_of(make_transport, allowed={Budgeted.MESSAGES: LITTLE})
    got: list[PeerId] = []
    told: list[Event] = []
    server.doors.set_listener(told.append)
    server.set_message_handler(lambda peer, _raw: got.append(peer))

    async def flood() -> None:
        for _ in range(100):
            try:
                await stranger.send(server.peer_id, b"x", 30)
            except PeerUnavailable:
                if told:
                    return

    await flood()
    [said] = told
    assert isinstance(said, TurnedAway)
    assert said.who == stranger.peer_id
    assert Trespass.FLOOD.value in said.reason
    assert got.count(stranger.peer_id) == 5
    async with asyncio.timeout(60):
        while stranger.peer_id in await connected(server):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    with pytest.raises(PeerUnavailable):  # refused, or hung up on before that has come
        await stranger.send(server.peer_id, b"again", 30)
    assert got.count(stranger.peer_id) == 5
    for _ in range(50):
        await member.send(server.peer_id, b"x", 30)
    assert got.count(member.peer_id) == 50
    assert member.peer_id in await connected(server)


async def test_a_stranger_that_is_turned_away_opens_no_stream(
    make_transport: MakeTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, member, stranger = await trio_of(make_transport)
    asked: list[PeerId] = []

    async def serve(peer: PeerId, _header: dict[str, Any]) -> Reply:
        asked.append(peer)
        return Reply({}, [b"contribution"])

    await server.serve("blob", serve)
    for _ in range(10):
        server.doors.oversize(stranger.peer_id)
    with pytest.raises(PeerUnavailable):
        await stranger.fetch(server.peer_id, "blob", {}, max_body_bytes=100, timeout_s=60)
    _, body = await member.fetch(server.peer_id, "blob", {}, max_body_bytes=100, timeout_s=60)
    assert (bytes(body), asked) == (b"contribution", [member.peer_id])


async def test_when_p2pd_holds_too_much_strangers_are_hung_up_on(
    make_transport: MakeTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, member, stranger = await trio_of(make_transport)
    async with asyncio.timeout(60):
        while not {member.peer_id, stranger.peer_id} <= await connected(server):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    monkeypatch.setattr(doorkeeper, "DAEMON_BYTES", 1)
    await until(lambda: server.doors.num_hung_up > 0)
    assert await connected(server) == {member.peer_id}


async def test_strangers_that_ask_nothing_make_room_for_one_that_does(
    make_transport: MakeTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "PATIENT_S", 0.0)
    server, _, stranger = await trio_of(make_transport, streams=2, streams_waiting=0)  # one place for strangers
    newcomer, _ = await make_transport("newcomer", initial_peers=server.addresses)

    async def serve(_peer: PeerId, _header: dict[str, Any]) -> Reply:
        return Reply({}, [b"state"])

    await server.serve("blob", serve)
    _, writer = await stranger.open_stream(server.peer_id, server.fetch_protocol("blob"), 30)
    try:
        await until(lambda: server.is_busy(stranger.peer_id))
        _, body = await newcomer.fetch(server.peer_id, "blob", {}, max_body_bytes=100, timeout_s=60)
        assert bytes(body) == b"state"
    finally:
        writer.transport.abort()


async def ways_to(ours: Transport, peer: PeerId) -> list[str]:
    """Those of our connections with it, once p2pd has heard who it is, for which a stream waits. Nothing yet: after a moment."""
    try:
        _, writer = await ours.open_stream(peer, "/ipfs/ping/1.0.0", 5.0)
    except PeerUnavailable:
        await asyncio.sleep(0.2)
        return []
    try:
        return await ours.leads_to(peer)
    finally:
        writer.transport.abort()


async def test_a_stranger_that_p2pd_dials_over_webtransport_is_seen_as_others_are(
    make_transport: MakeTransport, tmp_path: Path
) -> None:
    """p2pd learns that address when the stranger comes in, and dials it later; hivemind cannot read it."""
    ours, _ = await make_transport()
    binary = Path(str(importlib.util.find_spec("hivemind").origin)).parent / "hivemind_cli" / "p2pd"  # type: ignore[union-attr]
    with Identity.open(tmp_path / "stranger" / "identity.key") as stranger:
        process = await asyncio.create_subprocess_exec(
            binary, "-b=1", "-dhtServer=1", "-idleTimeout=60s", "-tls=1", "-forceReachabilityPublic=1", f"-id={stranger.path}",
            f"-listen=/unix{tmp_path}/p2pd.sock", f"-bootstrapPeers={ours.addresses[0]}",
            "-hostAddrs=/ip4/127.0.0.1/udp/0/quic-v1/webtransport", stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            async with asyncio.timeout(PATIENCE_S):  # over TCP, by which p2pd hears where else it listens; then there
                while "/ip4/127.0.0.1/unknown" not in (ways := await ways_to(ours, stranger.peer_id)):
                    if ways:
                        await asyncio.sleep(1.0)  # p2pd keeps what it has heard
                        await ours.hang_up(stranger.peer_id)
            assert (await ours.paths())[stranger.peer_id] == "direct"
            await until(lambda: list(ours.doors.hosts_of(stranger.peer_id)) == ["127.0.0.1"])
        finally:
            process.kill()
            await process.wait()


async def test_names_that_were_not_seen_yet_are_of_one_holder_and_a_look_tells_whose_a_new_one_is(
    make_transport: MakeTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fresh name was a range of its own until the next look: two of them a second left a newcomer a fifth of a donor."""
    server, _ = await make_transport("server")
    monkeypatch.setattr(doors, "SEEN_S", PATIENCE_S)
    newcomer, _ = await make_transport("newcomer", initial_peers=server.addresses)
    strange = {server.doors.holder_of(PeerId(f"name {number}")) for number in range(10)}
    assert strange == {doors.UNSEEN}
    assert await server.doors.holder(newcomer.peer_id) == newcomer.peer_id, "from this computer"
    assert server.doors.holder_of(newcomer.peer_id) == newcomer.peer_id
    monkeypatch.setattr(doors, "SEEN_S", 0.1)
    assert await server.doors.holder(PeerId("a name")) == doors.UNSEEN
