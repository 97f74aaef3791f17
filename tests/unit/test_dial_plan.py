"""Which peers of the stage are dialled, and when."""

from dataclasses import replace
from itertools import pairwise

from dilocox_peer.dht.records import Lease
from dilocox_peer.peer.dial_plan import FIRST_RETRY_S, MAX_RETRY_S, DialPlan
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
    while now < 600:
        if dialled(plans, set(), now):
            times.append(now)
            plans.dialled(A, now, is_there=False)
        now += 0.5
    pauses = [later - earlier for earlier, later in pairwise(times)]
    assert pauses[0] == FIRST_RETRY_S
    assert pauses == sorted(pauses)
    assert pauses[-1] == MAX_RETRY_S


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
