"""A table at which one means ill: what the others make of its messages."""

import pytest

from dilocox_peer.events import EquivocationProved, MemberDoubted
from dilocox_peer.peer.rounds import conduct
from dilocox_peer.peer.rounds.contract import Closed, PeerRefused, Received, Send
from dilocox_peer.peer.rounds.jury import MAX_ASKED
from dilocox_peer.peer.rounds.view_changes import MAX_NUMBER_AHEAD
from dilocox_peer.types import PeerId, sha256
from dilocox_peer.wire.chain import Entry
from dilocox_peer.wire.declared import replaced
from dilocox_peer.wire.rounds import (
    Accepted,
    Ack,
    Contradiction,
    Heartbeat,
    Nack,
    Prepare,
    Promise,
    Proof,
    Propose,
    Statement,
    ViewAnswer,
    ViewCall,
)
from tests.unit.test_rounds import TIMING, Table, acceptance_of, contributors, offered, promised, proposal, refusals


def test_an_offer_at_once_does_not_end_the_round_of_those_still_training() -> None:
    """One member of four that offered at every new head what nobody could fetch made nine of twelve rounds empty."""
    table = Table("a", "b", "c", "d").start()
    liar = PeerId(table.by_rank()[-1])
    honest = [name for name in "abcd" if name != liar]
    at = table.machine("a").sitting.seat.at()
    fake = Entry(liar, 1, sha256(b"nowhere"), 10, 8)
    for name in honest:
        table.give(PeerId(name), Received(liar, offered(at, fake)))
    table.wait(TIMING.offer_wait_start_s + 2.0)
    assert [table.machine(name).round for name in honest] == [0, 0, 0]
    table.offer(*honest)
    table.wait(TIMING.offer_wait_start_s + 1.0)
    assert contributors(table, honest[0]) == sorted(honest)


def test_who_fails_to_deliver_twice_is_named_and_waited_for_no_more() -> None:
    table = Table("a", "b", "c", "d").start()
    liar = PeerId("d")
    for number in range(3):
        machine = table.machine("d")
        fake = Entry(liar, 1, sha256(b"nowhere", bytes([number])), 10, 8, machine.state_digest)
        table.give(liar, Closed(machine.head, fake))
        began = table.now
        table.offer("a", "b", "c")
        while table.machine("a").round == number:
            table.wait(0.5)
        assert contributors(table, "a") == ["a", "b", "c"]
        table.wait(2.0)
        assert len(table.heads()) == 1
    for name in "abc":
        assert {event.peer for event in table.noted(name, MemberDoubted)} == {liar}
    table.give(liar, Closed(table.machine("d").head, replaced(fake, blob=sha256(b"nowhere either"))))
    began, before = table.now, table.machine("a").round
    table.offer("a", "b", "c")
    table.wait(0.0)
    assert (table.machine("a").round, table.now) == (before + 1, began), "not for a moment"


def test_who_offers_nothing_is_not_waited_for_when_it_is_its_turn_to_lead() -> None:
    """It led every fourth round as slowly as it could without being put off: it waited for its own offer to the end."""
    table = Table("a", "b", "c", "d").start()
    silent, waited = PeerId("d"), []
    for _ in range(24):
        began, before = table.now, table.machine("a").round
        is_its_turn = table.machine("a").sitting.seat.leader(0) == silent
        is_doubted = all(table.noted(name, MemberDoubted) for name in "abc")
        table.offer("a", "b", "c")
        while table.machine("a").round == before:
            table.wait(0.5)
        if is_doubted and is_its_turn:
            waited.append(table.now - began)
        table.wait(1.0)
    assert waited
    assert waited == [0.0] * len(waited)


def test_ballots_beyond_the_budget_are_not_heeded() -> None:
    table = Table("a", "b", "c").start()
    gone, first, third = table.by_rank()
    at = table.machine(first).sitting.seat.at()
    table.give(PeerId(first), PeerRefused(PeerId(gone)))  # whose turn it is
    for ballot in (2, 5, 8, 11):
        table.give(PeerId(first), Received(PeerId(third), Prepare(*at, ballot)))
    assert [message.ballot for message in table.said(first, Promise)] == [2, 5]
    assert [message.promised for message in table.said(first, Nack)] == [5, 5]
    for ballot in range(14, 300, 3):
        table.give(PeerId(first), Received(PeerId(third), Prepare(*at, ballot)))
    assert len(table.said(first, Nack)) == MAX_ASKED, "each would be work that it has us do"
    table.offer("a", "b", "c")
    table.wait(30.0)
    assert (table.machine(first).round, table.machine(first).view) == (1, 1)


