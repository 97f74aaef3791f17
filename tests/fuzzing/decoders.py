"""Every decoder of bytes or text that come from somebody else, with what it may raise and what honest input looks like.

Whatever goes in, a decoder gives back a value or raises one of its refusals, soon, and keeps nothing. corpora/ has inputs that honest
peers send and those that reached new code when they were mutated (run.py --guided), a line of hex each.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from dilocox_peer.admission import Grant, Revocations
from dilocox_peer.compression.codec import CODECS
from dilocox_peer.compression.contribution import decode_contribution, encode_contribution
from dilocox_peer.compression.policy import policy_named
from dilocox_peer.compression.slices import cut, read_table, table_of
from dilocox_peer.config import preset
from dilocox_peer.dht.entry import Record, decode_dictionary, encode_dictionary
from dilocox_peer.dht.records import Lease, decode_word
from dilocox_peer.errors import ConfigError, DilocoxError, MalformedBlob, ManifestMismatch, ProtocolError
from dilocox_peer.invitation import parse_invitation, parse_multiaddr
from dilocox_peer.manifest import Manifest
from dilocox_peer.model.activations import BodyFormat
from dilocox_peer.network import relay_protocol
from dilocox_peer.network.frames import PREFIX_BYTES, pack_header, unpack_header, unpack_prefix
from dilocox_peer.network.link_frames import BufferReader, ChunkReader, FrameKind
from dilocox_peer.network.message_answers import ANSWERED_AT_ONCE
from dilocox_peer.network.message_frames import (
    ANSWER_HEAD_BYTES,
    HEAD_BYTES,
    BatchHead,
    BatchPacking,
    join_batch,
    pack_answer,
    pack_head,
    read_answer_head,
    read_head,
    split_answer,
)
from dilocox_peer.network.message_packing import Packer, Unpacker
from dilocox_peer.network.nat_pmp import read_address, read_mapping
from dilocox_peer.peer.control import command_of
from dilocox_peer.scan import scan
from dilocox_peer.signing import SigningKey
from dilocox_peer.store.outline import Outline
from dilocox_peer.types import Layout, PeerId, RunId, TensorSpec, sha256
from dilocox_peer.wire.chain import decode_chain
from dilocox_peer.wire.directives import Directive, read_directive, sign_directive
from dilocox_peer.wire.health import HEALTH
from dilocox_peer.wire.hops import decode_hops
from dilocox_peer.wire.records import GREETING
from dilocox_peer.wire.rounds import decode_message

CORPORA = Path(__file__).parent / "corpora"
GOLDEN = Path(__file__).parents[1] / "unit" / "golden"

KEY = SigningKey(sha256(b"a key of the fuzzer's"))
SENDER = KEY.peer_id
LISTED = PeerId("12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN")  # of the golden leases
RUN = RunId("ab" * 32)
MAX_BODY_BYTES = 4096
LAYOUT = Layout((TensorSpec("matrix", (24, 40)), TensorSpec("vector", (40,), "vector")))
CUT = cut(LAYOUT, 3)


@dataclass(frozen=True)
class Decoder:
    """refusals: what `decode` may raise, and nothing else."""

    name: str
    decode: Callable[[bytes], object]
    refusals: tuple[type[Exception], ...]
    honest: Callable[[], list[bytes]]

    @property
    def path(self) -> Path:
        return CORPORA / f"{self.name.replace(' ', '-')}.hex"

    def corpus(self) -> list[bytes]:
        """What honest peers send, and what is kept of earlier searches."""
        kept = [bytes.fromhex(line) for line in self.path.read_text().split("\n")] if self.path.exists() else []
        return list(dict.fromkeys([*self.honest(), *kept]))

    def refuses(self, raw: bytes) -> bool:
        """Whether it does; raises whatever is not a refusal."""
        try:
            self.decode(raw)
        except self.refusals:
            return True
        return False


@cache
def _golden(name: str) -> dict[str, bytes]:
    lines = [line.split() for line in (GOLDEN / name).read_text().splitlines()]
    return {f"{number} {line[0]}": bytes.fromhex(line[-1]) for number, line in enumerate(lines)}


def _of(name: str, *begin: str) -> list[bytes]:
    return [raw for label, raw in _golden(name).items() if not begin or label.split()[1].startswith(begin)]


def _frame(raw: bytes) -> None:
    prefix = unpack_prefix(raw[:PREFIX_BYTES], max_body_bytes=MAX_BODY_BYTES)
    unpack_header(raw[PREFIX_BYTES : PREFIX_BYTES + prefix.header_bytes])


def _frames() -> list[bytes]:
    headers: list[tuple[int, dict[str, Any], int]] = [
        (FrameKind.HELLO, {"role": "control", "g": 7}, 0),
        (FrameKind.FRAME, {"h": b"header"}, 9),
        (FrameKind.PING, {"i": 3}, 0),
    ]
    return [pack_header(kind, header, body) + bytes(body) for kind, header, body in headers]


def _messages(raw: bytes) -> None:
    unpacker = Unpacker()
    for _ in range(2):
        head = read_head(raw[:HEAD_BYTES].ljust(HEAD_BYTES, b"\0"))
        if unpacker.is_lost(head):
            return
        unpacker.unpack(head, raw[HEAD_BYTES:][: head.num_packed])
        raw = raw[HEAD_BYTES + head.num_packed :]


def _batches() -> list[bytes]:
    packer, messages = Packer(), _of("rounds.txt")
    together = b"".join(packer.pack(3, join_batch(messages[at : at + 3])) for at in range(2))
    raw = join_batch(messages[:2])
    plain = pack_head(BatchHead(BatchPacking.NONE, 2, len(raw), len(raw), *ANSWERED_AT_ONCE)) + raw
    return [together, plain + Packer().pack(2, raw)]


def _answer(raw: bytes) -> None:
    _, num_bytes = read_answer_head(raw[:ANSWER_HEAD_BYTES].ljust(ANSWER_HEAD_BYTES, b"\0"))
    split_answer(3, raw[ANSWER_HEAD_BYTES:][:num_bytes])


def _chunks(raw: bytes) -> None:
    """In pieces, as they come off a stream; where is cut follows from the bytes."""
    reader, rng, at = ChunkReader(MAX_BODY_BYTES), random.Random(len(raw)), 0
    while at < len(raw):
        size = rng.choice((1, 3, 19, 500))
        list(reader.feed(raw[at : at + size]))
        at += size


def _buffers(raw: bytes) -> None:
    reader, at = BufferReader(MAX_BODY_BYTES), 0
    while at < len(raw):
        space = reader.space()
        size = min(len(space), len(raw) - at)
        space[:size] = raw[at : at + size]
        space.release()
        reader.take(size)
        at += size


def _healths() -> list[bytes]:
    return [bytes.fromhex(line) for line in (GOLDEN / "health.txt").read_text().split()]


def _tables() -> list[bytes]:
    values_N = torch.randn(LAYOUT.num_elements, generator=torch.Generator().manual_seed(3))
    parts = zip(CUT.starts, CUT.slices, strict=True)
    blobs = [
        encode_contribution(each, values_N[start : start + each.num_elements], policy_named("int4"))
        for start, each in parts
    ]
    return [table_of(CUT, blobs)]


def _router(raw: bytes) -> None:
    read_address(raw)
    read_mapping(raw, 4711)


def _lease(raw: bytes) -> None:
    Lease.from_bytes(raw, peer=LISTED, expires_s=1.0)


def _directives() -> list[bytes]:
    unsigned = Directive(sha256(b"run"), 3, said="a word to all", banned=(SENDER,))
    return [sign_directive(unsigned, KEY.sign).to_bytes()]


def _dictionaries() -> list[bytes]:
    records = [Record(b"k", b"\xa1" + name, b"value" * 9, 1e9) for name in (b"a", b"b")]
    return [encode_dictionary(records), encode_dictionary([])]


_OUT_N = torch.zeros(LAYOUT.num_elements)


def _contribution(raw: bytes) -> None:
    decode_contribution(raw, LAYOUT, _OUT_N)


def _contributions() -> list[bytes]:
    values_N = torch.randn(LAYOUT.num_elements, generator=torch.Generator().manual_seed(1))
    return [encode_contribution(LAYOUT, values_N, policy_named(name)) for name in sorted(CODECS)]


_BODIES = {form: BodyFormat(form, 1, 8, 16, 300) for form in ("int8", "bf16", "fp32")}


def _activations(raw: bytes, form: BodyFormat) -> None:
    """Whatever is let pass can be unpacked, and is finite."""
    if (reason := form.why_not(raw, is_step=True)) is not None:
        raise ProtocolError(None, reason)
    device = torch.device("cpu")
    assert torch.isfinite(form.unpack_hidden(raw, device)).all()
    form.unpack_targets(raw, device)
    form.unpack_starts(raw, device)


def _bodies(form: BodyFormat) -> list[bytes]:
    hidden_BTD = torch.randn(1, 8, 16, generator=torch.Generator().manual_seed(2))
    return [form.pack_hidden(hidden_BTD) + form.pack_targets(torch.arange(8).view(1, 8))]


def _manifests() -> list[bytes]:
    return [preset("tiny").signed_by(KEY).to_bytes(), preset("tiny", stages={"count": 2}).signed_by(KEY).to_bytes()]


def _text(raw: bytes, read: Callable[[str], object]) -> None:
    read(raw.decode("utf-8", "surrogateescape"))


def _links() -> list[bytes]:
    return [f"dilocox://{RUN}@/ip4/203.0.113.5/tcp/31337/p2p/{SENDER}".encode()]


def _addresses() -> list[bytes]:
    return [
        f"/ip4/203.0.113.5/tcp/31337/p2p/{SENDER}".encode(),
        f"/dns6/a.example/tcp/1/p2p/{SENDER}/p2p-circuit/p2p/{SENDER}".encode(),
    ]


def _relay_requests() -> list[bytes]:
    peer = b"\x0a\x04abcd"
    return [b"\x08\x00", b"\x08\x01\x12" + bytes([len(peer)]) + peer]


DECODERS = (
    Decoder("message", lambda raw: decode_message(raw, SENDER), (ProtocolError,), lambda: _of("rounds.txt")),
    Decoder("hops", lambda raw: decode_hops(raw, SENDER), (ProtocolError,), lambda: _of("hops.txt")),
    Decoder(
        "chain",
        lambda raw: decode_chain(raw, 1 << 20),
        (ProtocolError, ValueError),
        lambda: _of("journal.txt", "chain"),
    ),
    Decoder("directive", read_directive, (ValueError,), _directives),
    Decoder("lease", _lease, (ValueError,), lambda: _of("records.txt", "lease")),
    Decoder("word", decode_word, (ValueError,), lambda: _of("records.txt", "word")),
    Decoder("grant", Grant.from_bytes, (ValueError,), lambda: _of("records.txt", "pass", "invitation")),
    Decoder(
        "revocations",
        lambda raw: Revocations.from_bytes(raw, run_id=RUN, owner=SENDER),
        (ValueError,),
        lambda: _of("records.txt", "revocations"),
    ),
    Decoder("health", lambda raw: HEALTH.hear(raw, None), (ProtocolError,), _healths),
    Decoder("slice table", lambda raw: read_table(raw, CUT), (MalformedBlob,), _tables),
    Decoder(
        "router",
        _router,
        (),
        lambda: [bytes.fromhex("0080000000000010cb007105"), bytes.fromhex("0082000000000010126712670000003c")],
    ),
    Decoder("greeting", lambda raw: GREETING.hear(raw, None), (ProtocolError,), lambda: _of("records.txt", "hello")),
    Decoder("dictionary", lambda raw: decode_dictionary(b"k", raw), (ValueError,), _dictionaries),
    Decoder("frame", _frame, (ProtocolError,), _frames),
    Decoder("frames in chunks", _chunks, (ProtocolError,), _frames),
    Decoder("frames in buffers", _buffers, (ProtocolError,), _frames),
    Decoder(
        "scan",
        lambda raw: scan(raw, max_bytes=1 << 16, max_depth=4, max_items=1000, what="it"),
        (ValueError,),
        lambda: [frame[PREFIX_BYTES:] for frame in _frames()[::2]],
    ),
    Decoder("messages", _messages, (ProtocolError,), _batches),
    Decoder("answer", _answer, (ProtocolError,), lambda: [pack_answer(3, ["", "busy", "not ready"])]),
    Decoder("relay request", relay_protocol.read_request, (ValueError,), _relay_requests),
    Decoder(
        "relay answer", relay_protocol.read_answer, (ValueError,), lambda: [relay_protocol.reserved_until(10**9)[1:]]
    ),
    Decoder("contribution", _contribution, (MalformedBlob,), _contributions),
    *(
        Decoder(f"activations {name}", partial(_activations, form=form), (ProtocolError,), partial(_bodies, form))
        for name, form in _BODIES.items()
    ),
    Decoder("outline", lambda raw: Outline.unpacked(len(raw) << 10, raw), (ValueError,), lambda: [bytes(32)]),
    Decoder("manifest", lambda raw: Manifest.from_bytes(raw, run_id=RUN), (ManifestMismatch,), _manifests),
    Decoder("link", partial(_text, read=parse_invitation), (ConfigError, DilocoxError), _links),
    Decoder("address", partial(_text, read=lambda text: parse_multiaddr(text, "lease")), (ConfigError,), _addresses),
    Decoder("command", command_of, (), lambda: [b'{"command": "status"}', b'{"command": "pause 60"}']),
)
