"""What two peers of neighbouring stages say to each other about micro-batches, and its wire form.

A micro-batch is one recursive call per hop: STEP(x, targets) -> GRAD(dx, loss). A header is one msgpack list of up to
64 messages; only the last may be a Step or a Grad, whose body travels beside it in the same frame. Headers come from
strangers: `decode_hops` checks size, types and ranges, and raises ProtocolError. What a message may say at this moment
is for the scheduler to judge.

`call` is the caller's own number for one forward's output: answers, grants and cancellations name it, so that an answer
to an earlier output of the same micro-batch (two callers of one peer, a peer that restarted) is never taken for the
gradient of a later one.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from dilocox_peer.errors import ProtocolError
from dilocox_peer.types import PeerId

MAX_MESSAGES = 64
MAX_HOPS_BYTES = 32 * 1024  # 64 messages with the longest ids are about 8 KB
MAX_WINDOW = 1 << 16
MAX_STAGES = 1 << 16
LEAST_SECONDS, MAX_SECONDS = 1e-9, 1e6  # beside 0; below, speeds and their quotients would not be finite
MAX_LOSS = 1e6
MAX_COUNT = 2**53  # any counter; exact in every language's double
MAX_PEER_CHARS = 64  # base58 of an Ed25519 PeerID is 52
MAX_REASON_CHARS = 64


@dataclass(frozen=True, slots=True)
class MicroBatchId:
    """The index-th micro-batch that an origin (a peer of stage 0) drew in this life of its process."""

    origin: PeerId
    incarnation: int
    index: int


@dataclass(frozen=True, slots=True)
class Reserve:
    """I am computing this micro-batch's forward and shall want a slot. round: the one its origin trains."""

    id: MicroBatchId
    round: int
    call: int = 0


@dataclass(frozen=True, slots=True)
class Grant:
    """You may send its body."""

    id: MicroBatchId
    call: int = 0


@dataclass(frozen=True, slots=True)
class Wait:
    """No slot is free; so many are before you, this one included."""

    id: MicroBatchId
    position: int
    call: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """Activations and targets, in the body. window: how many micro-batches the sender may have under way."""

    id: MicroBatchId
    round: int
    window: int
    call: int = 0


@dataclass(frozen=True, slots=True)
class Grad:
    """The gradient of a Step's activations, in the body. behind: the lowest certified round of the stages from the
    sender's on. loss is NaN where it is not finite, or beyond MAX_LOSS."""

    id: MicroBatchId
    loss: float
    behind: int
    call: int = 0


@dataclass(frozen=True, slots=True)
class Ack:
    """The Grad arrived; you may forget it."""

    id: MicroBatchId
    call: int = 0


@dataclass(frozen=True, slots=True)
class Cancel:
    """I no longer want it."""

    id: MicroBatchId
    call: int = 0


@dataclass(frozen=True, slots=True)
class Refuse:
    """I shall not do it; ask another peer."""

    id: MicroBatchId
    reason: str
    call: int = 0


@dataclass(frozen=True, slots=True)
class Status:
    """How the sender and the stages behind it are. stage0_certified flows downstream, the rest of the path upstream.

    behind: lowest certified round from the sender's stage on. service_s: median time of its own compute a micro-batch,
    0 unknown. load: micro-batches granted or waiting. path_s: round trips to the last stage, summed. slowest_s: largest
    service time from here to the last stage. width: peers behind the sender that work for it, shares counted.
    place: (low, high) of the receiver among the sender's callers, by their speed, as a part of [0, 1]; to a callee
    (0, 1). The plan of routes rests on it (routes.py).
    """

    stage: int
    training_round: int
    certified: int
    stage0_certified: int
    behind: int
    service_s: float
    load: int
    path_s: float
    slowest_s: float
    width: float = 0.0
    place: tuple[float, float] = (0.0, 1.0)


HopMessage = Reserve | Grant | Wait | Step | Grad | Ack | Cancel | Refuse | Status
CallMessage = Reserve | Grant | Wait | Step | Grad | Ack | Cancel | Refuse


def has_body(message: HopMessage) -> bool:
    """Whether a body travels beside this message."""
    return type(message) is Step or type(message) is Grad


def encode_hops(messages: Sequence[HopMessage]) -> bytes:
    """The wire form of 1 to 64 messages, of which only the last may have a body."""
    assert 0 < len(messages) <= MAX_MESSAGES, f"{len(messages)} messages in one header"
    assert not any(has_body(message) for message in messages[:-1]), "a message with a body must be the last"
    packed: bytes = msgpack.packb([_fields_of(message) for message in messages])
    return packed


