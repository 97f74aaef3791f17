"""The directory on real nodes: what it finds, and what an attacker without our validator can do to it."""

import asyncio
import hashlib
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import msgpack
import pytest

from dilocox_peer.dht.directory import Directory
from dilocox_peer.dht.records import (
    LEASE_TTL_S,
    MAX_TTL_S,
    Lease,
    bucket_of,
    dht_id,
    lease_key,
    manifest_key,
)
from dilocox_peer.dht.validators import RecordValidator
from dilocox_peer.errors import RunUnreachable
from dilocox_peer.manifest import Manifest, RunSection
from dilocox_peer.network.daemon import client_of
from dilocox_peer.network.transport import Transport
from dilocox_peer.peer.identity import Identity, encode_key
from dilocox_peer.signing import SigningKey
from dilocox_peer.types import PeerId

from .conftest import PATIENCE_S, MakeTransport

MANIFEST = Manifest().signed_by(SigningKey(bytes(32)))
RUN = MANIFEST.run_id


class MakeNode(Protocol):
    def __call__(self, name: str, **options: Any) -> Awaitable[tuple[Directory, Identity, Transport]]: ...


@pytest.fixture
async def make_node(make_transport: MakeTransport) -> AsyncIterator[MakeNode]:
    """Makes nodes of one directory: the first is everybody's initial peer."""
    first: list[Transport] = []
    async with AsyncExitStack() as stack:

        async def make(
            name: str, *, run: Any = RUN, transport_options: Any = None, **options: Any
        ) -> tuple[Directory, Identity, Transport]:
            peers = first[0].addresses if first else ()
            transport, identity = await make_transport(
                name, **({"namespace": run, "initial_peers": peers} | (transport_options or {}))
            )
            first.append(transport)
            directory = await Directory.create(transport, run, identity.key, **options)
            stack.push_async_callback(directory.close)
            return directory, identity, transport

        yield make


def lease_of(identity: "Identity | FakeIdentity", stage: int = 0, **fields: Any) -> Lease:
    lease = Lease(
        peer=identity.peer_id, stage=stage, incarnation=1, addresses=(), protocol=1, tokens_per_s=1.5, memory_bytes=1 << 30,
        reachability="direct", round=0,
    )  # fmt: skip
    return replace(lease, **fields)


async def peers_of(directory: Directory, stage: int = 0) -> list[PeerId]:
    return [lease.peer for lease in await directory.peers(stage)]


# -- what it is for ---------------------------------------------------------------------------------------------------


async def test_leases_are_found_by_everybody_and_by_stage(make_node: MakeNode) -> None:
    nodes = [await make_node(name) for name in ("boot", "a", "b")]
    (boot, _, _), (a, key_a, transport_a), (b, key_b, _) = nodes
    before = time.time()
    written = await a.announce(lease_of(key_a, 0, addresses=transport_a.addresses, round=5))
    after = time.time()
    await b.announce(lease_of(key_b, 1))
    for directory, _, _ in nodes:
        assert await directory.peers(0) == [written]
        assert await peers_of(directory, 1) == [key_b.peer_id]
        assert await directory.peers(2) == []
    assert written.addresses == transport_a.addresses
    assert before <= written.expires_s - LEASE_TTL_S <= after
    assert boot.num_known_nodes == 2


async def test_a_lease_that_is_written_again_is_not_looked_up_again_until_nodes_come_or_go(make_node: MakeNode) -> None:
    nodes = [await make_node(name) for name in ("boot", "a", "b", "c")]
    a, key_a, _ = nodes[1]
    asked: list[str] = []
    find = a.node.protocol.call_find

    async def counted(peer: Any, keys: Any) -> Any:
        asked.append(str(peer))
        return await find(peer, keys)

    a.node.protocol.call_find = counted

    async def num_asked(number: int) -> int:
        del asked[:]
        await a.announce(lease_of(key_a, round=number))
        return len(asked)

    assert [await num_asked(1), await num_asked(2)] == [3, 0]
    for directory, _, _ in nodes:
        assert [lease.round for lease in await directory.peers(0)] == [2]
    *_, transport_d = await make_node("d")  # greets all
    assert [await num_asked(3), await num_asked(4)] == [4, 0]
    os.kill(transport_d.daemon_pid, signal.SIGKILL)
    assert await num_asked(5) == 0  # d does not answer, and is known no more
    assert await num_asked(6) >= 3
    for directory, _, _ in nodes:
        assert [lease.round for lease in await directory.peers(0)] == [6]


