"""The entry of the directory: everything between hivemind's DHTNode and the network passes here and is checked first.

`GuardedP2P` is what DHTNode takes for hivemind's P2P. hivemind itself decodes what strangers send before any validator is
asked, by recursion in C, without bounds, in one turn of the event loop. What holds for whatever it is handed from here:
E1 the bytes of a request or an answer are counted before they are parsed, the lists in it before they are read;
E2 no dictionary of a stranger reaches hivemind's serializer: a stored one is taken apart here and handed on record by record,
a found one is written anew from the records in it that the validator accepts. Plain values, which a directory has not, and
values for the cache, which could hide what is stored, are refused;
E3 a node id is the hash of the public key in its peer's PeerID, in requests, in answers, and among the nodes that an answer
names; another is left out. So a peer is one node, and what it takes to be many nodes is as many connections;
E4 a peer's requests are limited in rate, number, and bytes of their answers, and long ones are checked in slices: the loop goes on between them;
E5 what is kept is bounded: records under a key, bytes of all, nodes in the routing table (bounds.py).
Nothing here imports hivemind; its messages are known by their fields.
"""

import asyncio
import hashlib
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgpack

from dilocox_peer.dht.bounds import giver
from dilocox_peer.dht.records import BUCKETS
from dilocox_peer.dht.room import MAX_RECORDS, Giver
from dilocox_peer.scan import DICTIONARY_EXT, scan
from dilocox_peer.signing import public_key_in
from dilocox_peer.token_bucket import TokenBucket
from dilocox_peer.types import PeerId
from dilocox_peer.wire.records import MAX_STAGES

NODE_ID_BYTES = 20
MAX_KEYS = (
    2 + MAX_STAGES * (1 + BUCKETS) + BUCKETS
)  # that a run has; a node of hivemind's own hands all it holds to a nearer one in one request
MAX_ASKED_KEYS = 32  # in one find; a node asks for the square root of what it looks for
MAX_NEAREST = 20  # nodes named for one key; hivemind's bucket size
MAX_SUBKEY_BYTES = 80
MAX_DICTIONARY_BYTES = 1024 * 1024
MAX_SMALL_BYTES = 4096  # a ping, a find, the answer to a ping or a store
MAX_BYTES = 4 * 1024 * 1024  # a store, the answer to a find; p2pd's own limit
MAX_FOUND_BYTES = MAX_BYTES // 2  # of values in an answer of ours

REQUESTS_PER_S, REQUESTS_BURST = 100.0, 400.0  # of one peer; a peer at work sends below one
RECORDS_PER_REQUEST = 4  # of a store that count as one request
MAX_AT_ONCE, MAX_AT_ONCE_OF_PEER = 128, 32
MAX_BYTES_AT_ONCE, MAX_BYTES_AT_ONCE_OF_PEER = (
    16 * 1024 * 1024,
    2 * MAX_BYTES,
)  # of requests; parsed they take some times as much
MAX_ASKED_BACK, MAX_ASKED_BACK_OF_PEER = 32, 2  # who want to know whether they can be reached
WITHDRAW_S = 3.0
SLICE_S = 0.005  # of checking, before the loop has its turn
_KNOWN_PEERS = 1024

_PLAIN_TAG, _DICTIONARY_TAG = b"\xc0", b""  # hivemind's subkeys of a value that has none, and of a whole dictionary
_NOT_FOUND, _FOUND_DICTIONARY = 0, 2
_DICTIONARY_DEPTH = 4  # the extension type, its fields, the list of records, a record


class Refused(Exception):
    """Its repr() is what hivemind sends to who asked."""

    def __repr__(self) -> str:
        return str(self)


class Validator(Protocol):
    def validate(self, record: Any) -> bool: ...


class Door(Protocol):
    """What it needs of network/doors.py."""

    def request(self, peer: PeerId, num_bytes: int) -> str | None: ...
    def answered(self, peer: PeerId, num_bytes: int) -> None: ...
    def oversize(self, peer: PeerId) -> None: ...
    def malformed(self, peer: PeerId) -> None: ...
    def place_of(self, peer: PeerId) -> str: ...


class OpenDoor:
    """Of a directory by itself: everybody comes in."""

    def request(self, _peer: PeerId, _num_bytes: int) -> str | None:
        return None

    def answered(self, _peer: PeerId, _num_bytes: int) -> None:
        pass

    def oversize(self, _peer: PeerId) -> None:
        pass

    def malformed(self, _peer: PeerId) -> None:
        pass

    def place_of(self, _peer: PeerId) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class Record:
    """hivemind.dht.crypto.DHTRecord, by its fields."""

    key: bytes
    subkey: bytes
    value: bytes
    expiration_time: float