def decode_hops(raw: bytes, sender: PeerId) -> tuple[HopMessage, ...]:
    """The messages in raw, in order. Raises ProtocolError for anything that is not exactly a well-formed header."""
    if len(raw) > MAX_HOPS_BYTES:
        raise ProtocolError(sender, f"a header of {len(raw)} bytes; at most {MAX_HOPS_BYTES} are read")
    try:
        items = msgpack.unpackb(raw, raw=False, use_list=True, max_map_len=0, max_ext_len=0, max_array_len=MAX_MESSAGES)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise ProtocolError(sender, f"not msgpack: {type(error).__name__}") from None
    if type(items) is not list or not 0 < len(items) <= MAX_MESSAGES:
        raise ProtocolError(sender, f"no list of 1 to {MAX_MESSAGES} messages")
    messages = tuple(_read(item, sender) for item in items)
    if any(has_body(message) for message in messages[:-1]):
        raise ProtocolError(sender, "a message with a body is not the last of its header")
    return messages


def _fields_of(message: HopMessage) -> list[object]:
    if isinstance(message, Status):
        low, high = message.place
        return [
            _STATUS, message.stage, message.training_round, message.certified, message.stage0_certified, message.behind,
            float(message.service_s), message.load, float(message.path_s), float(message.slowest_s),
            float(message.width), float(low), float(high),
        ]  # fmt: skip
    id_ = message.id
    fields: list[object] = [_CODES[type(message)], id_.origin, id_.incarnation, id_.index, message.call]
    match message:
        case Reserve():
            fields.append(message.round)
        case Wait():
            fields.append(message.position)
        case Step():
            fields += (message.round, message.window)
        case Grad():
            fields += (float(message.loss) if abs(message.loss) <= MAX_LOSS else None, message.behind)
        case Refuse():
            fields.append(message.reason[:MAX_REASON_CHARS])
        case Grant() | Ack() | Cancel():
            pass
    return fields


def _read(item: object, sender: PeerId) -> HopMessage:
    if type(item) is not list or not item or type(item[0]) is not int:
        raise ProtocolError(sender, "a message that is no list with its kind first")
    code = item[0]
    if not 0 <= code < len(_SCHEMAS):
        raise ProtocolError(sender, f"a message of unknown kind {code}")
    kind, checks = _SCHEMAS[code]
    if len(item) != len(checks) + 1:
        raise ProtocolError(sender, f"{kind.__name__} with {len(item) - 1} fields instead of {len(checks)}")
    for place, check in enumerate(checks, start=1):
        if not check(item[place]):
            raise ProtocolError(sender, f"field {place} of {kind.__name__} is out of range or of the wrong type")
    if kind is Status:
        if item[11] > item[12]:
            raise ProtocolError(sender, "a place that ends before it begins")
        return Status(*[*item[1:11], (item[11], item[12])])
    id_, call = MicroBatchId(PeerId(item[1]), item[2], item[3]), item[4]
    if kind is Grad:
        return Grad(id_, math.nan if item[5] is None else item[5], item[6], call)
    message: CallMessage = kind(id_, *item[5:], call)
    return message


def _count(item: object) -> bool:
    return type(item) is int and 0 <= item <= MAX_COUNT


def _stage(item: object) -> bool:
    return type(item) is int and 0 <= item < MAX_STAGES


def _window(item: object) -> bool:
    return type(item) is int and 1 <= item <= MAX_WINDOW


def _seconds(item: object) -> bool:
    return type(item) is float and (item == 0.0 or LEAST_SECONDS <= item <= MAX_SECONDS)


def _part(item: object) -> bool:
    return type(item) is float and 0.0 <= item <= 1.0


def _loss(item: object) -> bool:
    return item is None or (type(item) is float and abs(item) <= MAX_LOSS)


def _peer(item: object) -> bool:
    return type(item) is str and 0 < len(item) <= MAX_PEER_CHARS and item.isascii() and item.isalnum()


def _reason(item: object) -> bool:
    return type(item) is str and len(item) <= MAX_REASON_CHARS and item.isascii() and item.isprintable()


_Check = Callable[[object], bool]
_CALL: tuple[_Check, ...] = (_peer, _count, _count, _count)
# A message's number on the wire is its place here: append, never reorder.
_SCHEMAS: tuple[tuple[Any, tuple[_Check, ...]], ...] = (
    (Reserve, (*_CALL, _count)),
    (Grant, _CALL),
    (Wait, (*_CALL, _count)),
    (Step, (*_CALL, _count, _window)),
    (Grad, (*_CALL, _loss, _count)),
    (Ack, _CALL),
    (Cancel, _CALL),
    (Refuse, (*_CALL, _reason)),
    (
        Status,
        (
            _stage, _count, _count, _count, _count, _seconds, _count, _seconds, _seconds, _seconds, _part, _part,
        ),
    ),
)  # fmt: skip
_CODES: dict[type, int] = {kind: code for code, (kind, _) in enumerate(_SCHEMAS)}
_STATUS = _CODES[Status]
