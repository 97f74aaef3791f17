"""Every message the peers of a stage exchange about rounds, and its wire form (a flat msgpack list).

Messages come from strangers: `decode_message` checks size, schema, types, lengths and ranges, and raises ProtocolError.
What a field may say at this moment (ballots, rosters, signatures) is for the protocol to judge, not for this file.
Each carries (stage, head, view) of its sender.
"""

from collections.abc import Callable
from dataclasses import dataclass

import msgpack

from dilocox_peer.checkpoints import Checkpoint
from dilocox_peer.errors import ProtocolError
from dilocox_peer.peer.rounds.chain import Certificate, Entry, Value
from dilocox_peer.peer.rounds.durable import Accepted, read_accepted
from dilocox_peer.peer.rounds.justified import (
    MAX_STATEMENT_BYTES,
    Contradiction,
    Justification,
    Statement,
    read_promises,
)
from dilocox_peer.peer.rounds.wire import (
    MAX_ROSTER,
    MAX_SIGNATURE_BYTES,
    Fields,
    certificate_fields,
    checkpoint_fields,
    read_certificate,
    read_checkpoint,
    read_entry,
    read_value,
    unpack,
)
from dilocox_peer.types import Digest, PeerId

VERSION = 2  # 1 had votes without an order
MAX_MESSAGE_BYTES = 1 << 20
MAX_PAGE = 16  # certificates in a ChainPage; of 64 peers each that is about 350 KB
MAX_LOCATOR = 64  # heads in a GetChain; with doubling distances more than any chain needs


@dataclass(frozen=True, slots=True)
class Placed:
    """Where the sender is: its stage, its head, and the view of that head."""

    stage: int
    head: Digest
    view: int


@dataclass(frozen=True, slots=True)
class Heartbeat(Placed):
    """I am here. height, round, weight: of my chain; training_round, micro_batches: what I am training and how much of
    it is done; ready: I hold the anchor state at my head; state_digest: its digest, b"" if unknown; paused: I vote, fetch
    and serve, and train nothing for now: wait for no work of mine beyond what I report."""

    incarnation: int
    height: int
    round: int
    weight: int
    training_round: int
    micro_batches: int
    ready: bool
    state_digest: bytes
    paused: bool = False


@dataclass(frozen=True, slots=True)
class Leave(Placed):
    """I go. A later incarnation of mine may come back."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Offer(Placed):
    """My contribution on top of head; its blob is to be had from me."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Propose(Placed):
    """The leader of ballot asks for value to be accepted. signature: of its own acceptance; promises: in a ballot above 0, the
    quorum of them that lets it propose this value."""

    ballot: int
    value: Value
    signature: bytes
    promises: Justification = ()


@dataclass(frozen=True, slots=True)
class Ack(Placed):
    """I accepted the value in the ballot and hold all its blobs; signature is over chain.acceptance."""

    ballot: int
    value: Digest
    signature: bytes


@dataclass(frozen=True, slots=True)
class Nack(Placed):
    """I do not accept: these blobs are bad or not to be had, or I have promised a higher ballot."""

    ballot: int
    promised: int
    blobs: tuple[Digest, ...]


@dataclass(frozen=True, slots=True)
class Prepare(Placed):
    """The leader of ballot asks for promises."""

    ballot: int


@dataclass(frozen=True, slots=True)
class Promise(Placed):
    """I vote in no lower ballot than this; accepted is what I accepted last; signature is over justified.promise_statement."""

    ballot: int
    accepted: Accepted | None
    signature: bytes


@dataclass(frozen=True, slots=True)
class ViewCall(Placed):
    """The quorum is lost; who of you is here for view `number`?"""

    number: int


@dataclass(frozen=True, slots=True)
class ViewAnswer(Placed):
    """I am here for it. Binds nobody."""

    number: int


@dataclass(frozen=True, slots=True)
class ViewPropose(Placed):
    """Sign this view change, all of its roster."""

    number: int
    value: Value


