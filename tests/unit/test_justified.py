"""Proposals that show what they rest on, and proofs of peers with two tongues."""

from functools import partial

import pytest

from dilocox_peer.peer.rounds.chain import ORDER_BYTES, Place, vote_for
from dilocox_peer.peer.rounds.justified import Witness, promise_statement, why_guilty, why_not_justified
from dilocox_peer.types import Digest, PeerId, sha256
from dilocox_peer.wire.chain import Plan, acceptance
from dilocox_peer.wire.declared import replaced
from dilocox_peer.wire.rounds import Contradiction, Promised, Statement

HEAD = sha256(b"head")
AT = (0, HEAD, 1)
A, B, C, D = (PeerId(name) for name in "abcd")
ROSTER = (A, B, C)
PLACE = Place(0, HEAD, 3, 2, 5, 1, ROSTER, Plan("fp16", 0, 8))
ONE, OTHER = PLACE.round_value([], ROSTER), PLACE.round_value([], ROSTER[:2])


def sign(peer: PeerId, message: bytes) -> bytes:
    return sha256(peer.encode(), message)


def verify(peer: PeerId, message: bytes, signature: bytes) -> bool:
    return signature == sign(peer, message)


def promised(peer: PeerId, ballot: int, accepted: tuple[int, Digest] | None = None) -> Promised:
    return Promised(peer, accepted, sign(peer, promise_statement(AT, ballot, accepted)))


def why_not(*promises: Promised, ballot: int = 4, value: Digest = ONE.digest()) -> str | None:
    return why_not_justified(promises, AT, ballot, value, ROSTER, verify)


def test_a_quorum_that_accepted_nothing_lets_any_value_pass() -> None:
    assert why_not(promised(A, 4), promised(C, 4)) is None


def test_what_was_accepted_in_the_highest_ballot_must_be_proposed() -> None:
    low, high = promised(A, 4, (1, OTHER.digest())), promised(B, 4, (2, ONE.digest()))
    assert why_not(low, high, promised(C, 4)) is None
    assert "another value than the one accepted in ballot 2" in (why_not(low, high, value=OTHER.digest()) or "")


@pytest.mark.parametrize(
    ("promises", "reason"),
    [
        ((), "no quorum"),
        ((promised(A, 4),), "no quorum"),
        ((promised(A, 4), promised(A, 4)), "no quorum"),
        ((promised(A, 4), promised(D, 4)), "no quorum"),
        ((promised(A, 4), promised(B, 3)), "does not verify"),
        ((promised(A, 4), replaced(promised(B, 4), accepted=(1, ONE.digest()))), "does not verify"),
        ((promised(A, 4), promised(B, 4, (4, ONE.digest()))), "accepted in no lower one"),
    ],
)
def test_what_does_not_justify_a_proposal_is_refused(promises: tuple[Promised, ...], reason: str) -> None:
    assert reason in (why_not(*promises) or "")


# ---- two tongues ----


def accepted(ballot: int, value: object = ONE, at: tuple[int, Digest, int] = AT, peer: PeerId = A) -> Statement:
    return voted(acceptance(at[0], at[1], at[2], ballot, value), 7, peer)  # type: ignore[arg-type]


def voted(message: bytes, order: int, peer: PeerId = A) -> Statement:
    """What a vote says, and the signature of just that."""
    vote = vote_for(message, order, partial(sign, peer))
    return Statement(vote[:ORDER_BYTES] + message, vote[ORDER_BYTES:])


def said(ballot: int, earlier: tuple[int, Digest] | None) -> Statement:
    message = promise_statement(AT, ballot, earlier)
    return Statement(message, sign(A, message))


ELSEWHERE = (0, sha256(b"elsewhere"), 1)


@pytest.mark.parametrize(
    ("left", "right", "guilt"),
    [
        (accepted(1, ONE), accepted(1, OTHER), "accepted two values in ballot 1"),
        (accepted(1), said(2, None), "hid what it had accepted in ballot 1"),
        (said(5, (0, OTHER.digest())), accepted(1), "hid what it had accepted in ballot 1"),
        (accepted(1), said(3, (1, OTHER.digest())), "named another"),
        (accepted(1, ONE), accepted(2, OTHER), None),
        (accepted(1), accepted(1), None),
        (accepted(2), said(2, None), None),
        (accepted(3), said(2, None), None),
        (accepted(1), said(2, (1, ONE.digest())), None),
        (accepted(1), said(3, (2, OTHER.digest())), None),
        (said(2, None), said(3, (2, ONE.digest())), None),
        (accepted(1, ONE), accepted(1, OTHER, at=ELSEWHERE), None),
        (accepted(1, ONE), accepted(1, OTHER, peer=B), None),
        (accepted(1), Statement(b"\x93nothing", b"s"), None),
        (accepted(1), Statement(b"\x91" * 200, b"s"), None),
    ],
)
def test_two_statements_prove_what_no_honest_peer_signs(left: Statement, right: Statement, guilt: str | None) -> None:
    found = why_guilty(Contradiction(A, left, right), 0, verify)
    assert (found is None) == (guilt is None), found
    assert (guilt or "") in (found or "")


def test_a_proof_is_of_one_peer_and_one_stage() -> None:
    proof = Contradiction(A, accepted(1, ONE), accepted(1, OTHER))
    assert why_guilty(proof._replace(peer=B), 0, verify) is None
    assert why_guilty(proof, 1, verify) is None


def test_the_same_acceptance_in_a_later_vote_is_no_second_one() -> None:
    statements = [voted(acceptance(*AT, 1, value), order) for order, value in ((7, ONE), (8, ONE), (9, OTHER))]
    assert why_guilty(Contradiction(A, statements[0], statements[1]), 0, verify) is None
    assert why_guilty(Contradiction(A, statements[0], statements[2]), 0, verify) is not None


def test_a_witness_finds_the_contradiction_and_forgets_old_ballots() -> None:
    witness = Witness()
    one, other = accepted(0, ONE), accepted(0, OTHER)
    assert witness.hears(A, one) is None
    assert witness.hears(B, other) is None
    assert witness.hears(A, other) == Contradiction(A, one, other)
    for ballot in range(1, 100):
        statement = accepted(ballot)
        assert witness.hears(A, statement) is None
    assert len(witness.said[A]) <= 16
