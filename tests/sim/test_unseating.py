"""One hostile voter that leads a round now and then, in a run of a few voters and of newcomers that have no vote yet: what it leaves out costs no
other voter its vote, gives nobody one, and moves no clock. Every peer is a real round machine."""

from collections.abc import Callable, Collection

import msgspec
import pytest

from dilocox_peer.peer.rounds.ballots import Ballots
from dilocox_peer.peer.rounds.chain import MAX_VIEWS, vote_for
from dilocox_peer.peer.rounds.contract import Action, Closed, Input, Send
from dilocox_peer.peer.rounds.drafting import Drafts
from dilocox_peer.peer.rounds.jury import MAX_JUMP
from dilocox_peer.peer.rounds.machine import RoundMachine
from dilocox_peer.peer.rounds.view_changes import ViewChanges
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.chain import MAX_QUANTITY, Entry, Report, Result, Value, acceptance
from dilocox_peer.wire.rounds import Ack, Message, Nack, Prepare, Promise, Propose

from .test_sybils import HOUR_US, found, machine_of
from .test_takeover import machine_with
from .test_withheld import Withholding
from .world import Node, World, sign_as

HOSTILE = PeerId("p03")

Unseats = Callable[[tuple[PeerId, ...]], Collection[PeerId]]
"""Of a roster, those that the hostile one leaves out of what it writes."""


class OpenRun:
    """Founders with the run's owner, of which p03 turns hostile when the newcomers sit in the roster."""

    def __init__(self, founders: int, newcomers: int, unseats: Unseats, *, writes_rosters: bool = True) -> None:
        self.is_on = False

        run = self

        class Leaving(Drafts):
            def _left_out(self) -> set[PeerId]:
                here = self._seat
                return set(unseats(here.place.roster)) - {HOSTILE} if run.is_on and here.me == HOSTILE else set()

            def entries(self, excluded: Collection[Digest], now: float) -> list[Entry]:
                left_out = self._left_out()
                return [each for each in super().entries(excluded, now) if each.peer not in left_out]

            def _value(self, entries: list[Entry], now: float, results: tuple[Result, ...] = ()) -> Value:  # type: ignore[override]
                value = super()._value(entries, now, results)
                left_out = self._left_out() if writes_rosters else set()
                return msgspec.structs.replace(
                    value, roster=tuple(each for each in value.roster if each not in left_out)
                )

        self.world = world = World(1, founders, machine=machine_with(Leaving))
        self.founders = found(world)
        assert world.run(60.0, stop=lambda: self.chain_at(0) >= 1)
        world.start_peers = 1
        for node in [world.add_node(PeerId(f"n{number:02d}")) for number in range(newcomers)]:
            node.start(sorted(world.nodes))
        everybody = set(world.nodes)
        assert world.run(world.now + 120, stop=lambda: set(machine_of(self.founders[0]).roster) == everybody)

    def chain_at(self, founder: int) -> int:
        return machine_of(self.founders[founder]).round

    def turn_hostile(self, seconds: float) -> None:
        self.is_on = True
        self.world.run(self.world.now + seconds)

    @property
    def places(self) -> list[tuple[int, set[PeerId], set[PeerId]]]:
        """(round, its entries, who sits in the next) of the chain at an honest founder."""
        return [
            (each.value.round, {entry.peer for entry in each.value.entries}, set(each.value.roster))
            for each in machine_of(self.founders[0]).chain
        ]


FOUNDERS = tuple(PeerId(f"p{number:02d}") for number in range(7))


@pytest.mark.parametrize("founders", [4, 7])
@pytest.mark.parametrize("newcomers", [0, 5, 8])
def test_no_leader_puts_more_than_a_third_of_the_voters_out(founders: int, newcomers: int) -> None:
    """With five newcomers one round left the hostile one as the only voter; with eight, none of the voters was left and the newcomers voted."""
    run = OpenRun(founders, newcomers, lambda _: FOUNDERS)
    run.turn_hostile(150.0)
    voters = set(FOUNDERS[:founders])
    assert all(3 * len(voters - roster) <= founders for _, _, roster in run.places)
    assert set(machine_of(run.founders[0]).voters) == voters
    assert run.chain_at(0) > 15


@pytest.mark.parametrize("founders", [4, 7])
def test_nor_one_after_the_other(founders: int) -> None:
    """Each round that it led it left one more out, and those that it had left out before."""
    run = OpenRun(founders, 0, lambda roster: {*(set(FOUNDERS) - set(roster)), max(set(roster) - {HOSTILE})})
    run.turn_hostile(300.0)
    for _, _, roster in run.places:
        assert 3 * (founders - len(roster)) <= founders, run.places[-3:]
    assert run.chain_at(0) > 30


