"""The owner's directives in seeded runs, with every fault of the other seeds beside them; and each rule shown to be needed."""

import pytest

from dilocox_peer.peer.rounds.contract import OwnerSpoke, Received
from dilocox_peer.peer.rounds.directing import PATIENT_FOR, Authority, Directing
from dilocox_peer.peer.rounds.seat import Seat
from dilocox_peer.types import PeerId
from dilocox_peer.wire.directives import Directive, sign_directive
from dilocox_peer.wire.rounds import Directed, Message, ViewPropose

from .directing import run_directed, said
from .invariants import Violation
from .world import OWNER, ROUND_S, RUN, World, certificates_of, sign_as

BATCH = 20
HISTORIES = 4


@pytest.mark.parametrize(
    "first", [pytest.param(first, marks=[pytest.mark.slow] if first >= 40 else []) for first in range(0, 100, BATCH)]
)
def test_everybody_comes_to_go_by_the_newest_directive_and_by_no_forged_one(first: int) -> None:
    outcomes = [run_directed(seed) for seed in range(first, first + BATCH)]
    assert any(outcome.two_tongues for outcome in outcomes), "no seed in which the owner signs two with one number"


def test_without_a_look_at_the_signature_a_forged_one_gets_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Authority, "why_not", lambda _self, _directive: None)
    with pytest.raises(Violation, match="has not said"):
        _ = [run_directed(seed) for seed in range(20)]


def test_members_vote_for_no_leader_that_leaves_out_what_all_have_known_for_some_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of five nobody brings it before all have known it for so long, and then who leads does not."""
    assert _led_without(monkeypatch) == 0
    monkeypatch.setattr(Directing, "why_withheld", lambda *_: None)
    assert _led_without(monkeypatch) == HISTORIES


def _led_without(monkeypatch: pytest.MonkeyPatch) -> int:
    """In how many histories the round without it is certified."""
    to_carry = Seat.to_carry
    omitting: set[PeerId] = set()
    monkeypatch.setattr(
        Seat, "to_carry", property(lambda seat: () if seat.me in omitting else to_carry.__get__(seat, Seat))
    )
    num_without = 0
    for seed in range(HISTORIES):
        world = _settled(5, seed)
        omitting.update(world.nodes)
        for node in world.nodes.values():
            node.feed(OwnerSpoke(said(1)))
        all_know = _round(world) + PATIENT_FOR
        assert world.run(world.now + 20 * ROUND_S, stop=lambda end=all_know: _round(world) >= end)  # type: ignore[misc]  # noqa: B023
        omitting.intersection_update({machine.leader for node in world.up() if (machine := node.machine) is not None})
        assert world.run(world.now + 20 * ROUND_S, stop=lambda end=all_know: _round(world) > end)  # type: ignore[misc]  # noqa: B023
        newest = max((certificates_of(node) for node in world.up()), key=lambda each: len(list(each)))[-1].value
        num_without += newest.directive is None
    monkeypatch.setattr(Seat, "to_carry", to_carry)
    return num_without


def test_who_is_banned_is_in_no_roster_any_more_and_the_others_go_on() -> None:
    world = _settled(4)
    banned = sorted(world.nodes)[1]
    directive = sign_directive(Directive(RUN, 1, banned=(banned,)), sign_as(OWNER))
    world.nodes[PeerId("p00")].feed(OwnerSpoke(directive))
    others = [node for node in world.nodes.values() if node.peer != banned]

    def is_out() -> bool:
        return all(node.machine is not None and banned not in node.machine.roster for node in others)

    assert world.run(world.now + 20 * ROUND_S, stop=is_out)
    before = max(node.machine.round for node in others if node.machine is not None)
    world.run(world.now + 10 * ROUND_S)
    for node in others:
        assert node.machine is not None
        assert node.machine.round > before + 3, "the others do not go on"
        assert banned not in node.machine.roster


def test_who_is_banned_is_seated_by_no_view_change_before_that_is_in_the_chain() -> None:
    """An accomplice proposed a roster with it: with both, of three, they were its quorum."""
    world = _settled(6)
    gone, (victim, accomplice, banned) = sorted(world.nodes)[:3], sorted(world.nodes)[3:]
    for name in gone:
        world.nodes[name].crash()
        world.nodes[name].gone_for_good = True
    machine = world.nodes[victim].machine
    assert machine is not None
    assert world.run(world.now + 60.0, stop=lambda: machine.sitting.view_changes.is_wanted(world.now))
    world.nodes[victim].feed(OwnerSpoke(sign_directive(Directive(RUN, 1, banned=(banned,)), sign_as(OWNER))))
    told, deliver = list[PeerId](), world.deliver

    def listen(sender: PeerId, to: PeerId, message: Message) -> None:
        if isinstance(message, Directed):
            told.append(to)
        deliver(sender, to, message)

    world.deliver = listen  # type: ignore[method-assign]
    seat = machine.sitting.seat
    value = seat.place.view_change([victim, accomplice, banned])
    world.nodes[victim].feed(Received(accomplice, ViewPropose(*seat.at(), seat.place.view + 5, value)))
    world.run(world.now + 0.5)
    assert seat.votes.view_change != value
    assert accomplice in told, "it may not have heard"
    world.run(world.now + 60.0)
    assert banned not in machine.roster


def test_a_run_that_is_told_to_stop_ends_after_that_round_everywhere() -> None:
    world = _settled(3)
    last = _round(world) + 5
    directive = sign_directive(Directive(RUN, 1, stop_after=last), sign_as(OWNER))
    world.nodes[PeerId("p02")].feed(OwnerSpoke(directive))
    world.run(world.now + 15 * ROUND_S)
    for node in world.nodes.values():
        assert node.machine is not None
        assert (node.machine.round, node.machine.schedule.is_over) == (last, True)


def test_a_run_that_is_made_longer_goes_on_to_its_new_end() -> None:
    world = World(5, 3)
    world.be_directed()
    world.total_rounds = 6
    for node in world.nodes.values():
        node.start(sorted(world.nodes))
    assert world.run(60 * ROUND_S, stop=lambda: _round(world) >= 2)
    steps = 2 * world.plans.total_steps if world.plans.total_steps else 0
    world.nodes[PeerId("p00")].feed(OwnerSpoke(sign_directive(Directive(RUN, 1, total_steps=steps), sign_as(OWNER))))
    world.run(world.now + 40 * ROUND_S)
    machines = [node.machine for node in world.nodes.values() if node.machine is not None]
    assert all(machine.schedule.is_over for machine in machines)
    assert {machine.schedule.plan_for(machine.round).end for machine in machines} == {steps}


def _settled(num_peers: int, seed: int = 3) -> World:
    """A world whose peers are all in one roster, and no faults."""
    world = World(seed, num_peers)
    world.be_directed()
    for node in world.nodes.values():
        node.start(sorted(world.nodes))

    def together() -> bool:
        return world.shares_one_head() and all(
            node.machine is not None and len(node.machine.roster) == num_peers for node in world.up()
        )

    assert world.run(40 * ROUND_S, stop=together)
    return world


def _round(world: World) -> int:
    return max(node.machine.round for node in world.up() if node.machine is not None)
