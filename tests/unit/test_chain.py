from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox_peer.peer.rounds.chain import (
    Chain,
    Place,
    is_quorum,
    is_vote,
    order_of,
    suffix_of,
    vote_for,
)
from dilocox_peer.peer.rounds.named_state import majority_digest
from dilocox_peer.peer.rounds.ranks import by_rank, turn_of
from dilocox_peer.types import Digest, PeerId, sha256
from dilocox_peer.wire.chain import Certificate, Entry, Plan, Value, acceptance
from dilocox_peer.wire.declared import replaced

PLAN = Plan("fp16", 0, 8)
GENESIS = Place.genesis(0, sha256(b"genesis"), PLAN)
A, B, C, D = (PeerId(name) for name in "abcd")


def sign(peer: PeerId, message: bytes) -> bytes:
    return sha256(peer.encode(), message)


def verify(peer: PeerId, message: bytes, signature: bytes) -> bool:
    return signature == sign(peer, message)


def entry(peer: PeerId, digest: bytes = b"") -> Entry:
    return Entry(peer, 1, sha256(b"blob of", peer.encode()), 100, 8, digest)


def certified(
    place: Place, value: Value, signers: tuple[PeerId, ...], view: int | None = None, ballot: int = 0
) -> Certificate:
    at = place.view if view is None else view
    message = acceptance(place.stage, place.head, at, ballot, value)
    return Certificate(
        place.stage,
        place.head,
        at,
        ballot,
        value,
        tuple((peer, vote_for(message, 1, partial(sign, peer))) for peer in signers),
    )


def first_view(*roster: PeerId) -> Certificate:
    return certified(GENESIS, GENESIS.view_change(roster), roster, view=1)


def round_after(place: Place, *entrants: PeerId, signers: tuple[PeerId, ...] | None = None) -> Certificate:
    value = place.round_value([entry(peer) for peer in entrants], place.roster)
    return certified(place, value, signers or place.roster)


def why_not(place: Place, certificate: Certificate) -> str | None:
    return place.why_not_certificate(certificate, verify, max_peers=4)


@given(st.sets(st.integers(0, 7)), st.sets(st.integers(0, 7)), st.integers(1, 8))
def test_two_quorums_share_a_peer(one: set[int], other: set[int], size: int) -> None:
    roster = [PeerId(str(number)) for number in range(size)]
    left, right = ({PeerId(str(number)) for number in numbers if number < size} for numbers in (one, other))
    if is_quorum(left, roster) and is_quorum(right, roster):
        assert left & right


def test_half_is_a_quorum_only_with_the_first_of_the_roster() -> None:
    assert is_quorum({A, D}, (A, B, C, D))
    assert not is_quorum({B, D}, (A, B, C, D))
    assert is_quorum({A}, (A,))
    assert not is_quorum({A}, ())


def test_each_peer_leads_about_as_often_and_no_certificate_has_a_say_in_it() -> None:
    roster = (A, B, C)
    firsts = [by_rank(roster, turn_of(0, height, 3))[0] for height in range(300)]
    assert min(map(firsts.count, roster)) > 70
    assert set(by_rank(roster, turn_of(0, 1, 0))) == set(roster)


def test_majority_digest_is_that_of_most_voters_or_of_most_contributors_and_of_a_voter() -> None:
    low, high = b"\x01" * 32, b"\x02" * 32
    voters = (A, B, C)
    assert majority_digest([entry(A, high), entry(B, high), entry(C, low)], voters) == high
    assert majority_digest([entry(A)], voters) == b""
    assert majority_digest([entry(A, low)], voters) == low, "the others rest"
    assert majority_digest([entry(A, high), entry(B, low), entry(C, low)], (A,)) == high, "the others have no vote"
    assert majority_digest([entry(A, high), entry(B, low), entry(C)], voters) == b""


def test_a_voter_does_not_name_the_state_of_all_while_the_others_rest() -> None:
    """Of four voters three rested for the night; each of 30 certificates named the fourth's, whatever five newcomers had."""
    theirs, honest = b"\x01" * 32, b"\x02" * 32
    newcomers = [entry(PeerId(f"newcomer {number}"), honest) for number in range(5)]
    voters = (A, B, C, D)
    assert majority_digest([entry(A, theirs), *newcomers], voters) == b""
    assert majority_digest([entry(A, theirs), entry(B, honest)], voters) == b"", "neither has more than half"
    assert majority_digest([entry(A, honest), *newcomers], voters) == honest


def test_of_two_voters_that_differ_the_other_contributors_tell_which_is_named() -> None:
    """One of two voters had computed another state, with the lower digest, and kept it for five rounds, until the third had earned its vote."""
    drifted, theirs = b"\x01" * 32, b"\x02" * 32
    assert majority_digest([entry(A, theirs), entry(B, theirs), entry(C, drifted)], (A, C)) == theirs
    assert majority_digest([entry(A, theirs), entry(C, drifted)], (A, C)) == b""


def test_a_leader_puts_nobody_before_those_that_stay() -> None:
    """The first voter's half is a quorum: the second of two wrote a roster with itself in front, and went on alone."""
    place = GENESIS.then(first_view(A, B, C))
    for roster, is_right in (
        ((A, C, D), True),
        ((B, C), True),
        ((C, A), False),
        ((D, A, B, C), False),
        ((A, D, B), False),
    ):
        value = place.round_value([entry(A)], roster)
        assert (why_not(place, certified(place, value, (A, B))) is None) is is_right, roster


