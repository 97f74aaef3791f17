"""Every message the peers of a stage exchange about rounds.

A message is a list: version, kind, (stage, head, view) of its sender, its own fields. A kind's number is its tag: give new
ones new numbers. What a field may say at this moment (ballots, rosters, signatures) is for the protocol to judge.
"""

from typing import Annotated, NamedTuple

from msgspec import Meta

from dilocox_peer.errors import ProtocolError
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire import versions
from dilocox_peer.wire.chain import MAX_ROSTER, MAX_SLICES, Certificate, Entry, MicroBatches, SliceNumber, Value
from dilocox_peer.wire.checkpoints import Checkpoint
from dilocox_peer.wire.declared import (
    MAX_SIGNATURE_BYTES,
    Declared,
    FromOne,
    Hash,
    HashOrNone,
    Number,
    Parser,
    PeerName,
    Signature,
    StageNumber,
    check_digest,
    encode,
    replaced,
)
from dilocox_peer.wire.directives import Directive

MAX_MESSAGE_BYTES = 1 << 20
_BEAT = bytes((versions.ROUNDS, 0))  # the first two fields of a heartbeat, behind a byte that says how many there are
MAX_PAGE = 64  # certificates in a ChainPage; where they have many signatures fewer are sent (peer/rounds/healing.py)
MAX_LOCATOR = 64  # heads in a GetChain; with doubling distances more than any chain needs
MAX_CARRIED_BYTES = 1 << 13  # a table of 64 slices has 3 kB
MAX_PASSED_BYTES = 1 << 16  # of a message that a third passes on; a certificate of 64 members has some 25 KB
MAX_STATEMENT_BYTES = 192  # either kind; an acceptance has about 110, a promise 150


class Promised(Declared, frozen=True):
    """A signed promise without its ballot, which is the proposal's. accepted: (ballot, digest of the value), None: nothing."""

    peer: PeerName
    accepted: tuple[Number, Hash] | None
    signature: Signature


Justification = tuple[Promised, ...]
Promises = Annotated[Justification, Meta(max_length=MAX_ROSTER)]
Signatures = Annotated[tuple[Signature, ...], Meta(max_length=MAX_ROSTER)]


class Accepted(Declared, frozen=True):
    """The value this peer has accepted last, and in which ballot. Its blobs are held.

    signature: of the leader's own acceptance, b"" in a log of before; promises: that let it propose this (ballots above 0).
    With both a later leader can show that it did not make the value up, and a restarted one propose it again. authors: as in Propose; none in a log of before.
    """

    ballot: Number
    value: Value
    signature: Annotated[bytes, Meta(max_length=MAX_SIGNATURE_BYTES)] = b""
    promises: Promises = ()
    authors: Signatures = ()

    @property
    def named(self) -> tuple[int, Digest]:
        """What a promise says of it."""
        return self.ballot, self.value.digest()


class Statement(Declared, frozen=True):
    """The bytes that a peer signed, and its signature."""

    message: Annotated[bytes, Meta(min_length=1, max_length=MAX_STATEMENT_BYTES)]
    signature: Signature


class Contradiction(NamedTuple):
    """Two statements of one peer that no honest peer makes."""

    peer: PeerId
    left: Statement
    right: Statement


class Placed(Declared, frozen=True):
    """Where the sender is: its stage, its head, and the view of that head."""

    stage: StageNumber
    head: Hash
    view: Number


class Heartbeat(Placed, frozen=True, tag=0):
    """I am here. height, round, weight: of my chain; training_round, micro_batches: what I am training and how much of
    it is done; ready: I hold the anchor state at my head; state_digest: its digest, b"" if unknown; paused: I vote, fetch
    and serve, and train nothing for now: wait for no work of mine beyond what I report."""

    incarnation: Number
    height: Number
    round: Number
    weight: Number
    training_round: Number
    micro_batches: MicroBatches
    ready: bool
    state_digest: HashOrNone
    paused: bool = False

    def __post_init__(self) -> None:
        check_digest(self.state_digest, "state digest")

    def is_news_after(self, was: "Heartbeat") -> bool:
        """Whether more than the count of micro-batches is other."""
        return self != replaced(was, micro_batches=self.micro_batches)


class Leave(Placed, frozen=True, tag=1):
    """I go. A later incarnation of mine may come back."""

    incarnation: Number


class Offer(Placed, frozen=True, tag=2):
    """My contribution on top of head; its blob is to be had from me. signature: over chain.offer_statement."""

    entry: Entry
    signature: Signature


class Propose(Placed, frozen=True, tag=3):
    """The leader of ballot asks for value to be accepted. signature: of its own acceptance; promises: in a ballot above 0, the
    quorum of them that lets it propose this value. authors: of each entry in it, its author's signature (Offer)."""

    ballot: Number
    value: Value
    signature: Signature
    promises: Promises = ()
    authors: Signatures = ()


class Ack(Placed, frozen=True, tag=4):
    """I accepted the value in the ballot and hold all its blobs; signature is over chain.acceptance."""

    ballot: Number
    value: Hash
    signature: Signature


class Nack(Placed, frozen=True, tag=5):
    """I do not accept: these blobs are bad or not to be had, these newcomers (by the hash of their names) were not met here, or I have promised a
    higher ballot."""

    ballot: Number
    promised: Number
    blobs: Annotated[tuple[Hash, ...], Meta(max_length=MAX_ROSTER)]