def test_a_proposal_in_a_higher_ballot_needs_its_promises() -> None:
    table = Table("a", "b", "c").start()
    first, second, third = table.by_rank()
    machine = table.machine(first)
    at, place = machine.sitting.seat.at(), machine.sitting.seat.place
    table.swallow = lambda sender, to, message: True
    free, forced = place.round_value([], place.roster), place.round_value([], place.roster[1:])
    shown = [promised(at, 1, PeerId(second)), promised(at, 1, PeerId(third), (0, forced.digest()))]
    (reason,) = refusals(table, first, second, proposal(at, second, 1, free))
    assert "no quorum of the roster" in reason
    (reason,) = refusals(table, first, second, proposal(at, second, 1, free, shown))
    assert "another value than the one accepted in ballot 0" in reason
    (reason,) = refusals(table, first, second, proposal(at, second, 1, forced, shown))
    assert first in reason, "left out, by a value that one of three says it had accepted"
    shown = [promised(at, 1, PeerId(peer), (0, forced.digest())) for peer in (second, third)]
    assert not refusals(table, first, second, proposal(at, second, 1, forced, shown))


def test_a_promise_that_makes_up_what_it_accepted_is_refused() -> None:
    table = Table("a", "b", "c").start()
    _first, second, third = table.by_rank()
    table.swallow = lambda sender, to, message: True
    table.offer(second)
    while not table.said(second, Prepare):
        table.wait(1.0)
    ballot = table.said(second, Prepare)[-1].ballot
    machine = table.machine(second)
    at, place = machine.sitting.seat.at(), machine.sitting.seat.place
    made_up = place.round_value([], place.roster)
    for signature in (b"x" * 32, acceptance_of(at, PeerId(third), 0, made_up)):
        accepted = Accepted(0, made_up, signature)
        mine = promised(at, ballot, PeerId(third), accepted.named).signature
        assert refusals(table, second, third, Promise(*at, ballot, accepted, mine)) == [
            "accepted in ballot 0 what its leader did not sign"
        ]


def test_a_leader_with_two_values_is_proven_everywhere_and_out_of_the_next_roster() -> None:
    table = Table("a", "b", "c", "d").start()
    first, second, third, fourth = table.by_rank()
    machine = table.machine(first)
    at, place = machine.sitting.seat.at(), machine.sitting.seat.place
    table.mute = {(PeerId(first), peer) for peer in table.machines}
    one, other = place.round_value([], place.roster), place.round_value([], place.roster[1:])
    table.give(PeerId(second), Received(PeerId(first), proposal(at, first, 0, one)))
    assert not table.noted(second, EquivocationProved)
    table.give(PeerId(second), Received(PeerId(first), proposal(at, first, 0, other)))
    for name in (second, third, fourth):
        table.wait(0.0)
        assert [(event.peer, event.reason) for event in table.noted(name, EquivocationProved)] == [
            (first, "accepted two values in ballot 0")
        ]
    for _ in range(2):  # one value of its was taken, and names it once more
        table.offer(second, third, fourth)
        table.wait(20.0)
    assert table.machine(second).round == 2
    assert PeerId(first) not in table.machine(second).roster
    assert {table.machine(name).view for name in (second, third, fourth)} == {1}


def test_a_member_that_votes_for_two_values_in_one_ballot_is_proven_by_the_certificate() -> None:
    table = Table("a", "b", "c").start()
    first, second, third = table.by_rank()
    machine = table.machine(second)
    at, place = machine.sitting.seat.at(), machine.sitting.seat.place
    other = place.round_value([], place.roster)
    table.give(PeerId(second), Received(PeerId(first), Prepare(*at, 3)))
    vote = acceptance_of(at, PeerId(third), 0, other)
    machine.sitting.ballots.jury.hear(PeerId(third), machine.sitting.seat.voted(other, vote, ballot=0))
    table.swallow = lambda sender, to, message: isinstance(message, Ack) and sender == second
    table.offer("a", "b", "c")
    table.wait(2.0)
    assert [event.peer for event in table.noted(second, EquivocationProved)] == [third]


def test_a_proof_that_proves_nothing_is_refused() -> None:
    table = Table("a", "b", "c").start()
    at = table.machine("a").sitting.seat.at()
    nothing = Contradiction(PeerId("c"), Statement(b"one", b"s"), Statement(b"other", b"s"))
    assert refusals(table, "a", "b", Proof(*at, *nothing)) == ["a proof against c that proves nothing"]
    assert not table.noted("a", EquivocationProved)


