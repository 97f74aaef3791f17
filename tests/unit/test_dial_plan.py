"""Which peers of the stage are dialled, and when."""

from dataclasses import replace
from itertools import pairwise

from dilocox_peer.dht.records import Lease
from dilocox_peer.peer.dial_plan import (
    BETTER_S,
    FIRST_RETRY_S,
    MAX_LISTED,
    MAX_RETRY_S,
    MOST_BETTER_S,
    PUNCH_S,
    DialPlan,
    to_ask_for_relays,
)
from dilocox_peer.signing import SigningKey
from dilocox_peer.types import PeerId

ME, A, B = PeerId("me"), PeerId("a"), PeerId("b")


def lease(peer: PeerId, *addresses: str) -> Lease:
    return Lease(
        peer=peer, stage=0, incarnation=1, addresses=addresses or ("/one",), protocol=1, tokens_per_s=0.0, memory_bytes=0,
        reachability="direct", round=0,
    )  # fmt: skip


def plan(*leases: Lease) -> DialPlan:
    made = DialPlan(ME)
    made.listed(leases)
    return made


def dialled(of: DialPlan, connected: set[PeerId], now: float) -> list[PeerId]:
    return [peer for peer, _ in of.due(connected, now)]


def test_everybody_listed_is_dialled_once_but_ourselves():
    plans = plan(lease(A), lease(B), lease(ME))
    assert plans.due(set(), 0.0) == [(A, ("/one",)), (B, ("/one",))]
    assert plans.due(set(), 0.0) == []
    assert plans.dialled(A, 0.0, is_there=True)
    assert not plans.dialled(A, 0.0, is_there=True)


def test_one_we_are_connected_with_is_new_all_the_same():
    """It may have dialled us: it has to be made known to the rounds."""
    plans = plan(lease(A))
    assert dialled(plans, {A}, 0.0) == [A]
    plans.dialled(A, 0.0, is_there=True)
    assert dialled(plans, {A}, 100.0) == []


def test_a_lost_connection_is_made_anew():
    plans = plan(lease(A))
    plans.due(set(), 0.0)
    plans.dialled(A, 0.0, is_there=True)
    assert plans.missing({A}) == []
    assert plans.missing(set()) == [A]
    assert dialled(plans, set(), 2 * FIRST_RETRY_S) == [A]


def test_who_cannot_be_reached_is_tried_ever_more_seldom_but_tried():
    plans, now, times = plan(lease(A)), 0.0, []
    while now < 1200:
        if dialled(plans, set(), now):
            times.append(now)
            plans.dialled(A, now, is_there=False)
        now += 0.5
    pauses = [later - earlier for earlier, later in pairwise(times)]
    assert pauses[0] == FIRST_RETRY_S
    assert pauses == sorted(pauses)
    assert pauses[-1] > MAX_RETRY_S, "it was never reached"


def test_who_was_reached_once_is_tried_every_minute_at_least():
    plans, now, times = plan(lease(A)), 0.0, []
    plans.due(set(), now)
    plans.dialled(A, now, is_there=True)
    while now < 600:
        if dialled(plans, set(), now):
            times.append(now)
            plans.dialled(A, now, is_there=False)
        now += 0.5
    assert max(later - earlier for earlier, later in pairwise(times)) == MAX_RETRY_S


def test_another_address_is_tried_at_once():
    plans = plan(lease(A))
    plans.due(set(), 0.0)
    plans.dialled(A, 0.0, is_there=False)
    assert dialled(plans, set(), 0.1) == []
    plans.listed([replace(lease(A), addresses=("/two",))])
    assert plans.due(set(), 0.1) == [(A, ("/two",))]


def test_who_is_listed_no_more_is_forgotten():
    plans = plan(lease(A))
    plans.due(set(), 0.0)
    plans.listed([])
    assert not plans.dialled(A, 0.0, is_there=True)
    assert plans.missing(set()) == []
    assert dialled(plans, set(), 1000.0) == []


def crowd(first_range: int, count: int, ranges: int = 1) -> list[Lease]:
    """Made-up leases that come first by their names."""
    found = []
    for number in range(count):
        where = f"/ip4/{first_range + number % ranges // 250}.0.{number % ranges % 250}.1/tcp/9"
        found.append(lease(PeerId(f"0 made up {first_range} {number:04}"), f"{where}/p2p/{PEER}"))
    return found


PEER = SigningKey(b"p" * 32).peer_id
HONEST = [lease(PeerId(f"honest {number}"), f"/ip4/9.9.{number}.1/tcp/9/p2p/{PEER}") for number in range(5)]


def all_dialled(of: DialPlan, until: float) -> set[PeerId]:
    """Nobody answers."""
    found, now = set[PeerId](), 0.0
    while now < until:
        for peer in dialled(of, set(), now):
            found.add(peer)
            of.dialled(peer, now, is_there=False)
        now += 1.0
    return found


def test_made_up_leases_that_sort_first_keep_nobody_of_another_range_from_being_dialled():
    assert {each.peer for each in HONEST} <= all_dialled(plan(*crowd(20, 2 * MAX_LISTED), *HONEST), 1.0)


