"""The door of a run that takes invited peers: real network daemons on loopback, with and without a pass."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from dilocox_peer.admission import Admission, Gate, Grant, Revocations, Right
from dilocox_peer.dht.directory import Directory
from dilocox_peer.errors import PeerUnavailable, RunRefused, RunUnreachable
from dilocox_peer.manifest import AdmissionSection, Manifest
from dilocox_peer.network.bulk import PeerGone, Reply, RequestRefused
from dilocox_peer.network.transport import Transport
from dilocox_peer.peer.desk import Desk, OwnerRecords
from dilocox_peer.peer.entry import Newcomer, come_in, look_again
from dilocox_peer.peer.identity import Identity, encode_key
from dilocox_peer.signing import SigningKey, public_key_of
from dilocox_peer.types import PeerId

from .conftest import MakeTransport

OWNER = SigningKey(b"o" * 32)
MANIFEST = Manifest(admission=AdmissionSection(mode="invite")).signed_by(OWNER)
RUN = MANIFEST.run_id


def grant(uses: int = 0, peer: PeerId | None = None, *, right: Right = Right.JOIN, valid_s: int = 600) -> Grant:
    now = time.time()
    unsigned = Grant(RUN, b"g" * 16, frozenset({right}), int(now * 1000) - 1000, int(now) + valid_s, peer, uses)
    return unsigned.signed_by(OWNER)


def admission_of(shown: Grant | None) -> Admission:
    gate = Gate.of(MANIFEST)
    assert gate is not None
    return Admission(gate, b"" if shown is None else shown.to_bytes())


async def served(_peer: PeerId, header: dict[str, Any]) -> Reply:
    return Reply({}, [b"the state"])


async def guarded(
    make_transport: MakeTransport, name: str, *, to: Transport | None = None, **options: Any
) -> Transport:
    """A transport with a pass of its own, as `options` of the grant say, that hears messages and serves two services."""
    transport, identity = await make_transport(name, namespace=RUN, initial_peers=to.addresses if to else ())
    await transport.guard(admission_of(grant(peer=identity.peer_id, **options)))
    return transport


# -- the door ---------------------------------------------------------------------------------------------------------


def refusal(server: Transport, peer: PeerId) -> str | None:
    assert server.admission is not None
    return server.admission.gate.refusal(peer, Right.JOIN, time.time())


async def test_a_pass_is_shown_once_when_it_is_asked_for(make_transport: MakeTransport) -> None:
    server = await guarded(make_transport, "server")
    got: list[bytes] = []
    server.set_message_handler(lambda _peer, raw: got.append(raw))
    await server.serve("state", served, right=Right.READ)
    client = await guarded(make_transport, "client", to=server)

    assert refusal(server, client.peer_id) is not None
    await client.send(server.peer_id, b"hello", 30)
    assert got == [b"hello"]
    assert refusal(server, client.peer_id) is None
    _, body = await client.fetch(server.peer_id, "state", {}, max_body_bytes=100, timeout_s=60)
    assert body == b"the state"


async def test_a_request_shows_the_pass_as_a_message_does(make_transport: MakeTransport) -> None:
    server = await guarded(make_transport, "server")
    await server.serve("blob", served)
    client = await guarded(make_transport, "client", to=server)
    _, body = await client.fetch(server.peer_id, "blob", {}, max_body_bytes=100, timeout_s=60)
    assert body == b"the state"


async def test_a_stranger_is_not_heard_and_its_bytes_are_not_decoded(make_transport: MakeTransport) -> None:
    server = await guarded(make_transport, "server")
    heard: list[object] = []
    server.set_message_handler(lambda _peer, raw: heard.append(raw))

    async def serve(_peer: PeerId, header: dict[str, Any]) -> Reply:
        heard.append(header)
        return Reply({})

    for kind, right in (("state", Right.READ), ("blob", Right.JOIN)):
        await server.serve(kind, serve, right=right)
    stranger, _ = await make_transport("stranger", namespace=RUN, initial_peers=server.addresses)
    with pytest.raises(RequestRefused, match="has shown no invitation"):
        await stranger.send(server.peer_id, b"x", 30)
    for kind in ("state", "blob"):
        with pytest.raises(RequestRefused, match="has shown no invitation"):
            await stranger.fetch(server.peer_id, kind, {"head": bytes(32)}, max_body_bytes=100, timeout_s=60)
    for bad in (b"", b"x" * 300, grant(peer=server.peer_id).to_bytes(), grant(5).to_bytes()):
        with pytest.raises(RequestRefused):
            await stranger.daemon.call(server.peer_id, stranger.pass_protocol, bad, 5)
    assert heard == []


async def test_a_reader_reads_and_takes_no_part(make_transport: MakeTransport) -> None:
    server = await guarded(make_transport, "server")
    server.set_message_handler(lambda _peer, _raw: None)
    await server.serve("state", served, right=Right.READ)
    await server.serve("blob", served)
    reader = await guarded(make_transport, "reader", to=server, right=Right.READ)
    _, body = await reader.fetch(server.peer_id, "state", {}, max_body_bytes=100, timeout_s=60)
    assert body == b"the state"
    for attempt in (
        reader.send(server.peer_id, b"x", 30),
        reader.fetch(server.peer_id, "blob", {}, max_body_bytes=100, timeout_s=60),
    ):
        with pytest.raises(RequestRefused, match="allows reading, not taking part"):
            await attempt


async def test_who_is_put_out_is_heard_no_more_and_told_nothing(make_transport: MakeTransport) -> None:
    server = await guarded(make_transport, "server")
    client = await guarded(make_transport, "client", to=server)
    for transport in (server, client):
        transport.set_message_handler(lambda _peer, _raw: None)
    await client.send(server.peer_id, b"x", 30)
    await server.send(client.peer_id, b"x", 30)

    assert server.admission is not None
    server.admission.gate.take(Revocations(RUN, 1, ((b"g" * 16, 1),)))
    with pytest.raises(RequestRefused, match="revoked by the run's owner"):
        await client.send(server.peer_id, b"x", 30)
    with pytest.raises(PeerGone, match="revoked by the run's owner"):
        await server.send(client.peer_id, b"x", 30)


async def test_who_asks_for_a_pass_again_and_again_gets_one_and_no_loop(make_transport: MakeTransport) -> None:
    """A peer that always says that it was shown nothing."""
    from dilocox_peer.errors import ProtocolError

    server = await guarded(make_transport, "server")
    asked = 0

    def refuse(_peer: PeerId, _raw: bytes) -> None:
        nonlocal asked
        asked += 1
        raise ProtocolError(None, "it has shown no invitation")

    server.set_message_handler(refuse)
    client = await guarded(make_transport, "client", to=server)
    with pytest.raises(RequestRefused):
        await client.send(server.peer_id, b"x", 30)
    assert asked == 1, "the door asked first, then the pass was shown, then the peer was asked"


# -- coming in --------------------------------------------------------------------------------------------------------


@dataclass
class Bootstrap:
    transport: Transport
    directory: Directory
    desk: Desk


@dataclass
class Guest:
    """Somebody with a key and a link."""

    transport: Transport
    directory: Directory
    identity: Identity
    folder: Path

    async def come_in(self, brought: Grant | None, right: Right = Right.JOIN) -> Admission:
        newcomer = Newcomer(self.identity.peer_id, brought, self.folder, right)
        admission = await come_in(newcomer, MANIFEST, transport=self.transport, directory=self.directory)
        assert admission is not None
        return admission


MakeGuest = Callable[..., Awaitable[Guest]]


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as entered:
        yield entered


async def bootstrap(
    make_transport: MakeTransport, stack: AsyncExitStack, home: Path, owner: SigningKey | None = OWNER
) -> Bootstrap:
    transport, identity = await make_transport("bootstrap", namespace=RUN)
    directory = await Directory.create(transport, RUN, identity.key)
    stack.push_async_callback(directory.close)
    gate = Gate.of(MANIFEST)
    assert gate is not None
    desk = Desk.open(gate, OwnerRecords(home, RUN), owner)
    stack.callback(desk.close)
    directory.set_gate(gate)
    await desk.serve(transport)
    return Bootstrap(transport, directory, desk)


async def guest(
    make_transport: MakeTransport, stack: AsyncExitStack, to: Bootstrap, folder: Path, name: str = "guest"
) -> Guest:
    transport, identity = await make_transport(name, namespace=RUN, initial_peers=to.transport.addresses)
    directory = await Directory.create(transport, RUN, identity.key)
    stack.push_async_callback(directory.close)
    return Guest(transport, directory, identity, folder / name / "kept")


async def test_an_invitation_for_many_is_redeemed_kept_and_used_up(
    make_transport: MakeTransport, stack: AsyncExitStack, tmp_path: Path
) -> None:
    boot = await bootstrap(make_transport, stack, tmp_path)
    first = await guest(make_transport, stack, boot, tmp_path, "first")
    admission = await first.come_in(grant(1))
    kept = first.folder / "pass"
    assert kept.read_bytes() == admission.own_pass
    assert kept.stat().st_mode & 0o777 == 0o600
    assert Grant.from_bytes(admission.own_pass).peer == first.identity.peer_id

    second = await guest(make_transport, stack, boot, tmp_path, "second")
    with pytest.raises(RunRefused, match=r"used up: it was for one peer; ask the run's owner"):
        await second.come_in(grant(1))
    assert not (second.folder / "pass").exists()


async def test_a_kept_pass_needs_neither_invitation_nor_bootstrap(
    make_transport: MakeTransport, stack: AsyncExitStack, tmp_path: Path
) -> None:
    boot = await bootstrap(make_transport, stack, tmp_path, owner=None)
    comer = await guest(make_transport, stack, boot, tmp_path)
    own = grant(peer=comer.identity.peer_id)
    comer.folder.mkdir(parents=True)
    (comer.folder / "pass").write_bytes(own.to_bytes())
    assert (await comer.come_in(None)).own_pass == own.to_bytes()


async def test_an_older_link_changes_nothing_about_a_good_pass_and_a_later_one_nobody_redeems_neither(
    make_transport: MakeTransport, stack: AsyncExitStack, tmp_path: Path
) -> None:
    """A service's unit keeps the link that it was made with: a peer with a pass for a month was refused, as that invitation was used up."""
    boot = await bootstrap(make_transport, stack, tmp_path, owner=None)
    for name, later_ms in (("earlier", -86_400_000), ("later", 1)):
        comer = await guest(make_transport, stack, boot, tmp_path, name)
        own = grant(peer=comer.identity.peer_id)
        comer.folder.mkdir(parents=True)
        (comer.folder / "pass").write_bytes(own.to_bytes())
        other = replace(grant(2), issued_ms=own.issued_ms + later_ms).signed_by(OWNER)
        assert (await comer.come_in(other)).own_pass == own.to_bytes()


