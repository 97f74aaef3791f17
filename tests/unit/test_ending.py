"""Whose word it takes that a run is over."""

import pytest

from dilocox_peer.peer.rounds.chain import Chain
from dilocox_peer.peer.rounds.ending import Ending
from dilocox_peer.peer.rounds.forks import Forks
from dilocox_peer.peer.rounds.membership import Members
from dilocox_peer.peer.rounds.timing import AWAY_S, Timing
from dilocox_peer.types import PeerId
from dilocox_peer.wire.checkpoints import Checkpoint
from tests.unit.test_forks import GENESIS, A, B, Branch, C, D, E, checkpoint_of

NEWCOMER, STRANGER = PeerId("newcomer"), PeerId("stranger")


class Peer:
    """Came at 0 s, and has this chain."""

    def __init__(self, branch: Branch, *, me: PeerId = NEWCOMER, checkpoint: Checkpoint | None = None) -> None:
        self.chain, self.members = Chain(GENESIS, branch.certificates), Members(me, Timing())
        self.forks = Forks(self.chain, max_back=None, checkpoint=checkpoint)
        self.ending = Ending(me, self.chain, self.forks, self.members, 0.0)


def forged(*voters: PeerId) -> Branch:
    branch = Branch().start(*voters).round(*voters, order=2).view(STRANGER, order=3)
    for order in range(4, 9):
        branch.round(STRANGER, order=order)
    return branch


def test_the_end_of_a_chain_that_its_voters_certified_is_one_at_once() -> None:
    branch = Branch().start(A, B, C, D).round(A, B, C, order=2).view(A, B, C, order=3).round(A, B, order=4)
    assert Peer(branch).ending.is_believed(0.0)


@pytest.mark.parametrize("heard", [(), (A,)])
def test_the_end_of_a_strangers_branch_is_none_before_its_voters_are_away(heard: tuple[PeerId, ...]) -> None:
    peer = Peer(forged(A, B, C))
    assert not peer.ending.is_believed(AWAY_S - 1.0)
    for voter in heard:
        peer.members.heard(voter, AWAY_S - 1.0)
    assert peer.ending.is_believed(AWAY_S) == (not heard)
    assert peer.ending.is_believed(2 * AWAY_S)


def test_the_owners_word_on_the_branch_is_enough() -> None:
    branch = forged(A, B, C)
    assert not Peer(branch, checkpoint=checkpoint_of(branch, 2)).ending.is_believed(0.0), "before where it parts"
    assert Peer(branch, checkpoint=checkpoint_of(branch, 3)).ending.is_believed(0.0)


def test_voters_who_said_that_they_leave_are_not_waited_for() -> None:
    peer = Peer(forged(A))
    peer.members.heard(A, 5.0)
    peer.members.left(A, 0)
    assert peer.ending.is_believed(6.0)


def test_a_minority_ends_it_for_itself_and_for_nobody_else() -> None:
    branch = Branch().start(A, B, C, D).round(A, B, C, order=2).view(D, order=3).round(D, order=4)
    assert Peer(branch, me=D).ending.is_believed(0.0)
    assert not Peer(branch).ending.is_believed(0.0)


def test_voters_who_came_over_have_confirmed_it() -> None:
    branch = Branch().start(A, B, C, D).round(A, B, C, order=2).view(D, order=3)
    branch.round(D, order=4, roster=(D, A, B)).round(D, A, order=5, roster=(D, A, B)).round(D, B, order=6)
    assert Peer(branch).ending.is_believed(0.0)


def test_a_voter_that_goes_along_does_not_take_its_own_vote_for_the_others() -> None:
    """A comes back, meets the stranger alone, and signs with it."""
    branch = Branch().start(A, B).round(A, B, order=2).view(STRANGER, order=3)
    branch.round(STRANGER, order=4, roster=(STRANGER, A)).round(STRANGER, A, order=5)
    assert not Peer(branch, me=A).ending.is_believed(0.0)
    assert Peer(branch, me=E).ending.is_believed(0.0), "half of the two with the first of them is a quorum to others"


def test_what_the_chain_becomes_later_is_looked_at_anew() -> None:
    branch = Branch().start(A, B, C).round(A, B, C, order=2)
    peer = Peer(branch)
    assert peer.ending.is_believed(0.0)
    for certificate in forged(A, B, C).certificates[2:]:
        peer.chain.append(certificate)
    assert not peer.ending.is_believed(0.0)
    peer.forks.checkpoint = checkpoint_of(forged(A, B, C), 5)
    assert peer.ending.is_believed(0.0)
