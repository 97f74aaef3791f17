"""For whose records a key of the directory has room, when strangers make up peers without end."""

import time
from typing import Any

import pytest
from hivemind.dht.storage import DHTLocalStorage

from dilocox_peer.dht.bounds import bound_storage, giver
from dilocox_peer.dht.room import HANDED_ON, MAX_BYTES_OF_KEY, MAX_BYTES_OF_PLACE, MAX_RECORDS, Giver, RecordRoom
from dilocox_peer.types import PeerId

VALUE = b"v" * 500


class Node:
    """hivemind's storage of one, bounded. What it is given comes with connections, and lives until a minute after the test began."""

    def __init__(self) -> None:
        self.storage: Any = DHTLocalStorage()
        bound_storage(self.storage, "ourselves")
        self.expires_s = time.time() + 60.0

    def take(self, writer: str, by: Giver, *, key: str = "key", value: bytes = VALUE, later_s: float = 0.0) -> bool:
        token = giver.set(by)
        try:
            taken: bool = self.storage.store_subkey(key, writer, value, self.expires_s + later_s)
        finally:
            giver.reset(token)
        return taken

    def comes(self, writer: str, place: str, *, later_s: float = 0.0) -> bool:
        """It is connected, and writes for itself."""
        return self.take(writer, Giver(PeerId(writer), place), later_s=later_s)

    def held(self, key: str = "key") -> set[str]:
        return set(self.storage.get(key).value.data)


def test_one_connection_hands_on_a_few_of_others_and_newcomers_find_room() -> None:
    node, stranger = Node(), Giver(PeerId("stranger"), "203.0.113.0/24")
    taken = [node.take(f"made up {number}", stranger) for number in range(4 * MAX_RECORDS)]
    assert sum(taken) == HANDED_ON
    assert all(node.comes(f"volunteer {number}", f"10.0.{number}.1") for number in range(64))
    assert len(node.held()) == HANDED_ON + 64


def test_a_new_name_of_the_same_range_hands_on_no_more() -> None:
    node = Node()
    taken = [node.take(f"made up {n}", Giver(PeerId(f"stranger {n}"), "203.0.113.0/24")) for n in range(100)]
    unseen = [node.take(f"invented {n}", Giver(PeerId(f"passer-by {n}"))) for n in range(100)]
    assert (sum(taken), sum(unseen)) == (HANDED_ON, HANDED_ON)


def test_in_a_full_key_who_writes_for_itself_takes_the_place_of_what_the_most_crowded_range_handed_on() -> None:
    node = Node()
    for number in range(MAX_RECORDS - HANDED_ON - 1):
        assert node.comes(f"volunteer {number}", f"10.0.{number}.1")
    for number in range(HANDED_ON):
        assert node.take(f"made up {number}", Giver(PeerId("stranger"), "203.0.113.0/24"))
    assert node.take("friend's friend", Giver(PeerId("friend"), "198.51.100.0/24"))
    assert not node.take("another", Giver(PeerId("other friend"), "192.0.2.0/24")), "it is full"
    assert node.comes("newcomer", "100.64.0.1")
    assert len(node.held()) == MAX_RECORDS
    assert f"made up {HANDED_ON - 1}" not in node.held()
    assert {"newcomer", "friend's friend", "made up 0", "volunteer 0"} <= node.held()


def test_connections_of_one_range_take_each_others_places_alone() -> None:
    """Those of which there are most: the newest goes, for whoever comes, and who was there before stays."""
    node = Node()
    honest = [f"volunteer {number}" for number in range(20)]
    assert all(node.comes(name, f"10.0.{number}.1") for number, name in enumerate(honest))
    crowd = [f"crowd {number}" for number in range(3 * MAX_RECORDS)]
    assert all(node.comes(name, "203.0.113.0/24") for name in crowd)
    assert set(honest) <= node.held()
    assert node.comes("newcomer", "100.64.0.1")
    assert {"newcomer", *honest, crowd[0]} <= node.held()
    assert len(node.held()) == MAX_RECORDS


def test_where_every_place_has_one_nobody_is_dropped() -> None:
    node = Node()
    for number in range(MAX_RECORDS):
        assert node.comes(f"volunteer {number}", f"10.0.{number}.1")
    assert not node.comes("newcomer", "100.64.0.1")
    assert node.comes("volunteer 0", "10.0.0.1", later_s=1.0), "who is there renews"
    assert node.storage.store_subkey("key", "ourselves", VALUE, node.expires_s)


def test_what_its_writer_brought_stays_its_own_when_others_hand_it_on_again() -> None:
    node, stranger = Node(), Giver(PeerId("stranger"), "203.0.113.0/24")
    for number in range(2 * HANDED_ON):
        assert node.comes(f"volunteer {number}", f"10.0.{number}.1")
        assert node.take(f"volunteer {number}", stranger, later_s=1.0)
    assert node.take("made up", stranger), "none of them counts as handed on"


def test_a_key_keeps_no_more_bytes_than_a_reader_takes() -> None:
    room = RecordRoom("ourselves")
    size = MAX_BYTES_OF_KEY // 4
    for number in range(4):
        by = Giver(PeerId(f"writer {number}"), f"place {number // 2}")
        assert room.make("key", by.peer, size, by, 0.0) == []
        room.kept("key", by.peer, size, 60.0, by)
    newcomer = Giver(PeerId("newcomer"), "place 2")
    assert room.make("key", newcomer.peer, size, newcomer, 0.0) == ["writer 1"]
    assert room.make("key", newcomer.peer, size, newcomer, 61.0) == [], "they have expired"


@pytest.mark.parametrize("is_own", [True, False])
def test_no_range_takes_more_than_its_share_of_a_nodes_memory(is_own: bool) -> None:
    room, taken, size = RecordRoom("ourselves"), 0, 4096
    for number in range(4000):
        by = Giver(PeerId(f"name {number}"), "203.0.113.0/24")
        writer = by.peer if is_own else f"made up {number}"
        if room.make(number // 4, writer, size, by, 0.0) is None:
            continue
        room.kept(number // 4, writer, size, 60.0, by)
        taken += size
    assert MAX_BYTES_OF_PLACE // 2 < taken <= MAX_BYTES_OF_PLACE
    other = Giver(PeerId("other"), "198.51.100.0/24")
    assert room.make(0, "other", size, other, 0.0) == []
    again = Giver(PeerId("again"), "203.0.113.0/24")
    assert room.make(0, "again", size, again, 61.0) == [], "its records have expired"
