"""A ballot under way, as ballots.py keeps it: one of ours that we lead, or another's proposal. Pure records."""

from dataclasses import dataclass, field

from dilocox_peer.peer.rounds.timing import FOREVER
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.chain import Value
from dilocox_peer.wire.rounds import Accepted, Justification, Promised


@dataclass(slots=True)
class Lead:
    """A ballot of ours. value: None while promises are gathered."""

    ballot: int
    started_at: float
    promises: dict[PeerId, Accepted | None] = field(default_factory=dict)
    signed: dict[PeerId, Promised] = field(default_factory=dict)
    value: Value | None = None
    shown: Justification = ()
    acks: dict[PeerId, bytes] = field(default_factory=dict)
    nackers: set[PeerId] = field(default_factory=set)
    nacked: dict[Digest, set[PeerId]] = field(default_factory=dict)
    resend_at: float = 0.0
    outbid: int = 0  # highest ballot that a NACK named as promised
    outbid_at: float = FOREVER  # when to ask above it, if whoever leads it has not been heard by then


@dataclass(slots=True)
class Pending:
    """A proposal of another that is accepted as soon as its blobs are here."""

    ballot: int
    value: Value
    leader: PeerId
    signature: bytes
    promises: Justification
    since: float
    nacked: set[Digest] = field(default_factory=set)
