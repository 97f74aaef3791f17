"""Whom a bootstrap has met, for its next start.

One that starts again knows nobody, and is known by its address alone: peers come back to it when their leases are due, which takes up to two minutes. Until
then whoever joins by it finds nobody, and its page says that the stages are empty. So it writes down where peers are, and looks for them when it starts.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from dilocox_peer.dht.directory import Directory
from dilocox_peer.dht.records import Lease
from dilocox_peer.errors import RunUnreachable
from dilocox_peer.peer.acquaintances import (
    KEPT_ADDRESSES,
    MAX_KEPT,
    read_acquaintances,
    to_remember,
    write_acquaintances,
)
from dilocox_peer.peer.arrival import keep_greeting

FILE = "peers"
LOOKED_FOR_S = 150.0  # then each peer that is there has renewed its lease here
FIRST_S, EVERY_S = 15.0, 60.0  # after which it is written down who is there


class Reunion:
    """Of one run at a bootstrap. `run` looks, then remembers, until it is cancelled."""

    def __init__(self, directory: Directory, num_stages: int, folder: Path, look_now: Callable[[], object]) -> None:
        """directory: made with those of `remembered`. look_now: has whoever else reads the directory read it."""
        self._directory = directory
        self._num_stages = num_stages
        self._path = folder / FILE
        self._look_now = look_now
        self._remembered = remembered(folder)
        self.is_looking = bool(self._remembered)

    async def run(self) -> None:
        if self.is_looking:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOKED_FOR_S):
                    await keep_greeting(self._directory, self._look_now)
            self.is_looking = False
            self._look_now()
        await asyncio.sleep(FIRST_S)
        while True:
            with suppress(RunUnreachable):  # the beat tells it
                await self._remember({stage: await self._directory.peers(stage) for stage in range(self._num_stages)})
            await asyncio.sleep(EVERY_S)

    async def _remember(self, seen: Mapping[int, Sequence[Lease]]) -> None:
        met = [text for lease in to_remember(seen, own=0) for text in lease.addresses[:KEPT_ADDRESSES]][:MAX_KEPT]
        if not set(met) <= set(self._remembered):
            self._remembered = tuple(dict.fromkeys([*met, *self._remembered]))[:MAX_KEPT]
            with suppress(OSError):  # a convenience for the next start
                await asyncio.to_thread(self._write)

    def _write(self) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_acquaintances(self._path, self._remembered)


def remembered(folder: Path) -> tuple[str, ...]:
    """Addresses of those that were met before, as the run's folder has them."""
    return read_acquaintances(folder / FILE)
