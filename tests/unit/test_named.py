"""How often the peers that a run's link names are asked of the directory, and what of their answers stands."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from dilocox_peer.dht.named import ASKED_AGAIN_S, MOST_S, NamedPeers, Stored, merged
from dilocox_peer.types import PeerId

BOOT, OTHER = PeerId("boot"), PeerId("other")


class Id(str):
    @classmethod
    def generate(cls, *, source: str) -> "Id":
        return cls(source)

    def to_bytes(self) -> bytes:
        return self.encode()


@dataclass
class Node:
    """Of hivemind's, what is asked of it: records are what a named peer holds, or None where it does not answer."""

    records: dict[str, tuple[bytes, float]] | None
    node_id: Id = field(default_factory=lambda: Id("me"))
    asked: Counter[str] = field(default_factory=Counter)
    known: dict[str, PeerId] = field(default_factory=lambda: {"n": BOOT, "o": OTHER})

    @property
    def protocol(self) -> Any:
        table = SimpleNamespace(uid_to_peer_id=self.known)
        serializer = SimpleNamespace(dumps=str.encode, loads=lambda raw: raw)
        return SimpleNamespace(routing_table=table, serializer=serializer, call_find=self.call_find)

    async def call_find(self, peer: PeerId, keys: list[Id]) -> Any:
        assert peer == BOOT, "it alone is named"
        self.asked.update(keys)
        if self.records is None:
            return None
        return {key: (SimpleNamespace(value=self.records) if self.records else None, {}) for key in keys}


@dataclass
class Swarm:
    node: Node
    now: float = 1000.0

    def __post_init__(self) -> None:
        validator = SimpleNamespace(strip_value=lambda record: record.value)
        self.named = NamedPeers(
            self.node, lambda: {BOOT}, cast("Any", validator), lambda: self.now, random.Random(0), lambda: self.now
        )

    def find(self, others: set[str]) -> set[str]:
        told = asyncio.run(self.named.find(["key"]))
        self.named.others_found("key", {PeerId(each) for each in others})
        return set(told.get("key", {}))

    def times_asked(self, others: set[str], *, over_s: float) -> int:
        before, until = self.node.asked["key"], self.now + over_s
        while self.now < until:
            self.find(others)
            self.now += 1.0
        return self.node.asked["key"] - before


def records(count: int, expires_s: float = 1e9) -> dict[str, tuple[bytes, float]]:
    return {f"peer{number}": (b"lease", expires_s) for number in range(count)}


def test_many_records_are_asked_for_seldom_and_again_soon_where_the_nearest_lack_some() -> None:
    few, many = Swarm(Node(records(4))), Swarm(Node(records(400)))
    everybody = set(records(400))
    assert few.find(everybody) == set(records(4))
    assert few.times_asked(everybody, over_s=600) > 600 / (1.5 * ASKED_AGAIN_S)
    assert many.times_asked(everybody, over_s=1200) <= 1200 / (0.75 * MOST_S)
    assert many.times_asked(everybody - {"peer7"}, over_s=600) >= 600 / (1.5 * ASKED_AGAIN_S) - 1, "one is hidden"


def test_what_was_told_stands_until_it_expires() -> None:
    swarm = Swarm(Node(records(400, expires_s=1050.0)))
    assert len(swarm.find(set())) == 400
    swarm.node.records = None  # does not answer any more
    swarm.now = 1049.0
    assert len(swarm.find(set())) == 400
    swarm.now = 1051.0
    assert swarm.find(set()) == set()


def test_nobody_is_asked_who_is_not_in_the_routing_table() -> None:
    swarm = Swarm(Node(records(1)))
    swarm.node.known = {"o": OTHER}
    assert swarm.find(set()) == set()
    assert not swarm.node.asked


def test_a_key_of_which_nobody_tells_any_more_is_left_out() -> None:
    """An empty answer says that there is nothing, and no answer says nothing."""
    swarm = Swarm(Node({}))
    assert asyncio.run(swarm.named.find(["key"])) == {"key": {}}
    swarm.node.records = None
    swarm.now += 2 * MOST_S
    assert asyncio.run(swarm.named.find(["key"])) == {}


async def test_two_stores_of_a_record_send_it_to_nobody_twice() -> None:
    sent: list[str] = []

    async def call() -> list[bool]:
        sent.append("boot")
        await asyncio.sleep(0)
        return [True]

    nearest = Stored()
    named = Stored(nearest.calls)
    await asyncio.gather(nearest.ask("boot", call), named.ask("boot", call))
    assert (sent, nearest.answers, named.answers) == (["boot"], [True], [True])


def test_of_each_writer_the_record_that_expires_last_counts() -> None:
    a, b = PeerId("a"), PeerId("b")
    found = merged({"k": {a: (b"old", 1.0), b: (b"b", 1.0)}}, {"k": {a: (b"new", 2.0)}, "other": {b: (b"b", 1.0)}})
    assert found == {"k": {a: (b"new", 2.0), b: (b"b", 1.0)}, "other": {b: (b"b", 1.0)}}
