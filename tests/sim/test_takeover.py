"""One hostile member of a few, in rounds averaged all to all or in slices: it takes no stage over, leads no more than its turns, and stops no view change."""

from collections.abc import Callable, Collection

import msgspec
import pytest

from dilocox_peer.peer.rounds.ballots import Ballots
from dilocox_peer.peer.rounds.contract import Action
from dilocox_peer.peer.rounds.drafting import Drafts
from dilocox_peer.peer.rounds.machine import RoundMachine
from dilocox_peer.peer.rounds.ranks import by_rank, turn_of
from dilocox_peer.peer.rounds.sitting import Sitting
from dilocox_peer.peer.rounds.view_changes import ViewChanges
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.chain import Entry, Result, Value, offer_statement
from dilocox_peer.wire.rounds import (
    Ack,
    Cert,
    Message,
    Offer,
    Prepare,
    Promise,
    Promised,
    Propose,
    ViewAnswer,
    ViewCall,
    ViewPropose,
    ViewSign,
)

from .test_withheld import HOSTILE, Withholding
from .world import sign_as

SAYS_NOTHING = (ViewSign, Ack, Promise, Propose, Prepare, Cert, ViewPropose, ViewCall, Offer)


def machine_with(
    drafts: type[Drafts], ballots: type[Ballots] = Ballots, view_changes: type[ViewChanges] = ViewChanges
) -> type[RoundMachine]:
    """A machine whose parts do as the hostile one does, at its peer."""
    parts = {
        "ballots_type": type("HostileBallots", (ballots,), {"drafts_type": drafts}),
        "view_changes_type": view_changes,
    }
    return type("HostileMachine", (RoundMachine,), {"sitting_type": type("HostileSitting", (Sitting,), parts)})


def _with_roster(roster_of: Callable[[tuple[PeerId, ...]], tuple[PeerId, ...]]) -> type[RoundMachine]:
    """The hostile one writes this next roster where it leads."""

    class Rosters(Drafts):
        def _value(self, entries: list[Entry], now: float, results: tuple[Result, ...] = ()) -> Value:  # type: ignore[override]
            value = super()._value(entries, now, results)
            if self._seat.me != HOSTILE:
                return value
            return msgspec.structs.replace(value, roster=roster_of(value.roster))

    return machine_with(Rosters)


def _omitting(victims: Collection[PeerId]) -> type[Drafts]:
    """The hostile one leaves these out where it leads."""

    class Omits(Drafts):
        def entries(self, excluded: Collection[Digest], now: float) -> list[Entry]:
            entries = super().entries(excluded, now)
            return [each for each in entries if self._seat.me != HOSTILE or each.peer not in victims]

    return Omits


@pytest.mark.parametrize("slices", [0, 4])
@pytest.mark.parametrize(
    "roster_of",
    [
        lambda roster: (HOSTILE,),
        lambda roster: tuple(peer for peer in roster if peer != "p01"),
        lambda roster: (*roster, *(PeerId(f"z{number:02d}") for number in range(11))),
    ],
    ids=["itself alone", "one left out", "made-up newcomers"],
)
def test_nobody_votes_for_a_roster_that_takes_a_stage_over(
    slices: int, roster_of: Callable[[tuple[PeerId, ...]], tuple[PeerId, ...]]
) -> None:
    """All five signed it, and from then on it certified alone."""
    world = Withholding(5, slices, _with_roster(roster_of))
    members = sorted(world.nodes)
    assert world.rounds_in(80.0) >= 6
    assert all(sorted(each.value.roster) == members for each in world.chain())


def test_a_promise_made_up_in_ballot_0_is_no_excuse() -> None:
    """With one it named its own contribution alone, at once, as if it had had no choice; nobody put it off."""
    world = Withholding(5, 0, machine_with(_omitting([PeerId(name) for name in ("p00", "p01", "p02", "p04")])))
    deliver = world.deliver

    def excuse(sender: PeerId, to: PeerId, message: Message) -> None:
        if sender == HOSTILE and isinstance(message, Propose) and message.ballot == 0:
            made_up = (Promised(PeerId("p00"), (0, Digest(bytes(32))), b"garbage!"),)
            message = msgspec.structs.replace(message, promises=made_up)
        deliver(sender, to, message)

    world.deliver = excuse  # type: ignore[method-assign]
    assert world.rounds_in(80.0) >= 8
    assert [HOSTILE] not in [[entry.peer for entry in each.value.entries] for each in world.chain()]
    assert world.doubted_but_by({HOSTILE}) == {HOSTILE}


class Hasty(Ballots):
    """The hostile one asks for its next ballot as soon as a round has ended."""

    def advance(self, now: float) -> list[Action]:
        seat = self._seat
        is_hasty = seat.me == HOSTILE and seat.may_vote and seat.leader(0) != HOSTILE and seat.votes.promised == 0
        if is_hasty and self._arrivals.ended_at is not None and self.certificate is None:
            return self._prepare(next(number for number in range(1, 99) if seat.leader(number) == HOSTILE), now)
        return super().advance(now)


