"""Whom a relay passes on, and how its owner's budget is shared."""

import random

import pytest

from dilocox_peer.network.relay_desk import (
    BURST_S,
    LEAST_PIECE_BYTES,
    MAX_CIRCUITS,
    MAX_CIRCUITS_BETWEEN,
    MAX_CIRCUITS_FROM,
    MAX_RESERVED,
    MAX_RESERVED_PER_HOST,
    MOST_PIECE_BYTES,
    RESERVED_S,
    TURNS_S,
    Circuit,
    RelayDesk,
    RelayTurns,
)
from dilocox_peer.network.relay_protocol import RelayStatus
from dilocox_peer.types import PeerId

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
RATE = 1e6


def host(number: int) -> str:
    return f"31.0.{number}.1"


def test_only_who_has_a_reservation_is_connected_with():
    desk = RelayDesk()
    assert desk.connect(A, B, 0.0) is RelayStatus.NO_RESERVATION
    assert desk.reserve(B, host(1), 0.0) is RelayStatus.OK
    assert isinstance(desk.connect(A, B, 0.1), Circuit)
    assert desk.connect(B, B, 0.1) is RelayStatus.NO_RESERVATION
    assert desk.connect(A, B, RESERVED_S + 0.1) is RelayStatus.NO_RESERVATION


def test_a_reservation_lives_by_being_asked_for_again():
    desk = RelayDesk()
    for step in range(8):
        assert desk.reserve(B, host(1), step * RESERVED_S * 0.9) is RelayStatus.OK
    assert isinstance(desk.connect(A, B, 7 * RESERVED_S * 0.9 + 1), Circuit)


def test_who_cannot_be_dialled_takes_nobody_new_and_keeps_whom_it_has():
    desk = RelayDesk()
    assert desk.reserve(A, host(1), 0.0) is RelayStatus.OK
    desk.is_open = False
    assert desk.reserve(B, host(2), 0.1) is RelayStatus.REFUSED
    assert desk.reserve(A, host(1), 0.1) is RelayStatus.OK


def test_one_host_does_not_take_all_places():
    desk = RelayDesk()
    found = [desk.reserve(PeerId(f"p{number}"), host(1), 0.0) for number in range(MAX_RESERVED)]
    assert found.count(RelayStatus.OK) == MAX_RESERVED_PER_HOST
    assert desk.reserve(A, host(2), 0.0) is RelayStatus.OK


def test_one_range_of_addresses_does_not_keep_all_places() -> None:
    """One /64 of IPv6 took all places of a relay, and so did eight hosts of one /24."""
    desk = RelayDesk()
    found = [desk.reserve(PeerId(f"p{number}"), f"2a01:4f8:1:2::{number:x}", 0.0) for number in range(MAX_RESERVED)]
    assert found.count(RelayStatus.OK) == MAX_RESERVED_PER_HOST
    for number in range(MAX_RESERVED):
        desk.reserve(PeerId(f"q{number}"), f"31.0.1.{number // 8}", 0.0)
    assert desk.num_reserved_at(0.0) == MAX_RESERVED
    for number in range(2, 12):
        assert desk.reserve(PeerId(f"home{number}"), host(number), 1.0) is RelayStatus.OK
    assert desk.num_reserved_at(1.0) == MAX_RESERVED
    assert all(desk.has(PeerId(f"home{number}"), 1.0) for number in range(2, 12))
    assert desk.reserve(PeerId("q99"), "31.0.1.77", 1.0) is RelayStatus.FULL, "nor does it take one of another's"


def test_places_are_bounded_and_free_again():
    desk = RelayDesk()
    found = [desk.reserve(PeerId(f"p{number}"), host(number), 0.0) for number in range(2 * MAX_RESERVED)]
    assert found.count(RelayStatus.OK) == MAX_RESERVED == desk.num_reserved_at(0.0)
    assert desk.reserve(A, host(200), RESERVED_S + 1) is RelayStatus.OK
    assert desk.num_reserved_at(RESERVED_S + 1) == 1
    assert desk.num_reserved_at(2 * RESERVED_S + 2) == 0