def test_strangers_that_accuse_themselves_take_no_members_place_and_are_nobodys_news(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Keys cost nothing: 513 of them had the proof against a member forgotten, and each was told to everybody."""
    monkeypatch.setattr(conduct, "MAX_PROVEN", 4)
    table = Table("a", "b", "c", "d").start()
    first, *_, guilty = table.by_rank()
    seat = table.machine(first).sitting.seat

    def proof(peer: str) -> Proof:
        values = [seat.place.round_value([], roster) for roster in (seat.place.roster, seat.place.roster[1:])]
        left, right = (
            seat.voted(value, acceptance_of(seat.at(), PeerId(peer), 0, value), ballot=0) for value in values
        )
        return Proof(*seat.at(), PeerId(peer), left, right)

    accuser = next(name for name in table.by_rank() if name not in (first, guilty))
    table.give(PeerId(first), Received(PeerId(accuser), proof(guilty)))
    for number in range(6):
        stranger = PeerId(f"s{number}")
        beat = Heartbeat(*seat.at(), 1, 1, 0, 0, 1, 0, False, b"")
        table.give(PeerId(first), Received(stranger, beat))
        table.give(PeerId(first), Received(stranger, proof(stranger)))
    assert [event.peer for event in table.noted(first, EquivocationProved)] == [guilty]
    told = [action.message for action in table.done[PeerId(first)] if isinstance(action, Send)]
    assert {message.peer for message in told if isinstance(message, Proof)} == {guilty}
    for _ in range(2):
        table.offer("a", "b", "c", "d")
        table.wait(20.0)
    assert PeerId(guilty) not in table.machine(first).roster


@pytest.mark.parametrize("kind", [ViewAnswer, ViewCall])
def test_numbers_that_a_stranger_names_have_no_member_left_out_of_a_view_change(
    kind: type[ViewAnswer] | type[ViewCall],
) -> None:
    """One that was told such ones called a number that the other members do not heed, and went on alone."""
    table = Table("a", "b", "c", "d", "e").start()
    table.offer("a", "b", "c", "d", "e")
    first, second, *others = table.by_rank()
    for gone in others:
        table.leave_the_room(PeerId(gone))
        for left in (first, second):
            table.give(PeerId(left), PeerRefused(PeerId(gone)))
    table.wait(2.0)
    seat = table.machine(first).sitting.seat
    for number in range(1, 4):
        table.give(
            PeerId(first), Received(PeerId("stranger"), kind(*seat.at(), seat.place.view + number * MAX_NUMBER_AHEAD))
        )
    table.wait(30.0)
    assert [set(table.machine(left).roster) for left in (first, second)] == [{first, second}] * 2


def test_a_plan_that_no_certificate_leads_to_is_refused_and_its_leader_named() -> None:
    table = Table("a", "b", "c").start()
    first, second, _third = table.by_rank()
    machine = table.machine(first)
    at, place = machine.sitting.seat.at(), machine.sitting.seat.place
    table.swallow = lambda sender, to, message: sender == first
    value = place.round_value([], place.roster)
    dear = replaced(value, plan=replaced(value.plan, codec="none"))
    (reason,) = refusals(table, second, first, proposal(at, first, 0, dear))
    assert reason == "plans none, 8 steps where the certificates lead to fp16, 8 steps"
    assert [event.peer for event in table.noted(second, MemberDoubted)] == [first]


def test_work_that_nobody_can_have_done_is_left_out() -> None:
    table = Table("a", "b", "c").start()
    table.wait(10.0)
    liar = PeerId(table.by_rank()[-1])
    honest = [name for name in "abc" if name != liar]
    machine = table.machine(liar)
    blob = sha256(b"blob of the liar")
    table.blobs[liar].add(blob)
    table.give(liar, Closed(machine.head, Entry(liar, 1, blob, 10, 2**31, machine.state_digest)))
    table.offer(*honest)
    table.wait(10.0)
    assert contributors(table, honest[0]) == sorted(honest)
    named = {event.peer for name in honest for event in table.noted(name, MemberDoubted)}
    assert named == {liar}


def test_a_leader_that_leaves_out_what_is_here_waits_until_it_is_late() -> None:
    table = Table("a", "b", "c", "d").start()
    first = table.by_rank()[0]
    others = [name for name in "abcd" if name != first]
    machine = table.machine(first)
    at, place = machine.sitting.seat.at(), machine.sitting.seat.place
    table.mute = {(PeerId(first), peer) for peer in table.machines}
    empty = place.round_value([], place.roster)
    table.offer(*others)
    for name in others:
        table.give(PeerId(name), Received(PeerId(first), proposal(at, first, 0, empty)))
    assert not any(table.said(name, Ack) for name in others)
    table.wait(3 * TIMING.ballot_start_s)
    assert contributors(table, others[0]) == sorted(others)
    assert {event.peer for name in others for event in table.noted(name, MemberDoubted)} == {first}


def test_a_proposal_survives_a_restart_with_its_promises() -> None:
    """A restarted leader proposes again in the ballot it was interrupted in: the others ask for its promises as before."""
    table = Table("a", "b", "c").start()
    _first, second, _third = table.by_rank()
    table.swallow = lambda sender, to, message: (
        isinstance(message, Ack) or (isinstance(message, Propose) and message.ballot == 0)
    )
    table.offer("a", "b", "c")
    head = table.machine(second).head
    while not [message for message in table.said(second, Propose) if message.ballot > 0]:
        table.wait(1.0)
    proposed = table.said(second, Propose)[-1]
    restarted = table.sit(PeerId(second), incarnation=2, stored_states={head})
    accepted = restarted.sitting.seat.votes.accepted
    assert accepted is not None
    assert (accepted.ballot, accepted.signature, accepted.promises) == (
        proposed.ballot,
        proposed.signature,
        proposed.promises,
    )
    assert proposed.promises
