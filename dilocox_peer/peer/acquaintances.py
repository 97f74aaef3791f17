"""Addresses of peers met before, on disk: a volunteer whose link names a bootstrap that is gone still finds the run.

One address a line, bounded: those that we are connected with first, then what the file had, then those of whom there is nothing but a lease, as
a look while our line is down must not have the file forget everybody. What is read back is checked like any address; a damaged file is an
empty one.
"""

import asyncio
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path

from dilocox_peer.dht.records import Lease
from dilocox_peer.errors import ConfigError
from dilocox_peer.files import replace_file
from dilocox_peer.invitation import address_range, parse_multiaddr
from dilocox_peer.types import PeerId

ACQUAINTANCES_FILE = "peers"  # in a run's folder
MAX_KEPT = 16
KEPT_ADDRESSES = 2  # of each peer
KEPT_OF_RANGE = 4  # of public ones; names are as one, as anybody has as many as he likes
MAX_FILE_BYTES = 16 * 1024


def read_acquaintances(path: Path) -> tuple[str, ...]:
    """The addresses in the file that can be dialled; none if there is no readable file."""
    try:
        with path.open("rb") as file:
            lines = file.read(MAX_FILE_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return ()
    addresses = []
    for line in lines[:MAX_KEPT]:
        try:
            addresses.append(parse_multiaddr(line, "peer").text)
        except ConfigError:
            continue
    return tuple(addresses)


def write_acquaintances(path: Path, addresses: Iterable[str]) -> None:
    """Replaces the file, whole or not at all. addresses: newest first. Raises OSError."""
    kept = list(dict.fromkeys(addresses))[:MAX_KEPT]
    replace_file(path, ["".join(f"{address}\n" for address in kept).encode()], mode=0o600, durable=False)


class Acquaintances:
    """Of one run. addresses: as the file had them, then of whom we have met since, too."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.addresses = read_acquaintances(path)

    async def remember(self, seen: Mapping[int, Sequence[Lease]], own: int, met: Collection[PeerId]) -> None:
        """Writes down where these are, of all stages, whom the next start may look for. own: the stage that comes first. met: peers that we are
        connected with, without a relay."""
        found = to_remember(seen, own, met)
        of_met, of_others = (
            [text for lease in found if (lease.peer in met) is is_met for text in entries_of(lease)]
            for is_met in (True, False)
        )
        kept = _few_of_each_range([*of_met, *self.addresses, *of_others])
        if set(kept) <= set(self.addresses):
            return
        self.addresses = kept
        with suppress(OSError):  # a convenience for the next start
            await asyncio.to_thread(self._write)

    def _write(self) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_acquaintances(self._path, self.addresses)


def to_remember(leases: Mapping[int, Sequence[Lease]], own: int, met: Collection[PeerId]) -> list[Lease]:
    """One of each stage in turn, ours first, so that some of every stage are among the first few; in a stage those we are connected with before those
    of whom there is nothing but a lease, and of either the newest first. Pure."""
    queues = [
        sorted(leases[stage], key=lambda lease: (lease.peer not in met, -lease.incarnation))
        for stage in sorted(leases, key=lambda stage: (stage != own, stage))
    ]
    return [lease for turn in zip_longest(*queues) for lease in turn if lease is not None]


def entries_of(lease: Lease) -> list[str]:
    """A few addresses at which a start can enter by that peer, those outside a house first: none by way of a relay, which may be gone with the bootstrap."""
    found = []
    for text in lease.addresses:
        with suppress(ConfigError):
            found.append(parse_multiaddr(text, "peer"))
    return [each.text for each in sorted(found, key=lambda each: not address_range(each.host))][:KEPT_ADDRESSES]


def _few_of_each_range(addresses: Iterable[str]) -> tuple[str, ...]:
    """As many as are kept, the first first: names cost nothing, so that one range of addresses would have the whole file."""
    kept, of_range = list[str](), Counter[str]()
    for text in dict.fromkeys(addresses):
        address = parse_multiaddr(text, "peer")
        place = "names" if address.host_kind.startswith("dns") else address_range(address.host)
        of_range[place] += 1
        if len(kept) < MAX_KEPT and (not place or of_range[place] <= KEPT_OF_RANGE):
            kept.append(text)
    return tuple(kept)
