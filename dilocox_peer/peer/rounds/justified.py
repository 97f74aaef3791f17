"""What makes a proposal in a higher ballot believable, and what proves that a peer has spoken with two tongues. Pure values.

A PROMISE is signed: (stage, head, view, ballot, what its sender accepted last). A value proposed in a ballot above 0
comes with a quorum of promises for exactly that ballot; it must be the one of the highest accepted ballot among them, or any
if none of them accepted anything. So no leader can pass over a value that may have a quorum, whatever it means to do.

Two signed statements of one peer that no honest peer makes are a `Contradiction`: two values accepted in one ballot (a leader's
proposal is its own acceptance), or a promise that leaves out what the same peer had accepted in a lower ballot. Anyone can
check it, with nothing but the two statements; what a peer has made durable before it signs keeps it from ever making one.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgpack

from dilocox_peer.peer.rounds.chain import ORDER_BYTES, Verifier, is_quorum
from dilocox_peer.peer.rounds.wire import MAX_ROSTER, MAX_SIGNATURE_BYTES, Fields
from dilocox_peer.types import DIGEST_BYTES, Digest, PeerId, canonical

MAX_STATEMENT_BYTES = 192  # either kind; an acceptance has about 110, a promise 150
MAX_BALLOTS_REMEMBERED = 8  # of a peer's statements at one head
_ACCEPT, _PROMISE = "dilocox-accept", "dilocox-promise"

At = tuple[int, Digest, int]  # stage, head, view


@dataclass(frozen=True, slots=True)
class Promised:
    """A signed promise without its ballot, which is the proposal's. accepted: (ballot, digest of the value), None: nothing."""

    peer: PeerId
    accepted: tuple[int, Digest] | None
    signature: bytes

    def fields(self) -> list[object]:
        return [self.peer, None if self.accepted is None else list(self.accepted), self.signature]


Justification = tuple[Promised, ...]


def promise_statement(at: At, ballot: int, accepted: tuple[int, Digest] | None) -> bytes:
    """The bytes a peer signs with a promise."""
    return canonical([_PROMISE, *at, ballot, *(accepted or (None, None))])


def why_not_justified(
    promises: Sequence[Promised], at: At, ballot: int, value: Digest, roster: Sequence[PeerId], verify: Verifier
) -> str | None:
    """Why these promises do not let value be proposed in ballot, or None. Cheap checks first: signatures cost most."""
    peers = {promised.peer for promised in promises}
    if len(peers) != len(promises) or not peers <= set(roster) or not is_quorum(peers, roster):
        return f"proposes in ballot {ballot} with promises that are no quorum of the roster"
    accepted = [promised.accepted for promised in promises if promised.accepted is not None]
    if any(earlier >= ballot for earlier, _ in accepted):
        return f"proposes in ballot {ballot} with the promise of one that had accepted in no lower one"
    highest = max((earlier for earlier, _ in accepted), default=None)
    if highest is not None and value not in {digest for earlier, digest in accepted if earlier == highest}:
        return f"proposes in ballot {ballot} another value than the one accepted in ballot {highest}"
    for promised in promises:
        if not verify(promised.peer, promise_statement(at, ballot, promised.accepted), promised.signature):
            return f"proposes in ballot {ballot} with a promise that does not verify"
    return None


def is_forced(promises: Iterable[Promised]) -> bool:
    """Whether the leader had no choice."""
    return any(promised.accepted is not None for promised in promises)


def read_justification(fields: Iterable[Fields]) -> Justification:
    promises = []
    for each in fields:
        peer, nested = each.peer(), each.optional()
        accepted = None
        if nested is not None:
            accepted = (nested.integer(), nested.digest())
            nested.end()
        promises.append(Promised(peer, accepted, each.binary(1, MAX_SIGNATURE_BYTES)))
        each.end()
    return tuple(promises)


def read_promises(fields: Fields) -> Justification:
    """The next field, a list of promises."""
    return read_justification(fields.items(MAX_ROSTER))


# ---- two tongues ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Statement:
    """The bytes that a peer signed, and its signature."""

    message: bytes
    signature: bytes


