"""In which order peers are tried that are known by their leases alone: one of each range of addresses in turn. Pure.

Leases cost next to nothing, and PeerIDs are ground that come first by any order which others know. So where there are more than can be tried, the
order is one of our own, and one range has no more of the first places than others have.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Any

from dilocox_peer.dht.records import Lease
from dilocox_peer.errors import ConfigError
from dilocox_peer.invitation import address_range, parse_multiaddr
from dilocox_peer.types import PeerId


def first_range(addresses: Sequence[str]) -> str:
    """Where the first address leads, relays' too; "" within a house, or without any."""
    for text in addresses:
        with suppress(ConfigError):
            host = parse_multiaddr(text, "lease").host
            return address_range(host) or host
    return ""


def by_turns(leases: Iterable[Lease], rank: Callable[[PeerId], Any]) -> list[Lease]:
    """rank: the lowest of each range comes first, and nobody else knows it before."""
    queues: dict[str, list[Lease]] = {}
    for lease in sorted(leases, key=lambda lease: rank(lease.peer)):
        queues.setdefault(first_range(lease.addresses), []).append(lease)
    return [lease for turn in zip_longest(*queues.values()) for lease in turn if lease is not None]
