"""Which links become sessions, statement by statement; many of them at once, under faults: tests/sim/test_links.py."""

from typing import Any

import pytest

from dilocox_peer.events import Failed, NeighbourLinked, NeighbourUnlinked
from dilocox_peer.invitation import MAX_ADDRESS_CHARS
from dilocox_peer.network.frames import pack_header
from dilocox_peer.network.link_frames import FrameKind
from dilocox_peer.peer.links.dialling import MAX_DIALLED, Dial, HangUp, LinkAddress
from dilocox_peer.peer.links.greeting import Greeter
from dilocox_peer.peer.links.sessions import (
    FAULTS_UNTIL_DROPPED,
    GREETING_S,
    MAX_RESTARTS,
    MOVES,
    REST_S,
    RESTARTS_WITHIN_S,
    Cause,
    GiveUp,
    Greet,
    Hand,
    LinkAction,
    LinkSessions,
    LinkState,
    StartLinkd,
    Tell,
)
from dilocox_peer.peer.links.shunned import LINES_PER_MINUTE, MAX_SHUNNED, SHUN_S, Shunned
from dilocox_peer.pipeline import contract
from dilocox_peer.signing import SigningKey
from dilocox_peer.types import LinkId, PeerId, RunId

RUN, OURS, LINK, OTHER = RunId("run"), LinkId("ours"), LinkId("theirs"), LinkId("theirs, anew")
KEYS = [SigningKey(bytes([number]) * 32) for number in range(1, 7)]


class Side:
    """A peer's sessions, and what they wanted done so far."""

    def __init__(self, stage: int = 0) -> None:
        self.now = 0.0
        greeter = Greeter(SigningKey(bytes(32)), RUN, lambda: OURS, stage, 1)
        self.sessions = LinkSessions(stage, greeter.checked)
        self.done: list[LinkAction] = []

    def opened(self, link: LinkId = LINK) -> None:
        self.done += self.sessions.opened(link, self.now) + self.sessions.tick(self.now)

    def lost(self, link: LinkId = LINK) -> None:
        self.done += self.sessions.lost(link, "gone", self.now)

    def greeted(self, key: SigningKey = KEYS[0], *, link: LinkId = LINK, stage: int = 1, run: str = RUN) -> None:
        raw = Greeter(key, RunId(run), lambda: link, stage, 5).hello(OURS)
        self.done += self.sessions.greeting(link, raw, self.now)

    def refused(self, link: LinkId = LINK) -> None:
        self.done += self.sessions.refused(link, "for a test", self.now)

    def want(self, *links: LinkId, peer: PeerId = KEYS[0].peer_id, addresses: tuple[str, ...] = ("here",)) -> None:
        self.sessions.want([LinkAddress(peer, link, addresses) for link in links], self.now)
        self.tick()

    def tick(self) -> None:
        self.done += self.sessions.tick(self.now)

    def take(self, kind: type) -> list[Any]:
        """What there was of a kind, taken out."""
        found = [action for action in self.done if isinstance(action, kind)]
        self.done = [action for action in self.done if not isinstance(action, kind)]
        return found

    def told(self, kind: type) -> list[Any]:
        return [action.event for action in self.done if isinstance(action, Tell) and isinstance(action.event, kind)]

    def handed(self) -> list[Any]:
        return [action.happened for action in self.done if isinstance(action, Hand)]


@pytest.fixture
def side() -> Side:
    return Side()


def test_a_link_is_greeted_and_with_its_greeting_becomes_a_session(side: Side):
    side.opened()
    assert side.done == [Greet(LINK)]
    assert side.sessions.peer_of(LINK) is None
    side.greeted()
    peer = KEYS[0].peer_id
    assert side.sessions.linked == {peer: 1}
    assert (side.sessions.peer_of(LINK), side.sessions.link_of(peer)) == (peer, LINK)
    assert side.handed() == [contract.Linked(peer, 1)]
    assert side.told(NeighbourLinked) == [NeighbourLinked(peer, 1)]


def test_a_link_that_ends_and_comes_again_before_we_have_greeted_is_greeted_once(side: Side):
    """linkd tells all at one time, and what is sent then goes over the second link."""
    for _ in range(2):
        side.done += side.sessions.opened(LINK, side.now)
        side.lost()
    side.opened()
    assert side.done == [Greet(LINK)]


