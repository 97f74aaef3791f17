"""What two peers of neighbouring stages say to each other about micro-batches.

A micro-batch is one recursive call per hop: STEP(x, targets) -> GRAD(dx, loss). A header is a list of 1 to 64 messages; only
the last may be a Step or a Grad, whose body travels beside it in the same frame. What a message may say at this moment is for
the scheduler to judge.

`call` is the caller's own number for one forward's output: answers, grants and cancellations name it, so that an answer
to an earlier output of the same micro-batch (two callers of one peer, a peer that restarted) is never taken for the
gradient of a later one.
"""

import math
from collections.abc import Sequence
from typing import Annotated, NamedTuple

from msgspec import Meta

from dilocox_peer.errors import ProtocolError
from dilocox_peer.types import PeerId
from dilocox_peer.wire.declared import MAX_PEER_CHARS, MAX_STAGE, Declared, Number, Parser, Site, encode

MAX_MESSAGES = 64
MAX_HOPS_BYTES = 32 * 1024  # 64 messages with the longest ids are about 8 KB
MAX_WINDOW = 1 << 16
LEAST_SECONDS, MAX_SECONDS = 1e-9, 1e6  # beside 0; below, speeds and their quotients would not be finite
MAX_LOSS = 1e3  # nats a target: a uniform guess among a million tokens has 14

LetteredPeer = Annotated[PeerId, Meta(min_length=1, max_length=MAX_PEER_CHARS, pattern=r"^[A-Za-z0-9]+\Z")]
Window = Annotated[int, Meta(ge=1, le=MAX_WINDOW)]
Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
Part = Annotated[float, Meta(ge=0, le=1)]
ToldLoss = Annotated[float, Meta(ge=0, le=MAX_LOSS)]
Reason = Annotated[str, Meta(max_length=64, pattern=r"^[ -~]*\Z")]


class MicroBatchId(NamedTuple):
    """The index-th micro-batch that an origin (a peer of stage 0) drew in this life of its process."""

    origin: PeerId
    incarnation: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody asks of an id


class Call(Declared, frozen=True):
    """What every message about a micro-batch begins with: the fields of its id, and the caller's number."""

    origin: LetteredPeer
    incarnation: Number
    index: Number
    call: Number

    @property
    def id(self) -> MicroBatchId:
        return MicroBatchId(self.origin, self.incarnation, self.index)


class Reserve(Call, frozen=True, tag=0):
    """I am computing this micro-batch's forward and shall want a slot. round: the one its origin trains."""

    round: Number


class SlotGrant(Call, frozen=True, tag=1):
    """You may send its body."""


class SlotWait(Call, frozen=True, tag=2):
    """No slot is free; so many are before you, this one included."""

    position: Number


class Step(Call, frozen=True, tag=3):
    """Activations and targets, in the body. window: how many micro-batches the sender may have under way."""

    round: Number
    window: Window


class Grad(Call, frozen=True, tag=4):
    """The gradient of a Step's activations, in the body. behind: the lowest certified round of the stages from the
    sender's on. told_loss: None where it is not finite, or beyond MAX_LOSS."""

    told_loss: ToldLoss | None
    behind: Number

    @property
    def loss(self) -> float:
        """NaN where none was told."""
        return math.nan if self.told_loss is None else self.told_loss


class GradAck(Call, frozen=True, tag=5):
    """The Grad arrived; you may forget it."""


class Cancel(Call, frozen=True, tag=6):
    """I no longer want it."""


class Refuse(Call, frozen=True, tag=7):
    """I shall not do it; ask another peer."""

    reason: Reason


class HopStatus(Declared, frozen=True, tag=8):
    """How the sender and the stages behind it are. stage0_certified flows downstream, the rest of the path upstream.

    behind: lowest certified round from the sender's stage on. service_s: median time of its own compute a micro-batch,
    0 unknown. load: micro-batches granted or waiting. path_s: round trips to the last stage, summed. slowest_s: largest
    service time from here to the last stage. width: peers behind the sender that work for it, shares counted.
    low, high: where the receiver's place among the sender's callers begins and ends, by their speed, as a part of [0, 1];
    to a callee 0 and 1, or 0 and 0 where the sender does not plan on it. body_s: what the receiver's bodies take to come in, 0 unknown.
    site: where the sender's volunteer says that it is. The plan of routes rests on them (routes.py).
    """

    stage: Annotated[int, Meta(ge=0, lt=MAX_STAGE)]
    training_round: Number
    certified: Number
    stage0_certified: Number
    behind: Number
    service_s: Seconds
    load: Number
    path_s: Seconds
    slowest_s: Seconds
    width: Seconds = 0.0
    low: Part = 0.0
    high: Part = 1.0
    body_s: Seconds = 0.0
    site: Site = ""

    @property
    def place(self) -> tuple[float, float]:
        return self.low, self.high


CallMessage = Reserve | SlotGrant | SlotWait | Step | Grad | GradAck | Cancel | Refuse
HopMessage = CallMessage | HopStatus
_HEADER = Parser[tuple[HopMessage, ...]](
    Annotated[tuple[HopMessage, ...], Meta(min_length=1, max_length=MAX_MESSAGES)], "a header", MAX_HOPS_BYTES
)


def tellable(loss: float) -> float | None:
    """loss as a Grad tells it."""
    return float(loss) if 0 <= loss <= MAX_LOSS else None


def has_body(message: HopMessage) -> bool:
    """Whether a body travels beside this message."""
    return type(message) is Step or type(message) is Grad


def encode_hops(messages: Sequence[HopMessage]) -> bytes:
    """The wire form of 1 to 64 messages, of which only the last may have a body."""
    assert 0 < len(messages) <= MAX_MESSAGES, f"{len(messages)} messages in one header"
    assert not any(has_body(message) for message in messages[:-1]), "a message with a body must be the last"
    return encode(messages)


def decode_hops(raw: bytes, sender: PeerId) -> tuple[HopMessage, ...]:
    """The messages in raw, in order. Raises ProtocolError for anything that is not exactly a well-formed header."""
    messages = _HEADER.hear(raw, sender)
    for place, message in enumerate(messages):
        if type(message) is HopStatus:
            _check(message, sender)
        elif has_body(message) and place + 1 < len(messages):
            raise ProtocolError(sender, "a message with a body is not the last of its header")
    return messages


def _check(status: HopStatus, sender: PeerId) -> None:
    """What bounds of single fields cannot say."""
    for name in ("service_s", "path_s", "slowest_s", "width", "body_s"):
        seconds = getattr(status, name)
        if 0 < seconds < LEAST_SECONDS:
            raise ProtocolError(sender, f"{name} of Status is {seconds}: 0, or at least {LEAST_SECONDS}")
    if status.low > status.high:
        raise ProtocolError(sender, "a place that ends before it begins")
