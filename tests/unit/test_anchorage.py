"""Which anchor is held and asked for: what the simulators do not show by themselves."""

import random

from dilocox_peer.peer.rounds.anchorage import MAX_HOLLOW, Anchorage
from dilocox_peer.peer.rounds.chain import Chain, Suffix
from dilocox_peer.peer.rounds.forks import Forks
from dilocox_peer.peer.rounds.membership import Members
from dilocox_peer.peer.rounds.timing import Timing
from dilocox_peer.types import Digest, PeerId, sha256
from dilocox_peer.wire.chain import Certificate, Entry
from dilocox_peer.wire.rounds import Heartbeat
from tests.unit.test_forks import GENESIS, A, B, Branch, C, suffix


def is_nobodys(_blob: Digest) -> bool:
    """Of no contribution that it is ours."""
    return False


def test_the_victim_of_a_copy_does_not_count_its_work_twice() -> None:
    """Our contribution is certified in another's name, and then a whole state comes."""
    mine = Entry(B, 7, sha256(b"ours"), 1, 1)
    ours = Branch().start(A, B, C)
    chain = Chain(GENESIS, ours.certificates)
    place = chain.place
    for contribution, keeps in ((mine, False), (Entry(B, 7, sha256(b"another"), 1, 1), True)):
        child = Certificate(0, place.head, 1, 0, place.round_value([contribution], place.roster), ())
        members = Members(A, Timing())
        members.heard(B, 1.0)
        members.said(B, Heartbeat(0, child.head, 1, 1, 1, 1, 0, 2, 0, True, sha256(b"state")))
        anchorage = Anchorage(
            (A, 7), chain, Forks(chain, max_back=None), members, Timing(), random.Random(0), mine.blob.__eq__, (), 0.0
        )
        anchorage.applying(chain.height)
        [asked] = anchorage.fetch(Suffix(chain.height, (child,)), 1.0)
        assert asked.keep_pseudo_gradient is keeps


def test_a_state_that_came_too_late_is_not_installed() -> None:
    """Found by seed 538 of the outer loop's simulator: while the state came, a voter went over to the branch that we left for it."""
    start = Branch().start(A, B, C)
    ours = start.fork().round(A, C, order=2)
    other = start.fork().view(B, C, order=3).round(B, C, order=3)
    over = ours.fork().view(C, order=4).round(C, order=5)
    chain = Chain(GENESIS, ours.certificates)
    forks = Forks(chain, max_back=None)
    members = Members(A, Timing())
    members.heard(B, 1.0)
    members.said(B, Heartbeat(0, other.place.head, 1, 1, 1, 1, 0, 2, 0, True, sha256(b"state")))
    anchorage = Anchorage((A, 1), chain, forks, members, Timing(), random.Random(0), is_nobodys, (), 0.0)
    path = suffix(ours, other)
    [asked] = anchorage.fetch(path, 1.0)
    assert asked.head == other.place.head
    assert anchorage.is_wanted(asked.head, path)
    assert anchorage.is_wanted(asked.head, None), "held back meanwhile, and still better than ours"
    assert not anchorage.is_wanted(asked.head, suffix(ours, over))
    forks.held_back(suffix(ours, over))
    assert not anchorage.is_wanted(asked.head, None)


def test_of_those_who_gave_no_state_a_bounded_number_is_remembered_the_newest() -> None:
    ours = Branch().start(A, B, C)
    ahead = ours.fork().round(A, B, C, order=2)
    chain = Chain(GENESIS, ours.certificates)
    anchorage = Anchorage(
        (A, 1),
        chain,
        Forks(chain, max_back=None),
        members := Members(A, Timing()),
        Timing(),
        random.Random(0),
        is_nobodys,
        (),
        0.0,
    )
    path = suffix(ours, ahead)
    now, told = 1.0, list[PeerId]()
    for batch in range(3):
        for number in range(MAX_HOLLOW // 2):
            peer = PeerId(f"peer{batch}-{number:03}")
            members.heard(peer, now)
            members.said(peer, Heartbeat(0, ahead.place.head, 1, 1, 1, 1, 0, 2, 0, True, sha256(b"state")))
        [asked] = anchorage.fetch(path, now)
        anchorage.missed(asked.head, now)
        told += asked.donors
        now = anchorage.retry_at + Timing().alive_s + 1.0
    assert list(anchorage.hollow) == told[-MAX_HOLLOW:]
