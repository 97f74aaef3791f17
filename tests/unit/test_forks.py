"""Which of two chains counts: the votes of the last common roster, the owner's checkpoints, and the two bounds."""

from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox_peer.peer.rounds.chain import Chain, Place, Suffix, place_after, vote_for, votes_on
from dilocox_peer.peer.rounds.forks import MAX_HELD, Forks, supporters
from dilocox_peer.types import Digest, PeerId, sha256
from dilocox_peer.wire.chain import Certificate, Plan, Value, acceptance
from dilocox_peer.wire.checkpoints import Checkpoint, sign_checkpoint
from dilocox_peer.wire.declared import replaced

OWNER = PeerId("owner")
GENESIS = Place.genesis(0, sha256(b"genesis"), Plan("fp16", 0, 8), OWNER)
A, B, C, D, E = (PeerId(name) for name in "abcde")
SYBILS = tuple(PeerId(f"sybil{number:02d}") for number in range(16))


def sign(peer: PeerId, message: bytes) -> bytes:
    return sha256(peer.encode(), message)


def verify(peer: PeerId, message: bytes, signature: bytes) -> bool:
    return signature == sign(peer, message)


class Branch:
    """A chain that grows by hand."""

    def __init__(self, certificates: Sequence[Certificate] = ()) -> None:
        self.certificates = list(certificates)

    @property
    def place(self) -> Place:
        return place_after(GENESIS, self.certificates)

    def add(self, value: Value, signers: Sequence[PeerId], view: int, order: int) -> "Branch":
        place = self.place
        message = acceptance(0, place.head, view, 0, value)
        votes = tuple((peer, vote_for(message, order, partial(sign, peer))) for peer in signers)
        certificate = Certificate(0, place.head, view, 0, value, votes)
        assert place.why_not_certificate(certificate, verify, 16) is None
        self.certificates.append(certificate)
        return self

    def start(self, *roster: PeerId) -> "Branch":
        return self.add(GENESIS.view_change(roster), (OWNER,), 1, 1)

    def view(self, *roster: PeerId, order: int) -> "Branch":
        return self.add(self.place.view_change(roster), roster, self.place.view + 1, order)

    def round(self, *signers: PeerId, order: int, roster: Sequence[PeerId] = ()) -> "Branch":
        return self.add(self.place.round_value([], roster or self.place.roster), signers, self.place.view, order)

    def fork(self) -> "Branch":
        return Branch(self.certificates)


def forks_of(
    own: Branch, *, max_back: int | None = None, checkpoint: Checkpoint | None = None, me: PeerId | None = None
) -> Forks:
    return Forks(Chain(GENESIS, own.certificates), max_back=max_back, checkpoint=checkpoint, me=me)


def suffix(own: Branch, other: Branch) -> Suffix:
    shared = 0
    while shared < min(len(own.certificates), len(other.certificates)) and (
        own.certificates[shared].head == other.certificates[shared].head
    ):
        shared += 1
    return Suffix(shared, tuple(other.certificates[shared:]))


def beats(one: Branch, other: Branch, **options: object) -> bool:
    """Whether a peer on `other` prefers `one`."""
    return forks_of(other, **options).is_better(suffix(other, one), None)  # type: ignore[arg-type]


def why_not(own: Branch, other: Branch, **options: object) -> str:
    return forks_of(own, **options).why_not(suffix(own, other)) or ""  # type: ignore[arg-type]


def checkpoint_of(branch: Branch, height: int, sequence: int = 1) -> Checkpoint:
    place = Chain(GENESIS, branch.certificates).place_at(height)
    unsigned = Checkpoint(0, GENESIS.head, height, place.round, place.head, sequence, False)
    return sign_checkpoint(unsigned, partial(sign, OWNER))


def test_a_thousand_certificates_of_made_up_keys_count_nothing() -> None:
    honest = Branch().start(A, B, C).round(A, B, order=2)
    forged = Branch(honest.certificates[:1]).view(*SYBILS, order=9)
    for order in range(10, 200):
        forged.round(*SYBILS, order=order)
    assert not beats(forged, honest)
    assert beats(honest, forged)
    assert "nobody of the roster there has signed" in why_not(honest, forged)


