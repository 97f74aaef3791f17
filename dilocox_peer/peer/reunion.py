"""Whom a bootstrap has met, for its next start.

One that starts again knows nobody, and is known by its address alone: peers come back to it when their leases are due, which takes up to two minutes. Until
then whoever joins by it finds nobody, and its page says that the stages are empty. So it writes down where peers are, and looks for them when it starts.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

from dilocox_peer.dht.directory import Directory
from dilocox_peer.errors import PeerUnavailable, RunUnreachable
from dilocox_peer.peer.acquaintances import Acquaintances
from dilocox_peer.peer.arrival import keep_greeting
from dilocox_peer.types import PeerId

LOOKED_FOR_S = 150.0  # then each peer that is there has renewed its lease here
FIRST_S, EVERY_S = 15.0, 60.0  # after which it is written down who is there


class Reunion:
    """Of one run at a bootstrap. `run` looks, then remembers, until it is cancelled."""

    def __init__(
        self,
        directory: Directory,
        num_stages: int,
        acquaintances: Acquaintances,
        look_now: Callable[[], object],
        paths: Callable[[], Awaitable[Mapping[PeerId, str]]],
        *,
        is_alone: bool,
    ) -> None:
        """directory: made with the addresses of the acquaintances. look_now: has whoever else reads the directory read it. is_looking: nobody of those has been
        found yet, so that a stage that looks empty may not be. is_alone: there is somebody to look for. paths: the peers that we are connected with, and how."""
        self._directory = directory
        self._num_stages = num_stages
        self._acquaintances = acquaintances
        self._look_now = look_now
        self._paths = paths
        self.is_looking = is_alone

    async def run(self) -> None:
        if self.is_looking:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOKED_FOR_S):
                    await keep_greeting(self._directory, self._look_now)
            self.is_looking = False
            self._look_now()
        await asyncio.sleep(FIRST_S)
        while True:
            with suppress(RunUnreachable, PeerUnavailable, TimeoutError):  # the beat tells it
                seen = {stage: await self._directory.peers(stage) for stage in range(self._num_stages)}
                met = [peer for peer, way in (await self._paths()).items() if way == "direct"]
                await self._directory.greet_initial_peers()  # whom the operator named may be back
                await self._acquaintances.remember(seen, own=0, met=met)
            await asyncio.sleep(EVERY_S)