@dataclass(frozen=True, slots=True)
class _Context:
    """hivemind.p2p.P2PContext, by its fields."""

    handle_name: str
    local_id: Any
    remote_id: Any


@dataclass
class Intake:
    """How much of others' asking is taken. Pure; a request is begun with `refusal`, and ended with `end`."""

    _rates: OrderedDict[PeerId, TokenBucket] = field(default_factory=OrderedDict)
    _running: Counter[PeerId] = field(default_factory=Counter)
    _bytes: Counter[PeerId] = field(default_factory=Counter)  # of what is running

    def refusal(self, peer: PeerId, num_bytes: int, now: float) -> str | None:
        """Why peer's request is not taken now; None if it is, and then it runs until `end`."""
        if not self._rate_of(peer, now).try_take(1.0, now):
            return f"more than {REQUESTS_PER_S:g} requests a second"
        if self._running[peer] >= MAX_AT_ONCE_OF_PEER or self._running.total() >= MAX_AT_ONCE:
            return "busy"
        if (
            self._bytes[peer] + num_bytes > MAX_BYTES_AT_ONCE_OF_PEER
            or self._bytes.total() + num_bytes > MAX_BYTES_AT_ONCE
        ):
            return "busy"
        self._running[peer] += 1
        self._bytes[peer] += num_bytes
        return None

    def may_store(self, peer: PeerId, num_records: int, now: float) -> bool:
        """Whether peer may have so many records checked now: that costs more than a request."""
        return self._rate_of(peer, now).try_take(num_records / RECORDS_PER_REQUEST, now)

    def _rate_of(self, peer: PeerId, now: float) -> TokenBucket:
        bucket = self._rates.get(peer)
        if bucket is None:
            bucket = self._rates[peer] = TokenBucket(REQUESTS_PER_S, REQUESTS_BURST, now)
            if len(self._rates) > _KNOWN_PEERS:
                self._rates.popitem(last=False)
        self._rates.move_to_end(peer)
        return bucket

    def end(self, peer: PeerId, num_bytes: int) -> None:
        self._running[peer] -= 1
        self._bytes[peer] -= num_bytes
        if not self._running[peer]:
            del self._running[peer], self._bytes[peer]