def test_a_minority_with_sybils_does_not_beat_the_majority_however_long_its_branch() -> None:
    honest = Branch().start(A, B, C).round(A, B, order=2)
    forged = Branch(honest.certificates[:1]).view(C, order=9)
    forged.round(C, order=10, roster=(C, *SYBILS[:15]))
    for order in range(11, 40):
        forged.round(C, *SYBILS[:15], order=order)
    assert not beats(forged, honest)
    assert beats(honest, forged)


def test_who_changed_its_mind_counts_where_it_is_now() -> None:
    """A certificate that somebody kept back has votes of peers that went elsewhere since."""
    start = Branch().start(A, B, C, D, E)
    held_back = start.fork().round(A, C, D, E, order=2)
    went_on = start.fork().view(A, B, order=3).round(A, B, order=4)
    assert beats(held_back, went_on)  # C, D and E stand there; A no longer does
    went_on.round(A, order=5, roster=(A, B, C))
    went_on.round(A, B, C, order=6)
    assert not beats(held_back, went_on)
    assert beats(went_on, held_back)


def test_as_many_votes_here_as_there_the_lowest_position_decides_for_everybody() -> None:
    start = Branch().start(A, B, C, D, E)
    one, other = start.fork().view(B, E, order=2), start.fork().view(C, D, order=3)
    assert beats(one, other)
    assert not beats(other, one)


def test_without_any_vote_the_lower_hash_decides() -> None:
    start = Branch().start(A)
    branches = [start.fork().view(B, order=2), start.fork().view(C, order=2)]
    low, high = sorted(branches, key=lambda branch: branch.place.head)
    assert beats(low, high)
    assert not beats(high, low)


def test_a_branch_is_as_strong_as_all_that_grew_out_of_its_first_certificate() -> None:
    """Else: B beats A at the start, A's other half beats A later, and B that: three peers chase one another."""
    start = Branch().start(A, B, C, D, E)
    trunk = start.fork().round(A, B, C, order=2)
    left = trunk.fork().round(A, B, D, order=3)
    right = trunk.fork().view(C, order=4)
    other = start.fork().view(D, E, order=5)
    chain = Chain(GENESIS, left.certificates)
    forks = Forks(chain, max_back=None)
    assert not forks.is_better(Suffix(1, tuple(other.certificates[1:])), None)
    forks.left(2, chain.truncate(2))
    for certificate in right.certificates[2:]:
        chain.append(certificate)
    assert not forks.is_better(Suffix(1, tuple(other.certificates[1:])), None)


def test_votes_on_a_path_that_is_held_back_count_for_what_it_goes_on_from() -> None:
    """A voter that came over from the other branch by a view change of its own, which nobody follows yet, is no longer there."""
    start = Branch().start(A, B, C)
    ours = start.fork().round(A, C, order=2)
    other = start.fork().view(B, C, order=3)
    over = ours.fork().view(C, order=4).round(C, order=5)
    forks = forks_of(ours)
    assert forks.is_better(suffix(ours, other), None)
    forks.held_back(suffix(ours, over))
    assert not forks.is_better(suffix(ours, other), None)
    assert forks.support(suffix(ours, other)) == (1, 2)
    there = forks_of(other)
    assert not there.is_better(suffix(other, ours), None)
    there.held_back(suffix(other, over))
    assert there.is_better(suffix(other, ours), None), "nor is it where another knows of the beginning of that path"


def test_who_goes_on_from_our_chain_without_a_vote_there_still_stands_on_it_where_it_had_one() -> None:
    """B was left out of our roster, and went on from there alone: it is not on the branch that parts before that."""
    start = Branch().start(A, B, C)
    ours, other = start.fork().view(A, C, order=2), start.fork().view(A, order=3)
    over = ours.fork().view(B, order=4)
    forks = forks_of(ours)
    assert forks.is_better(suffix(ours, other), None)
    forks.held_back(suffix(ours, over))
    assert forks.support(suffix(ours, other)) == (1, 2)
    assert not forks.is_better(suffix(ours, other), None)
    third = start.fork().view(C, order=5)
    chain = Chain(GENESIS, ours.certificates)
    forks = Forks(chain, max_back=None)
    forks.held_back(suffix(ours, over))
    forks.left(1, chain.truncate(1))
    assert not forks.is_better(suffix(start, third), suffix(start, ours)), "nor is that forgotten where we have left it"
    stranger = ours.fork().view(D, order=6)
    forks = forks_of(ours)
    for each in (over, *(ours.fork().view(D, order=order) for order in range(7, 7 + 2 * MAX_HELD))):
        forks.held_back(suffix(ours, each))
    forks.held_back(suffix(ours, stranger))
    assert forks.support(suffix(ours, other)) == (1, 2), "whoever had no vote anywhere drives nobody out"


