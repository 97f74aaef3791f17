"""How many newcomers of one range of addresses a roster takes in."""

import pytest

from dilocox_peer.invitation import address_range
from dilocox_peer.peer.rounds.membership import MAX_KNOWN, Members, within_shares
from dilocox_peer.peer.rounds.timing import Timing
from dilocox_peer.types import PeerId, sha256
from dilocox_peer.wire.rounds import Heartbeat

HEAD = sha256(b"head")
FARM = "203.0.113.0/24"
MEMBERS = tuple(PeerId(name) for name in "abcdef")
SYBILS = tuple(PeerId(f"sybil{number:02d}") for number in range(30))


def members_that_know(*, range_of_sybils: str) -> Members:
    members = Members(MEMBERS[0], Timing())
    for peer in (*MEMBERS[1:], *SYBILS):
        members.heard(peer, 0.0)
        members.said(peer, Heartbeat(0, HEAD, 1, 1, 1, 1, 0, 2, 0, True, b""))
        if peer in SYBILS:
            members.seen_in(peer, range_of_sybils)
    return members


def next_roster(members: Members) -> tuple[PeerId, ...]:
    return members.next_roster(MEMBERS, (), [HEAD], me_too=True, max_peers=16, now=1.0)


def test_thirty_of_one_range_get_a_quarter_of_the_places() -> None:
    roster = next_roster(members_that_know(range_of_sybils=FARM))
    assert roster[:6] == MEMBERS
    assert len(roster) == 6 + 4


def test_where_sixty_four_may_come_one_range_has_a_quarter_of_those_who_are_here() -> None:
    many = tuple(PeerId(f"member{number:02d}") for number in range(40))
    assert len(within_shares(MEMBERS, SYBILS, lambda peer: FARM if peer in SYBILS else "", 64)) == 6 + 4
    assert len(within_shares(many, SYBILS, lambda peer: FARM if peer in SYBILS else "", 64)) == 40 + 10


def test_peers_of_one_house_and_relayed_ones_are_not_counted_together() -> None:
    assert len(next_roster(members_that_know(range_of_sybils=""))) == 16


def test_a_proposed_roster_with_a_crowd_is_refused_by_who_sees_it() -> None:
    members = members_that_know(range_of_sybils=FARM)
    assert members.why_crowded(MEMBERS, (*MEMBERS, *SYBILS[:4]), 16) is None
    assert FARM in (members.why_crowded(MEMBERS, (*MEMBERS, *SYBILS[:5]), 16) or "")


def test_who_is_in_stays_also_where_all_are_seen_in_one_range() -> None:
    assert within_shares(MEMBERS, SYBILS, lambda peer: FARM, 16) == list(MEMBERS)


@pytest.mark.parametrize(
    ("host", "found"),
    [
        ("9.9.9.9", "9.9.9.0/24"),
        ("2620:fe:0:1::9", "2620:fe::/48"),
        ("127.0.0.1", ""),
        ("192.168.1.7", ""),
        ("10.1.2.3", ""),
        ("::1", ""),
        ("fe80::1", ""),
        ("example.org", ""),
    ],
)
def test_the_range_of_an_address(host: str, found: str) -> None:
    assert address_range(host) == found


def test_bytes_of_a_body_are_a_sign_of_life_of_who_was_heard() -> None:
    timing = Timing()
    members, heard, stranger = Members(PeerId("me"), timing), PeerId("heard"), PeerId("stranger")
    members.heard(heard, 0.0)
    members.add(stranger)
    for peer in (heard, stranger, PeerId("unknown")):
        members.is_here(peer, timing.alive_s)
    assert members.alive(2 * timing.alive_s) == {heard}
    members.left(heard, 1)
    members.is_here(heard, 2 * timing.alive_s)
    assert not members.alive(2 * timing.alive_s), "it said that it leaves"


def test_nothing_is_waited_for_of_who_has_gone_on_along_another_branch() -> None:
    """Found by slicing seeds 2791 and 3182: half of a roster with its first peer is a quorum, and waited for offers, slices and leaders
    of the other half, which had gone on without it."""
    members, gone, late = Members(PeerId("me"), Timing()), PeerId("gone"), PeerId("late")
    elsewhere = sha256(b"a head that is known to be on another branch")
    members.is_elsewhere = lambda head: head == elsewhere
    for peer, head in ((gone, elsewhere), (late, HEAD)):
        members.heard(peer, 0.0)
        members.said(peer, Heartbeat(0, head, 1, 1, 1, 1, 0, 2, 0, True, b""))
    assert [members.takes_part(peer, 1.0) for peer in (gone, late)] == [False, True]
    assert [members.may_offer(peer, 1.0) for peer in (gone, late)] == [False, True]
    assert members.is_alive(gone, 1.0), "it stays in the roster, and may come over"
    members.said(gone, Heartbeat(0, HEAD, 1, 1, 1, 1, 0, 2, 0, True, b""))
    assert members.takes_part(gone, 1.0), "it has come over"