@dataclass(frozen=True, slots=True)
class ViewSign(Placed):
    """My signature of the view change (over chain.acceptance with ballot 0)."""

    number: int
    value: Digest
    signature: bytes


@dataclass(frozen=True, slots=True)
class Cert(Placed):
    """A new certificate."""

    certificate: Certificate


@dataclass(frozen=True, slots=True)
class GetChain(Placed):
    """Send me your certificates after the first of these heads that is in your chain (newest first)."""

    locator: tuple[Digest, ...]


@dataclass(frozen=True, slots=True)
class ChainPage(Placed):
    """Certificates in order, each the child of the one before; more: my chain goes on after the last."""

    certificates: tuple[Certificate, ...]
    more: bool


@dataclass(frozen=True, slots=True)
class Vouch(Placed):
    """The newest checkpoint of the run's owner that I know."""

    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True)
class Proof(Placed):
    """Two signed statements of a peer that no honest peer makes."""

    contradiction: Contradiction


Message = (
    Heartbeat | Leave | Offer | Propose | Ack | Nack | Prepare | Promise
    | ViewCall | ViewAnswer | ViewPropose | ViewSign | Cert | GetChain | ChainPage | Vouch | Proof
)  # fmt: skip


def encode_message(message: Message) -> bytes:
    """The wire form of message."""
    code = _CODES[type(message)]
    placed = [VERSION, code, message.stage, message.head, message.view]
    packed: bytes = msgpack.packb(placed + _own_fields(message))
    return packed


def decode_message(raw: bytes, sender: PeerId) -> Message:
    """The message in raw. Raises ProtocolError for anything that is not exactly one well-formed message."""
    fields = unpack(raw, MAX_MESSAGE_BYTES, sender)
    if (version := fields.integer()) != VERSION:
        raise ProtocolError(sender, f"protocol version {version}; this peer speaks {VERSION}")
    code = fields.integer()
    placed = (fields.integer(high=2**16), fields.digest(), fields.integer())
    if code >= len(_READERS):
        raise ProtocolError(sender, f"a message of unknown kind {code}")
    message = _READERS[code][1](placed, fields)
    fields.end()
    return message


def _own_fields(message: Message) -> list[object]:
    match message:
        case Heartbeat():
            return [
                message.incarnation, message.height, message.round, message.weight, message.training_round,
                message.micro_batches, message.ready, message.state_digest, message.paused,
            ]  # fmt: skip
        case Leave():
            return [message.incarnation]
        case Offer():
            return [message.entry.fields()]
        case Propose():
            promises = [promised.fields() for promised in message.promises]
            return [message.ballot, message.value.fields(), message.signature, promises]
        case Ack():
            return [message.ballot, message.value, message.signature]
        case Nack():
            return [message.ballot, message.promised, list(message.blobs)]
        case Prepare():
            return [message.ballot]
        case Promise():
            accepted = message.accepted
            return [message.ballot, None if accepted is None else accepted.fields(), message.signature]
        case ViewCall() | ViewAnswer():
            return [message.number]
        case ViewPropose():
            return [message.number, message.value.fields()]
        case ViewSign():
            return [message.number, message.value, message.signature]
        case Cert():
            return [certificate_fields(message.certificate)]
        case GetChain():
            return [list(message.locator)]
        case ChainPage():
            return [[certificate_fields(each) for each in message.certificates], message.more]
        case Vouch():
            return [checkpoint_fields(message.checkpoint)]
        case Proof():
            proof = message.contradiction
            sides = [[each.message, each.signature] for each in (proof.left, proof.right)]
            return [proof.peer, *sides]


_Place = tuple[int, Digest, int]


def _heartbeat(placed: _Place, fields: Fields) -> Message:
    return Heartbeat(
        *placed, fields.integer(), fields.integer(), fields.integer(), fields.integer(), fields.integer(),
        fields.integer(high=2**31), fields.flag(), fields.state_digest(), fields.flag(),
    )  # fmt: skip