def test_a_link_that_greeted_before_we_have_is_greeted_all_the_same(side: Side):
    side.done += side.sessions.opened(LINK, side.now)
    side.greeted()
    side.tick()
    assert side.take(Greet) == [Greet(LINK)]


def test_one_link_greets_for_one_peer(side: Side):
    """Else each greeting adds a callee, and all but the last stay when the link ends: an origin would wait for them."""
    side.opened()
    for key in KEYS:
        side.greeted(key)
    assert len(side.told(NeighbourLinked)) == 1
    assert any("a second greeting" in event.reason for event in side.told(Failed))
    side.lost()
    assert len(side.told(NeighbourUnlinked)) == 1
    assert side.sessions.linked == {}
    assert side.sessions.state_of(LINK) is LinkState.DOWN


def test_a_new_link_may_greet_again(side: Side):
    for _ in range(2):
        side.opened()
        side.greeted()
        assert len(side.sessions.linked) == 1
        side.lost()
    assert side.handed() == [contract.Linked(KEYS[0].peer_id, 1), contract.Unlinked(KEYS[0].peer_id)] * 2


@pytest.mark.parametrize(("stage", "run"), [(0, "run"), (2, "run"), (1, "another")])
def test_a_greeting_of_another_stage_or_run_costs_its_link(side: Side, stage: int, run: str):
    side.opened()
    side.greeted(stage=stage, run=run)
    assert side.take(HangUp) == [HangUp(LINK)]
    assert side.sessions.linked == {}
    assert len(side.told(Failed)) == 1


def test_a_link_that_was_refused_is_hung_up_unheard_when_it_dials_in_again(side: Side):
    """Else each greeting costs it a link, and us a signature to check and an event."""
    for _ in range(5):
        side.opened()
        side.greeted(stage=5)
        side.lost()
    assert side.take(HangUp) == [HangUp(LINK)] * 5
    assert side.take(Greet) == [Greet(LINK)]
    assert len(side.told(Failed)) == 1
    side.now = SHUN_S + 1.0
    side.opened()
    side.greeted()
    assert len(side.sessions.linked) == 1


def test_a_neighbour_is_dropped_for_its_last_fault_and_its_link_not_heard_from_then_on(side: Side):
    side.opened()
    side.greeted()
    for _ in range(FAULTS_UNTIL_DROPPED):
        assert side.sessions.peer_of(LINK) is not None
        side.refused()
    assert side.sessions.peer_of(LINK) is None
    assert side.take(HangUp) == [HangUp(LINK)]
    assert [event.reason for event in side.told(NeighbourUnlinked)] == ["for a test"]
    told = len(side.done)
    side.refused()
    side.greeted()
    assert len(side.done) == told


def test_a_flood_of_strangers_does_not_fill_the_log(side: Side):
    for number in range(3 * LINES_PER_MINUTE):
        stranger = LinkId(f"stranger{number}")
        side.opened(stranger)
        side.done += side.sessions.greeting(stranger, b"?", side.now)
    assert len(side.told(Failed)) == LINES_PER_MINUTE


def test_a_link_that_says_nothing_is_hung_up_in_time_and_not_shunned(side: Side):
    """linkd holds a bounded number of links that others made: silent ones would shut its door."""
    side.opened()
    assert side.sessions.deadline == GREETING_S
    side.now = GREETING_S
    side.tick()
    assert side.take(HangUp) == [HangUp(LINK)]
    side.lost()
    side.opened()
    assert side.take(Greet) == [Greet(LINK)] * 2


def test_a_peer_that_comes_with_another_link_leaves_the_one_it_had(side: Side):
    side.opened()
    side.greeted()
    side.opened(OTHER)
    side.greeted(link=OTHER)
    peer = KEYS[0].peer_id
    assert side.sessions.link_of(peer) == OTHER
    assert side.handed() == [contract.Linked(peer, 1), contract.Unlinked(peer), contract.Linked(peer, 1)]
    assert side.take(HangUp) == [HangUp(LINK)]  # else it would take one of linkd's places for ever
    side.lost(LINK)
    assert side.sessions.linked == {peer: 1}