class GuardedP2P:
    """See the module. Whatever is not named here is the p2p's own."""

    def __init__(
        self, p2p: Any, validator: Validator, clock: Callable[[], float] = time.monotonic, door: Door | None = None
    ) -> None:
        self._p2p = p2p
        self._door = door or OpenDoor()
        self._validator = validator
        self._clock = clock
        self._intake = Intake()
        self._served: list[str] = []
        self.asked_back: Counter[PeerId] = Counter()
        self._turn = asyncio.Lock()  # one key is checked at a time: slices of many at once would add up
        self._slice_began_at = clock()  # of checking, since the loop had its turn

    def __getattr__(self, name: str) -> Any:
        return getattr(self._p2p, name)

    # -- requests of others -------------------------------------------------------------------------------------------

    async def add_protobuf_handler(
        self, name: str, handler: Callable[[Any, Any], Awaitable[Any]], input_protobuf_type: Any, **options: Any
    ) -> None:
        """Serves the handler behind the checks for its method; KeyError if hivemind has one that is not known here."""
        assert not options.pop("stream_input", False), name
        assert not options.pop("stream_output", False), name
        method = name.rpartition(".")[2]
        answer = {"rpc_ping": self._answer_ping, "rpc_store": self._answer_store, "rpc_find": self._answer_find}[method]
        most_bytes = MAX_BYTES if method == "rpc_store" else MAX_SMALL_BYTES

        async def serve(raw: bytes, remote: Any) -> bytes:
            peer = PeerId(str(remote))
            if len(raw) > most_bytes:
                self._door.oversize(peer)
                raise Refused(f"a request of {len(raw)} bytes, at most {most_bytes}")
            refusal = self._door.request(peer, len(raw)) or self._intake.refusal(peer, len(raw), self._clock())
            if refusal is not None:
                raise Refused(refusal)
            try:
                await asyncio.sleep(0)  # many that came at once are counted before the first is read
                try:
                    request = input_protobuf_type.FromString(raw)
                except Exception as error:  # protobuf's DecodeError, by whichever of its implementations
                    self._door.malformed(peer)
                    raise Refused("unreadable") from error
                _keep_own_node_id(request.peer, remote.to_bytes())
                response = await answer(handler, request, _Context(name, self._p2p.peer_id, remote))
                serialized: bytes = response.SerializeToString()
                self._door.answered(peer, len(serialized))
                return serialized
            finally:
                self._intake.end(peer, len(raw))

        await self._p2p._client.add_unary_handler(name, serve, **options)
        self._served.append(name)

    async def withdraw(self) -> None:
        """Serves none of it any more; another node may on the same p2p."""
        served, self._served = self._served, []
        with suppress(Exception):  # hivemind's own kinds, of a p2pd that is gone with what it served, or hangs
            async with asyncio.timeout(WITHDRAW_S):
                for name in served:
                    await self._p2p._client.remove_unary_handler(name)

    async def _answer_ping(self, handler: Callable[[Any, Any], Awaitable[Any]], request: Any, context: _Context) -> Any:
        if not request.validate:
            return await handler(request, context)
        # hivemind asks back and waits seconds for it: a few who do not answer must not take everybody's place.
        peer = PeerId(str(context.remote_id))
        if self.asked_back[peer] >= MAX_ASKED_BACK_OF_PEER or self.asked_back.total() >= MAX_ASKED_BACK:
            request.validate = False  # it is told that it could not be reached
            return await handler(request, context)
        self.asked_back[peer] += 1
        try:
            return await handler(request, context)
        finally:
            self.asked_back[peer] -= 1
            if not self.asked_back[peer]:
                del self.asked_back[peer]

    async def _answer_find(self, handler: Callable[[Any, Any], Awaitable[Any]], request: Any, context: _Context) -> Any:
        if len(request.keys) > MAX_ASKED_KEYS:
            raise Refused(f"{len(request.keys)} keys, at most {MAX_ASKED_KEYS}")
        if any(len(key) != NODE_ID_BYTES for key in request.keys):
            raise Refused(f"a key that has not {NODE_ID_BYTES} bytes")
        response = None
        room = MAX_FOUND_BYTES
        for key in request.keys:
            one = type(request)(peer=request.peer, keys=[key])
            async with self._turn:
                found = await handler(one, context)
            for result in found.results:
                room -= len(result.value)
                if room < 0:
                    result.type, result.value, result.expiration_time = _NOT_FOUND, b"", 0.0
            if response is None:
                response = found
            else:
                response.results.extend(found.results)
        return response if response is not None else await handler(request, context)

    async def _answer_store(
        self, handler: Callable[[Any, Any], Awaitable[Any]], request: Any, context: _Context
    ) -> Any:
        count = len(request.keys)
        if count > MAX_KEYS:
            raise Refused(f"{count} keys, at most {MAX_KEYS}")
        lists = (request.subkeys, request.values, request.expiration_time, request.in_cache)
        if any(len(each) != count for each in lists):
            raise Refused(f"{count} keys, and lists of {', '.join(str(len(each)) for each in lists)}")
        peer = PeerId(str(context.remote_id))
        answers = []
        response = None
        for index, key in enumerate(request.keys):
            one = type(request)()
            if index == 0:
                one.peer.CopyFrom(request.peer)
            async with self._turn:  # key by key: a long request does not keep short ones waiting
                records: list[Record] = []
                if len(key) == NODE_ID_BYTES and not request.in_cache[index]:
                    tag, value, expires_s = (
                        request.subkeys[index],
                        request.values[index],
                        request.expiration_time[index],
                    )
                    records = _records_of(key, tag, value, expires_s)
                if not records or not self._intake.may_store(peer, len(records), self._clock()):
                    answers.append(False)
                    continue
                accepted = await self._accepted(records)
                for record in accepted:
                    one.keys.append(record.key)
                    one.subkeys.append(record.subkey)
                    one.values.append(record.value)
                    one.expiration_time.append(record.expiration_time)
                    one.in_cache.append(False)
                token = giver.set(Giver(peer, self._door.place_of(peer)))
                try:
                    response = await handler(one, context)
                finally:
                    giver.reset(token)
            answers.append(len(accepted) == len(records) and all(response.store_ok))
        if response is None:  # nothing to be stored: hivemind says who it is
            one = type(request)()
            one.peer.CopyFrom(request.peer)
            response = await handler(one, context)
        del response.store_ok[:]
        response.store_ok.extend(answers)
        return response

    # -- answers of others --------------------------------------------------------------------------------------------

    async def call_protobuf_handler(self, peer_id: Any, name: str, input: Any, output_protobuf_type: Any) -> Any:  # noqa: A002
        """The answer of a peer, checked. Raises Refused for one that breaks a bound, and what the p2p raises."""
        method = name.rpartition(".")[2]
        raw = await self._p2p._client.call_unary_handler(peer_id, name, input.SerializeToString())
        most_bytes = MAX_BYTES if method == "rpc_find" else MAX_SMALL_BYTES
        if len(raw) > most_bytes:
            raise Refused(f"an answer of {len(raw)} bytes, at most {most_bytes}")
        response = output_protobuf_type.FromString(raw)
        _keep_own_node_id(response.peer, peer_id.to_bytes())
        match method:
            case "rpc_ping":
                pass
            case "rpc_store":
                if len(response.store_ok) != len(input.keys):
                    raise Refused(f"{len(response.store_ok)} answers to {len(input.keys)} keys")
            case "rpc_find":
                if len(response.results) != len(input.keys):
                    raise Refused(f"{len(response.results)} answers to {len(input.keys)} keys")
                for key, result in zip(input.keys, response.results, strict=True):
                    async with self._turn:
                        await self._mend_found(key, result)
            case other:
                raise AssertionError(f"hivemind calls {other}")
        return response

    async def _mend_found(self, key: bytes, result: Any) -> None:
        """Leaves in result only nodes that can be and records that hold."""
        nearest = [
            (node_id, peer_id)
            for node_id, peer_id in zip(
                result.nearest_node_ids[:MAX_NEAREST], result.nearest_peer_ids[:MAX_NEAREST], strict=False
            )
            if node_id == node_id_of(peer_id)
        ]
        del result.nearest_node_ids[:], result.nearest_peer_ids[:]
        result.nearest_node_ids.extend(node_id for node_id, _ in nearest)
        result.nearest_peer_ids.extend(peer_id for _, peer_id in nearest)
        accepted: list[Record] = []
        if result.type == _FOUND_DICTIONARY:
            with suppress(ValueError):  # the nodes it names may be of use all the same
                accepted = await self._accepted(decode_dictionary(key, result.value))
        if accepted:
            result.value = encode_dictionary(accepted)
            result.expiration_time = max(record.expiration_time for record in accepted)
        else:
            result.type, result.value, result.expiration_time = _NOT_FOUND, b"", 0.0

    async def _accepted(self, records: Sequence[Record]) -> list[Record]:
        """Those that the validator lets pass, in order; the loop goes on meanwhile."""
        accepted = []
        for record in records:
            if self._clock() - self._slice_began_at > SLICE_S:
                await asyncio.sleep(0)
                self._slice_began_at = self._clock()
            if self._validator.validate(record):
                accepted.append(record)
        return accepted


