"""Who may knock at linkd's port, and how often."""

from dilocox_peer.network.link_gate import KNOCKS, MAX_OF_PLACE, MAX_PLACES, OWN_KNOCKS, PLACE_KNOCKS, LinkGate


def test_a_place_knocks_a_few_times_and_others_get_in_all_the_same() -> None:
    gate = LinkGate(0.0)
    assert sum(gate.knocks("8.8.4.0/24", 0.0) for _ in range(1000)) == min(PLACE_KNOCKS, MAX_OF_PLACE)
    assert gate.knocks("9.9.9.0/24", 0.0)


def test_many_places_share_what_the_process_can_bear() -> None:
    gate = LinkGate(0.0)
    assert sum(gate.knocks(f"8.8.{number}.0/24", 0.0) for number in range(200)) == KNOCKS


def test_a_place_has_so_many_connections_until_they_end() -> None:
    gate = LinkGate(0.0)
    now = 0.0
    for _ in range(MAX_OF_PLACE):
        now += 1.0
        assert gate.knocks("8.8.4.0/24", now)
    assert not gate.knocks("8.8.4.0/24", now + 100)
    gate.left("8.8.4.0/24")
    assert gate.knocks("8.8.4.0/24", now + 101)


def test_this_computer_has_tunnels_and_so_more() -> None:
    gate = LinkGate(0.0)
    assert sum(gate.knocks("", 0.0) for _ in range(1000)) == OWN_KNOCKS


def test_a_place_that_is_forgotten_is_a_new_one_and_no_more_is_kept() -> None:
    gate = LinkGate(0.0)
    for number in range(3 * MAX_PLACES):
        now = float(number)
        if gate.knocks(f"place {number}", now):
            gate.left(f"place {number}")
    assert gate.num_places <= MAX_PLACES