def why_not(members: Members, before: str, after: str, *, unwanted: str = "", max_peers: int = 16) -> str | None:
    def peers(names: str) -> tuple[PeerId, ...]:
        return tuple(map(PeerId, names))

    reason = members.why_expelled(tuple(peer for peer in peers(before) if peer not in unwanted), peers(after), (), 1.0)
    return reason or members.why_unseated(
        peers(after), 1.0, is_unwanted=lambda peer: peer in unwanted, max_peers=max_peers
    )


def voters_that_were(names: str, now: str, newcomers: str = "") -> Members:
    """Who voted with us before and follows, and who votes now; newcomers sit in the roster too."""
    members = members_that_know(range_of_sybils="")
    members.sit_down(tuple(map(PeerId, names)), tuple(map(PeerId, names)), [HEAD], 0.0)
    members.sit_down(tuple(map(PeerId, now + newcomers)), tuple(map(PeerId, now)), [HEAD], 0.5)
    return members


def test_of_voters_that_are_here_a_third_may_be_left_out() -> None:
    members = voters_that_were("abcdef", "abcdef")
    assert why_not(members, "abcdef", "abcd") is None
    assert why_not(members, "abcdef", "abc") == "a roster without 3 members that are here"
    assert why_not(voters_that_were("abc", "abc", "def"), "abcdef", "adef") == "a roster without 2 voters that are here"


def test_who_voted_before_and_is_back_counts_where_there_is_a_place() -> None:
    members = voters_that_were("abcdef", "abcd")
    assert why_not(members, "abcd", "abcd") is None, "two of six: who leads may not have heard that they are back"
    assert why_not(members, "abcd", "abc") == "a roster without 3 voters that are here"
    assert why_not(members, "abcd", "abce") is None
    assert why_not(members, "abcd", "abc", max_peers=3) is None, "there is no place for them"
    assert why_not(members, "abcd", "abc", unwanted="ef") is None, "banned, or proved to have voted twice"
    assert why_not(members, "abcd", "abc", unwanted="de") is None


def test_of_two_voters_neither_is_left_out() -> None:
    assert why_not(voters_that_were("ab", "ab"), "ab", "b") == "a roster without 1 voters that are here"


def test_a_crowd_of_strangers_has_no_voter_forgotten() -> None:
    """Keys cost nothing: a voter last heard a second ago would be gone, with all that it has said."""
    members, voter = Members(PeerId("me"), Timing()), PeerId("voter")
    members.sit_down([voter], [voter], [], 0.0)
    members.heard(voter, 10.0)
    for number in range(2 * MAX_KNOWN):
        members.heard(PeerId(f"s{number}"), 11.0)
    assert len(members.known) == MAX_KNOWN
    assert members.is_alive(voter, 11.0)


def test_who_sat_in_a_roster_and_was_not_met_is_as_unknown_as_before() -> None:
    """Whoever leads writes rosters: a key that it has made up would be known from its first round in one."""
    me, made_up, found, heard = (PeerId(name) for name in ("me", "made up", "found", "heard"))
    members = Members(me, Timing())
    members.heard(heard, 0.0)
    members.add(found)
    members.seen_in(found, "")
    before = (me, heard)
    assert members.why_unknown(before, (*before, found), vote_at_once=True) is None
    members.sit_down((*before, made_up), (*before, made_up), [], 0.0)
    members.sit_down(before, before, [], 1.0)
    reason = "a roster with 1 newcomers that are not known here"
    assert members.why_unknown(before, (*before, made_up), vote_at_once=True) == reason
    assert members.why_unknown(before, (*before, made_up), vote_at_once=False) is None, "it has to earn its vote"
    many = (*before, made_up, PeerId("another"))
    assert members.why_unknown(before, many, vote_at_once=False) == "a roster with 2 newcomers that are not known here"


def test_who_was_put_out_is_unknown_until_it_is_met_again() -> None:
    me, peer = PeerId("me"), PeerId("peer")
    members = Members(me, Timing())

    def is_known() -> bool:
        return members.why_unknown((me,), (me, peer), vote_at_once=True) is None

    members.heard(peer, 0.0)
    members.left(peer, 1)
    members.refused(peer, 1.0)
    assert is_known(), "its process has ended, and may have started again where another hears it"
    members.refused(peer, 1.0, is_out=True)
    assert not is_known()
    members.seen_in(peer, "")
    assert is_known(), "with an invitation that is newer"
    members.refused(peer, 1.5, is_out=True)
    members.heard(peer, 2.0)
    assert is_known()