def node_id_of(peer_id: bytes) -> bytes | None:
    """The one node id that a peer of this binary PeerID has (directory.py takes it); None for what is none of ours."""
    public_key = public_key_in(peer_id)
    return None if public_key is None else hashlib.sha1(public_key, usedforsecurity=False).digest()


def decode_dictionary(key: bytes, raw: bytes) -> list[Record]:
    """The records in what hivemind sends of a whole dictionary. Raises ValueError for all that is not exactly of its form."""
    scan(
        raw, max_bytes=MAX_DICTIONARY_BYTES, max_depth=_DICTIONARY_DEPTH, max_items=8 + 4 * MAX_RECORDS,
        nested_exts={DICTIONARY_EXT}, what="dictionary",
    )  # fmt: skip
    match msgpack.unpackb(raw, strict_map_key=True):
        case msgpack.ExtType(code=code, data=content) if code == DICTIONARY_EXT:
            pass
        case _:
            raise ValueError("a plain value in place of a dictionary")
    match msgpack.unpackb(content, strict_map_key=True, max_map_len=0, max_ext_len=0):
        case [None | int() | float(), int() | float(), list(items)] if len(items) <= MAX_RECORDS:
            pass
        case _:
            raise ValueError("a dictionary of another form")
    records = []
    for item in items:
        match item:
            case [str(subkey), bytes(value), float(expires_s)]:
                records.append(Record(key, msgpack.packb(subkey), value, expires_s))
            case _:
                raise ValueError("an entry of another form")
    return records


def encode_dictionary(records: Iterable[Record]) -> bytes:
    """What hivemind sends of a whole dictionary."""
    items = [[msgpack.unpackb(record.subkey), record.value, record.expiration_time] for record in records]
    latest = max((item[2] for item in items), default=-math.inf)
    packed: bytes = msgpack.packb(msgpack.ExtType(DICTIONARY_EXT, msgpack.packb([math.inf, latest, items])))
    return packed


def _records_of(key: bytes, tag: bytes, value: bytes, expires_s: float) -> list[Record]:
    """What is to be stored under a key; nothing if it is of the wrong form."""
    if tag == _PLAIN_TAG or len(tag) > MAX_SUBKEY_BYTES:
        return []
    if tag != _DICTIONARY_TAG:
        return [Record(key, tag, value, expires_s)]
    try:
        return decode_dictionary(key, value)
    except ValueError:
        return []


def _keep_own_node_id(node: Any, peer_id: bytes) -> None:
    """Forgets a node id that is not the sender's; it is then answered like a peer that is no node."""
    if node.node_id and node.node_id != node_id_of(peer_id):
        node.node_id = b""