def test_a_voter_on_a_third_branch_that_is_held_back_is_on_neither_of_two() -> None:
    start = Branch().start(A, B, C, D)
    ours, theirs = start.fork().view(B, C, order=2), start.fork().view(A, order=2)
    third = start.fork().view(C, order=3)
    forks = forks_of(ours)
    assert not forks.is_better(suffix(ours, theirs), None)
    forks.held_back(suffix(ours, third))
    assert forks.is_better(suffix(ours, theirs), None)


def test_of_two_branches_neither_of_which_is_ours_who_stands_on_ours_stands_on_none() -> None:
    """Found by slicing seed 368: by a vote that its signer had taken elsewhere, a worse branch kept a better one out, for ever."""
    start = Branch().start(A, B, C, D)
    ours = start.fork().view(B, order=5)
    left, better = start.fork().view(B, C, order=2), start.fork().view(A, order=3)
    forks = forks_of(ours)
    assert forks.is_better(suffix(ours, better), suffix(ours, left))
    assert not forks.is_better(suffix(ours, left), suffix(ours, better))


def test_votes_before_a_branch_begins_are_not_on_it() -> None:
    start = Branch().start(A, B, C)
    trunk = start.fork().round(A, B, C, order=2)
    far = trunk.fork().round(A, B, order=3)
    forks = forks_of(start)
    forks.held_back(suffix(start, far))
    left, right = far, trunk.fork().view(C, order=4)
    assert forks.is_better(suffix(start, left), suffix(start, right))
    assert not forks.is_better(suffix(start, right), suffix(start, left)), "C's vote on the trunk is older"


def test_a_chain_beats_its_own_beginning() -> None:
    short = Branch().start(A, B)
    long = short.fork().round(A, order=2)
    assert beats(long, short)
    assert not forks_of(long).is_better(None, Suffix(1, tuple(long.certificates[1:])))


def test_the_owners_word_goes_before_votes() -> None:
    start = Branch().start(A, B, C)
    many, few = start.fork().round(A, B, order=2), start.fork().view(C, order=3).round(C, order=4)
    vouched = checkpoint_of(few, 3)
    assert beats(few, many, checkpoint=vouched)
    assert not beats(many, few, checkpoint=vouched)
    assert why_not(many, few, checkpoint=vouched, max_back=0) == ""
    assert "without round 1 that the run's owner has signed" in why_not(few, many, checkpoint=vouched)


def test_nobody_goes_back_further_than_the_bound_without_the_owner() -> None:
    """Keys that were the majority long ago do not rewrite a run."""
    start = Branch().start(A, B, C)
    ours = start.fork().view(A, C, order=2)
    for order in range(3, 8):
        ours.round(A, C, order=order)
    late = start.fork().round(A, B, order=9)
    assert "5 rounds back; at most 4 without the owner's word" in why_not(ours, late, max_back=4)
    assert why_not(ours, late, max_back=5) == ""
    assert why_not(ours, late, max_back=4, checkpoint=checkpoint_of(late, 2)) == ""


def seized(*followers: PeerId, from_round: int = 5) -> tuple[Branch, Branch]:
    """(what E wrote alone after three rounds, which D and these have signed from a round on; the beginning that it shares with the others)."""
    start = Branch().start(A, B, C, D)
    for order in range(2, 5):
        start.round(A, B, C, D, order=order)
    branch = start.fork().view(E, order=5)
    branch.round(E, order=6, roster=(E, *followers))
    for order in range(7, 17):
        branch.round(E, *(followers if order - 5 >= from_round else ()), order=order)
    return branch, start


def test_rounds_that_left_a_quorum_behind_keep_nobody_from_coming_back_to_it() -> None:
    """A newcomer met a stranger first, a reader one liar; the run's members came a moment later, and were refused for ever."""
    branch, start = seized()
    run = start.fork().round(A, B, C, order=20)
    assert why_not(branch, run, max_back=4) == ""
    assert why_not(branch, run, max_back=4, me=D) == ""
    assert beats(run, branch, max_back=4)
    longer = start.fork().round(A, B, C, D, order=5)
    for order in range(6, 11):
        longer.round(A, B, C, D, order=order)
    on_top = longer.fork().view(E, order=11)
    other = start.fork().round(A, B, C, order=20, roster=(A, B, C))
    assert "6 rounds back" in why_not(on_top, other, max_back=4), "those before that view change count as ever"