def test_circuits_are_bounded_from_one_between_two_and_in_all():
    desk = RelayDesk()
    targets = [PeerId(f"t{number}") for number in range(MAX_RESERVED)]
    for number, target in enumerate(targets):
        desk.reserve(target, host(number), 0.0)
    taken = [desk.connect(A, targets[0], 0.0) for _ in range(MAX_CIRCUITS_BETWEEN + 1)]
    assert taken.pop() is RelayStatus.FULL
    for circuit in taken:
        assert isinstance(circuit, Circuit)
        desk.ended(circuit)
    assert desk.num_circuits == 0
    found = [desk.connect(A, target, 0.0, host(1)) for target in targets * 2]
    assert sum(isinstance(each, Circuit) for each in found) == MAX_CIRCUITS_FROM
    for source in "bcdefgh":
        found += [desk.connect(PeerId(source), target, 0.0, host(1)) for target in targets]
    assert sum(isinstance(each, Circuit) for each in found) == MAX_CIRCUITS == desk.num_circuits
    assert desk.take_given_up() == []


def test_one_range_of_addresses_does_not_keep_all_circuits() -> None:
    """Fifteen names of one house filled a relay: three circuits each between seven sources and eight targets, with a byte now and then."""
    desk = RelayDesk()
    ours = [PeerId(f"t{number}") for number in range(8)]
    for peer in [*ours, B, C]:
        desk.reserve(peer, host(1) if peer in ours else "", 0.0)
    first = desk.connect(PeerId("s0"), ours[0], 0.0, host(1))
    for source in range(7):
        for target in ours * MAX_CIRCUITS_BETWEEN:
            desk.connect(PeerId(f"s{source}"), target, 0.0, host(1))
    assert desk.num_circuits == MAX_CIRCUITS
    honest = [desk.connect(A, target, 1.0, host(2)) for target in (B, C)]
    assert all(isinstance(each, Circuit) for each in honest)
    given_up = desk.take_given_up()
    assert given_up[0] is first
    assert len(given_up) == 2
    assert desk.num_circuits == MAX_CIRCUITS
    assert desk.connect(PeerId("s9"), ours[0], 1.0, host(1)) is RelayStatus.FULL, "nor does it take one of another's"
    desk.ended(given_up[0])  # told late, by who passed on: it counts once
    assert desk.num_circuits == MAX_CIRCUITS


def served(
    turns: RelayTurns, until: float, *, hungry: dict[PeerId, int], places: dict[PeerId, str] | None = None
) -> dict[PeerId, int]:
    """Bytes that each had within that time, which always has so many tickets out."""
    of = places or {}
    owners: dict[int, tuple[PeerId, int]] = {}

    def ask(sender: PeerId) -> None:
        num_bytes = turns.piece_bytes()
        owners[turns.ask(sender, num_bytes, of.get(sender, ""))] = (sender, num_bytes)

    for sender, tickets in hungry.items():
        for _ in range(tickets):
            ask(sender)
    got = dict.fromkeys(hungry, 0)
    now = 0.0
    while now <= until:
        for ticket in turns.granted(now):
            sender, num_bytes = owners.pop(ticket)
            got[sender] += num_bytes
            ask(sender)
        now += max(turns.wait_s(now) or 0.0, 1e-4)
    return got


@pytest.mark.parametrize("rate", [12_500.0, 1e6, 12.5e6])
def test_the_budget_holds_and_is_used(rate: float):
    turns = RelayTurns(rate, 0.0)
    got = sum(served(turns, 20.0, hungry={A: 3, B: 1}).values())
    most = 20.0 * rate + max(rate * BURST_S, LEAST_PIECE_BYTES) + MOST_PIECE_BYTES
    assert 0.97 * 20.0 * rate <= got <= most
    assert got <= turns.num_bytes <= got + MOST_PIECE_BYTES