async def test_a_damaged_pass_on_disk_is_as_none(
    make_transport: MakeTransport, stack: AsyncExitStack, tmp_path: Path
) -> None:
    boot = await bootstrap(make_transport, stack, tmp_path)
    comer = await guest(make_transport, stack, boot, tmp_path)
    comer.folder.mkdir(parents=True)
    (comer.folder / "pass").write_bytes(b"\x99" * 4000)
    (comer.folder / "revocations").write_bytes(b"\x99" * 40_000)
    with pytest.raises(RunRefused, match="this link has no invitation"):
        await comer.come_in(None)
    with pytest.raises(RunRefused, match="invitation expired on"):
        await comer.come_in(grant(2, valid_s=-1))
    with pytest.raises(RunRefused, match="was not signed by the run's owner"):
        await comer.come_in(replace(grant(2), uses=3))
    with pytest.raises(RunRefused, match="the invitation is for another peer"):
        await comer.come_in(grant(peer=boot.transport.peer_id))
    with pytest.raises(RunRefused, match="allows reading, not taking part"):
        await comer.come_in(grant(2, right=Right.READ))
    assert not boot.desk.redeemed.used, "none of them was used"  # type: ignore[union-attr]


async def test_a_bootstrap_without_the_owners_key_is_named_not_the_invitation(
    make_transport: MakeTransport, stack: AsyncExitStack, tmp_path: Path
) -> None:
    boot = await bootstrap(make_transport, stack, tmp_path, owner=None)
    comer = await guest(make_transport, stack, boot, tmp_path)
    with pytest.raises(RunUnreachable, match="has to hold the owner's key"):
        await comer.come_in(grant(2))
    assert (await comer.come_in(grant(peer=comer.identity.peer_id))).own_pass


