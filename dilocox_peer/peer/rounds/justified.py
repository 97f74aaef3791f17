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
from contextlib import suppress

from dilocox_peer.peer.rounds.chain import ORDER_BYTES, Verifier, is_quorum
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.chain import Acceptance, PromiseSaid
from dilocox_peer.wire.declared import Parser, encode
from dilocox_peer.wire.rounds import MAX_STATEMENT_BYTES, Contradiction, Promised, Statement

MAX_BALLOTS_REMEMBERED = 8  # of a peer's statements at one head
_Statement = Acceptance | PromiseSaid
_ACCEPTANCE = Parser[_Statement](Acceptance, "an acceptance", MAX_STATEMENT_BYTES - ORDER_BYTES)
_PROMISE = Parser[_Statement](PromiseSaid, "a promise", MAX_STATEMENT_BYTES)

At = tuple[int, Digest, int]  # stage, head, view


def promise_statement(at: At, ballot: int, accepted: tuple[int, Digest] | None) -> bytes:
    """The bytes a peer signs with a promise."""
    return encode(PromiseSaid(*at, ballot, *(accepted or (None, None))))


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


# ---- two tongues ----------------------------------------------------------------------------------------------------


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


def _contradicts(one: _Statement, other: _Statement) -> str | None:
    if not isinstance(one, Acceptance):
        return None
    if isinstance(other, Acceptance):
        if one.ballot == other.ballot and one.value != other.value:
            return f"accepted two values in ballot {one.ballot}"
        return None
    if other.ballot <= one.ballot:
        return None
    if other.earlier is None or other.earlier < one.ballot:
        return f"promised ballot {other.ballot} and hid what it had accepted in ballot {one.ballot}"
    if other.earlier == one.ballot and other.value != one.value:
        return f"accepted one value in ballot {one.ballot} and named another when it promised ballot {other.ballot}"
    return None


def _read(statement: bytes) -> _Statement | None:
    """What a statement says: a promise as it is, an acceptance behind the order of its vote."""
    for parser, said in ((_ACCEPTANCE, statement[ORDER_BYTES:]), (_PROMISE, statement)):
        with suppress(ValueError):
            return parser.read(said)
    return None


class Witness:
    """What others signed at one head, as far as it came by us; finds the two statements that do not go together.

    Only what was verified is given to it. Of each peer the newest few ballots are remembered.
    """

    def __init__(self) -> None:
        self.said: dict[PeerId, OrderedDict[tuple[type, int], Statement]] = {}

    def hears(self, peer: PeerId, statement: Statement) -> Contradiction | None:
        """Takes a verified statement in; the contradiction that it makes with an earlier one, if any."""
        said = _read(statement.message)
        if said is None:
            return None
        statements = self.said.setdefault(peer, OrderedDict())
        for other in statements.values():
            heard = _read(other.message)
            assert heard is not None, "only what could be read is kept"
            if heard.at == said.at and (_contradicts(heard, said) or _contradicts(said, heard)):
                return Contradiction(peer, other, statement)
        statements.setdefault((type(said), said.ballot), statement)
        while len(statements) > 2 * MAX_BALLOTS_REMEMBERED:
            statements.popitem(last=False)
        return None
