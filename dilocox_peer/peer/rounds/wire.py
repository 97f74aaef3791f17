"""Reading and writing chain values as msgpack lists: strict, flat schemas for bytes that come from strangers.

`Fields` walks a decoded list field by field and checks type, length and range of each; anything odd is a ProtocolError.
The size cap is checked before decoding; there are no maps and no extension types, and nothing here recurses.
"""

from typing import Any

import msgpack

from dilocox_peer.checkpoints import Checkpoint
from dilocox_peer.errors import ProtocolError
from dilocox_peer.peer.planning.plan import Plan, Report
from dilocox_peer.peer.rounds.chain import Certificate, Entry, Kind, Value
from dilocox_peer.types import DIGEST_BYTES, Digest, PeerId

MAX_PEER_CHARS = 64  # base58 of an Ed25519 PeerID is 52
MAX_ROSTER = 64  # limits.max_peers of the manifest is at most this
MAX_COUNT = 2**53  # any counter; exact in every language's double
MAX_SIGNATURE_BYTES = 128
MAX_CODEC_CHARS = 32
MAX_LIST, MAX_TEXT, MAX_BINARY = 128, 128, 256  # twice what any field holds: what is little too long has Fields say so
_KINDS: tuple[Kind, ...] = ("round", "epoch")


def unpack(raw: bytes, max_bytes: int, sender: PeerId | None, *, max_list: int = MAX_LIST) -> "Fields":
    """The list that raw encodes. Raises ProtocolError; nothing is allocated beyond max_bytes and its decoded form.

    max_list: fields of a list, checked before there is one (an empty list takes one byte in raw, 64 here)."""
    if len(raw) > max_bytes:
        raise ProtocolError(sender, f"{len(raw)} bytes; at most {max_bytes} are read")
    try:
        items = msgpack.unpackb(
            raw, raw=False, use_list=True, strict_map_key=True, max_map_len=0, max_ext_len=0, max_array_len=max_list,
            max_str_len=MAX_TEXT, max_bin_len=MAX_BINARY,
        )  # fmt: skip
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise ProtocolError(sender, f"not msgpack: {type(error).__name__}") from None
    return Fields(items, sender)


class Fields:
    """The fields of a list, taken in order. Every method raises ProtocolError for what does not fit."""

    __slots__ = ("_items", "_next", "_sender")

    def __init__(self, items: object, sender: PeerId | None) -> None:
        if type(items) is not list:
            raise ProtocolError(sender, f"{type(items).__name__} where a list belongs")
        self._items: list[Any] = items
        self._next = 0
        self._sender = sender

    def refuse(self, reason: str) -> ProtocolError:
        return ProtocolError(self._sender, reason)

    def _take(self) -> Any:
        if self._next >= len(self._items):
            raise self.refuse(f"a list of {len(self._items)} fields ends early")
        self._next += 1
        return self._items[self._next - 1]

    def end(self) -> None:
        if self._next != len(self._items):
            raise self.refuse(f"{len(self._items) - self._next} fields too many")

    def integer(self, low: int = 0, high: int = MAX_COUNT) -> int:
        item = self._take()
        if type(item) is not int or not low <= item <= high:
            raise self.refuse(f"field {self._next} is no integer from {low} to {high}")
        return item

    def flag(self) -> bool:
        item = self._take()
        if type(item) is not bool:
            raise self.refuse(f"field {self._next} is no boolean")
        return item

    def binary(self, low: int, high: int) -> bytes:
        item = self._take()
        if type(item) is not bytes or not low <= len(item) <= high:
            raise self.refuse(f"field {self._next} is no string of {low} to {high} bytes")
        return item

    def digest(self) -> Digest:
        return Digest(self.binary(DIGEST_BYTES, DIGEST_BYTES))

    def state_digest(self) -> bytes:
        item = self.binary(0, DIGEST_BYTES)
        if len(item) not in (0, DIGEST_BYTES):
            raise self.refuse(f"a state digest of {len(item)} bytes")
        return item

    def text(self, high: int) -> str:
        item = self._take()
        if type(item) is not str or not 0 < len(item) <= high or not item.isascii() or not item.isprintable():
            raise self.refuse(f"field {self._next} is no plain text of 1 to {high} characters")
        return item

    def peer(self) -> PeerId:
        return PeerId(self.text(MAX_PEER_CHARS))

    def items(self, high: int) -> list["Fields"]:
        """A list of lists."""
        item = self._take()
        if type(item) is not list or len(item) > high:
            raise self.refuse(f"field {self._next} is no list of at most {high}")
        return [Fields(each, self._sender) for each in item]

    def one(self) -> "Fields":
        return Fields(self._take(), self._sender)

    def optional(self) -> "Fields | None":
        item = self._take()
        return None if item is None else Fields(item, self._sender)

    def flat(self, high: int) -> "Fields":
        """A list of plain fields of one kind; read it with `while more`."""
        item = self._take()
        if type(item) is not list or len(item) > high:
            raise self.refuse(f"field {self._next} is no list of at most {high}")
        return Fields(item, self._sender)

    @property
    def more(self) -> bool:
        return self._next < len(self._items)