async def test_what_is_revoked_reaches_newcomers_and_those_who_are_in(
    make_transport: MakeTransport, stack: AsyncExitStack, tmp_path: Path
) -> None:
    boot = await bootstrap(make_transport, stack, tmp_path)
    comer = await guest(make_transport, stack, boot, tmp_path)
    admission = await comer.come_in(grant(2))
    newcomer = Newcomer(comer.identity.peer_id, None, comer.folder)
    member, out = SigningKey(b"m" * 32), list[PeerId]()
    assert admission.gate.show(member.peer_id, grant(peer=member.peer_id).to_bytes(), time.time()) is None
    await look_again(admission, newcomer, "tiny", comer.directory, out.append)
    assert not out

    records = OwnerRecords(tmp_path, RUN)
    without = Revocations(RUN, 0, ()).with_also(public_key_of(member.peer_id), int(time.time() * 1000))
    records.write_revocations(without.signed_by(OWNER))
    await boot.desk.beat(boot.directory)
    await look_again(admission, newcomer, "tiny", comer.directory, out.append)
    assert out == [member.peer_id], "the rounds are told who was put out"
    records.write_revocations(without.with_also(b"g" * 16, 5).signed_by(OWNER))
    await boot.desk.beat(boot.directory)
    with pytest.raises(RunRefused, match="the invitation was revoked by the run's owner"):
        await look_again(admission, newcomer, "tiny", comer.directory, out.append)
    other = await guest(make_transport, stack, boot, tmp_path, "other")
    with pytest.raises(RunRefused, match="the invitation was revoked by the run's owner"):
        await other.come_in(grant(2))


