"""What strangers send to a node of the directory, byte by byte: nothing of it ends the process or is kept."""

import asyncio
import time
from dataclasses import replace
from typing import Any

import msgpack
import pytest

from dilocox_peer.dht import entry
from dilocox_peer.dht.directory import Directory
from dilocox_peer.dht.entry import (
    MAX_ASKED_BACK_OF_PEER,
    MAX_ASKED_KEYS,
    MAX_KEYS,
    MAX_SMALL_BYTES,
    Record,
    decode_dictionary,
    encode_dictionary,
    node_id_of,
)
from dilocox_peer.dht.records import MAX_TTL_S, Lease, bucket_of, dht_id, lease_key
from dilocox_peer.dht.room import HANDED_ON, MAX_RECORDS
from dilocox_peer.dht.validators import RecordValidator
from dilocox_peer.network.daemon import client_of, raw_peer
from dilocox_peer.network.doorkeeper import Budgeted
from dilocox_peer.network.transport import Transport
from dilocox_peer.scan import DICTIONARY_EXT
from dilocox_peer.signing import SigningKey

from .conftest import RUN, MakeTransport

pytestmark = pytest.mark.usefixtures("no_process_left")
EVIL = SigningKey(b"evil" * 8)


def nested(depth: int) -> bytes:
    """A dictionary value in a dictionary value: 200 deep it ends a process that gives it to hivemind's serializer."""
    raw = b"\xc0"
    for _ in range(depth):
        raw = msgpack.packb(msgpack.ExtType(DICTIONARY_EXT, b"\x93\xc0\xcb" + bytes(8) + b"\x91" + raw))
    return raw


def leases(key: SigningKey, count: int = 1, stage: int = 0) -> tuple[bytes, list[Record]]:
    """A key of the directory, and signed leases of `count` peers that belong there."""
    expires_s = time.time() + MAX_TTL_S
    bucket, records, number = bucket_of(key.peer_id), list[Any](), 0
    while len(records) < count:
        writer = key if not records else SigningKey(number.to_bytes(32, "little"))
        number += 1
        if bucket_of(writer.peer_id) != bucket:
            continue
        lease = Lease(
            peer=writer.peer_id, stage=stage, incarnation=1, addresses=(), protocol=1, tokens_per_s=1.0, memory_bytes=1,
            reachability="direct", round=0,
        )  # fmt: skip
        unsigned = Record(
            dht_id(lease_key(RUN, stage, bucket)), msgpack.packb(str(writer.peer_id)), msgpack.packb(lease.to_bytes()),
            expires_s,
        )  # fmt: skip
        records.append(replace(unsigned, value=RecordValidator(RUN, writer, time.time).sign_value(unsigned)))
    return records[0].key, records


class Stranger:
    """Sends requests to a node as they are."""

    def __init__(self, own: Transport, key: SigningKey, to: Transport) -> None:
        from hivemind.p2p import PeerID

        self.own = own
        self.key = key
        self.client = client_of(own.p2p)
        self.to = PeerID(raw_peer(to.peer_id))

    async def raw(self, method: str, raw: bytes) -> bytes:
        async with asyncio.timeout(60):
            answer: bytes = await self.client.call_unary_handler(self.to, f"DHTProtocol.{method}", raw)
        return answer

    async def store(self, records: list[tuple[bytes, bytes, bytes, float]], *, in_cache: bool = False) -> list[bool]:
        from hivemind.proto import dht_pb2

        request = dht_pb2.StoreRequest()
        for key, subkey, value, expires_s in records:
            request.keys.append(key)
            request.subkeys.append(subkey)
            request.values.append(value)
            request.expiration_time.append(expires_s)
            request.in_cache.append(in_cache)
        answer = await self.raw("rpc_store", request.SerializeToString())
        return list(dht_pb2.StoreResponse.FromString(answer).store_ok)


@pytest.fixture
async def meeting(make_transport: MakeTransport) -> Any:
    """(stranger, node): a stranger connected with a node that it can send to."""
    home, identity = await make_transport("node")
    async with await Directory.create(home, RUN, identity.key) as directory:
        own, its = await make_transport("stranger", initial_peers=home.addresses)
        yield Stranger(own, its.key, home), directory


