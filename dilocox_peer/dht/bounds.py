"""What a DHTNode keeps of others, bounded: hivemind itself keeps all that expires later. E5 of entry.py. Nothing here imports hivemind."""

import heapq
from collections import Counter
from typing import Any

MAX_RECORDS = 128  # under one key; the peers of a stage are spread over BUCKETS keys
MAX_BYTES_OF_KEY = 768 * 1024  # of values: else we would hand out what nobody reads (MAX_DICTIONARY_BYTES)
MAX_STORED_BYTES = 16 * 1024 * 1024
RECORD_COST_BYTES = 512  # beside its value: what the objects around a record take, about
MAX_NODES = 1024  # in the routing table


def bound_node(node: Any, own_subkey: str) -> None:
    """Bounds what a DHTNode keeps of others: E5. Records of our own always have room."""
    protocol = node.protocol
    _bound_storage(protocol.storage, own_subkey)
    _bound_routing_table(protocol.routing_table)
    node.blacklist.ban_counter = _NoCounter()  # with our backoff rate of 1 nothing depends on it, and it forgets nobody


class _NoCounter(Counter[Any]):
    def __setitem__(self, key: Any, count: int) -> None:
        pass


def _bound_storage(storage: Any, own_subkey: str) -> None:
    store_subkey = storage.store_subkey
    stored_bytes = 0  # at least what is stored: what expires is counted until the next recount

    def store(key: Any, subkey: Any, value: bytes, expires_s: float) -> bool:
        nonlocal stored_bytes
        there = storage.get(key)
        dictionary = there.value if there is not None and not isinstance(there.value, bytes) else None
        if dictionary is not None:
            before = dictionary.get(subkey)
            if before is not None and before.expiration_time >= expires_s:
                return False  # hivemind refuses it too, but keeps a note of it until it would have expired
            there_bytes = sum(len(entry.value) for _, entry in dictionary.items())
            is_full = (before is None and len(dictionary) >= MAX_RECORDS) or there_bytes + len(value) > MAX_BYTES_OF_KEY
            if is_full and subkey != own_subkey:
                return False
        cost = RECORD_COST_BYTES + len(value)
        if stored_bytes + cost > MAX_STORED_BYTES:
            stored_bytes = _stored_bytes(storage)
            if stored_bytes + cost > MAX_STORED_BYTES and subkey != own_subkey:
                return False
        is_stored: bool = store_subkey(key, subkey, value, expires_s)
        if is_stored:
            stored_bytes += cost
            _compact(storage)
            _compact(storage.get(key).value)
        return is_stored

    storage.store_subkey = store


def _stored_bytes(storage: Any) -> int:
    return sum(
        RECORD_COST_BYTES + len(entry.value)
        for _, item in list(storage.items())
        if not isinstance(item.value, bytes)
        for _, entry in list(item.value.items())
    )


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