def test_head_names_the_value_and_neither_ballot_nor_signatures() -> None:
    place = GENESIS.then(first_view(A, B, C))
    value = place.round_value([entry(A)], place.roster)
    one = certified(place, value, (A, B))
    other = certified(place, value, (B, C), ballot=4)
    assert one.head == other.head
    assert one.head != certified(place, replaced(value, weight=value.weight + 1), (A, B)).head


def test_a_round_is_certified_by_a_quorum_of_its_parents_roster() -> None:
    place = GENESIS.then(first_view(A, B, C))
    assert why_not(place, round_after(place, A, B, signers=(A, B))) is None
    assert why_not(place, round_after(place, A, signers=(A,))) == "signatures that are no quorum of the roster"
    assert why_not(place, round_after(place, A, signers=(A, D))) == "signatures that are no quorum of the roster"


def test_a_view_change_is_signed_by_all_of_its_own_roster() -> None:
    assert why_not(GENESIS, first_view(A, B)) is None
    value = GENESIS.view_change((A, B))
    assert why_not(GENESIS, certified(GENESIS, value, (A,), view=1)) == "a view change not signed by all of its roster"


def test_genesis_has_no_quorum_for_a_round() -> None:
    value = GENESIS.round_value([], (A,))
    assert why_not(GENESIS, certified(GENESIS, value, (A,))) == "signatures that are no quorum of the roster"


def test_a_forged_signature_is_refused() -> None:
    place = GENESIS.then(first_view(A, B, C))
    good = round_after(place, A)
    forged = replaced(good, signatures=(good.signatures[0], (B, b"x" * 32)))
    assert why_not(place, forged) == "a signature that does not verify"
    twice = replaced(good, signatures=(good.signatures[0], good.signatures[0]))
    assert why_not(place, twice) == "a peer that signed twice"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"height": 5}, "height 5 after height 1"),
        ({"round": 3}, "round 3 after round 0"),
        ({"weight": 9}, "weight 9 after 0 with 2 entries"),
        ({"roster": ()}, "a roster of 0 peers"),
        ({"roster": (A, A)}, "a roster of 2 peers, 1 distinct"),
        ({"roster": tuple(PeerId(name) for name in "abcde")}, "a roster of 5 peers"),
        ({"entries": (entry(B), entry(A))}, "entries not in the order of distinct peers"),
        ({"entries": (entry(A), entry(A))}, "entries not in the order of distinct peers"),
        ({"entries": (entry(A), entry(D))}, "an entry of a peer that is not in the roster"),
        ({"state_digest": b"\x01" * 32}, "a state digest that is not the one its entries report"),
    ],
)
def test_a_value_that_does_not_follow_is_refused_with_the_reason(change: dict[str, object], reason: str) -> None:
    place = GENESIS.then(first_view(A, B, C))
    value = replaced(place.round_value([entry(A), entry(B)], place.roster), **change)
    assert (place.why_not(value, place.view, max_peers=4) or "").startswith(reason)


def test_a_view_change_is_void_and_newer() -> None:
    place = GENESIS.then(first_view(A, B))
    value = place.view_change((A,))
    assert place.why_not(value, 2, max_peers=4) is None
    assert place.why_not(value, 1, max_peers=4) == "view 1 called in view 1"
    assert place.why_not(replaced(value, plan=Plan("none", 0, 1)), 2, max_peers=4) == "a view change that is not void"


def test_locator_names_new_heads_densely_and_ends_at_genesis() -> None:
    chain = Chain(GENESIS, [first_view(A, B, C)])
    for _ in range(200):
        chain.append(round_after(chain.place, A))
    heads = chain.locator()
    assert heads[0] == chain.head
    assert heads[-1] == GENESIS.head
    assert len(heads) < 20
    assert all(chain.height_of(head) is not None for head in heads)


def test_truncate_forgets_what_was_above() -> None:
    chain = Chain(GENESIS, [first_view(A, B, C)])
    kept = chain.head
    chain.append(round_after(chain.place, A))
    gone = chain.head
    chain.truncate(1)
    assert chain.head == kept
    assert chain.height_of(gone) is None
    assert chain.place == chain.place_at(1)


def test_suffix_leaves_out_what_the_chain_has() -> None:
    start = first_view(A, B, C)
    chain = Chain(GENESIS, [start])
    child = round_after(chain.place, A)
    found = suffix_of(chain, 0, [start, child])
    assert (found.ancestor, found.heads) == (1, (child.head,))
    assert found.up_to(Digest(child.head)) == found


def test_newcomers_do_not_make_a_new_roster_beside_members() -> None:
    place = GENESIS.then(first_view(A, B))
    mixed = certified(place, place.view_change((A, C)), (A, C), view=2)
    assert (why_not(place, mixed) or "").startswith("a view change that seats newcomers beside members")
    assert why_not(place, certified(place, place.view_change((C, D)), (C, D), view=2)) is None


def test_the_first_roster_of_an_owned_run_is_the_owners_alone_to_sign() -> None:
    genesis = replace(GENESIS, founder=D)
    value = genesis.view_change((A, B))
    for signers in ((A, B), (A, B, D), (C,)):
        reason = genesis.why_not_certificate(certified(genesis, value, signers, view=1), verify, max_peers=4)
        assert (reason or "").startswith("a first roster that the run's owner")
    assert genesis.why_not_certificate(certified(genesis, value, (D,), view=1), verify, max_peers=4) is None


def test_a_vote_says_its_order_and_nobody_can_change_it() -> None:
    vote = vote_for(b"message", 7, partial(sign, A))
    assert order_of(vote) == 7
    assert is_vote(verify, A, b"message", vote)
    assert not is_vote(verify, A, b"message", (8).to_bytes(8, "big") + vote[8:])
    assert not is_vote(verify, B, b"message", vote)
    assert not is_vote(verify, A, b"message", vote[:8])