def stored(directory: Directory) -> dict[bytes, dict[str, bytes]]:
    storage = directory.node.protocol.storage
    return {
        key.to_bytes(): {subkey: entry.value for subkey, entry in item.value.items()} for key, item in storage.items()
    }


async def test_a_dictionary_in_a_dictionary_200_deep_is_refused(meeting: Any) -> None:
    stranger, directory = meeting
    key, _ = leases(EVIL)
    for value in (nested(200), nested(5), nested(20_000)[:60_000]):
        assert await stranger.store([(key, b"", value, time.time() + 60)]) == [False]
        assert await stranger.store([(key, value[:70], value, time.time() + 60)]) == [False]
    assert stored(directory) == {}


async def test_records_are_stored_singly_or_in_a_dictionary_without_those_that_do_not_hold(meeting: Any) -> None:
    stranger, directory = meeting
    key, [mine, other, *_] = leases(EVIL, 3)
    assert await stranger.store([(key, mine.subkey, mine.value, mine.expiration_time)]) == [True]
    bad = replace(other, value=other.value[:-1] + bytes([other.value[-1] ^ 1]))
    assert await stranger.store([(key, b"", encode_dictionary([mine, bad]), 1.0)]) == [False]
    assert stored(directory) == {key: {str(EVIL.peer_id): mine.value}}
    assert await stranger.store([(key, b"", encode_dictionary([other]), 1.0)]) == [True]
    assert len(stored(directory)[key]) == 2


async def test_values_of_the_wrong_kind_and_for_the_cache_are_refused(meeting: Any) -> None:
    stranger, directory = meeting
    key, [mine] = leases(EVIL)
    dictionary = encode_dictionary([mine])
    for tag, value in (
        (b"\xc0", mine.value),
        (b"", mine.value),
        (mine.subkey, dictionary),
        (b"\xc0", dictionary),
        (b"", b""),
        (b"", b"\xc7\x00\x50"),
        (b"", msgpack.packb(msgpack.ExtType(DICTIONARY_EXT, msgpack.packb({"a": 1})))),
        (b"", msgpack.packb(msgpack.ExtType(DICTIONARY_EXT, msgpack.packb([None, 1.0, [[[], b"", 1.0]]])))),
    ):
        assert await stranger.store([(key, tag, value, mine.expiration_time)]) == [False]
    assert await stranger.store([(key, mine.subkey, mine.value, mine.expiration_time)], in_cache=True) == [False]
    assert stored(directory) == {}
    assert not directory.node.protocol.cache.data


async def test_counts_and_sizes_beyond_the_bounds_are_refused_unread(meeting: Any) -> None:
    from hivemind.p2p import P2PHandlerError
    from hivemind.proto import dht_pb2

    stranger, directory = meeting
    for method, request, reason in (
        ("rpc_store", dht_pb2.StoreRequest(keys=[b""] * (MAX_KEYS + 1)), f"{MAX_KEYS + 1} keys"),
        ("rpc_store", dht_pb2.StoreRequest(keys=[bytes(20)]), "lists of 0"),
        ("rpc_find", dht_pb2.FindRequest(keys=[bytes(20)] * (MAX_ASKED_KEYS + 1)), "33 keys"),
        ("rpc_find", dht_pb2.FindRequest(keys=[bytes(21)]), "20 bytes"),
        ("rpc_find", dht_pb2.FindRequest(keys=[bytes(MAX_SMALL_BYTES)]), "at most"),
        ("rpc_ping", dht_pb2.PingRequest(peer=dht_pb2.NodeInfo(node_id=bytes(MAX_SMALL_BYTES))), "at most"),
    ):
        with pytest.raises(P2PHandlerError, match=reason):
            await stranger.raw(method, request.SerializeToString())
    with pytest.raises(P2PHandlerError, match="unreadable"):
        await stranger.raw("rpc_ping", b"\xff\xff\xff")
    assert directory.num_known_nodes == 0