@pytest.mark.parametrize("num_peers", [4, 6])
def test_who_asks_for_a_ballot_at_once_leads_no_round_out_of_turn(num_peers: int) -> None:
    """It led four rounds of five so, and left the same members out of each."""
    victim = PeerId("p01")
    world = Withholding(num_peers, 0, machine_with(_omitting([victim]), Hasty))
    assert world.rounds_in(150.0) >= 25
    peers = sorted(world.nodes)
    others = [
        each
        for each in world.chain()[-25:]
        if by_rank(peers, turn_of(0, each.value.height - 1, each.view))[0] != HOSTILE
    ]
    assert len(others) >= 10
    assert sum(victim in {entry.peer for entry in each.value.entries} for each in others) >= 0.8 * len(others)


@pytest.mark.parametrize(("num_peers", "crash"), [(4, 1), (5, 2), (8, 3)])
def test_who_answers_view_changes_and_signs_none_is_in_none(num_peers: int, crash: int) -> None:
    """It was asked again and again, and no round was made; dead it cost nothing."""
    world = Withholding(num_peers, 0)
    deliver = world.deliver

    def keep_silent(sender: PeerId, to: PeerId, message: Message) -> None:
        if sender != HOSTILE or not isinstance(message, SAYS_NOTHING):
            deliver(sender, to, message)

    world.deliver = keep_silent  # type: ignore[method-assign]
    for name in sorted(set(world.nodes) - {HOSTILE})[:crash]:
        world.nodes[name].crash()
        world.nodes[name].gone_for_good = True
    honest = [node.machine for node in world.up() if node.peer != HOSTILE and node.machine is not None]
    before = min(machine.round for machine in honest)
    world.run(world.now + 150.0)
    assert min(machine.round for machine in honest) - before >= 15


@pytest.mark.parametrize(("num_peers", "crash"), [(4, 1), (5, 2), (8, 3)])
def test_who_proposes_view_changes_and_signs_none_stops_no_other(num_peers: int, crash: int) -> None:
    """Each second it proposed a roster of everybody with a higher number: all signed, and gave up the calls that they had under way."""
    world = Withholding(num_peers, 0)
    deliver = world.deliver

    def keep_silent(sender: PeerId, to: PeerId, message: Message) -> None:
        is_its_own = sender == HOSTILE and isinstance(message, (*SAYS_NOTHING, ViewAnswer))
        if not is_its_own and (to != HOSTILE or not isinstance(message, ViewSign)):
            deliver(sender, to, message)

    world.deliver = keep_silent  # type: ignore[method-assign]
    for name in sorted(set(world.nodes) - {HOSTILE})[:crash]:
        world.nodes[name].crash()
        world.nodes[name].gone_for_good = True
    honest = [node for node in world.up() if node.peer != HOSTILE]
    here = {node.peer for node in world.up()}
    highest = [1]

    def propose() -> None:
        signed = [node.machine.sitting.seat.votes.view_change_signed for node in honest if node.machine is not None]
        highest[0] = max([*highest, *signed]) + 1
        for node in honest:
            assert node.machine is not None
            seat = node.machine.sitting.seat
            roster = [peer for peer in seat.place.roster if peer in here]
            deliver(HOSTILE, node.peer, ViewPropose(*seat.at(), highest[0], seat.place.view_change(roster)))
        world.at(world.now + 1.0, propose)

    world.at(world.now, propose)
    before = min(node.machine.round for node in honest if node.machine is not None)
    world.run(world.now + 150.0)
    assert min(node.machine.round for node in honest if node.machine is not None) - before >= 10


def test_variants_of_one_offer_stop_nobody() -> None:
    """Each member keeps the first that it hears; whoever leads names its own, and the others remembered eight and refused a ninth."""
    world = Withholding(5, 0)
    deliver, told = world.deliver, dict[tuple[bytes, PeerId], bool]()

    def vary(sender: PeerId, to: PeerId, message: Message) -> None:
        if sender == HOSTILE and isinstance(message, Offer) and (message.head, to) not in told:
            told[message.head, to] = True
            number = sorted(world.nodes).index(to)
            for more in range(40):
                entry = msgspec.structs.replace(message.entry, size_bytes=message.entry.size_bytes + 50 * number + more)
                signed = sign_as(HOSTILE)(offer_statement(message.stage, message.head, entry))
                deliver(sender, to, msgspec.structs.replace(message, entry=entry, signature=signed))
        elif sender != HOSTILE or not isinstance(message, Offer):
            deliver(sender, to, message)

    world.deliver = vary  # type: ignore[method-assign]
    assert world.rounds_in(60.0) >= 8
    assert not world.doubted_but_by({HOSTILE}) - {HOSTILE}
