"""A view change of a minority draws nobody away from a quorum that is at work, wherever on the path it is."""

from collections.abc import Collection
from typing import Any, cast

from dilocox_peer.peer.rounds.chain import Chain, Suffix
from dilocox_peer.peer.rounds.following import Following
from dilocox_peer.peer.rounds.forks import Forks
from dilocox_peer.peer.rounds.membership import Members
from dilocox_peer.peer.rounds.timing import Timing
from dilocox_peer.peer.rounds.view_changes import ViewChanges, close_heads
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.checkpoints import Checkpoint
from dilocox_peer.wire.rounds import Heartbeat
from tests.unit.test_forks import GENESIS, A, B, Branch, C, D, E, checkpoint_of, suffix

LATE = 2**52


class Works:
    """ViewChanges where nobody wants one."""

    patience_s = 25.0

    def __init__(self, *, is_wanted: bool = False) -> None:
        self._is_wanted = is_wanted

    def is_wanted(self, now: float) -> bool:
        return self._is_wanted

    def has_more_here(self, others: Collection[PeerId], now: float) -> bool:
        """The rules without it: those who are more have had their time."""
        return False


def allowed(
    own: Branch,
    path: Suffix,
    heads: dict[PeerId, Digest],
    *,
    me: PeerId = A,
    is_wanted: bool = False,
    checkpoint: Checkpoint | None = None,
    for_s: float = 0.0,
    given_up: int = 0,
) -> int | None:
    """How many certificates of the path are followed by a peer that hears these for so long, each at its head; None: it is held back.
    given_up: of how many of them the state could not be had."""
    chain, members = Chain(GENESIS, own.certificates), Members(me, Timing())
    following = Following(me, chain, Forks(chain, max_back=None, checkpoint=checkpoint), members)
    for now in (100.0, 100.0 + for_s):
        for peer, head in heads.items():
            members.heard(peer, now)
            members.said(peer, Heartbeat(0, head, 1, 1, 1, 1, 0, 2, 0, True, b""))
        following.watch(path, now)
    if given_up:
        following.give_up(path.up_to(path.heads[given_up - 1]))
    found = following.allowed(path, cast("ViewChanges", Works(is_wanted=is_wanted)), 100.0 + for_s)
    return None if found is None else len(found.certificates)


def at(branch: Branch, peers: Collection[PeerId]) -> dict[PeerId, Any]:
    return dict.fromkeys(peers, branch.place.head)


def test_a_hostile_pair_further_up_is_not_followed_by_who_is_a_round_behind() -> None:
    """Four, two of them hostile, the first one honest: half of the roster with its first peer is a quorum that is at work."""
    behind = Branch().start(A, B, C, D).round(A, B, C, order=2)
    ahead = behind.fork().round(B, C, D, order=3)
    forged = ahead.fork().view(C, D, order=LATE)
    for order in range(LATE, LATE + 20):
        forged.round(C, D, order=order + 1)
    heard = {**at(ahead, [B]), **at(forged, [C, D])}
    assert allowed(behind, suffix(behind, forged), heard) == 1, "up to the round that a quorum has certified"
    assert allowed(ahead, suffix(ahead, forged), heard) is None
    assert allowed(behind, suffix(behind, forged), at(forged, [C, D])) == 22, "where nobody stays, it is gone after"


def test_a_pair_that_leaves_a_round_of_its_own_behind_draws_nobody_back() -> None:
    """Two of five have chosen whose votes certify a round, one honest one beside their own, and fork before it."""
    before = Branch().start(A, B, C, D, E).round(A, B, C, order=2)
    ours = before.fork().round(A, D, E, order=3)
    forged = before.fork().view(D, E, order=LATE)
    path = suffix(ours, forged)
    chain = Chain(GENESIS, ours.certificates)
    assert Forks(chain, max_back=None).is_better(path, None), "by votes alone it counts more"
    heard = {**at(ours, [B, C]), **at(forged, [D, E])}
    assert allowed(ours, path, heard) is None
    assert allowed(ours, path, at(forged, [D, E])) == 1, "but where the quorum is gone it is all there is"


def test_two_minorities_that_meet_go_by_the_votes() -> None:
    before = Branch().start(A, B, C, D, E)
    ours, theirs = before.fork().view(A, order=3), before.fork().view(B, C, order=3)
    heard = {**at(theirs, [B, C]), **at(before, [D, E])}
    assert allowed(ours, suffix(ours, theirs), heard) == 1