def test_a_neighbour_that_does_not_take_what_we_send_is_dialled_again_after_a_rest(side: Side):
    """linkd forgets whom it dials when it hangs up: the neighbour would be lost unless it dials us."""
    side.want(LINK)
    assert side.take(Dial) == [Dial(LINK, ("here",))]
    side.opened()
    side.greeted()
    side.done += side.sessions.congested(LINK, side.now)
    assert side.take(HangUp) == [HangUp(LINK)]
    side.lost()
    side.want(LINK)
    assert side.take(Dial) == []
    assert side.sessions.deadline == REST_S
    side.now = REST_S
    side.tick()
    assert side.take(Dial) == [Dial(LINK, ("here",))]


def test_a_shunned_link_is_dialled_again_when_its_time_is_over_and_not_when_its_lease_is_read_again(side: Side):
    side.want(LINK)
    side.opened()
    side.greeted(stage=5)
    side.lost()
    side.take(Dial)
    for side.now in (1.0, SHUN_S - 1.0):
        side.want(LINK)
        assert side.take(Dial) == []
    side.now = side.sessions.deadline
    side.tick()
    assert (side.now, side.take(Dial)) == (SHUN_S, [Dial(LINK, ("here",))])


def test_a_lease_that_names_anothers_link_costs_that_one_nothing(side: Side):
    """A lease can name any link; a greeting is signed by its holder."""
    side.want(LINK, peer=KEYS[1].peer_id)
    side.opened()
    side.greeted(KEYS[0])
    assert side.sessions.linked == {KEYS[0].peer_id: 1}
    assert [KEYS[1].peer_id in event.reason for event in side.told(Failed)] == [True]


def test_a_link_that_two_leases_name_is_dialled_at_the_addresses_of_both(side: Side):
    leases = [LinkAddress(KEYS[each].peer_id, LINK, (f"of {each}",)) for each in (0, 1)]
    side.sessions.want(leases, side.now)
    side.tick()
    (dial,) = side.take(Dial)
    assert set(dial.addresses) == {"of 0", "of 1"}


def test_however_many_leases_name_a_link_its_addresses_go_into_one_order(side: Side):
    """A lease may name any link, and what an order to linkd holds is bounded: one that is not packed ends the pipeline."""
    long = "x" * (MAX_ADDRESS_CHARS - 10)
    leases = [
        LinkAddress(PeerId(f"{peer:03}"), LINK, tuple(f"{number} of {peer} {long}" for number in range(9)))
        for peer in range(MAX_DIALLED)
    ]
    side.sessions.want(leases, side.now)
    side.tick()
    (dial,) = side.take(Dial)
    assert pack_header(FrameKind.DIAL, {"n": dial.link, "a": dial.addresses}, 0)
    assert {lease.addresses[0] for lease in leases} <= set(dial.addresses), "the one that is true is among them"


def test_a_link_that_nobody_wants_any_more_is_not_dialled_once_it_has_ended(side: Side):
    side.want(LINK, OTHER)
    side.opened()
    side.greeted()
    side.want()
    assert side.take(HangUp) == [HangUp(OTHER)]
    side.lost()
    side.tick()
    assert side.take(HangUp) == [HangUp(LINK)]
    assert side.sessions.dialled == {}


def test_addresses_are_dialled_when_they_are_new_and_those_on_this_network_come_first(side: Side):
    side.want(LINK)
    side.want(LINK)
    side.done += side.sessions.found(LINK, ("near",))
    side.done += side.sessions.found(LINK, ("near",))
    side.done += side.sessions.found(OTHER, ("near",))  # none of ours
    side.want(LINK, addresses=("there", "here"))
    assert side.take(Dial) == [Dial(LINK, ("here",)), Dial(LINK, ("near", "here")), Dial(LINK, ("there", "here"))]


def test_so_many_are_dialled_and_no_more(side: Side):
    side.want(*(LinkId(f"link{number}") for number in range(MAX_DIALLED + 1)))
    assert len(side.take(Dial)) == MAX_DIALLED


def test_of_too_many_nobody_else_can_tell_who_is_dialled():
    """Names are made until they are low: whoever dials the lowest would dial nobody else."""
    sessions = LinkSessions(0, Greeter(SigningKey(bytes(32)), RUN, lambda: OURS, 0, 1).checked, lambda peer: peer[::-1])
    peers = [PeerId(f"{number:02}") for number in range(MAX_DIALLED + 9)]
    sessions.want([LinkAddress(peer, LinkId(peer), ("here",)) for peer in peers], 0.0)
    sessions.tick(0.0)
    assert list(sessions.dialled) == [LinkId(peer) for peer in sorted(peers, key=lambda peer: peer[::-1])[:MAX_DIALLED]]