async def test_a_host_with_many_addresses_announces_those_that_others_can_use(make_node: MakeNode) -> None:
    directory, identity, _ = await make_node("a")
    tail = f"tcp/5/p2p/{identity.peer_id}"
    many = [f"/ip4/127.0.0.1/{tail}", *(f"/ip4/203.0.113.{number}/{tail}" for number in range(1, 12))]
    written = await directory.announce(lease_of(identity, addresses=tuple(many)))
    assert written.addresses == tuple(many[1:9])
    with pytest.raises(ValueError, match=r"a lease: Expected `float`"):
        await directory.announce(lease_of(identity, tokens_per_s=float("nan")))


async def test_a_node_alone_finds_what_it_wrote(make_node: MakeNode) -> None:
    directory, identity, _ = await make_node("alone")
    assert await directory.peers(0) == []
    await directory.announce(lease_of(identity))
    assert await peers_of(directory) == [identity.peer_id]


async def test_a_renewed_lease_replaces_the_old_one(make_node: MakeNode) -> None:
    boot, _, _ = await make_node("boot")
    directory, identity, _ = await make_node("a")
    for round_ in range(3):
        await directory.announce(lease_of(identity, round=round_))
    assert [lease.round for lease in await boot.peers(0)] == [2]


async def test_who_left_is_no_longer_found_and_may_come_back(make_node: MakeNode) -> None:
    boot, _, _ = await make_node("boot")
    directory, identity, _ = await make_node("a")
    await directory.leave()  # nothing announced: nothing to do
    await directory.announce(lease_of(identity))
    await directory.leave()
    assert await peers_of(boot) == []
    await directory.announce(
        lease_of(identity, incarnation=2)
    )  # sooner than the tombstone's expiry allows: it is asked for
    assert [lease.incarnation for lease in await boot.peers(0)] == [2]


async def test_the_manifest_is_handed_on_and_verified(make_node: MakeNode) -> None:
    boot, _, _ = await make_node("boot")
    joiner, _, _ = await make_node("joiner")
    with pytest.raises(RunUnreachable, match="nobody here knows run"):
        await joiner.fetch_manifest()
    await boot.publish_manifest(MANIFEST)
    assert await joiner.fetch_manifest() == MANIFEST
    await joiner.publish_manifest(MANIFEST)
    assert await boot.fetch_manifest() == MANIFEST


async def test_the_largest_manifest_passes(make_node: MakeNode) -> None:
    raw = MANIFEST.to_bytes()
    boot, identity, _ = await make_node("boot")
    joiner, _, _ = await make_node("joiner")
    padded = raw[:-1] + b" " * (64 * 1024 - len(raw)) + b"}"  # JSON may hold spaces; the run id is of the content
    key = manifest_key(RUN)
    assert await boot.node.store(key, padded, time.time() + 60, subkey=str(identity.peer_id))
    assert await joiner.fetch_manifest() == MANIFEST


async def test_a_bootstrap_that_is_no_directory_is_named(make_node: MakeNode, make_transport: MakeTransport) -> None:
    bare, _ = await make_transport("bare")
    with pytest.raises(RunUnreachable, match="no directory of a run answers there"):
        await make_node("a", transport_options={"initial_peers": bare.addresses})