@dataclass(frozen=True, slots=True)
class Contradiction:
    """Two statements of one peer that no honest peer makes."""

    peer: PeerId
    left: Statement
    right: Statement


@dataclass(frozen=True, slots=True)
class _Said:
    """A statement, read. digest of an acceptance: of its value; earlier: what a promise says was accepted last."""

    kind: str
    at: At
    ballot: int
    digest: Digest | None
    earlier: int | None


def why_guilty(proof: Contradiction, stage: int, verify: Verifier) -> str | None:
    """What the two statements show of their signer, None if they show nothing."""
    left, right = _read(proof.left.message), _read(proof.right.message)
    if left is None or right is None or left.at != right.at or left.at[0] != stage:
        return None
    reason = _contradicts(left, right) or _contradicts(right, left)
    if reason is None or not all(
        verify(proof.peer, each.message, each.signature) for each in (proof.left, proof.right)
    ):
        return None
    return reason


def _contradicts(one: _Said, other: _Said) -> str | None:
    if one.kind != _ACCEPT:
        return None
    if other.kind == _ACCEPT:
        if one.ballot == other.ballot and one.digest != other.digest:
            return f"accepted two values in ballot {one.ballot}"
        return None
    if other.ballot <= one.ballot:
        return None
    if other.earlier is None or other.earlier < one.ballot:
        return f"promised ballot {other.ballot} and hid what it had accepted in ballot {one.ballot}"
    if other.earlier == one.ballot and other.digest != one.digest:
        return f"accepted one value in ballot {one.ballot} and named another when it promised ballot {other.ballot}"
    return None


def _read(statement: bytes) -> _Said | None:
    """What a statement says: a promise as it is, an acceptance behind the order of its vote."""
    if len(statement) > MAX_STATEMENT_BYTES:
        return None
    said = _read_fields(statement[ORDER_BYTES:])
    if said is not None and said.kind == _ACCEPT:
        return said
    said = _read_fields(statement)
    return said if said is not None and said.kind == _PROMISE else None


def _read_fields(message: bytes) -> _Said | None:
    try:
        fields = msgpack.unpackb(message, max_map_len=0, max_ext_len=0, max_array_len=16)
    except (ValueError, msgpack.UnpackException):
        return None
    if type(fields) is not list or len(fields) < 6 or canonical(fields) != message:
        return None
    kind, stage, head, view, ballot = fields[:5]
    if not (_is_digest(head) and all(type(each) is int for each in (stage, view, ballot))):
        return None
    at = (stage, Digest(head), view)
    if kind == _ACCEPT and _is_digest(fields[5]):
        return _Said(kind, at, ballot, Digest(fields[5]), None)
    if kind == _PROMISE and len(fields) >= 7:
        earlier, digest = fields[5:7]
        if earlier is None and digest is None:
            return _Said(kind, at, ballot, None, None)
        if type(earlier) is int and _is_digest(digest):
            return _Said(kind, at, ballot, Digest(digest), earlier)
    return None


def _is_digest(item: object) -> bool:
    return type(item) is bytes and len(item) == DIGEST_BYTES


class Witness:
    """What others signed at one head, as far as it came by us; finds the two statements that do not go together.

    Only what was verified is given to it. Of each peer the newest few ballots are remembered.
    """

    def __init__(self) -> None:
        self._said: dict[PeerId, OrderedDict[tuple[str, int], Statement]] = {}

    def hears(self, peer: PeerId, statement: Statement) -> Contradiction | None:
        """Takes a verified statement in; the contradiction that it makes with an earlier one, if any."""
        said = _read(statement.message)
        if said is None:
            return None
        statements = self._said.setdefault(peer, OrderedDict())
        for other in statements.values():
            heard = _read(other.message)
            assert heard is not None, "only what could be read is kept"
            if heard.at == said.at and (_contradicts(heard, said) or _contradicts(said, heard)):
                return Contradiction(peer, other, statement)
        statements.setdefault((said.kind, said.ballot), statement)
        while len(statements) > 2 * MAX_BALLOTS_REMEMBERED:
            statements.popitem(last=False)
        return None