def test_fewer_than_that_quorum_take_no_more_back_than_the_bound() -> None:
    branch, start = seized()
    for alone in (start.fork().view(D, order=20), start.fork().view(C, D, order=20)):
        assert "11 rounds back" in why_not(branch, alone, max_back=4)
    strangers = start.fork().view(*SYBILS, order=20)
    assert "11 rounds back" in why_not(branch, strangers, max_back=4)
    held_back = start.fork().round(B, C, D, order=5)
    gone_on, _ = seized(B)
    assert "11 rounds back" in why_not(gone_on, held_back, max_back=4), "B has changed its mind since"


@pytest.mark.parametrize(("from_round", "why"), [(8, ""), (6, "11 rounds back")])
def test_rounds_that_we_have_signed_ourselves_count_whoever_was_left_behind(from_round: int, why: str) -> None:
    """Members of those who went on when a quorum had left do not lose a month's work to the keys of that quorum."""
    newcomer = SYBILS[0]
    branch, start = seized(newcomer, from_round=from_round)
    run = start.fork().round(A, B, C, order=20)
    said = why_not(branch, run, max_back=4, me=newcomer)
    assert why in said
    assert bool(why) == bool(said)
    assert why_not(branch, run, max_back=4, me=D) == "", "to whoever only follows they do not"


def test_a_checkpoint_counts_for_its_stage_run_and_signer_only() -> None:
    good = checkpoint_of(Branch().start(A), 1)
    terms = {"stage": 0, "genesis": GENESIS.head, "owner": OWNER, "verify": verify}
    assert good.why_not(**terms) is None  # type: ignore[arg-type]
    for bad in (replaced(good, stage=1), replaced(good, genesis=sha256(b"another run"))):
        assert bad.why_not(**terms) == "a checkpoint of another stage or run"  # type: ignore[arg-type]
    for bad in (replaced(good, height=2), replaced(good, is_last=True), sign_checkpoint(good, partial(sign, A))):
        assert bad.why_not(**terms) == "a checkpoint that the run's owner has not signed"  # type: ignore[arg-type]


ROSTER = (A, B, C, D, E)
HEADS = tuple(Digest(bytes([number]) * 32) for number in range(3))


@given(st.lists(st.dictionaries(st.sampled_from(ROSTER), st.integers(0, 5)), min_size=3, max_size=3))
def test_every_elector_stands_on_one_branch_at_most(votes: list[dict[PeerId, int]]) -> None:
    standing = supporters(ROSTER, dict(zip(HEADS, votes, strict=True)))
    counted = [position for positions in standing.values() for position in positions]
    assert len(counted) == len(set(counted)) == len({peer for each in votes for peer in each})


@given(st.dictionaries(st.sampled_from(SYBILS), st.integers(0, 9)), st.sampled_from(HEADS))
def test_votes_of_nobody_in_the_roster_move_nothing(votes: dict[PeerId, int], head: Digest) -> None:
    branches: dict[Digest, dict[PeerId, int]] = {HEADS[0]: {A: 1, B: 1}, HEADS[1]: {C: 1}, HEADS[2]: {}}
    with_votes = {**branches, head: {**branches[head], **votes}}
    assert supporters(ROSTER, with_votes) == supporters(ROSTER, branches)


@given(
    st.lists(
        st.one_of(st.tuples(st.just("add"), st.integers(1, 9)), st.tuples(st.just("cut"), st.integers(1, 4))),
        max_size=30,
    )
)
def test_votes_that_are_kept_counted_are_those_on_what_follows(steps: list[tuple[str, int]]) -> None:
    branch, chain = Branch().start(A, B, C), Chain(GENESIS)
    chain.append(branch.certificates[0])
    for step, number in steps:
        if step == "add":
            signers = [peer for peer, bit in ((A, 1), (B, 2), (C, 4)) if (number & 7) & bit or peer in (A, B)]
            chain.append(branch.round(*signers, order=number).certificates[-1])
        else:
            chain.truncate(max(1, chain.height - number))
            branch = Branch(chain.certificates)
        for height in range(chain.height + 1):
            assert chain.votes_since(height) == votes_on(chain.certificates[height:])
