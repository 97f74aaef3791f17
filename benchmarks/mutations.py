"""What a stranger may send, made from the grammars of what peers do send, and then broken. Pure; all from one seed.

Each method gives bytes (or a protobuf's bytes) for one entry point. About a tenth is left whole, so that decoders are
passed and what lies behind them is reached; the rest is nested, cut, counted wrongly, of the wrong type, or one byte off.
"""

import random
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import msgpack

from dilocox_peer.dht.entry import Record, encode_dictionary, node_id_of
from dilocox_peer.dht.records import (
    BUCKETS,
    Lease,
    bucket_of,
    dht_id,
    lease_key,
    manifest_key,
)
from dilocox_peer.dht.validators import RecordValidator
from dilocox_peer.errors import ProtocolError
from dilocox_peer.network.frames import MAGIC, pack_header
from dilocox_peer.network.link_frames import FrameKind
from dilocox_peer.network.message_frames import join_batch
from dilocox_peer.network.message_packing import Packer
from dilocox_peer.signing import SigningKey
from dilocox_peer.types import PeerId, RunId
from dilocox_peer.wire.rounds import decode_message

SERVICES = ("dial-back", "state", "store", "backup", "health")
METHODS = ("rpc_ping", "rpc_store", "rpc_find")
POOL = 300
GOLDEN = Path(__file__).parents[1] / "tests" / "unit" / "golden"
STAGE, HEAD = 2, 3  # where they stand in a message


@cache
def _messages() -> tuple[bytes, ...]:
    """Of each kind, as peers send them now: written down here they would be those of an older version before long."""
    lines = [
        line for name in ("rounds", "slices", "directed") for line in (GOLDEN / f"{name}.txt").read_text().splitlines()
    ]
    found = []
    for line in lines:
        raw = bytes.fromhex(line.split()[-1])
        with suppress(ProtocolError):  # what is no message, but lies on disks
            decode_message(raw, PeerId("golden"))
            found.append(raw)
    return tuple(found)