def read_entry(fields: Fields) -> Entry:
    entry = Entry(
        peer=fields.peer(), incarnation=fields.integer(), blob=fields.digest(), size_bytes=fields.integer(),
        micro_batches=fields.integer(high=2**31), state_digest=fields.state_digest(), report=_read_report(fields.one()),
    )  # fmt: skip
    fields.end()
    return entry


def _read_plan(fields: Fields) -> Plan:
    plan = Plan(
        codec=fields.text(MAX_CODEC_CHARS), rank=fields.integer(high=2**20),
        inner_steps=fields.integer(1, 2**31), first_step=fields.integer(),
    )  # fmt: skip
    fields.end()
    return plan


def _read_report(fields: Fields) -> Report:
    report = Report(
        uplink_kbps=fields.integer(high=2**40), step_us=fields.integer(high=2**40), exchange_ms=fields.integer(high=2**40),
        lost_permille=fields.integer(high=1000), needed_rank=fields.integer(high=2**20),
    )  # fmt: skip
    fields.end()
    return report


def read_value(fields: Fields) -> Value:
    kind = fields.text(5)
    if kind not in _KINDS:
        raise fields.refuse(f"a value of kind {kind!r}")
    height, round_, weight = fields.integer(1), fields.integer(), fields.integer()
    entries = tuple(read_entry(each) for each in fields.items(MAX_ROSTER))
    names = fields.flat(MAX_ROSTER)
    roster = []
    while names.more:
        roster.append(names.peer())
    value = Value(
        kind=kind, height=height, round=round_, weight=weight, entries=entries, roster=tuple(roster),
        plan=_read_plan(fields.one()), state_digest=fields.state_digest(),
    )  # fmt: skip
    fields.end()
    return value


def certificate_fields(certificate: Certificate) -> list[object]:
    signatures = [[peer, signature] for peer, signature in certificate.signatures]
    return [
        certificate.stage, certificate.parent, certificate.view, certificate.ballot, certificate.value.fields(), signatures,
    ]  # fmt: skip


def read_certificate(fields: Fields) -> Certificate:
    stage, parent, view, ballot = fields.integer(high=2**16), fields.digest(), fields.integer(), fields.integer()
    value = read_value(fields.one())
    signatures = []
    for each in fields.items(MAX_ROSTER):
        signatures.append((each.peer(), each.binary(1, MAX_SIGNATURE_BYTES)))
        each.end()
    fields.end()
    return Certificate(stage, parent, view, ballot, value, tuple(signatures))


def checkpoint_fields(checkpoint: Checkpoint) -> list[object]:
    return [
        checkpoint.stage, checkpoint.genesis, checkpoint.height, checkpoint.round, checkpoint.head, checkpoint.sequence,
        checkpoint.is_last, checkpoint.signature,
    ]  # fmt: skip


def read_checkpoint(fields: Fields) -> Checkpoint:
    checkpoint = Checkpoint(
        fields.integer(high=2**16), fields.digest(), fields.integer(1), fields.integer(), fields.digest(), fields.integer(),
        fields.flag(), fields.binary(1, MAX_SIGNATURE_BYTES),
    )  # fmt: skip
    fields.end()
    return checkpoint
