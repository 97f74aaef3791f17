"""In which order peers are tried that are known by their leases alone: one of each range of addresses in turn. Pure.

Leases cost next to nothing, and PeerIDs are ground that come first by any order which others know. So where there are more than can be tried, the
order is one of our own, and one range has no more of the first places than others have.
"""

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Any, Protocol

from dilocox_peer.dht.records import Lease
from dilocox_peer.errors import ConfigError
from dilocox_peer.invitation import address_range, parse_multiaddr
from dilocox_peer.types import PeerId


class Acquainted(Protocol):
    """What is asked of network/transport.py."""

    @property
    def named(self) -> Collection[PeerId]: ...
    @property
    def heard(self) -> Collection[PeerId]: ...


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


def known_first(leases: Iterable[Lease], transport: Acquainted, rng: random.Random) -> list[Lease]:
    """Those that the run's link names, then those that were heard, then the others; of either one of each range in turn, drawn anew."""
    found = by_turns(leases, lambda _peer: rng.random())
    return sorted(found, key=lambda lease: (lease.peer not in transport.named, lease.peer not in transport.heard))


class AskedInTurn:
    """Asks again and again, whoever was asked least often first: what one wants may be with any of them, and most may be nothing but leases.

    Half of the places are for those that are known, the named ones first, and one in eight for those that were asked before: names that are new at
    each look are had without end.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._times: Counter[PeerId] = Counter()

    def take(self, leases: Iterable[Lease], transport: Acquainted, most: int) -> list[Lease]:
        """So many, that count as asked. Those that are listed no more are forgotten."""
        order = known_first(leases, transport, self._rng)
        listed = {lease.peer for lease in order}
        self._times = Counter({peer: count for peer, count in self._times.items() if peer in listed})
        order.sort(key=lambda lease: self._times[lease.peer])
        known = [lease for lease in order if lease.peer in transport.named]
        known += [lease for lease in order if lease.peer in transport.heard and lease.peer not in transport.named]
        again = [lease for lease in order if self._times[lease.peer]]
        turn = {lease.peer: lease for lease in [*known[: most // 2], *again[: most // 8], *order]}
        chosen = list(turn.values())[:most]
        self._times.update(lease.peer for lease in chosen)
        return chosen

    def were_all_asked(self, leases: Iterable[Lease]) -> bool:
        return all(self._times[lease.peer] for lease in leases)
