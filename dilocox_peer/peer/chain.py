"""Certificates and the chain they form: what a stage has agreed on. Pure values; the protocol that makes them is rounds.py.

A certificate's head is the hash of (stage, parent, epoch, value): the ballot and the signatures are its proof, not part
of what was agreed, so one value certified in two ballots is one head.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from dilocox_peer.types import Digest, PeerId, canonical, sha256

Verifier = Callable[[PeerId, bytes, bytes], bool]
"""(peer, message, signature) -> whether the signature is the peer's. signing.verify in a peer, a cheap one in the simulator."""

Kind = Literal["round", "epoch"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One offered contribution. (peer, incarnation, base head) names its movement; the base is the certificate's parent.

    incarnation: wall-clock milliseconds at the start of the peer's process; the newest is the peer.
    state_digest: of the anchor state this movement was taken against, b"" if unknown.
    """

    peer: PeerId
    incarnation: int
    blob: Digest
    size_bytes: int
    micro_batches: int
    state_digest: bytes = b""

    def fields(self) -> list[object]:
        return [self.peer, self.incarnation, self.blob, self.size_bytes, self.micro_batches, self.state_digest]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a certificate decides for the round after next: no message in flight changes shape."""

    codec: str
    rank: int
    inner_steps: int
    learning_rate_scale: float = 1.0

    def fields(self) -> list[object]:
        return [self.codec, self.rank, self.inner_steps, self.learning_rate_scale]


@dataclass(frozen=True, slots=True)
class Value:
    """What one certificate says.

    height: position in the chain, from 1. round: outer rounds completed with it (an epoch keeps its parent's, a round
    adds one, void or not). weight: sum over the chain of distinct contributors, this one included.
    roster: who may certify the next value, in order; roster[0] breaks ties. state_digest: of the anchor state at the
    parent as most of the entries report it, b"" if they report none; so state at a head is certified by the next one.
    """

    kind: Kind
    height: int
    round: int
    weight: int
    entries: tuple[Entry, ...]
    roster: tuple[PeerId, ...]
    plan: Plan
    state_digest: bytes = b""

    def fields(self) -> list[object]:
        entries = [entry.fields() for entry in self.entries]
        return [
            self.kind, self.height, self.round, self.weight, entries, list(self.roster), self.plan.fields(), self.state_digest,
        ]  # fmt: skip

    def digest(self) -> Digest:
        return sha256(canonical(["dilocox-value", *self.fields()]))


@dataclass(frozen=True, slots=True)
class Certificate:
    """A value, its place, and the signatures that make it agreed: a quorum of the parent's roster, or for an epoch
    every peer of its own roster."""

    stage: int
    parent: Digest
    epoch: int
    ballot: int
    value: Value
    signatures: tuple[tuple[PeerId, bytes], ...]

    @property
    def head(self) -> Digest:
        return head_of(self.stage, self.parent, self.epoch, self.value)


def head_of(stage: int, parent: Digest, epoch: int, value: Value) -> Digest:
    return sha256(canonical(["dilocox-head", stage, parent, epoch, value.digest()]))


def acceptance(stage: int, parent: Digest, epoch: int, ballot: int, value: Value) -> bytes:
    """The bytes a peer signs to accept a value in a ballot. Holding every blob of it is part of what it signs."""
    return canonical(["dilocox-accept", stage, parent, epoch, ballot, value.digest()])


def is_quorum(peers: Collection[PeerId], roster: Sequence[PeerId]) -> bool:
    """More than half of the roster, or exactly half with roster[0] among them. Two quorums always share a peer."""
    present = sum(1 for peer in roster if peer in peers)
    if 2 * present == len(roster):
        return bool(roster) and roster[0] in peers
    return 2 * present > len(roster)


def rank_of(head: Digest, peer: PeerId) -> bytes:
    """Order in which peers lead at a head; changes with every head, so a slow leader does not stay one."""
    return sha256(head, peer.encode())


def leader(roster: Sequence[PeerId], head: Digest, ballot: int) -> PeerId:
    return sorted(roster, key=lambda peer: rank_of(head, peer))[ballot % len(roster)]