def test_who_is_on_a_branch_of_its_own_holds_nobody_at_the_beginning_of_another() -> None:
    """A pair comes back from a partition to a chain that others, a pair by then too, have gone on with."""
    before = Branch().start(A, B, C, D)
    ours = before.fork().view(A, order=3)
    theirs = before.fork().round(B, C, D, order=3).view(C, D, order=4).round(C, D, order=5)
    heard = {**at(ours, [B]), **at(theirs, [C, D])}
    assert allowed(ours, suffix(ours, theirs), heard) == 3


def test_a_majority_that_went_on_without_us_is_followed() -> None:
    before = Branch().start(A, B, C, D, E)
    theirs = before.fork().view(B, C, D, order=3).round(B, C, order=4)
    assert allowed(before, suffix(before, theirs), at(theirs, [B, C, D])) == 2
    pair = before.fork().view(D, E, order=3)
    assert allowed(before, suffix(before, pair), {**at(before, [B, C]), **at(pair, [D, E])}) is None
    assert allowed(before, suffix(before, pair), at(pair, [D, E]), is_wanted=True) == 1


def test_what_the_owner_has_signed_is_followed_and_no_further() -> None:
    before = Branch().start(A, B, C, D)
    theirs = before.fork().view(D, order=3).round(D, order=4, roster=(D, E))
    vouched = checkpoint_of(theirs, 3)
    forged = theirs.fork().view(E, order=LATE)
    heard = {**at(before, [B, C]), **at(theirs, [D]), **at(forged, [E])}
    assert allowed(before, suffix(before, theirs), heard) is None
    assert allowed(before, suffix(before, theirs), heard, checkpoint=vouched) == 2
    assert allowed(before, suffix(before, forged), heard, checkpoint=vouched) == 2


def test_a_roster_of_strangers_further_up_is_not_followed_while_a_voter_is_here_though_the_others_are_silent() -> None:
    """Found by hostile seed 6952: cut off from the others, a round behind, and shown what they had certified and more."""
    strangers = (PeerId("stranger0"), PeerId("stranger1"))
    behind = Branch().start(A, B, C, D).round(A, B, C, order=2)
    ahead = behind.fork().round(B, C, D, order=3)
    forged = ahead.fork().view(*strangers, order=LATE).round(*strangers, order=LATE)
    assert allowed(behind, suffix(behind, forged), {strangers[0]: forged.place.head}, is_wanted=True) == 1


def test_a_voter_on_a_branch_of_its_own_follows_who_went_on_without_any_voter() -> None:
    """Found by seeds 615 and 1036: the other of a pair certified a round and was gone; a newcomer that had it went on alone. Each
    thought the other's branch the worse one, for ever."""
    newcomer = PeerId("newcomer")
    before = Branch().start(A, B)
    ours = before.fork().view(B, order=3).round(B, order=4, roster=(B,))
    theirs = before.fork().round(A, order=3, roster=(A, B)).view(newcomer, order=LATE).round(newcomer, order=LATE)
    path = suffix(ours, theirs)
    assert Forks(Chain(GENESIS, ours.certificates), max_back=None).is_better(path, None)
    assert allowed(ours, path, at(theirs, [newcomer]), me=B) == 3
    assert allowed(before, suffix(before, theirs), at(theirs, [newcomer]), me=B) == 1, (
        "who has not gone its own way waits"
    )


def test_what_strangers_began_is_followed_once_the_voters_who_are_here_go_along_with_it() -> None:
    """Found by slicing seed 2356: a newcomer wrote a view change alone, the only voter left came over from a branch of its own and voted in
    no certificate for long, and two newcomers wrote another beside it, because a voter was here. They stood apart for ever."""
    newcomer = PeerId("newcomer")
    before = Branch().start(A, B)
    theirs = before.fork().view(newcomer, order=3).round(newcomer, order=4, roster=(newcomer, B))
    ours = before.fork().view(C, D, order=5)
    for own in (before, ours):
        path = suffix(own, theirs)
        heard = at(theirs, [newcomer])
        assert allowed(own, path, {**heard, **at(before, [B])}, me=C, is_wanted=True) is None, "a voter stays"
        assert allowed(own, path, {**heard, **at(theirs, [B])}, me=C, is_wanted=True) == 2
        assert allowed(own, path, {**heard, **at(theirs, [B])}, me=A, is_wanted=True) is None, (
            "a voter of its own accord"
        )