async def test_one_that_found_no_directory_may_begin_alone_on_the_same_network(make_transport: MakeTransport) -> None:
    """A peer with a state came back while the bootstrap's network was up and its directory was not: a traceback."""
    bare, _ = await make_transport("bare")
    transport, identity = await make_transport("a", initial_peers=bare.addresses)
    with pytest.raises(RunUnreachable):
        await Directory.create(transport, RUN, identity.key)
    async with await Directory.create(transport, RUN, identity.key, is_alone=True) as directory:
        await directory.announce(lease_of(identity))
        assert await peers_of(directory) == [identity.peer_id]


async def test_a_node_that_comes_is_handed_nothing(make_node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ping of 24 bytes had it sent all that lies here, whenever it came again."""
    boot, _, _ = await make_node("boot")
    await boot.publish_manifest(MANIFEST)
    called: list[str] = []
    call = boot.node.protocol.p2p.call_protobuf_handler

    async def counted(peer: Any, name: str, *args: Any) -> Any:
        called.append(name.rpartition(".")[2])
        return await call(peer, name, *args)

    monkeypatch.setattr(boot.node.protocol.p2p, "call_protobuf_handler", counted)
    a, key_a, _ = await make_node("a")
    await a.announce(lease_of(key_a))
    await a.fetch_manifest()
    assert await peers_of(boot) == [key_a.peer_id]
    assert "rpc_find" in called
    assert "rpc_store" not in called


async def test_calls_end_when_our_p2pd_does(make_node: MakeNode) -> None:
    directory, identity, transport = await make_node("a")
    os.kill(transport.daemon_pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        await transport.wait_for_failure()
        with pytest.raises(RunUnreachable, match="p2pd has ended"):
            await directory.announce(lease_of(identity))
        with pytest.raises(RunUnreachable, match="p2pd has ended"):
            await directory.peers(0)
        await directory.close()


async def test_a_call_has_a_deadline(make_node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, _, _ = await make_node("a")
    monkeypatch.setattr(directory.node, "get_many", never)
    monkeypatch.setattr(directory.node, "store", never)
    with pytest.raises(RunUnreachable, match=r"no answer within 0.05 s"):
        await directory.fetch_manifest(timeout_s=0.05)
    with pytest.raises(RunUnreachable, match=r"took no record within 0.05 s"):
        await directory.publish_manifest(MANIFEST, timeout_s=0.05)


async def never(*_args: object, **_options: object) -> None:
    await asyncio.Event().wait()


async def test_nodes_that_answer_late_keep_nobody_from_what_the_links_peers_tell(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot, _, _ = await make_node("boot")
    (a, key_a, _), (b, key_b, _) = await make_node("a"), await make_node("b")
    await a.announce(lease_of(key_a))
    monkeypatch.setattr(b.node, "get_many", never)
    monkeypatch.setattr(b.node, "store", never)
    await b.announce(lease_of(key_b), timeout_s=4.0)
    for directory in (b, boot):
        assert {lease.peer for lease in await directory.peers(0, timeout_s=4.0)} == {key_a.peer_id, key_b.peer_id}


async def test_one_node_that_never_answers_hides_nothing_that_others_told(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the peers of the link none is there."""
    _, late, _ = await make_node("boot")
    (a, key_a, _), (b, _, transport_b) = await make_node("a"), await make_node("b")
    await a.announce(lease_of(key_a))
    transport_b.named = frozenset()
    monkeypatch.setattr(b.node.protocol.storage, "get", lambda _key: None)
    find = b.node.protocol.call_find

    async def late_find(peer: Any, keys: Any) -> Any:
        return await (never() if str(peer) == late.peer_id else find(peer, keys))

    monkeypatch.setattr(b.node.protocol, "call_find", late_find)
    assert [lease.peer for lease in await b.peers(0, timeout_s=4.0)] == [key_a.peer_id]


@pytest.mark.slow
async def test_a_restarted_bootstrap_learns_the_swarm_again(make_node: MakeNode) -> None:
    """Everybody's routing table has forgotten it, and without being greeted it would hand out an empty directory."""
    boot, key_boot, transport = await make_node("boot")
    (a, key_a, _), (b, key_b, _) = await make_node("a"), await make_node("b")
    for directory, identity in ((a, key_a), (b, key_b)):
        await directory.announce(lease_of(identity))
    addresses = transport.addresses
    await boot.close()
    await transport.close()
    for directory in (a, b):
        await directory.peers(0)  # notices that it is gone

    port = addresses[0].split("/")[4]
    # The identity object of the first is still open in the fixture; a new key would do as well, this is the same peer.
    again = await Transport.create(
        key_boot.path, transport.peer_id, namespace=RUN, runtime_dir=key_boot.path.parent / "run",
        host_maddrs=[f"/ip4/127.0.0.1/tcp/{port}"],
    )  # fmt: skip
    async with again, await Directory.create(again, RUN, boot.key) as new_boot:
        deadline = (
            time.monotonic() + PATIENCE_S
        )  # p2pd holds a dial back after it failed, 5 s, 6, 9 and so on: 17 s where nothing else runs
        while len(await new_boot.peers(0)) < 2:
            assert time.monotonic() < deadline
            for directory, identity in ((a, key_a), (b, key_b)):
                await directory.announce(lease_of(identity))
        assert new_boot.num_known_nodes == 2
        joiner, _, _ = await make_node("joiner", transport_options={"initial_peers": again.addresses})
        assert set(await peers_of(joiner)) == {key_a.peer_id, key_b.peer_id}


# -- clocks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead_s", [-30.0, 30.0])
async def test_thirty_seconds_of_clock_skew_are_tolerated(make_node: MakeNode, ahead_s: float) -> None:
    boot, key_boot, _ = await make_node("boot")
    skewed, key_skewed, _ = await make_node("skewed", clock=lambda: time.time() + ahead_s)
    await skewed.announce(lease_of(key_skewed))
    await boot.announce(lease_of(key_boot))
    for directory in (boot, skewed):
        assert set(await peers_of(directory)) == {key_boot.peer_id, key_skewed.peer_id}


async def test_a_clock_far_off_is_told_so(make_node: MakeNode) -> None:
    await make_node("boot")
    for name, ahead_s in (("ahead", 300.0), ("behind", -300.0)):
        skewed, identity, _ = await make_node(name, clock=lambda ahead_s=ahead_s: time.time() + ahead_s)
        with pytest.raises(RunUnreachable, match="is this computer's clock right"):
            await skewed.announce(lease_of(identity))


async def test_a_bootstrap_whose_clock_is_set_right_lets_newcomers_in_at_once(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time
    boot, key_boot, _ = await make_node("boot", clock=lambda: time.time())
    monkeypatch.setattr(time, "time", lambda: now() + 7200.0)
    await boot.publish_manifest(MANIFEST)
    await boot.announce(lease_of(key_boot, round=1))
    monkeypatch.undo()
    await boot.publish_manifest(MANIFEST)
    await boot.announce(lease_of(key_boot, round=2))
    newcomer, _, _ = await make_node("newcomer")
    assert await newcomer.fetch_manifest() == MANIFEST
    for directory in (boot, newcomer):
        assert [lease.round for lease in await directory.peers(0)] == [2]


# -- attacks ----------------------------------------------------------------------------------------------------------


class Attacker:
    """A DHT node without our validator: what it stores is what others have to refuse."""

    def __init__(self, node: Any, key: SigningKey) -> None:
        self.node, self.key = node, key

    async def store(
        self, key: str, value: Any, subkey: Any, expires_s: float, *, signature: bytes | None = None
    ) -> list[bool]:
        """Sends the record to every other node; whether each took it."""
        from hivemind.dht.routing import DHTID

        protocol = self.node.protocol
        raw = msgpack.packb(value) + (signature if signature is not None else bytes(64))
        answers = []
        for peer in list(protocol.routing_table.peer_id_to_uid):
            answer = await protocol.call_store(peer, [DHTID.generate(source=key)], [raw], [expires_s], subkeys=[subkey])
            assert answer is not None
            answers += answer
        return answers


@pytest.fixture
async def attacker(make_node: MakeNode, make_transport: MakeTransport) -> tuple[Attacker, Directory, Directory, PeerId]:
    """An attacker, two honest nodes, and the peer of the second, which has a lease on stage 0."""
    boot, _, transport = await make_node("boot")
    victim, identity, _ = await make_node("victim")
    await victim.announce(lease_of(identity))
    from hivemind.dht import DHTNode

    own, key = await make_transport("attacker", namespace=RUN, initial_peers=transport.addresses)
    node = await DHTNode.create(p2p=own.p2p, initial_peers=list(transport.addresses), strict=False)
    await node.protocol.call_ping((await client_of(victim.node.p2p).identify())[0])
    attacker = Attacker(node, key.key)
    assert len(node.protocol.routing_table.peer_id_to_uid) == 2
    return attacker, boot, victim, identity.peer_id


async def assert_unharmed(boot: Directory, victim: Directory, peer: PeerId) -> None:
    for directory in (boot, victim):
        assert await peers_of(directory) == [peer]


async def test_the_record_that_wipes_a_dictionary_is_refused(attacker: Any) -> None:
    """A plain value with a later expiry: without our validator everybody's leases are gone."""
    evil, boot, victim, peer = attacker
    key = lease_key(RUN, 0, bucket_of(peer))
    assert await evil.store(key, b"HACK", None, time.time() + 110) == [False, False]
    assert await evil.store(key, b"HACK", None, time.time() + 1e6) == [False, False]
    await assert_unharmed(boot, victim, peer)


async def test_a_foreign_write_is_refused(attacker: Any) -> None:
    evil, boot, victim, peer = attacker
    key = lease_key(RUN, 0, bucket_of(peer))
    forged = replace(lease_of(FakeIdentity(peer)), has_left=True).to_bytes()
    expires_s = time.time() + 110
    message = RecordValidator(RUN, evil.key, time.time).sign_value(
        FakeRecord(dht_id(key), msgpack.packb(evil.key.peer_id), msgpack.packb(forged), expires_s)
    )
    for signature in (bytes(64), message[-64:]):
        assert await evil.store(key, forged, peer, expires_s, signature=signature) == [False, False]
    await assert_unharmed(boot, victim, peer)


async def test_an_expiry_too_late_and_foreign_keys_are_refused(attacker: Any) -> None:
    evil, boot, _, peer = attacker
    own = lease_of(FakeIdentity(evil.key.peer_id))
    validator = RecordValidator(RUN, evil.key, time.time)

    async def store(key: str, expires_s: float) -> list[bool]:
        subkey = evil.key.peer_id
        value = msgpack.packb(own.to_bytes())
        signed = validator.sign_value(FakeRecord(dht_id(key), msgpack.packb(subkey), value, expires_s))
        return list(await evil.store(key, own.to_bytes(), subkey, expires_s, signature=signed[-64:]))

    mine = lease_key(RUN, 0, bucket_of(own.peer))
    assert await store(mine, time.time() + 1000) == [False, False]
    assert await store("free storage", time.time() + 60) == [False, False]
    assert await store(mine, time.time() + MAX_TTL_S) == [True, True]  # its own lease it may write
    assert set(await peers_of(boot)) == {peer, own.peer}


async def test_a_bad_entry_hides_no_good_ones(attacker: Any) -> None:
    """A holder that sends a dictionary with one bad entry: the good ones count."""
    evil, boot, victim, peer = attacker
    from hivemind.dht.routing import DHTID

    key = lease_key(RUN, 0, bucket_of(peer))
    stored = boot.node.protocol.storage.get(DHTID.generate(source=key)).value
    stored.store("not a peer", b"junk", time.time() + 1e6)
    stored.store(str(evil.key.peer_id), b"junk", time.time() + 1e6)
    assert await peers_of(victim) == [peer]
    _reader_sees_it = await victim.node.protocol.call_find(
        (await client_of(boot.node.p2p).identify())[0], [DHTID.generate(source=key)]
    )
    ((entries, _nearest),) = _reader_sees_it.values()
    assert list(dict(entries.value.items())) == [peer]


async def test_another_runs_records_are_refused(make_node: MakeNode) -> None:
    boot, _, _ = await make_node("boot")
    other = Manifest(run=RunSection(name="other")).signed_by(SigningKey(bytes(32)))
    stranger, _, _ = await make_node("stranger", run=other.run_id)
    with pytest.raises(RunUnreachable, match="nobody here knows run"):
        await stranger.fetch_manifest()
    with pytest.raises(RunUnreachable, match="took the manifest"):
        await stranger.publish_manifest(other)
    assert not list(boot.node.protocol.storage.items())
    assert not await boot.store(manifest_key(RUN), other.to_bytes(), time.time() + 60, 5)


async def test_one_node_that_refuses_everything_does_not_stop_us(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """hivemind reports the answer that came last."""
    nodes = [await make_node(name) for name in ("boot", "a", "b")]
    for refusing in range(3):
        directory, identity, _ = nodes[refusing - 1]
        with monkeypatch.context() as patch:
            patch.setattr(nodes[refusing][0].node.protocol.record_validator, "validate", lambda _record: False)
            await directory.announce(lease_of(identity))


class FakeIdentity:
    def __init__(self, peer: PeerId) -> None:
        self.peer_id = peer


class FakeRecord:
    def __init__(self, key: bytes, subkey: bytes, value: bytes, expiration_time: float) -> None:
        self.key, self.subkey, self.value, self.expiration_time = key, subkey, value, expiration_time


# -- many -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_names_made_up_to_be_nearest_hide_no_peer(make_node: MakeNode, tmp_path: Path) -> None:
    """Five nodes whose ids are nearer to a key than any honest one take what is written, and keep none of it."""
    boot, _, _ = await make_node("boot")
    other, _, _ = await make_node("other")
    victim, identity, _ = await make_node("victim")
    key = int.from_bytes(dht_id(lease_key(RUN, 0, bucket_of(identity.peer_id))), "big")

    def distance(seed: bytes) -> int:
        return int.from_bytes(hashlib.sha1(SigningKey(seed).public_key).digest(), "big") ^ key

    rng = random.Random(1)
    taken = count()
    for number, seed in enumerate(sorted((rng.randbytes(32) for _ in range(600)), key=distance)[:5]):
        path = tmp_path / f"bad{number}" / "identity.key"
        path.parent.mkdir()
        path.write_bytes(encode_key(seed))
        path.chmod(0o600)
        bad, _, _ = await make_node(f"bad{number}")
        storage: Any = bad.node.protocol.storage
        storage.store_subkey = lambda *_: next(taken) >= 0
        storage.get = lambda *_: None
    await victim.announce(lease_of(identity))
    assert next(taken) >= 5, "the nearest were asked, and all took it"
    newcomer, _, _ = await make_node("newcomer")
    for node in (boot, other, newcomer, victim):
        assert await peers_of(node) == [identity.peer_id]


async def test_eight_nodes_find_one_another_after_the_bootstrap_is_gone(make_node: MakeNode) -> None:
    boot, _, transport = await make_node("boot")
    nodes = [await make_node(f"peer{number}") for number in range(8)]
    await asyncio.gather(*(directory.announce(lease_of(identity)) for directory, identity, _ in nodes))
    everybody = {identity.peer_id for _, identity, _ in nodes}
    for directory, _, _ in nodes:
        assert set(await peers_of(directory)) == everybody
    await boot.close()
    await transport.close()
    random.Random(1).shuffle(nodes)
    for directory, _, _ in nodes:
        assert set(await peers_of(directory)) == everybody