class Prepare(Placed, frozen=True, tag=6):
    """The leader of ballot asks for promises."""

    ballot: Number


class Promise(Placed, frozen=True, tag=7):
    """I vote in no lower ballot than this; accepted is what I accepted last; signature is over justified.promise_statement."""

    ballot: Number
    accepted: Accepted | None
    signature: Signature


class ViewCall(Placed, frozen=True, tag=8):
    """The quorum is lost; who of you is here for view `number`?"""

    number: FromOne


class ViewAnswer(Placed, frozen=True, tag=9):
    """I am here for it. Binds nobody."""

    number: FromOne


class ViewPropose(Placed, frozen=True, tag=10):
    """Sign this view change, all of its roster."""

    number: FromOne
    value: Value


class ViewSign(Placed, frozen=True, tag=11):
    """My signature of the view change (over chain.acceptance with ballot 0)."""

    number: FromOne
    value: Hash
    signature: Signature


class Cert(Placed, frozen=True, tag=12):
    """A new certificate."""

    certificate: Certificate


class GetChain(Placed, frozen=True, tag=13):
    """Send me your certificates after the first of these heads that is in your chain (newest first)."""

    locator: Annotated[tuple[Hash, ...], Meta(max_length=MAX_LOCATOR)]


class ChainPage(Placed, frozen=True, tag=14):
    """Certificates in order, each the child of the one before; more: my chain goes on after the last."""

    certificates: Annotated[tuple[Certificate, ...], Meta(max_length=MAX_PAGE)]
    more: bool


class Vouch(Placed, frozen=True, tag=15):
    """The newest checkpoint of the run's owner that I know."""

    checkpoint: Checkpoint


class Proof(Placed, frozen=True, tag=16):
    """Two signed statements of a peer that no honest peer makes."""

    peer: PeerName
    left: Statement
    right: Statement

    @property
    def contradiction(self) -> Contradiction:
        return Contradiction(self.peer, self.left, self.right)


class Directed(Placed, frozen=True, tag=17):
    """The newest directive of the run's owner that I know."""

    directive: Directive


class Gathered(Placed, frozen=True, tag=18):
    """Of these contributions I hold every slice that is mine to average."""

    tables: Annotated[tuple[Hash, ...], Meta(max_length=MAX_ROSTER)]


class Inputs(Placed, frozen=True, tag=19):
    """The leader of ballot asks for these to be averaged. authors: as in Propose."""

    ballot: Number
    entries: Annotated[tuple[Entry, ...], Meta(min_length=1, max_length=MAX_ROSTER)]
    authors: Signatures


class Average(Declared, frozen=True):
    """What a slice came to, signed over chain.average_statement."""

    slice: SliceNumber
    blob: Hash
    size_bytes: Number
    base: HashOrNone
    residual: Hash
    signature: Signature

    def __post_init__(self) -> None:
        check_digest(self.base, "residual")


class Averages(Placed, frozen=True, tag=20):
    """What I have averaged of these inputs."""

    inputs: Hash
    averages: Annotated[tuple[Average, ...], Meta(min_length=1, max_length=MAX_SLICES)]


class Passed(Placed, frozen=True, tag=21):
    """A message (raw, encoded) of origin to a member that it has no path to, for one who hears both to hand on. signature: of
    origin, over passed_statement."""

    origin: PeerName
    to: PeerName
    number: Number
    raw: Annotated[bytes, Meta(min_length=1, max_length=MAX_PASSED_BYTES)]
    signature: Signature


class Carried(Placed, frozen=True, tag=22):
    """Something small that what I say beside it names: nobody has to fetch it."""

    raw: Annotated[bytes, Meta(min_length=1, max_length=MAX_CARRIED_BYTES)]


def passed_statement(genesis: Digest, origin: PeerId, to: PeerId, number: int, raw: bytes) -> bytes:
    """What origin signs, in the stage that begins at genesis."""
    return encode(("dilocox-passed", genesis, origin, to, number, raw))


def passed_beat(message: "Message") -> bytes:
    """What an envelope around a heartbeat is known by, so that a newer one takes its place where it waits; empty of anything else."""
    if not isinstance(message, Passed) or message.raw[1:3] != _BEAT:
        return b""
    return f"heartbeat {message.origin} {message.to}".encode()


Message = (
    Heartbeat | Leave | Offer | Propose | Ack | Nack | Prepare | Promise
    | ViewCall | ViewAnswer | ViewPropose | ViewSign | Cert | GetChain | ChainPage | Vouch | Proof | Directed
    | Gathered | Inputs | Averages | Passed | Carried
)  # fmt: skip
_WHAT = "a message"
_MESSAGE = Parser[Message](Message, _WHAT, MAX_MESSAGE_BYTES)


def encode_message(message: Message) -> bytes:
    """The wire form of message."""
    return versions.with_version(versions.ROUNDS, encode(message))


def decode_message(raw: bytes, sender: PeerId) -> Message:
    """The message in raw. Raises ProtocolError for anything that is not exactly one well-formed message; the place it names
    counts the fields from the kind on, which is 0."""
    if len(raw) > MAX_MESSAGE_BYTES:
        raise ProtocolError(sender, f"{len(raw)} bytes; at most {MAX_MESSAGE_BYTES} are read")
    try:
        return _MESSAGE.read(versions.without_version(raw, versions.ROUNDS, _WHAT))
    except ValueError as error:
        raise ProtocolError(sender, str(error)) from None