def test_where_each_made_up_lease_names_a_range_of_its_own_all_have_their_turn():
    """Those that were dialled in vain make room at the next look."""
    leases = [*crowd(20, 2 * MAX_LISTED, 2 * MAX_LISTED), *HONEST]
    plans, found = plan(*leases), set[PeerId]()
    for _ in range(4):
        found |= all_dialled(plans, 30.0)
        plans.listed(leases)
    assert {each.peer for each in HONEST} <= found


def test_who_was_reached_once_or_is_heard_is_pushed_out_by_nobody():
    reached, heard = HONEST[:3], [each.peer for each in HONEST[3:]]
    plans = plan(*reached)
    for peer in dialled(plans, set(), 0.0):
        plans.dialled(peer, 0.0, is_there=True)
    plans.listed([*crowd(20, 2 * MAX_LISTED, 2 * MAX_LISTED), *HONEST], heard)
    assert {each.peer for each in HONEST} <= set(dialled(plans, set(), 100.0))


def test_names_that_answer_leave_room_for_others():
    ours = crowd(20, MAX_LISTED)
    plans = plan(*ours)
    for peer in dialled(plans, set(), 0.0):
        plans.dialled(peer, 0.0, is_there=True)
    plans.listed([*ours, *HONEST])
    assert {each.peer for each in HONEST} <= set(dialled(plans, set(), 100.0))


def relayed(peer: PeerId) -> Lease:
    return replace(lease(peer, f"/relay/p2p-circuit/{peer}"), reachability="relayed")


def bettered(of: DialPlan, paths: dict[PeerId, str], until: float, *, may_punch: bool = True) -> list[float]:
    """When A is, looked at every second."""
    return [
        at for at in range(int(until)) if any(peer == A for peer, _ in of.to_better(paths, at, may_punch=may_punch))
    ]


def test_a_relayed_connection_with_who_can_be_dialled_by_now_is_made_anew_and_directly():
    plans = plan(lease(A, "/one", "/relay/p2p-circuit/a"))
    assert plans.to_better({A: "relayed"}, 0.0, may_punch=False) == []
    assert plans.to_better({A: "relayed"}, BETTER_S, may_punch=False) == [(A, ("/one",))]


def test_what_becomes_no_better_is_tried_ever_more_seldom():
    times = bettered(plan(lease(A)), {A: "relayed"}, 6 * MOST_BETTER_S)
    gaps = [later - before for before, later in pairwise(times)]
    assert gaps == sorted(gaps)
    assert gaps[-1] == MOST_BETTER_S
    assert len(gaps) > 6


def test_a_hole_is_tried_again_by_one_of_the_two_and_not_before_routers_have_forgotten():
    mine, theirs = plan(relayed(A), relayed(B)), DialPlan(B)
    theirs.listed([relayed(A)])
    assert bettered(mine, {A: "relayed"}, 2 * PUNCH_S) == [], "A is the smaller name of the two"
    assert bettered(theirs, {A: "relayed"}, 2 * PUNCH_S) == []
    smaller = DialPlan(PeerId("Z"))
    smaller.listed([relayed(A)])
    assert bettered(smaller, {A: "relayed"}, 2 * PUNCH_S) == [PUNCH_S]
    blind = DialPlan(PeerId("Z"))
    blind.listed([relayed(A)])
    assert bettered(blind, {A: "relayed"}, 2 * PUNCH_S, may_punch=False) == []


def test_a_connection_that_is_direct_or_lost_is_left_alone():
    plans = plan(lease(A))
    for path in ({A: "direct"}, {A: "punched"}, {}):
        assert bettered(plans, path, 10 * MOST_BETTER_S) == []
    plans.to_better({A: "relayed"}, 0.0, may_punch=True)
    plans.to_better({A: "punched"}, BETTER_S, may_punch=True)
    assert plans.to_better({A: "relayed"}, BETTER_S + 1, may_punch=True) == [], "it counts from the beginning"


def test_a_try_that_ends_the_connection_counts_all_the_same():
    """Else one that comes to nothing would be made every fifteen seconds."""
    plans, times = plan(lease(A)), []
    path: dict[PeerId, str] = {A: "relayed"}
    for at in range(int(4 * MOST_BETTER_S)):
        if plans.to_better(path, at, may_punch=True):
            times.append(at)
            path = {}
        elif not path and at >= times[-1] + 3:
            path = {A: "relayed"}
    gaps = [later - before for before, later in pairwise(times)]
    assert gaps == sorted(gaps)
    assert gaps[-1] >= MOST_BETTER_S


def test_a_crowd_of_names_behind_one_range_is_one_of_the_relays_that_are_asked_first():
    """Whoever knows a home's order grinds two names that come first in it, in a hundredth of a second, and is all its relays."""
    relayed = replace(lease(A), reachability="relayed", addresses=("/ip4/9.9.9.9/tcp/1/p2p/x/p2p-circuit/p2p/a",))
    found = to_ask_for_relays([*crowd(20, 50), *HONEST, relayed, lease(ME)], ME, str)
    assert len(found) == 50 + len(HONEST)
    first = [text.split("/")[2] for text in found[: 1 + len(HONEST)]]
    assert sorted(first) == sorted(["20.0.0.1", *(each.addresses[0].split("/")[2] for each in HONEST)])
    backwards = to_ask_for_relays(HONEST, ME, lambda peer: -int(peer.split()[-1]))
    assert backwards == [each.addresses[0] for each in reversed(HONEST)]