async def test_a_peer_is_the_one_node_that_its_key_says(meeting: Any) -> None:
    from hivemind.proto import dht_pb2

    stranger, directory = meeting
    own = node_id_of(raw_peer(stranger.own.peer_id))
    assert own is not None
    for node_id in (bytes(20), bytes(21), b"\x01", own[:-1], own + b"\x00"):
        peer = dht_pb2.NodeInfo(node_id=node_id)
        await stranger.raw("rpc_ping", dht_pb2.PingRequest(peer=peer).SerializeToString())
        await stranger.raw("rpc_find", dht_pb2.FindRequest(peer=peer, keys=[bytes(20)]).SerializeToString())
        await stranger.raw("rpc_store", dht_pb2.StoreRequest(peer=peer).SerializeToString())
    assert directory.num_known_nodes == 0
    await stranger.raw("rpc_ping", dht_pb2.PingRequest(peer=dht_pb2.NodeInfo(node_id=own)).SerializeToString())
    assert directory.num_known_nodes == 1


async def test_a_key_has_room_for_a_few_that_one_hands_on_for_its_own_and_always_for_ours(meeting: Any) -> None:
    stranger, directory = meeting
    key, records = leases(directory.key, MAX_RECORDS + 20)
    own, *others = records
    for record in others:
        await stranger.store([(key, record.subkey, record.value, record.expiration_time)])
    assert len(stored(directory)[key]) == HANDED_ON
    assert directory.node.protocol.storage.store_subkey(
        next(iter(directory.node.protocol.storage.data)), str(directory.key.peer_id), own.value, own.expiration_time
    )
    assert len(stored(directory)[key]) == HANDED_ON + 1
    key, [its_own] = leases(stranger.key)
    assert await stranger.store([(key, its_own.subkey, its_own.value, its_own.expiration_time)]) == [True]


async def test_a_record_that_is_sent_again_leaves_no_trace(meeting: Any) -> None:
    stranger, directory = meeting
    key, [mine] = leases(EVIL)
    storage = directory.node.protocol.storage
    for _ in range(50):
        await stranger.store([(key, mine.subkey, mine.value, mine.expiration_time)])
    assert len(storage.expiration_heap) <= 2
    for number in range(300):
        storage.store_subkey(next(iter(storage.data)), str(EVIL.peer_id), b"", mine.expiration_time + number)
    assert len(storage.expiration_heap) < 100
    assert len(next(iter(storage.data.values())).value.expiration_heap) < 100