def _leave(placed: _Place, fields: Fields) -> Message:
    return Leave(*placed, fields.integer())


def _offer(placed: _Place, fields: Fields) -> Message:
    return Offer(*placed, read_entry(fields.one()))


def _propose(placed: _Place, fields: Fields) -> Message:
    ballot, value = fields.integer(), read_value(fields.one())
    return Propose(*placed, ballot, value, fields.binary(1, MAX_SIGNATURE_BYTES), read_promises(fields))


def _ack(placed: _Place, fields: Fields) -> Message:
    return Ack(*placed, fields.integer(), fields.digest(), fields.binary(1, MAX_SIGNATURE_BYTES))


def _nack(placed: _Place, fields: Fields) -> Message:
    return Nack(*placed, fields.integer(), fields.integer(), _digests(fields.flat(MAX_ROSTER)))


def _prepare(placed: _Place, fields: Fields) -> Message:
    return Prepare(*placed, fields.integer())


def _promise(placed: _Place, fields: Fields) -> Message:
    ballot, accepted = fields.integer(), read_accepted(fields.optional())
    return Promise(*placed, ballot, accepted, fields.binary(1, MAX_SIGNATURE_BYTES))


def _view_call(placed: _Place, fields: Fields) -> Message:
    return ViewCall(*placed, fields.integer(1))


def _view_answer(placed: _Place, fields: Fields) -> Message:
    return ViewAnswer(*placed, fields.integer(1))


def _view_propose(placed: _Place, fields: Fields) -> Message:
    return ViewPropose(*placed, fields.integer(1), read_value(fields.one()))


def _view_sign(placed: _Place, fields: Fields) -> Message:
    return ViewSign(*placed, fields.integer(1), fields.digest(), fields.binary(1, MAX_SIGNATURE_BYTES))


def _cert(placed: _Place, fields: Fields) -> Message:
    return Cert(*placed, read_certificate(fields.one()))


def _get_chain(placed: _Place, fields: Fields) -> Message:
    return GetChain(*placed, _digests(fields.flat(MAX_LOCATOR)))


def _chain_page(placed: _Place, fields: Fields) -> Message:
    return ChainPage(*placed, tuple(read_certificate(each) for each in fields.items(MAX_PAGE)), fields.flag())


def _vouch(placed: _Place, fields: Fields) -> Message:
    return Vouch(*placed, read_checkpoint(fields.one()))


def _proof(placed: _Place, fields: Fields) -> Message:
    peer = fields.peer()
    return Proof(*placed, Contradiction(peer, _statement(fields.one()), _statement(fields.one())))


def _statement(fields: Fields) -> Statement:
    statement = Statement(fields.binary(1, MAX_STATEMENT_BYTES), fields.binary(1, MAX_SIGNATURE_BYTES))
    fields.end()
    return statement


def _digests(fields: Fields) -> tuple[Digest, ...]:
    digests = []
    while fields.more:
        digests.append(fields.digest())
    return tuple(digests)


# A message's number on the wire is its place here: append, never reorder.
_READERS: tuple[tuple[type[Placed], Callable[[_Place, Fields], Message]], ...] = (
    (Heartbeat, _heartbeat),
    (Leave, _leave),
    (Offer, _offer),
    (Propose, _propose),
    (Ack, _ack),
    (Nack, _nack),
    (Prepare, _prepare),
    (Promise, _promise),
    (ViewCall, _view_call),
    (ViewAnswer, _view_answer),
    (ViewPropose, _view_propose),
    (ViewSign, _view_sign),
    (Cert, _cert),
    (GetChain, _get_chain),
    (ChainPage, _chain_page),
    (Vouch, _vouch),
    (Proof, _proof),
)
_CODES: dict[type[Placed], int] = {kind: code for code, (kind, _) in enumerate(_READERS)}
