"""Which nodes are nearest to what is stored again and again: looked up now and then."""

from types import SimpleNamespace
from typing import Any

from dilocox_peer.dht.nearest import LOOKED_UP_S, MAX_KEYS, remember_nearest


class _Node:
    """Eight nodes, of which the table knows five; each looked-up key is asked for once more."""

    def __init__(self) -> None:
        self.node_id, self.num_replicas, self.now = 0, 5, 0.0
        self.table = [1, 2, 3, 4, 5]
        self.looked_up: list[int] = []
        self.found: list[list[int]] = []
        self.protocol = SimpleNamespace(routing_table=self)
        self.forget = remember_nearest(self, lambda: self.now)

    def get_nearest_neighbors(self, _key: int, k: int, exclude: int) -> list[tuple[int, str]]:
        return [(each, f"peer {each}") for each in self.table[:k] if each != exclude]

    async def find_nearest_nodes(self, queries: Any, found_callback: Any = None, node_to_peer_id: Any = None) -> Any:
        for key in queries:
            self.looked_up.append(key)
            node_to_peer_id.update({each: f"peer {each}" for each in range(1, 9)})
            await found_callback(key, [8, 7, *self.table], set())
        return {}

    async def store(self, key: int) -> None:
        peers: dict[int, str] = {}

        async def on_found(_key: int, nearest: list[int], _visited: set[int]) -> None:
            self.found.append(nearest)
            assert all(peers[each] == f"peer {each}" for each in nearest)

        await self.find_nearest_nodes([key], node_to_peer_id=peers, found_callback=on_found)


async def test_a_key_is_looked_up_once_in_two_minutes() -> None:
    node = _Node()
    for node.now in (0.0, 30.0, LOOKED_UP_S - 1):
        await node.store(1)
    assert node.looked_up == [1]
    assert node.found == [[8, 7, 1, 2, 3, 4, 5]] * 3
    node.now = LOOKED_UP_S
    await node.store(1)
    assert node.looked_up == [1, 1]


async def test_it_is_looked_up_when_others_are_nearest_by_our_table_and_when_nobody_took_it() -> None:
    node = _Node()
    await node.store(1)
    node.table = [6, 1, 2, 3, 4, 5]
    await node.store(1)
    assert node.looked_up == [1, 1]
    await node.store(1)
    node.forget(1)
    await node.store(1)
    assert node.looked_up == [1, 1, 1]


async def test_what_is_remembered_is_bounded() -> None:
    node = _Node()
    for key in range(MAX_KEYS + 1):
        await node.store(key)
    await node.store(MAX_KEYS)
    assert len(node.looked_up) == MAX_KEYS + 1
    await node.store(0)
    assert node.looked_up[-1] == 0