def test_with_linkd_all_sessions_end_and_it_is_started_after_growing_pauses_until_it_is_given_up(side: Side):
    side.opened()
    side.greeted()
    for _ in range(MAX_RESTARTS + 1):
        side.done += side.sessions.linkd_ended("killed", side.now)
    assert side.sessions.linked == {}
    assert [action.pause_s for action in side.take(StartLinkd)] == [0.0, 0.25, 0.5, 1.0, 2.0]
    assert len(side.take(GiveUp)) == 1
    side.now = RESTARTS_WITHIN_S + 1.0
    side.done += side.sessions.linkd_ended("killed", side.now)
    assert side.take(StartLinkd) == [StartLinkd(0.0)]


def test_round_trips_are_of_neighbours_alone(side: Side):
    side.opened()
    assert side.sessions.measured(LINK, 0.1) == []
    side.greeted()
    assert side.sessions.measured(LINK, 0.1) == [Hand(contract.RoundTrip(KEYS[0].peer_id, 0.1))]
    assert side.sessions.rtt_s == {KEYS[0].peer_id: 0.1}
    side.lost()
    assert side.sessions.rtt_s == {}


# -- the table of moves: what is done to a link in each state ----------------------------------------------------------


def _settle_elsewhere(side: Side) -> None:
    side.opened(OTHER)
    side.greeted(link=OTHER)


def _be_silent(side: Side) -> None:
    side.now += GREETING_S
    side.tick()


def _break_thrice(side: Side) -> None:
    for _ in range(FAULTS_UNTIL_DROPPED):
        side.refused()


DONE: dict[str, tuple[Any, dict[LinkState, list[Cause]]]] = {
    "it comes up": (
        Side.opened,
        {LinkState.DOWN: [Cause.OPENED], LinkState.CLOSING: [Cause.LOST, Cause.OPENED_SHUNNED]},
    ),
    "it greets": (Side.greeted, {LinkState.GREETING: [Cause.GREETED], LinkState.SETTLED: [Cause.FAULT]}),
    "a frame is refused": (Side.refused, {LinkState.GREETING: [Cause.REFUSED], LinkState.SETTLED: [Cause.FAULT]}),
    "three frames are refused": (
        _break_thrice,
        {LinkState.GREETING: [Cause.REFUSED], LinkState.SETTLED: [Cause.FAULT, Cause.FAULT, Cause.DROPPED]},
    ),
    "its peer settles elsewhere": (_settle_elsewhere, {LinkState.SETTLED: [Cause.REPLACED]}),
    "it takes no more": (
        lambda side: side.sessions.congested(LINK, side.now),
        {LinkState.SETTLED: [Cause.CONGESTED]},
    ),
    "it says nothing for long": (_be_silent, {LinkState.GREETING: [Cause.SILENT]}),
    "it ends": (Side.lost, {state: [Cause.LOST] for state in LinkState if state is not LinkState.DOWN}),
}
CASES = [
    (state, done)
    for state in LinkState
    for done, (_, causes_of) in DONE.items()
    if done != "it comes up" or state in causes_of  # linkd never says that of a link that is up
]


@pytest.mark.parametrize(("state", "done"), CASES)
def test_a_link_goes_where_the_table_says_and_stays_where_it_says_nothing(state: LinkState, done: str):
    side = Side()
    if state is not LinkState.DOWN:
        side.opened()
    if state is LinkState.SETTLED:
        side.greeted()
    if state is LinkState.CLOSING:
        side.refused()
    assert side.sessions.state_of(LINK) is state
    do, causes_of = DONE[done]
    expected = state
    for cause in causes_of.get(state, []):
        expected = MOVES[expected, cause]
    do(side)
    assert side.sessions.state_of(LINK) is expected


def test_shunned_links_are_forgotten_in_time_and_beyond_a_number():
    shunned, links = Shunned(), [LinkId(f"stranger{number}") for number in range(MAX_SHUNNED + 1)]
    for link in links:
        shunned.add(link, 0.0)
    assert not shunned.has(links[0], 1.0)
    assert all(shunned.has(link, 1.0) for link in links[1:])
    shunned.add(links[1], 1.0)
    assert shunned.has(links[1], SHUN_S)
    assert not shunned.has(links[2], SHUN_S)
    shunned.add(links[0], SHUN_S + 2.0)
    assert len(shunned) == 1