@pytest.mark.parametrize("newcomers", [3, 8])
def test_one_voter_alone_does_not_have_the_hours_pass_that_a_vote_takes(newcomers: int) -> None:
    """It led a round without the others' contributions, and its step was the median: nine thousand hours in one round, and newcomers voted."""
    run = OpenRun(4, newcomers, lambda _: FOUNDERS, writes_rosters=False)
    hostile = run.world.nodes[HOSTILE]
    _has_steps_of(hostile, MAX_QUANTITY)
    run.turn_hostile(200.0)
    assert any(entries & set(FOUNDERS) == {HOSTILE} for _, entries, _ in run.places)  # it did lead one
    machine = machine_of(run.founders[0])
    assert machine.sitting.seat.place.seats.clock_us < HOUR_US
    assert set(machine.voters) == set(FOUNDERS[:4])


def _has_steps_of(node: Node, step_us: int) -> None:
    """From now on it says that its steps take so long."""
    feed = node.feed

    def lie(happened: Input) -> None:
        if isinstance(happened, Closed):
            entry = msgspec.structs.replace(happened.entry, report=Report(step_us=step_us))
            happened = Closed(happened.base, entry, happened.parts, happened.table)
        feed(happened)

    node.feed = lie  # type: ignore[method-assign]


def test_a_certificate_whose_view_is_out_of_reach_is_refused() -> None:
    world = World(1, 2)
    node = world.nodes[PeerId("p00")]
    node.start(sorted(world.nodes))
    place = machine_of(node).sitting.seat.place
    value = place.view_change(sorted(world.nodes))
    assert place.why_not(value, place.view + MAX_VIEWS, 64) is None
    assert place.why_not(value, place.view + MAX_VIEWS + 1, 64) == f"view {MAX_VIEWS + 1} called in view 0"


def _is_newcomer(peer: PeerId) -> bool:
    return peer.startswith("n")


class _Hasty(ViewChanges):
    """The hostile one writes a view change of itself and what newcomers there are before the others may write theirs."""

    takes_newcomers = True

    def advance(self, now: float) -> list[Action]:
        seat, since = self._seat, self._lost_since
        if (
            seat.me != HOSTILE
            or self.certificate is not None
            or since is None
            or now < since + self.patience_s / 2 + 0.3
        ):
            return super().advance(now)
        others = set(filter(_is_newcomer, seat.place.roster)) if self.takes_newcomers else set()
        roster = [peer for peer in seat.place.roster if peer == HOSTILE or peer in others]
        number, value = seat.place.view + 1, seat.place.view_change(roster)
        votes = seat.vote(view_change_signed=number, view_change=value)
        said = acceptance(seat.place.stage, seat.place.head, number, 0, value)
        signatures = {peer: vote_for(said, int(1000 * now), sign_as(peer)) for peer in roster}
        self.certificate = seat.certificate(value, signatures, view=number, ballot=0)
        return [votes]


class _Alone(Drafts):
    """And they stay alone in its roster."""

    def _value(self, entries: list[Entry], now: float, results: tuple[Result, ...] = ()) -> Value:  # type: ignore[override]
        value = super()._value(entries, now, results)
        crowd = tuple(peer for peer in value.roster if peer == HOSTILE or _is_newcomer(peer))
        is_alone = self._seat.me in crowd and self._seat.place.roster[0] == HOSTILE
        return msgspec.structs.replace(value, roster=crowd) if is_alone else value


@pytest.mark.parametrize(("voters", "lost", "seed"), [(7, 4, 1), (7, 4, 2), (9, 5, 3), (8, 5, 1)])
def test_of_those_whom_a_lost_quorum_leaves_one_alone_does_not_take_the_run(voters: int, lost: int, seed: int) -> None:
    """It wrote its view change at half the patience of the others, who went along, and certified alone from then on."""
    machine = machine_with(_Alone, view_changes=_Hasty)
    world = World(seed, voters, machine=machine)
    world.start_peers, world.faulty = voters, False
    for node in list(world.nodes.values()):
        node.start(sorted(world.nodes))
    left = [node for node in world.nodes.values() if node.peer != HOSTILE]
    assert world.run(90.0, stop=lambda: machine_of(left[0]).round >= 3)
    for node in left[-lost:]:
        node.crash()
        node.gone_for_good = True
    left = left[:-lost]
    began = machine_of(left[0]).round
    world.run(world.now + 200.0)
    for node in left:
        assert machine_of(node).round > began + 10
        assert {each.peer for each in left} <= set(machine_of(node).roster)


