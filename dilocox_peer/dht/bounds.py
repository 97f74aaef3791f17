"""What a DHTNode keeps of others, bounded: hivemind itself keeps all that expires later. E5 of entry.py; for whom there is room says
room.py. Nothing here imports hivemind."""

import heapq
import time
from collections import Counter
from contextvars import ContextVar
from typing import Any

from dilocox_peer.dht.records import LATEST_S
from dilocox_peer.dht.room import Giver, RecordRoom
from dilocox_peer.types import PeerId

MAX_NODES = 1024  # in the routing table

giver: ContextVar[Giver | None] = ContextVar("giver", default=None)
"""It sent the request to store that this task answers, which hivemind does not tell its storage; None: this node itself."""


def bound_node(node: Any, own_subkey: str) -> None:
    """Bounds what a DHTNode keeps of others: E5. Records of our own always have room; what was stored while this computer's clock was
    ahead is gone when it is right again."""
    protocol = node.protocol
    bound_storage(protocol.storage, own_subkey)
    _bound_routing_table(protocol.routing_table)
    bound_bans(node.blacklist)


def bound_bans(blacklist: Any) -> None:
    """Of nodes that did not answer, which hivemind leaves alone for some seconds."""
    blacklist.ban_counter = _NoCounter()  # with our backoff rate of 1 nothing depends on it, and it forgets nobody
    blacklist.banned_peers = _Bans()


class _NoCounter(Counter[Any]):
    def __setitem__(self, key: Any, count: int) -> None:
        pass


class _Bans(dict[Any, float]):
    """Until when a node is left alone, by a clock that does not go back. By hivemind's, the one on the wall, whoever failed just before that
    was set back would be left alone for as long as it had been ahead."""

    def store(self, node: Any, _failures: int, expiration_time: float) -> None:
        now = time.monotonic()
        for each in [each for each, until in self.items() if until <= now]:
            del self[each]
        self[node] = now + expiration_time - time.time()

    def __contains__(self, node: object) -> bool:
        return self.get(node, 0.0) > time.monotonic()

    def __delitem__(self, node: Any) -> None:
        self.pop(node, None)


def bound_storage(storage: Any, own_subkey: str) -> None:
    get, store_subkey = storage.get, storage.store_subkey
    room, ourselves = RecordRoom(own_subkey), Giver(PeerId(own_subkey))

    def drop(key: Any, subkey: str) -> None:
        room.dropped(key, subkey)
        if (there := storage.get(key)) is not None:
            del there.value[subkey]

    def get_sane(key: Any) -> Any:
        """As hivemind's, but that of records what expires too late for any node to take it is dropped: our clock was ahead. Such a record
        stands in the way of every newer one of its writer, ours too, for as long as the clock was ahead."""
        there, latest_s = get(key), time.time() + LATEST_S
        if there is None or there.expiration_time <= latest_s:
            return there
        records = [] if isinstance(there.value, bytes) else list(there.value.items())
        # The key anew: hivemind lets no dictionary expire sooner than the latest that was ever in it.
        del storage[key]
        for subkey, (value, expires_s) in records:
            if expires_s > latest_s or not store_subkey(key, subkey, value, expires_s):
                room.dropped(key, subkey)
        return get(key)

    def store(key: Any, subkey: Any, value: bytes, expires_s: float) -> bool:
        there = storage.get(key)
        dictionary: Any = {} if there is None or isinstance(there.value, bytes) else there.value
        before = dictionary.get(subkey)
        if before is not None and before.expiration_time >= expires_s:
            return False  # hivemind refuses it too, but keeps a note of it until it would have expired
        by, now = giver.get() or ourselves, time.time()
        if not now < expires_s <= now + LATEST_S:
            return False  # what has expired hivemind refuses too, after another's record had gone for it
        if subkey != own_subkey:
            going = room.make(key, subkey, len(value), by, now)
            if going is None:
                return False
            for name in going:
                drop(*name)
        is_stored: bool = store_subkey(key, subkey, value, expires_s)
        if is_stored:
            room.kept(key, subkey, len(value), expires_s, by)
            _compact(storage)
            _compact(storage.get(key).value)
        return is_stored

    storage.get, storage.store_subkey = get_sane, store


def _compact(storage: Any) -> None:
    """hivemind's heap of expiries keeps every store until it would have expired, also of what was replaced since."""
    if len(storage.expiration_heap) > 64 + 4 * len(storage.data):
        heap = [entry for key, entry in storage.key_to_heap.items() if key in storage.data]
        heapq.heapify(heap)
        storage.expiration_heap[:] = heap


def _bound_routing_table(table: Any) -> None:
    add = table.add_or_update_node

    def bounded(node_id: Any, peer_id: Any) -> Any:
        if node_id not in table and len(table.uid_to_peer_id) >= MAX_NODES:
            spare = next((spare for bucket in table.buckets for spare in bucket.replacement_nodes), None)
            if spare is None:
                return None
            del table[spare]
        return add(node_id, peer_id)

    table.add_or_update_node = bounded
