"""Whom to try first of many leases, most of which may be made up."""

import random
from types import SimpleNamespace

from dilocox_peer.dht.records import Lease
from dilocox_peer.dht.turns import AskedInTurn, by_turns, known_first
from dilocox_peer.signing import SigningKey
from dilocox_peer.types import PeerId

PEER = SigningKey(b"p" * 32).peer_id


def lease(name: str, host: str) -> Lease:
    return Lease(PeerId(name), 0, 1, (f"/ip4/{host}/tcp/9/p2p/{PEER}",), 1, 1.0, 1, "direct", 0)


CROWD = [lease(f"0 made up {number:04}", "9.9.9.1") for number in range(500)]
HONEST = [lease(f"honest {number}", f"8.8.{number}.1") for number in range(5)]
NOBODY = SimpleNamespace(named=frozenset(), heard=frozenset())


def names(leases: list[Lease]) -> set[str]:
    return {each.peer for each in leases}


def test_one_of_each_range_has_its_turn_before_a_second_of_any() -> None:
    order = by_turns([*CROWD, *HONEST], str)
    assert names(HONEST) <= names(order[:6])
    assert len(order) == len(CROWD) + len(HONEST)


def test_those_that_are_known_come_first_and_the_others_in_no_order_that_names_decide() -> None:
    alike = [lease(f"{number:03}", f"8.{number}.1.1") for number in range(100)]
    met = SimpleNamespace(named={alike[90].peer}, heard={alike[80].peer})
    first, second = (known_first(alike, met, random.Random(seed)) for seed in (1, 2))
    assert [each.peer for each in first[:2]] == [alike[90].peer, alike[80].peer]
    assert names(first[2:18]) != names(second[2:18])


def test_new_names_at_each_look_keep_nobody_from_being_asked_again() -> None:
    """An honest donor that was busy once was asked once in 720 looks, one that the link names too."""
    for met in (NOBODY, SimpleNamespace(named={HONEST[0].peer}, heard={HONEST[0].peer})):
        turns, times = AskedInTurn(random.Random(1)), 0
        for look in range(200):
            fresh = [lease(f"look {look} {number}", f"9.{number}.{look}.1") for number in range(20)]
            times += HONEST[0].peer in names(turns.take([*fresh, HONEST[0]], met, 16))
        assert times >= (200 if met is not NOBODY else 20)


def test_each_turn_takes_others_until_all_were_asked() -> None:
    fakes = [lease(f"0 made up {number:04}", f"9.{number % 250}.{number // 250}.1") for number in range(500)]
    leases, turns, asked = [*fakes, *HONEST], AskedInTurn(random.Random(1)), set[str]()
    for _ in range(-(-len(leases) // 14)):  # two of 16 are asked again
        assert turns.were_all_asked(leases) is (asked == names(leases))
        asked |= names(turns.take(leases, NOBODY, 16))
    assert asked == names(leases)
    assert turns.were_all_asked(leases)