def _open_run(machine: type[RoundMachine], founders: int, newcomers: int) -> tuple[World, list[Node]]:
    """With its founders, when the newcomers sit in the roster."""
    world = World(1, founders, machine=machine)
    nodes = found(world)
    assert world.run(60.0, stop=lambda: machine_of(nodes[0]).round >= 1)
    world.start_peers = 1
    for number in range(newcomers):
        world.add_node(PeerId(f"n{number:02d}")).start(sorted(world.nodes))
    assert world.run(world.now + 120.0, stop=lambda: set(machine_of(nodes[0]).roster) == set(world.nodes))
    return world, nodes


def _lose(nodes: Collection[Node]) -> None:
    for node in nodes:
        node.crash()
        node.gone_for_good = True


class _WhenOn(_Hasty):
    is_on = False

    def advance(self, now: float) -> list[Action]:
        return super().advance(now) if _WhenOn.is_on else ViewChanges.advance(self, now)


def test_newcomers_without_a_vote_do_not_make_one_voter_more_than_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """With three that it had seated it was more than the two that were left, who went along; no founder was in a roster again."""
    world, founders = _open_run(machine_with(_Alone, view_changes=_WhenOn), 6, 3)
    monkeypatch.setattr(_WhenOn, "is_on", True)
    _lose(founders[:3])
    left = founders[4:]
    began = machine_of(left[0]).round
    world.run(world.now + 120.0)
    for node in left:
        assert machine_of(node).round > began + 10
        assert {each.peer for each in left} <= set(machine_of(node).voters)


class _LonelyWhenOn(_WhenOn):
    takes_newcomers = False


class _ByItself(Drafts):
    """And it stays alone in its roster."""

    def _value(self, entries: list[Entry], now: float, results: tuple[Result, ...] = ()) -> Value:  # type: ignore[override]
        value = super()._value(entries, now, results)
        is_alone = self._seat.me == HOSTILE and self._seat.place.roster == (HOSTILE,)
        return msgspec.structs.replace(value, roster=(HOSTILE,)) if is_alone else value


def test_of_two_voters_that_are_left_the_one_that_newcomers_are_with_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting voters alone, one was as many as the other, and everybody followed whoever was first: into a roster of one."""
    machine = machine_with(_ByItself, view_changes=_LonelyWhenOn)
    world, founders = _open_run(machine, 4, 5)
    monkeypatch.setattr(_WhenOn, "is_on", True)
    _lose(founders[:2])
    left = [node for node in world.up() if node.peer != HOSTILE]
    began = machine_of(left[0]).round
    world.run(world.now + 120.0)
    for node in left:
        assert machine_of(node).round > began + 10
        assert {each.peer for each in left} <= set(machine_of(node).roster)


class _Apart(Ballots):
    """When its turn comes first, the hostile one asks each third of the others for ballots as far apart as are heeded."""

    asked = False

    def advance(self, now: float) -> list[Action]:
        seat = self._seat
        if seat.me != HOSTILE or not seat.may_vote or seat.leader(0) != HOSTILE:
            return super().advance(now)
        if self._arrivals.ended_at is None and self._arrivals.has_ended((), now):
            self._end_round(now)
        if self.asked or self._arrivals.ended_at is None:
            return self._arrivals.offer_again(now)
        self.asked = True
        near = self._led_below(MAX_JUMP)
        far = self._led_below(near + MAX_JUMP)
        third = -(-len(seat.others) // 3)
        asks = [Send(peer, Prepare(*seat.at(), near)) for peer in seat.others[third:]]
        return [
            *asks,
            *(Send(peer, Prepare(*seat.at(), far)) for peer in seat.others[2 * third :]),
            *self._arrivals.offer_again(now),
        ]

    def _led_below(self, most: int) -> int:
        return next(ballot for ballot in range(most, 0, -1) if self._seat.leader(ballot) == HOSTILE)


def test_ballots_asked_for_far_apart_stop_no_round() -> None:
    """Where three of four were each a million ballots from the next, no round was made until a view change."""
    world = Withholding(4, 0, machine_with(Drafts, _Apart))
    deliver = world.deliver

    def say_nothing(sender: PeerId, to: PeerId, message: Message) -> None:
        leads = machine_of(world.nodes[sender]).leader == HOSTILE
        if sender != HOSTILE or not leads or not isinstance(message, Ack | Promise | Propose | Nack):
            deliver(sender, to, message)

    world.deliver = say_nothing  # type: ignore[method-assign]
    assert world.rounds_in(300.0) >= 50
    assert sum(each.value.kind == "epoch" for each in world.chain()) <= 2