async def test_revocations_are_remembered_where_nobody_tells_of_them(
    make_transport: MakeTransport, stack: AsyncExitStack, tmp_path: Path
) -> None:
    boot = await bootstrap(make_transport, stack, tmp_path)
    comer = await guest(make_transport, stack, boot, tmp_path)
    admission = await comer.come_in(grant(2))
    await boot.directory.publish_revocations(Revocations(RUN, 9, ((b"g" * 16, 5),)).signed_by(OWNER))
    newcomer = Newcomer(comer.identity.peer_id, None, comer.folder)
    with pytest.raises(RunRefused):
        await look_again(admission, newcomer, "tiny", comer.directory, lambda _: None)
    assert Revocations.from_bytes(
        (comer.folder / "revocations").read_bytes(), run_id=RUN, owner=OWNER.peer_id
    ).by_target == {b"g" * 16: 5}


async def test_a_lease_without_a_pass_is_stored_by_nobody(
    make_transport: MakeTransport, stack: AsyncExitStack, tmp_path: Path
) -> None:
    from dilocox_peer.dht.records import Lease

    boot = await bootstrap(make_transport, stack, tmp_path)
    stranger = await guest(make_transport, stack, boot, tmp_path, "stranger")
    member = await guest(make_transport, stack, boot, tmp_path, "member")
    admission = await member.come_in(grant(2))

    def lease(who: Guest, shown: bytes) -> Lease:
        return Lease(
            peer=who.identity.peer_id, stage=0, incarnation=1, addresses=tuple(who.transport.addresses), protocol=1,
            tokens_per_s=1.0, memory_bytes=1, reachability="direct", round=0, admission=shown,
        )  # fmt: skip

    await member.directory.announce(lease(member, admission.own_pass))
    for shown in (b"", admission.own_pass, grant(2).to_bytes()):
        with pytest.raises(RunUnreachable):
            await stranger.directory.announce(lease(stranger, shown))
    assert [each.peer for each in await member.directory.peers(0)] == [member.identity.peer_id]
    assert [each.peer for each in await boot.directory.peers(0)] == [member.identity.peer_id]


async def test_who_is_listed_comes_in_by_its_key_and_who_is_not_by_an_invitation(
    make_transport: MakeTransport, stack: AsyncExitStack, tmp_path: Path
) -> None:
    listed = SigningKey(b"l" * 32)
    member_key, other_key = tmp_path / "member" / "identity.key", tmp_path / "other" / "identity.key"
    for path, key in ((member_key, b"l" * 32), (other_key, b"p" * 32)):
        path.parent.mkdir()
        path.write_bytes(encode_key(key))
        path.chmod(0o600)
    manifest = Manifest(admission=AdmissionSection(mode="list", members=(listed.peer_id,))).signed_by(OWNER)
    transports = {}
    for name in ("member", "other"):
        transport, identity = await make_transport(name, namespace=manifest.run_id)
        directory = await Directory.create(transport, manifest.run_id, identity.key)
        stack.push_async_callback(directory.close)
        transports[name] = transport, directory, identity.peer_id
    transport, directory, me = transports["member"]
    admission = await come_in(Newcomer(me, None, tmp_path / "kept"), manifest, transport=transport, directory=directory)
    assert admission is not None
    assert admission.own_pass == b""
    transport, directory, me = transports["other"]
    with pytest.raises(RunRefused, match=rf"takes listed and invited peers only.*for {me}$"):
        await come_in(Newcomer(me, None, tmp_path / "kept2"), manifest, transport=transport, directory=directory)
    own = replace(grant(peer=me), run_id=manifest.run_id).signed_by(OWNER)
    admission = await come_in(Newcomer(me, own, tmp_path / "kept2"), manifest, transport=transport, directory=directory)
    assert admission is not None
    assert admission.own_pass == own.to_bytes()


async def test_an_open_run_asks_nobody(make_transport: MakeTransport, stack: AsyncExitStack, tmp_path: Path) -> None:
    manifest = Manifest().signed_by(OWNER)
    transport, identity = await make_transport("alone", namespace=manifest.run_id)
    async with await Directory.create(transport, manifest.run_id, identity.key) as directory:
        newcomer = Newcomer(identity.peer_id, None, tmp_path / "run")
        assert await come_in(newcomer, manifest, transport=transport, directory=directory) is None
    assert transport.admission is None
    with pytest.raises(PeerUnavailable):
        await transport.send(OWNER.peer_id, b"x", 1)