async def test_who_asks_too_often_is_told_so_and_others_are_answered(
    meeting: Any, make_transport: MakeTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hivemind.p2p import P2PHandlerError
    from hivemind.proto import dht_pb2

    monkeypatch.setattr(entry, "REQUESTS_PER_S", 0.001)  # so that it is too often however slowly they come
    stranger, directory = meeting
    ping = dht_pb2.PingRequest().SerializeToString()
    asked = int(entry.REQUESTS_BURST) + 100
    answers = await asyncio.gather(*(stranger.raw("rpc_ping", ping) for _ in range(asked)), return_exceptions=True)
    refused = {str(answer) for answer in answers if isinstance(answer, P2PHandlerError)}
    told = (
        "busy",
        "more than 0.001 requests a second",
        "more than 100 requests to the directory a second",
        "turned away for ",
    )
    assert all(each.startswith(told) for each in refused), refused
    assert refused
    other, _ = await make_transport("other", initial_peers=directory.transport.addresses)
    assert await Stranger(other, EVIL, directory.transport).raw("rpc_ping", ping)


async def test_what_is_answered_counts_as_what_is_asked_does(meeting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A find of 700 bytes may have an answer of 2 MiB, which leaves over our line."""
    from hivemind.proto import dht_pb2

    stranger, directory = meeting
    charged: list[Any] = []
    monkeypatch.setattr(directory.transport.doors.keeper, "charged", lambda *args: charged.append(args))
    key, [mine] = leases(EVIL)
    await stranger.store([(key, mine.subkey, mine.value, mine.expiration_time)])
    charged.clear()
    answer = await stranger.raw("rpc_find", dht_pb2.FindRequest(keys=[key] * MAX_ASKED_KEYS).SerializeToString())
    assert [args[:3] for args in charged] == [(stranger.own.peer_id, Budgeted.REQUEST_BYTES, float(len(answer)))]


async def test_who_is_asked_back_and_does_not_answer_takes_nobodys_place(meeting: Any) -> None:
    from hivemind.proto import dht_pb2

    stranger, directory = meeting
    asked = 0

    async def never(_raw: bytes, _remote: Any) -> bytes:
        nonlocal asked
        asked += 1
        await asyncio.sleep(60)
        raise AssertionError

    await stranger.client.add_unary_handler("DHTProtocol.rpc_ping", never)
    peer = dht_pb2.NodeInfo(node_id=node_id_of(raw_peer(stranger.own.peer_id)))
    ping = dht_pb2.PingRequest(peer=peer, validate=True).SerializeToString()
    answers = await asyncio.gather(*(stranger.raw("rpc_ping", ping) for _ in range(30)))
    assert asked == MAX_ASKED_BACK_OF_PEER
    assert not any(dht_pb2.PingResponse.FromString(answer).available for answer in answers)
    assert not directory.node.protocol.p2p.asked_back


# -- answers ----------------------------------------------------------------------------------------------------------


async def answered(meeting: Any, change: Any) -> Any:
    """What the node makes of the stranger's answer to a find of one key; change(response, result) before it is sent."""
    from hivemind.dht.routing import DHTID
    from hivemind.p2p import PeerID
    from hivemind.proto import dht_pb2

    stranger, directory = meeting
    key, records = leases(EVIL, 2)

    async def answer(_raw: bytes, _remote: Any) -> bytes:
        result = dht_pb2.FindResult(
            type=2, value=encode_dictionary(records), expiration_time=records[0].expiration_time
        )
        response = dht_pb2.FindResponse(results=[result])
        change(response, response.results[0])
        sent: bytes = response.SerializeToString()
        return sent

    await stranger.client.add_unary_handler("DHTProtocol.rpc_find", answer)
    return await directory.node.protocol.call_find(
        PeerID(raw_peer(stranger.own.peer_id)), [DHTID(int.from_bytes(key, "big"))]
    )


async def test_an_answer_in_order_is_read(meeting: Any) -> None:
    ((found, nearest),) = (await answered(meeting, lambda _response, _result: None)).values()
    assert str(EVIL.peer_id) in dict(found.value.items())
    assert nearest == {}


async def test_an_answer_200_deep_is_nothing_found(meeting: Any) -> None:
    ((found, _),) = (await answered(meeting, lambda _, result: setattr(result, "value", nested(200)))).values()
    assert found is None


@pytest.mark.parametrize("kind", [1, 5])
async def test_an_answer_of_another_kind_is_nothing_found(meeting: Any, kind: int) -> None:
    ((found, _),) = (await answered(meeting, lambda _, result: setattr(result, "type", kind))).values()
    assert found is None


async def test_only_nodes_that_can_be_are_believed_to_be_near(meeting: Any) -> None:
    real = raw_peer(EVIL.peer_id)
    node_id = node_id_of(real)
    assert node_id is not None

    def name(_response: Any, result: Any) -> None:
        result.nearest_node_ids.extend([bytes(20), bytes(300), node_id, node_id, b""])
        result.nearest_peer_ids.extend([real, real, real, b"no peer"])

    ((_, nearest),) = (await answered(meeting, name)).values()
    assert {each.to_bytes(): peer.to_bytes() for each, peer in nearest.items()} == {node_id: real}


async def test_an_answer_with_too_many_results_counts_as_none(meeting: Any) -> None:
    assert await answered(meeting, lambda response, _: response.results.add()) is None


def test_what_is_decoded_is_what_was_encoded():
    key, records = leases(EVIL, 3)
    assert decode_dictionary(key, encode_dictionary(records)) == records


def test_hivemind_reads_what_we_write_and_we_read_what_it_writes():
    from hivemind.dht.storage import DictionaryDHTValue
    from hivemind.utils.serializer import MSGPackSerializer

    key, records = leases(EVIL, 3)
    theirs = MSGPackSerializer.loads(encode_dictionary(records))
    assert isinstance(theirs, DictionaryDHTValue)
    assert decode_dictionary(key, MSGPackSerializer.dumps(theirs)) == records
