"""For whose records a key of the directory has room, when strangers make up peers without end."""

import time
from typing import Any

import pytest
from hivemind.dht.node import Blacklist
from hivemind.dht.storage import DHTLocalStorage

from dilocox_peer.dht.bounds import bound_bans, bound_storage, giver
from dilocox_peer.dht.room import (
    HANDED_ON,
    MAX_BYTES_OF_KEY,
    MAX_BYTES_OF_PLACE,
    MAX_RECORDS,
    MAX_STORED_BYTES,
    Giver,
    RecordRoom,
)
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


def test_a_record_that_has_expired_takes_nobodys_place() -> None:
    node = Node()
    crowd = {f"crowd {number}" for number in range(MAX_RECORDS)}
    assert all(node.comes(name, "203.0.113.0/24") for name in crowd)
    assert not node.comes("late", "198.51.100.0/24", later_s=-90.0)
    assert node.held() == crowd


def test_what_was_stored_while_the_clock_was_ahead_stands_in_nobodys_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody was let into a run whose bootstrap had been two hours ahead, for two hours."""
    node, now = Node(), time.time
    assert node.comes("right", "10.0.0.1")
    monkeypatch.setattr(time, "time", lambda: now() + 7200.0)
    for name in ("ahead too", "gone since"):
        assert node.comes(name, "10.0.0.1", later_s=7200.0)
    assert node.storage.store_subkey("key", "ourselves", VALUE, node.expires_s + 7200.0)
    monkeypatch.undo()
    assert node.held() == {"right"}
    assert node.comes("ahead too", "10.0.0.1")
    assert node.storage.store_subkey("key", "ourselves", VALUE, node.expires_s)
    assert node.held() == {"right", "ahead too", "ourselves"}
    assert not node.comes("ahead now", "10.0.0.1", later_s=7200.0)
    assert node.storage.get("key").expiration_time == node.expires_s, "the key is forgotten with its last record"


def test_a_node_that_failed_before_the_clock_was_set_back_is_left_alone_for_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bans, elapsed_s = Blacklist(base_time=5.0, backoff_rate=1.0), 0.0
    bound_bans(bans)
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0 + elapsed_s)
    for node in ("gone", "back at once"):
        bans.register_failure(node)
    bans.register_success("back at once")
    bans.register_success("never failed")
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 7200.0)
    assert ("gone" in bans, "back at once" in bans) == (True, False)
    elapsed_s = 6.0
    assert "gone" not in bans
    bans.register_failure("another")
    assert len(bans.banned_peers) == 1, "what has ended is forgotten"


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
    assert room.make("key", newcomer.peer, size, newcomer, 0.0) == [("key", "writer 1")]
    assert room.make("key", newcomer.peer, size, newcomer, 61.0) == [], "they have expired"


class Keys:
    """A node's room, given records of one size under as many keys as a writer likes."""

    SIZE = 4096

    def __init__(self) -> None:
        self.room = RecordRoom("ourselves")
        self.held: dict[tuple[object, str], int] = {}

    def writes(
        self, name: str, place: str, key: object, *, size: int = SIZE, writer: str = "", now: float = 0.0
    ) -> bool:
        by = Giver(PeerId(name), place)
        going = self.room.make(key, writer or name, size, by, now)
        if going is None:
            return False
        for each in going:
            self.room.dropped(*each)
            del self.held[each]
        self.room.kept(key, writer or name, size, now + 60.0, by)
        self.held[key, writer or name] = size
        return True

    @property
    def num_bytes(self) -> int:
        return sum(self.held.values())

    def fill(self, places: int) -> None:
        """A few names of each of so many ranges write for themselves under all keys there are, and more."""
        for place in range(places):
            for name in range(3):
                for key in range(300):
                    self.writes(f"stranger {place} {name}", f"203.0.{place}.0/24", key)