class Mutations:
    """raw_peer: binary PeerID of who sends."""

    def __init__(self, seed: int, run_id: RunId, key: SigningKey, raw_peer: bytes) -> None:
        self.rng = random.Random(seed)
        self._run_id = run_id
        self._key = key
        self._validator = RecordValidator(run_id, key, time.time)
        self._node_id = node_id_of(raw_peer) or b""
        self._keys = [dht_id(manifest_key(run_id))]
        for stage in range(3):
            self._keys += [dht_id(lease_key(run_id, stage, bucket)) for bucket in range(BUCKETS)]
        self._pools: dict[str, list[bytes]] = {}
        self._own_key = dht_id(lease_key(run_id, 0, bucket_of(key.peer_id)))

    def drawn(self, what: str, make: Callable[[], bytes]) -> bytes:
        """A new one now and then, else one of the last few hundred with something wrong: ten times as fast."""
        pool = self._pools.setdefault(what, [])
        if len(pool) < POOL or self.rng.random() < 0.1:
            raw = make()
            if len(pool) < POOL:
                pool.append(raw)
            else:
                pool[self.rng.randrange(POOL)] = raw
            return raw
        return self.broken(self.rng.choice(pool))

    # -- anything -----------------------------------------------------------------------------------------------------

    def broken(self, raw: bytes) -> bytes:
        """raw with something wrong, or as it is."""
        rng = self.rng
        match rng.randrange(10):
            case 0:
                return raw
            case 1:
                return raw[: rng.randrange(len(raw) + 1)]
            case 2:
                return raw + rng.randbytes(rng.choice((1, 5, 300)))
            case 3:
                return rng.randbytes(rng.choice((0, 1, 20, 300)))
            case 4 | 5 if len(raw) > 2:  # a part twice, or not at all
                start, stop = sorted(rng.sample(range(len(raw)), 2))
                return raw[:start] + raw[start:stop] * rng.choice((0, 2, 3)) + raw[stop:]
            case _:
                changed = bytearray(raw or b"\x00")
                for _ in range(rng.choice((1, 1, 1, 4))):
                    changed[rng.randrange(len(changed))] = rng.choice((rng.randrange(256), 0xDD, 0xDF, 0xC9, 0xFF, 0))
                return bytes(changed)

    def packed(self) -> bytes:
        """MessagePack that is deep, or long, or says it is."""
        rng = self.rng
        match rng.randrange(9):
            case 0:
                return b"\x91" * rng.choice((5, 500, 5000, 100_000)) + b"\xc0"
            case 1:
                return b"\x81\xa0" * rng.choice((5, 500, 5000)) + b"\xc0"
            case 2:
                return self.nested_exts(rng.choice((2, 5, 200, 600)), rng.choice((0x50, 0x40, 0x01)))
            case 3:
                return (
                    rng.choice((b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9")) + b"\xff\xff\xff\xff" + rng.randbytes(20)
                )
            case 4:
                return b"\xdc\x10\x00" * rng.choice((3, 900)) + b"\xc0" * 500
            case 5:
                return bytes(msgpack.packb([None] * rng.choice((100, 5000, 60_000))))
            case 6:
                return bytes(msgpack.packb({str(number): number for number in range(rng.choice((10, 500)))}))
            case 7:
                return rng.choice(
                    (
                        b"",
                        b"\xc1",
                        b"\xc7\x00\x50",
                        b"\xd4\x50",
                        b"\xd6\xff\xff\xff\xff\xff",
                        b"\xc7\x0c\xff" + b"\xff" * 12,
                    )
                )
            case _:
                return bytes(msgpack.packb(self.value(3)))

    def nested_exts(self, depth: int, code: int) -> bytes:
        raw = b"\xc0"
        for _ in range(depth):
            raw = msgpack.packb(msgpack.ExtType(code, b"\x93\xc0\xcb" + bytes(8) + b"\x91" + raw))
        return raw

    def value(self, depth: int) -> Any:
        rng = self.rng
        choices: list[Callable[[], Any]] = [
            lambda: rng.choice(
                (None, True, 0, -1, 2**53, 2**63, 2**64 - 1, -(2**63), 1.0, float("nan"), float("inf"), 1e308)
            ),
            lambda: rng.randbytes(rng.choice((0, 20, 32, 64, 300))),
            lambda: rng.choice(("", "a", str(self._key.peer_id), "x" * 300, "\x1b[2J\n", "\ud7ff\U0010ffff")),
        ]
        if depth:
            choices += [
                lambda: [self.value(depth - 1) for _ in range(rng.randrange(6))],
                lambda: {str(number): self.value(depth - 1) for number in range(rng.randrange(4))},
                lambda: msgpack.ExtType(rng.choice((0x40, 0x50, 1)), msgpack.packb(self.value(depth - 1))),
            ]
        return rng.choice(choices)()

    # -- the directory ------------------------------------------------------------------------------------------------

    def record(self) -> Record:
        """One that holds: a lease of our own."""
        rng = self.rng
        expires_s = time.time() + rng.uniform(1, 110)
        value = Lease(
            peer=self._key.peer_id, stage=0, incarnation=rng.randrange(2**40), addresses=(), protocol=1,
            tokens_per_s=1.0, memory_bytes=1, reachability="relayed", round=rng.randrange(100), has_left=True,
        ).to_bytes()  # fmt: skip
        unsigned = Record(self._own_key, msgpack.packb(str(self._key.peer_id)), msgpack.packb(value), expires_s)
        return Record(self._own_key, unsigned.subkey, self._validator.sign_value(unsigned), expires_s)

    def node(self, info: Any) -> None:
        rng = self.rng
        info.node_id = rng.choice(
            (self._node_id, self._node_id, rng.randbytes(20), b"", rng.randbytes(rng.choice((1, 21, 300))))
        )

    def request(self, method: str) -> bytes:
        from hivemind.proto import dht_pb2

        rng = self.rng
        match method:
            case "rpc_ping":
                request = dht_pb2.PingRequest(validate=rng.random() < 0.1)
            case "rpc_find":
                keys = [rng.choice((*self._keys, rng.randbytes(20))) for _ in range(rng.choice((1, 1, 2, 2, 32, 150)))]
                if rng.random() < 0.1:
                    keys.append(rng.randbytes(rng.choice((0, 19, 21, 3000))))
                request = dht_pb2.FindRequest(keys=keys)
            case _:
                request = self._store()
        self.node(request.peer)
        raw: bytes = request.SerializeToString()
        return self.broken(raw) if rng.random() < 0.3 else raw

    def _store(self) -> Any:
        from hivemind.proto import dht_pb2

        rng = self.rng
        request = dht_pb2.StoreRequest()
        for _ in range(rng.choice((0, 1, 1, 1, 2, 8, 40))):
            record = self.record()
            key, tag, value, expires_s = record.key, record.subkey, record.value, record.expiration_time
            match rng.randrange(8):
                case 0:
                    tag, value = b"", self.dictionary()
                case 1:
                    tag, value = b"", self.packed()
                case 2:
                    tag = rng.choice((b"\xc0", b"", self.packed()[:200], rng.randbytes(90)))
                case 3:
                    value = self.packed() + rng.choice((b"", bytes(64)))
                case 4:
                    key = rng.choice((*self._keys, rng.randbytes(rng.choice((0, 20, 21)))))
                case 5:
                    expires_s = rng.choice((0.0, -1.0, 1e300, float("nan"), float("inf"), time.time() + 1e6))
                case 6:
                    value = self.broken(value)
            request.keys.append(key)
            request.subkeys.append(tag)
            request.values.append(value)
            request.expiration_time.append(expires_s)
            request.in_cache.append(rng.random() < 0.1)
        if rng.random() < 0.05:
            rng.choice((request.keys, request.subkeys, request.values)).extend([b""] * rng.choice((1, 2000, 20_000)))
        return request

    def dictionary(self) -> bytes:
        rng = self.rng
        records = [self.record() for _ in range(rng.choice((0, 1, 2, 5)))]
        match rng.randrange(5):
            case 0:
                return encode_dictionary(records)
            case 1:
                return self.broken(encode_dictionary(records))
            case 2:
                items = [[self.value(2), self.value(2), self.value(1)] for _ in range(rng.choice((1, 3, 200)))]
                return bytes(msgpack.packb(msgpack.ExtType(0x50, msgpack.packb([self.value(1), self.value(0), items]))))
            case 3:
                return bytes(msgpack.packb(msgpack.ExtType(0x50, self.packed())))
            case _:
                return self.nested_exts(rng.choice((2, 200, 400)), 0x50)

    def answer(self, method: str) -> bytes:
        from hivemind.proto import dht_pb2

        rng = self.rng
        match method:
            case "rpc_ping":
                response = dht_pb2.PingResponse(
                    dht_time=rng.choice((0.0, time.time(), float("nan"), 1e300)), available=rng.random() < 0.5
                )
            case "rpc_store":
                response = dht_pb2.StoreResponse(store_ok=[rng.random() < 0.5] * rng.choice((0, 1, 1, 2, 3000)))
            case _:
                response = dht_pb2.FindResponse()
                for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 60))):
                    result = response.results.add()
                    result.type = rng.choice((0, 1, 2, 2, 2, 7))
                    result.value = rng.choice((self.dictionary, self.packed, lambda: b""))()
                    result.expiration_time = rng.choice((0.0, time.time() + 60, float("nan"), float("inf")))
                    for _ in range(rng.choice((0, 1, 20, 400))):
                        result.nearest_node_ids.append(
                            rng.choice((self._node_id, rng.randbytes(20), b"", rng.randbytes(30)))
                        )
                        result.nearest_peer_ids.append(rng.randbytes(rng.choice((0, 38, 300))))
        self.node(response.peer)
        raw: bytes = response.SerializeToString()
        return self.broken(raw) if rng.random() < 0.3 else raw

    # -- messages between the peers of a stage ------------------------------------------------------------------------

    def message(self) -> bytes:
        """Of any kind that there is: one that peers do send, with a head and a stage of its own."""
        rng = self.rng
        if rng.random() < 0.2:
            return self.packed()
        fields = msgpack.unpackb(rng.choice(_messages()))
        fields[STAGE], fields[HEAD] = rng.choice((fields[STAGE], 0, 0, 1)), rng.randbytes(32)
        if rng.random() < 0.4:
            self._replace(fields)
        return self.broken(msgpack.packb(fields))

    def _replace(self, fields: list[Any]) -> None:
        """Something in it, or in what is in it, by anything; or a list by many times the same."""
        rng = self.rng
        while True:
            at = rng.randrange(len(fields))
            inner = fields[at]
            if not isinstance(inner, list) or not inner or rng.random() < 0.3:
                break
            fields = inner
        is_longer = isinstance(inner, list) and rng.random() < 0.5
        fields[at] = inner * rng.choice((2, 40, 70)) if is_longer else self.value(2)

    def batch(self) -> tuple[int, bytes, bool]:
        """How many messages, they as they travel on a stream, and whether that is whole: now and then what is told of them is wrong."""
        rng = self.rng
        messages = [
            self.drawn("message", self.message)
            for _ in range(rng.choice((1, 1, 2, 8, 32) if rng.random() < 0.1 else (1, 2, 4)))
        ]
        raw = Packer().pack(len(messages), join_batch(messages))
        is_whole = rng.random() < 0.9
        return len(messages), raw if is_whole else self.broken(raw), is_whole

    # -- streams ------------------------------------------------------------------------------------------------------

    def fetch_request(self, service: str) -> bytes:
        rng = self.rng
        headers: dict[str, tuple[dict[str, Any], ...]] = {
            "dial-back": ({"addresses": [f"/ip4/127.0.0.1/tcp/1/p2p/{self._key.peer_id}", "x" * 600, 1]}, {}),
            "state": ({"head": rng.randbytes(32)}, {"head": self.value(1)}),
            "store": (
                {"name": rng.randbytes(32), "want": "outline"},
                {"name": rng.randbytes(32), "start": rng.choice((0, -1, 2**60)), "stop": rng.choice((1, 2**62))},
            ),
            "backup": (
                {"stage": 0, "want": "summary"},
                {"stage": 0, "want": "chain", "locator": [rng.randbytes(32)] * rng.choice((1, 70))},
                {"stage": rng.choice((0, 1, -1, 2**60)), "want": "chain", "locator": [self.value(1)]},
            ),
            "health": ({}, {"stage": self.value(1)}),
        }
        header = dict(rng.choice(headers[service]))
        if rng.random() < 0.5:
            header[rng.choice((*header, "more"))] = self.value(2)
        return self.frame(1, header)

    def frame(self, kind: int, header: dict[str, Any], body: bytes = b"") -> bytes:
        rng = self.rng
        match rng.randrange(6):
            case 0:
                packed = self.packed()[:60_000]
                return struct.pack(">IBBHIQ", MAGIC, 1, kind, 0, len(packed), len(body)) + packed + body
            case 1:
                lengths = rng.choice((0, 1, 65_536, 65_537, 2**32 - 1)), rng.choice((0, 1, 2**20, 2**40, 2**64 - 1))
                return struct.pack(">IBBHIQ", MAGIC, 1, kind, 0, *lengths) + rng.randbytes(50)
            case 2 | 3:
                return self.broken(pack_header(kind, header, len(body)) + body)
            case _:
                return pack_header(kind, header, len(body)) + body

    def link_frame(self) -> bytes:
        """On a link that is made: most of these are its end."""
        rng = self.rng
        owners = (
            rng.choice((b"\x01", b"\x02", b"\x03", b""))
            + rng.choice(
                (self.packed, lambda: msgpack.packb([1, str(self._key.peer_id), 0, 1, rng.randbytes(64)]), lambda: b"")
            )()
        )
        return self.frame(
            rng.choice(
                (FrameKind.FRAME, FrameKind.FRAME, FrameKind.FRAME, FrameKind.PING, FrameKind.PONG, rng.randrange(64))
            ),
            rng.choice(({"h": owners[:65_000]}, {"i": rng.choice((0, -1, 2**64 - 1))}, {"h": "text"}, {})),
            rng.choice((b"", rng.randbytes(100), bytes(20_000))),
        )
