"""Addresses of peers met before, on disk: a volunteer whose link names a bootstrap that is gone still finds the run.

One address a line, newest meeting first, bounded. What is read back is checked like any address; a damaged file is an
empty one.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path

from dilocox_peer.dht.records import Lease
from dilocox_peer.errors import ConfigError
from dilocox_peer.files import replace_file
from dilocox_peer.invitation import parse_multiaddr

ACQUAINTANCES_FILE = "peers"  # in a run's folder
MAX_KEPT = 16
KEPT_ADDRESSES = 2  # of each peer
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

    async def remember(self, seen: Mapping[int, Sequence[Lease]], own: int) -> None:
        """Writes down where these are, of all stages, whom the next start may look for. own: the stage that comes first."""
        met = [text for lease in to_remember(seen, own) for text in lease.addresses[:KEPT_ADDRESSES]]
        if set(met) <= set(self.addresses):
            return
        self.addresses = tuple(dict.fromkeys([*met, *self.addresses]))[:MAX_KEPT]
        with suppress(OSError):  # a convenience for the next start
            await asyncio.to_thread(self._write)

    def _write(self) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_acquaintances(self._path, self.addresses)


def to_remember(leases: Mapping[int, Sequence[Lease]], own: int) -> list[Lease]:
    """One of each stage in turn, ours first, in a stage the newest first: some of every stage are among the first few. Pure."""
    queues = [
        sorted(leases[stage], key=lambda lease: -lease.incarnation)
        for stage in sorted(leases, key=lambda stage: (stage != own, stage))
    ]
    return [lease for turn in zip_longest(*queues) for lease in turn if lease is not None]
