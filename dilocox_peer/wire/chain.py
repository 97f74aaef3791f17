"""What a stage agrees on, as it is hashed, signed, sent and kept: certificates and what is in them. Pure values.

A certificate's head is the hash of (stage, parent, view, value): the ballot and the votes are its proof, not part
of what was agreed, so one value certified in two ballots is one head. What may follow what is peer/rounds/chain.py.
"""

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Annotated, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

from dilocox_peer.types import Digest, PeerId, sha256
from dilocox_peer.wire import versions
from dilocox_peer.wire.declared import (
    PLAIN,
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

MAX_ROSTER = 64  # limits.max_peers of the manifest is at most this
MAX_SLICES = 64  # of a stage's vector
VOUCHING = 2  # peers whose word makes a slice's result
RESULTS_TAG: Final = 64  # beside directives, whose tag is their version

Kind = Literal["round", "epoch"]
CodecName = Annotated[str, Meta(min_length=1, max_length=32, pattern=PLAIN)]
Rank = Annotated[int, Meta(ge=0, le=2**20)]
InnerSteps = Annotated[int, Meta(ge=1, le=2**31)]
MicroBatches = Annotated[int, Meta(ge=0, le=2**31)]
MAX_QUANTITY = 2**40
Quantity = Annotated[int, Meta(ge=0, le=MAX_QUANTITY)]
Permille = Annotated[int, Meta(ge=0, le=1000)]
Names = Annotated[tuple[PeerName, ...], Meta(max_length=MAX_ROSTER)]


class Plan(Declared, frozen=True):
    """codec, rank: of contributions (rank: of lowrank-int4). inner_steps: H. first_step: inner steps of the run planned
    before this round."""

    codec: CodecName
    rank: Rank
    inner_steps: InnerSteps
    first_step: Number = 0

    @property
    def end(self) -> int:
        """The first inner step after this round."""
        return self.first_step + self.inner_steps

    def next(self) -> "Plan":
        """The plan of the following round if nothing changes."""
        return replaced(self, first_step=self.end)


class Report(Declared, frozen=True):
    """What a contributor has measured, for the plans to come and for who looks on; in whole numbers, so that all who read it
    decide alike. 0: not measured.

    uplink_kbps: of its contributions. step_us: one of its inner steps, in microseconds. exchange_ms: from a round's close
    to its merge. lost_permille: of the energy of what was to be sent, the part that stayed in its residual.
    needed_rank: that holds nearly all energy of the averaged pseudo-gradient (lowrank-int4 only). loss_micronats: mean over
    the contribution's micro-batches, in millionths of a nat a token. closed_ms: its wall clock (Unix milliseconds) at the round's close.
    No plan is made of the last two.
    """

    uplink_kbps: Quantity = 0
    step_us: Quantity = 0
    exchange_ms: Quantity = 0
    lost_permille: Permille = 0
    needed_rank: Rank = 0
    loss_micronats: Quantity = 0
    closed_ms: Number = 0


NOT_MEASURED = Report()


class Entry(Declared, frozen=True):
    """One offered contribution. (peer, incarnation, base head) names its pseudo-gradient; the base is the certificate's parent.

    incarnation: wall-clock milliseconds at the start of the peer's process; the newest is the peer.
    state_digest: of the anchor state this pseudo-gradient was taken against, b"" if unknown. report: for the plans to come.
    """

    peer: PeerName
    incarnation: Number
    blob: Hash
    size_bytes: Number
    micro_batches: MicroBatches
    state_digest: HashOrNone = b""
    report: Report = NOT_MEASURED

    def __post_init__(self) -> None:
        check_digest(self.state_digest, "state digest")


SliceNumber = Annotated[int, Meta(ge=0, lt=MAX_SLICES)]


class Result(Declared, frozen=True):
    """What a slice of a round's contributions came to. blob: their mean with the residual named base (b"": with none), encoded; residual:
    the name of what encoding lost. by: who says so, and their signatures of AverageSaid."""

    blob: Hash
    size_bytes: Number
    base: HashOrNone
    residual: Hash
    by: Annotated[tuple[tuple[PeerName, Signature], ...], Meta(min_length=VOUCHING, max_length=VOUCHING)]

    def __post_init__(self) -> None:
        check_digest(self.base, "residual")

    @property
    def outcome(self) -> "SliceOutcome":
        return SliceOutcome(self.blob, self.size_bytes, self.base, self.residual)


class SliceOutcome(NamedTuple):
    """The outcome of a slice, as whoever averaged it says: the fields of Result."""

    blob: Digest
    size_bytes: int
    base: bytes
    residual: Digest


class Averaged(Declared, frozen=True, tag=RESULTS_TAG):
    """What each slice came to, in a round whose contributions were averaged in slices. directive: as in Value."""

    results: Annotated[tuple[Result, ...], Meta(min_length=1, max_length=MAX_SLICES)]
    directive: Directive | None = None


class Thing(NamedTuple):
    """What has to be held to apply a certificate. slice: of a result; None: it is a whole contribution. holder: who has made it."""

    name: Digest
    size_bytes: int
    holder: PeerId
    slice: int | None = None


class Value(Declared, frozen=True, dict=True):
    """What one certificate says.

    what: its kind; or of a round the directive of the run's owner that applies from here on (directing.py), or the results of its
    slices: then its first item, a string else, is that. height: position in the chain, from 1. round: outer rounds completed with it (a view change keeps its parent's, a round
    adds one, void or not). weight: sum over the chain of distinct contributors, this one included.
    roster: who may certify the next value, in order; roster[0] breaks ties. plan: of the round after the next one (a view change
    keeps its parent's). state_digest: of the anchor state at the
    parent as most of the entries report it, b"" if they report none; so state at a head is certified by the next one.
    """

    what: Kind | Directive | Averaged
    height: FromOne
    round: Number
    weight: Number
    entries: Annotated[tuple[Entry, ...], Meta(max_length=MAX_ROSTER)]
    roster: Names
    plan: Plan
    state_digest: HashOrNone = b""

    def __post_init__(self) -> None:
        check_digest(self.state_digest, "state digest")

    @property
    def kind(self) -> Kind:
        return self.what if isinstance(self.what, str) else "round"

    @property
    def directive(self) -> Directive | None:
        """The owner's that comes with it."""
        if isinstance(self.what, Averaged):
            return self.what.directive
        return self.what if isinstance(self.what, Directive) else None

    @property
    def results(self) -> tuple[Result, ...]:
        """Of each slice, where the round was averaged in slices."""
        return self.what.results if isinstance(self.what, Averaged) else ()

    @cached_property
    def things(self) -> tuple[Thing, ...]:
        """What has to be held to apply it: the results of its slices, else its contributions."""
        if results := self.results:
            return tuple(Thing(each.blob, each.size_bytes, each.by[0][0], index) for index, each in enumerate(results))
        return tuple(Thing(entry.blob, entry.size_bytes, entry.peer) for entry in self.entries)

    @property
    def blobs(self) -> tuple[Digest, ...]:
        """Their names."""
        return tuple(thing.name for thing in self.things)

    @cached_property
    def _digest(self) -> Digest:
        return sha256(encode(("dilocox-value", *msgspec.structs.astuple(self))))

    def digest(self) -> Digest:
        return self._digest


class Certificate(Declared, frozen=True, dict=True):
    """A value, its place, and the votes that make it agreed: of a quorum of the parent's roster; of a view change, those of
    every peer of its own roster; of a run's first view change, the owner's alone."""

    stage: StageNumber
    parent: Hash
    view: Number
    ballot: Number
    value: Value
    signatures: Annotated[tuple[tuple[PeerName, Signature], ...], Meta(max_length=MAX_ROSTER)]

    @cached_property
    def head(self) -> Digest:
        return head_of(self.stage, self.parent, self.view, self.value)


def head_of(stage: int, parent: Digest, view: int, value: Value) -> Digest:
    return sha256(encode(("dilocox-head", stage, parent, view, value.digest())))


# ---- what is signed -------------------------------------------------------------------------------------------------


class Said(Declared, frozen=True):
    """Where in the run of a stage a statement was made."""

    stage: StageNumber
    head: Hash
    view: Number
    ballot: Number

    @property
    def at(self) -> tuple[int, Digest, int]:
        return self.stage, self.head, self.view


class Acceptance(Said, frozen=True, tag="dilocox-accept"):
    """I accept the value in the ballot, and hold everything that is needed to apply it."""

    value: Hash


class PromiseSaid(Said, frozen=True, tag="dilocox-promise"):
    """I vote in no lower ballot. earlier, value: of what I accepted last, None if nothing."""

    earlier: Number | None
    value: Hash | None

    def __post_init__(self) -> None:
        if (self.earlier is None) != (self.value is None):
            raise ValueError("a ballot without its value, or a value without its ballot")


def acceptance(stage: int, parent: Digest, view: int, ballot: int, value: Value) -> bytes:
    """The bytes a peer signs to accept a value in a ballot. Holding all that applying it takes is part of what it signs."""
    return encode(Acceptance(stage, parent, view, ballot, value.digest()))


class AverageSaid(Declared, frozen=True, tag="dilocox-average"):
    """These inputs (inputs_of) came to this in the slice; I hold the result and what its encoding lost."""

    stage: StageNumber
    head: Hash
    inputs: Hash
    slice: SliceNumber
    blob: Hash
    size_bytes: Number
    base: HashOrNone
    residual: Hash


class OfferSaid(Declared, frozen=True, tag="dilocox-offer"):
    """I offer this contribution on top of head."""

    stage: StageNumber
    head: Hash
    entry: Entry


def offer_statement(stage: int, head: Digest, entry: Entry) -> bytes:
    """The bytes that the author of a contribution signs: whoever else names it shows them."""
    return encode(OfferSaid(stage, head, entry))


def average_statement(stage: int, head: Digest, inputs: Digest, index: int, outcome: SliceOutcome) -> bytes:
    """The bytes that whoever averages a slice signs."""
    return encode(AverageSaid(stage, head, inputs, index, *outcome))


def inputs_of(entries: Iterable[Entry]) -> Digest:
    """The name of what is averaged."""
    return sha256(encode(("dilocox-inputs", tuple(entries))))


# ---- many of them ---------------------------------------------------------------------------------------------------


class ChainFile(Declared, frozen=True, tag=versions.CHAIN):
    """Certificates in order, each the child of the one before: a page of a reply, or all of a file."""

    certificates: tuple[Certificate, ...]


_CHAIN_FILE = Parser[ChainFile](ChainFile, "a chain", 1 << 30, version=versions.CHAIN, is_canonical=False)


def encode_chain(certificates: Iterable[Certificate]) -> bytes:
    """A page of them is one reply, all of them one file."""
    return encode(ChainFile(tuple(certificates)))


def chain_in_parts(certificates: Iterable[Certificate], count: int) -> Iterator[bytes]:
    """What encode_chain would give of that many, certificate by certificate: a long one need not be in memory."""
    assert count < 2**32, f"{count} certificates"
    yield encode_chain(())[:-1] + b"\xdd" + count.to_bytes(4, "big")
    yield from map(encode, certificates)


def decode_chain(raw: bytes | bytearray, max_bytes: int, sender: PeerId | None = None) -> list[Certificate]:
    """Not verified yet. Raises ProtocolError."""
    return list(_CHAIN_FILE.hear(raw, sender, max_bytes=max_bytes).certificates)
