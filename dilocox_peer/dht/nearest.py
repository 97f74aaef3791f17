"""Which nodes of the directory are nearest to what a peer writes again and again, looked up now and then only.

hivemind asks up to twenty nodes who is nearest each time something is stored. A lease is written every half minute under one key: in a
run of twelve peers these questions were most of what the directory sent.
"""

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any

LOOKED_UP_S = 120.0  # no record lives longer: what nodes nearer than these are asked for is there again by then
MAX_KEYS = 64  # the longest unused is forgotten

OnFound = Callable[[Any, list[Any], set[Any]], Awaitable[Any]]
"""hivemind's: for a key, the nearest nodes and those that were asked."""


@dataclass(slots=True)
class _Nearest:
    """peers: of each node, the nearest first. in_table: the nearest that our routing table had at the time."""

    peers: dict[Any, Any]
    in_table: list[Any]
    found_at: float


def remember_nearest(node: Any, clock: Callable[[], float] = time.monotonic) -> Callable[[Any], None]:
    """node: a DHTNode. Makes it store under a key at the nodes that were nearest LOOKED_UP_S ago or less, unless the nearest it knows by
    itself, which those that do not answer drop out of, are others now. One that does not answer is left out for the next, as after a lookup. Gives back
    what forgets the nodes of a key: after a store that none of them took."""
    looked_up = node.find_nearest_nodes
    known: OrderedDict[Any, _Nearest] = OrderedDict()

    def in_table(key: Any) -> list[Any]:
        found = node.protocol.routing_table.get_nearest_neighbors(key, node.num_replicas, exclude=node.node_id)
        return [each for each, _peer in found]

    async def find(
        queries: Collection[Any], *args: Any, found_callback: OnFound | None = None, **kwargs: Any
    ) -> dict[Any, dict[Any, Any]]:
        peers = kwargs.get("node_to_peer_id")
        if found_callback is None or peers is None or len(queries) != 1:
            others: dict[Any, dict[Any, Any]] = await looked_up(queries, *args, found_callback=found_callback, **kwargs)
            return others
        (key,) = queries
        was = known.get(key)
        if was is not None and clock() - was.found_at < LOOKED_UP_S and in_table(key) == was.in_table:
            known.move_to_end(key)
            peers.update(was.peers)
            await found_callback(key, list(was.peers), set())
            return {key: dict(was.peers)}

        async def on_found(key: Any, nearest: list[Any], visited: set[Any]) -> Any:
            known[key] = _Nearest({each: peers[each] for each in nearest}, in_table(key), clock())
            known.move_to_end(key)
            while len(known) > MAX_KEYS:
                known.popitem(last=False)
            return await found_callback(key, nearest, visited)

        found: dict[Any, dict[Any, Any]] = await looked_up(queries, *args, found_callback=on_found, **kwargs)
        return found

    def forget(key: Any) -> None:
        known.pop(key, None)

    node.find_nearest_nodes = find
    return forget