def test_who_comes_back_goes_along_when_its_whole_roster_went_on_without_it() -> None:
    """Of two, the one with the lower position is a quorum alone: it founded a branch against the one that had waited for it."""
    before = Branch().start(A, B)
    theirs = before.fork().view(B, order=3).round(B, order=4, roster=(B,))
    assert allowed(before, suffix(before, theirs), at(theirs, [B])) == 2
    four = Branch().start(A, B, C, D)
    pair = four.fork().view(C, D, order=3)
    assert allowed(four, suffix(four, pair), at(pair, [C, D])) == 1
    assert allowed(four, suffix(four, pair), {**at(four, [B]), **at(pair, [C, D])}) is None


def test_who_has_certified_since_does_not() -> None:
    before = Branch().start(A, B)
    ours, theirs = before.fork().round(A, order=5), before.fork().view(B, order=3).round(B, order=4, roster=(B,))
    assert allowed(ours, suffix(ours, theirs), at(theirs, [B])) is None


def test_a_quorum_that_certifies_nothing_where_it_is_now_holds_nobody_for_long() -> None:
    """Found by slicing seed 193: one of a pair certified a round with the other, which missed that and went on alone, and by its position
    had the better branch. The third of the roster before stood with the first, had no vote there, and made it a quorum at work."""
    before = Branch().start(A, B, C)
    theirs = before.fork().view(B, order=4).round(B, order=5, roster=(B,))
    ours = before.fork().round(B, C, order=3, roster=(B, C))
    path = suffix(ours, theirs)
    assert Forks(Chain(GENESIS, ours.certificates), max_back=None).is_better(path, None)
    heard = {**at(theirs, [B]), **at(ours, [A])}
    assert allowed(ours, path, heard, me=C, for_s=12.0) is None
    assert allowed(ours, path, heard, me=C, for_s=13.0) == 2
    assert allowed(ours, path, {**at(theirs, [B]), **at(ours, [C])}, me=A, for_s=13.0) == 2, "whoever stands there"


def test_a_quorum_that_certifies_where_it_is_now_holds_us_for_ever() -> None:
    before = Branch().start(A, B, C, D, E)
    ours = before.fork().round(A, D, E, order=3, roster=(A, B, C, D, E))
    forged = before.fork().view(D, E, order=LATE)
    heard = {**at(ours, [B, C]), **at(forged, [D, E])}
    assert allowed(ours, suffix(ours, forged), heard, for_s=1000.0) is None


def test_who_cannot_come_as_far_as_the_quorum_would_stand_goes_along() -> None:
    """Found by seed 1370: one certified a round with a contribution that nobody else could merge, and went on alone. Two newcomers, a
    quorum of the roster that the round had, waited below it for a state that there was no more, until the owner signed what followed."""
    before = Branch().start(A)
    lost = before.fork().round(A, order=2, roster=(A, B, C))
    theirs = lost.fork().view(A, order=3).round(A, order=4)
    path, waiting = suffix(before, theirs), {**at(theirs, [A]), **at(before, [C])}
    assert allowed(before, path, waiting, me=B) == 1
    assert allowed(before, path, waiting, me=B, given_up=1) == 3
    elsewhere = lost.fork().round(B, C, order=5)
    for other in (lost, elsewhere):
        heard = {**at(theirs, [A]), **at(before, [D]), **at(other, [B, C])}
        assert allowed(before, path, heard, me=E, given_up=1) == 1, "a quorum is at work there"
    strangers = lost.fork().view(D, order=3).round(D, order=4)
    heard = {**at(strangers, [D]), **at(before, [C])}
    assert allowed(before, suffix(before, strangers), heard, me=B, given_up=1) == 1, "nor with what no voter has signed"


def test_who_may_stay_before_a_view_change_of_a_minority_is_not_close_behind_it() -> None:
    """Found by slicing seeds 6195, 6667 and 9275: one went on alone, took those into its next roster who held to the old one, and could
    certify nothing without them. Time and again it went on alone anew, as each of them came over to where it had been before."""
    before = Branch().start(A, B, C).round(A, B, order=2).round(A, B, order=3)
    assert close(before, 3) == heads(before)[-3:]
    alone = before.fork().view(C, order=4)
    assert close(alone, 3) == heads(alone)[-1:]
    assert close(alone.round(C, order=5), 3) == heads(alone)[-2:]
    assert close(alone.round(C, order=6).round(C, order=7), 3) == heads(alone)[-3:]
    most = before.fork().view(A, C, order=4)
    assert close(most, 3) == heads(most)[-3:], "whoever stayed would have no quorum there"


def close(branch: Branch, count: int) -> tuple[Digest, ...]:
    return close_heads(Chain(GENESIS, branch.certificates), count)


def heads(branch: Branch) -> tuple[Digest, ...]:
    return tuple(certificate.head for certificate in branch.certificates)