@pytest.mark.parametrize("is_own", [True, False])
def test_no_range_takes_more_than_its_share_of_a_nodes_memory(is_own: bool) -> None:
    node = Keys()
    for number in range(4000):
        name = f"name {number}"
        node.writes(name, "203.0.113.0/24", number // 4, writer=name if is_own else f"made up {number}")
    assert MAX_BYTES_OF_PLACE // 2 < node.num_bytes <= MAX_BYTES_OF_PLACE
    assert node.writes("other", "198.51.100.0/24", 0)
    assert not node.writes("again", "203.0.113.0/24", 0), "the others of its range have no more than it would have"
    assert node.writes("again", "203.0.113.0/24", 0, now=61.0), "its records have expired"


def test_names_whose_range_is_not_known_have_one_share_together() -> None:
    node = Keys()
    for number in range(4000):
        node.writes(f"name {number}", "", number // 4)
    assert node.num_bytes <= MAX_BYTES_OF_PLACE


def test_in_a_full_node_whoever_has_less_takes_room_from_the_range_that_has_most() -> None:
    node = Keys()
    volunteers = [f"volunteer {number}" for number in range(6)]
    assert all(node.writes(name, f"198.51.{name[-1]}.0/24", "lease") for name in volunteers)
    node.fill(12)
    assert MAX_STORED_BYTES // 2 < node.num_bytes <= MAX_STORED_BYTES
    assert {("lease", name) for name in volunteers} <= set(node.held), "nobody took theirs"
    for name in volunteers:
        assert node.writes(name, f"198.51.{name[-1]}.0/24", "lease", size=2 * node.SIZE), "it renews, with more to say"
    assert node.writes("newcomer", "192.0.2.0/24", "lease")
    assert not node.writes("newcomer", "192.0.2.0/24", "lease", writer="another"), "what is handed on takes nobody's"
    assert node.num_bytes <= MAX_STORED_BYTES


def test_in_a_full_share_a_newcomer_takes_room_from_the_peer_that_has_most() -> None:
    """As of a run whose peers are all behind relays."""
    node = Keys()
    assert node.writes("volunteer", "", "lease")
    for key in range(2 * MAX_BYTES_OF_PLACE // node.SIZE):
        node.writes("stranger", "", key)
    assert node.writes("newcomer", "", "lease")
    assert node.writes("volunteer", "", "lease", size=2 * node.SIZE)
    assert {("lease", "volunteer"), ("lease", "newcomer")} <= set(node.held)
    assert not node.writes("stranger", "", "one more"), "it has most"
    assert node.num_bytes <= MAX_BYTES_OF_PLACE


def test_in_a_share_of_small_ones_who_was_there_before_renews() -> None:
    node = Keys()
    for number in range(1000):
        node.writes(f"name {number}", "", "lease" if number == 0 else number)
    last = max(int(name.split()[1]) for _, name in node.held)
    assert node.writes("name 0", "", "lease", size=node.SIZE + 1024)
    assert (last, f"name {last}") not in node.held, "the newest has gone for it"


def test_what_goes_from_another_key_is_gone_from_the_storage() -> None:
    node, value = Node(), b"v" * 4096
    keys = [f"key {number}" for number in range(MAX_BYTES_OF_PLACE // 4096)]
    for key in keys:
        node.take("stranger", Giver(PeerId("stranger")), key=key, value=value)
    held = [key for key in keys if node.storage.get(key)]
    assert node.take("newcomer", Giver(PeerId("newcomer")), key="lease", value=value)
    assert not node.held(held[-1])
    assert node.held(held[0]) == {"stranger"}


def test_what_was_stored_while_the_clock_was_ahead_takes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A share that is full of it, of which nobody looks at the keys."""
    node, now, large = Node(), time.time, b"v" * (MAX_BYTES_OF_PLACE // 10)
    monkeypatch.setattr(time, "time", lambda: now() + 7200.0)
    ahead = Giver(PeerId("ahead"), "10.0.0.0/24")
    keys = [f"key {number}" for number in range(10)]
    stored = [node.take("ahead", ahead, key=key, value=large, later_s=7200.0) for key in keys]
    assert all(stored[:-1])
    assert not stored[-1], "the share is full"
    monkeypatch.undo()
    for key in keys[:-1]:
        assert node.take("newcomer", Giver(PeerId("newcomer"), "10.0.0.0/24"), key=f"another {key}", value=large)


def test_what_has_expired_makes_room_also_where_the_clock_went_back() -> None:
    room, large = RecordRoom("ourselves"), MAX_BYTES_OF_PLACE // 10

    def comes(name: str, now: float) -> bool:
        by = Giver(PeerId(name), "10.0.0.0/24")
        if room.make(name, name, large, by, now) is None:
            return False
        room.kept(name, name, large, now + 60.0, by)
        return True

    ahead, right = 107_200.0, 100_000.0
    for number in range(9):
        assert comes(f"ahead {number}", ahead)
    assert not comes("one more", ahead), "it is full"
    for number in range(9):
        room.dropped(f"ahead {number}", f"ahead {number}")
    for number in range(9):
        assert comes(f"here {number}", right)
    assert not comes("one more", right), "it is full"
    assert comes("newcomer", right + 61.0)