def test_who_floods_delays_itself():
    """Sixty circuits of one beside one of another: each sender has its half."""
    got = served(RelayTurns(RATE, 0.0), 10.0, hungry={A: 60, B: 1})
    assert got[B] >= 0.45 * sum(got.values())


def test_the_more_send_the_smaller_are_the_pieces():
    turns = RelayTurns(RATE, 0.0)
    assert turns.piece_bytes() == MOST_PIECE_BYTES
    for number in range(30):
        turns.ask(PeerId(f"p{number}"), MOST_PIECE_BYTES)
    assert LEAST_PIECE_BYTES <= turns.piece_bytes() <= RATE * TURNS_S / 30


def test_a_turn_comes_within_a_moment_for_everybody():
    senders = {PeerId(f"p{number}"): 1 for number in range(20)}
    got = served(RelayTurns(RATE, 0.0), 1.0, hungry=senders)
    assert min(got.values()) > 0


def test_a_circuit_that_ended_is_waited_for_no_more():
    turns = RelayTurns(RATE, 0.0)
    turns.ask(A, MOST_PIECE_BYTES)
    tickets = [turns.ask(A, MOST_PIECE_BYTES) for _ in range(10)]
    last = turns.ask(B, 1000)
    found = turns.granted(0.0)
    for ticket in tickets:
        turns.withdraw(A, ticket)
    now = 0.0
    while (wait_s := turns.wait_s(now)) is not None:
        now += wait_s + 1e-6
        found += turns.granted(now)
    assert last in found
    assert turns.num_bytes <= 5 * MOST_PIECE_BYTES


def test_nothing_is_granted_twice_or_forgotten():
    rng = random.Random(5)
    open_tickets: dict[int, PeerId] = {}
    granted: list[int] = []
    turns, now = RelayTurns(RATE, 0.0), 0.0
    for _ in range(2000):
        sender = PeerId(f"p{rng.randrange(7)}")
        if rng.random() < 0.6 and len(open_tickets) < 50:
            open_tickets[turns.ask(sender, rng.randrange(1, MOST_PIECE_BYTES))] = sender
        elif open_tickets and rng.random() < 0.2:
            ticket = rng.choice(list(open_tickets))
            turns.withdraw(open_tickets.pop(ticket), ticket)
        for ticket in turns.granted(now):
            granted.append(ticket)
            open_tickets.pop(ticket, None)
        now += rng.random() * 0.01
    while (wait_s := turns.wait_s(now)) is not None:
        now += wait_s + 1e-6
        for ticket in turns.granted(now):
            granted.append(ticket)
            open_tickets.pop(ticket, None)
    assert not open_tickets
    assert len(granted) == len(set(granted))


def test_many_names_of_one_range_have_one_turn_between_them() -> None:
    """Names cost nothing: 24 of them left an honest circuit a twenty-fifth of the budget, and a range may have 150."""
    crowd = [PeerId(f"evil{number}") for number in range(50)]
    got = served(
        RelayTurns(RATE, 0.0), 5.0, hungry={**dict.fromkeys(crowd, 2), A: 1}, places=dict.fromkeys(crowd, "203.0.113")
    )
    assert got[A] > 0.45 * sum(got.values())
    assert min(got[each] for each in crowd) > 0, "and each of the crowd its part of the other half"


def test_who_withdraws_leaves_nothing_behind() -> None:
    turns = RelayTurns(RATE, 0.0)
    tickets = [turns.ask(A, MOST_PIECE_BYTES, "203.0.113") for _ in range(3)]
    other = turns.ask(B, 1000, "203.0.113")
    for ticket in tickets:
        turns.withdraw(A, ticket, "203.0.113")
    found, now = list[int](), 0.0
    while turns.wait_s(now) is not None or not found:
        found += turns.granted(now)
        now += 0.01
    assert found == [other]
