"""Leaving a stage that can spare us for one that nobody holds any more, or that waits for its first peers. dht/assignment.py decides which peer goes.

A stage that stands empty stops the whole run, so a peer moves there, if its volunteer did not insist on a stage: after a
while, in which whoever left may come back, and one after another, as all see the same. What the stage had agreed on it
finds as any newcomer does (peer/state/restore.py).
"""

import asyncio
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from dilocox_peer.dht.assignment import Claimant, EmptyStages, ScantStages, where_they_are
from dilocox_peer.dht.directory import Directory
from dilocox_peer.dht.records import Lease
from dilocox_peer.errors import PeerUnavailable, RunUnreachable
from dilocox_peer.manifest import Manifest
from dilocox_peer.network.transport import PeerRefusing
from dilocox_peer.peer.claim import fitting_stages
from dilocox_peer.peer.links.conveyor import Conveyor, ConveyorStatus
from dilocox_peer.peer.pauses import Pauses
from dilocox_peer.peer.presence import Presence
from dilocox_peer.peer.reading import can_read
from dilocox_peer.peer.rounds.machine import RoundMachine
from dilocox_peer.peer.settings import SessionSettings
from dilocox_peer.types import PeerId

LOOK_S = 15.0
UNLINKED_LOOK_S = 4.0  # while a stage beside ours is linked with nobody
DIAL_S, MAX_DIALLED = 3.0, 8
SILENT_S = (
    30.0  # a neighbour that says nothing for so long stands still, though linkd, a process of its own, holds the link
)
STAGES_A_LOOK = 4  # a look at more of them comes as much more seldom


@dataclass(frozen=True, slots=True)
class Move:
    stage: int
    why: str


class Takeover:
    """`run` ends when this peer should move."""

    def __init__(
        self,
        presence: Presence,
        stage: int,
        *,
        num_stages: int,
        start_peers: int,
        fits: Collection[int],
        linked: Callable[[], Mapping[PeerId, int]],
        mates: Callable[[], Collection[PeerId]],
        is_paused: Callable[[], bool],
        directory: Directory,
    ) -> None:
        """fits: the stages that can be held here. linked: the peers whose links we have, with their stages, which are not empty,
        whatever the directory has lost. mates: peers of our stage that are in its roster, or heard in its rounds; others may be nothing but
        leases, for which nobody is to leave a stage."""
        self._presence = presence
        self._stage = stage
        self._num_stages = num_stages
        self._start_peers = start_peers
        self._scant = ScantStages()
        self._fits = fits
        self._linked = linked
        self._mates = mates
        self._is_paused = is_paused
        self._directory = directory
        self._empty = EmptyStages()
        self._rng = random.Random(f"{presence.me} {presence.incarnation} takeover")

    async def run(self) -> Move:
        """Looks until it is our turn to take an empty stage over."""
        while True:
            await self._pause()
            try:
                move = await self._look()
            except RunUnreachable:  # the discovery tells it
                continue
            if move is not None:
                return move

    @property
    def _beside(self) -> list[int]:
        return [stage for stage in (self._stage - 1, self._stage + 1) if 0 <= stage < self._num_stages]

    async def _pause(self) -> None:
        """Until the next look: soon, once a stage beside ours is linked with nobody; the links know that long before a lease ends."""
        pause_s = LOOK_S * max(1.0, self._num_stages / STAGES_A_LOOK) * self._rng.uniform(1.0, 1.5)
        began = time.monotonic()
        while (waited_s := time.monotonic() - began) < pause_s:
            if waited_s >= min(UNLINKED_LOOK_S, LOOK_S) and not set(self._beside) <= set(self._linked().values()):
                return
            await asyncio.sleep(min(1.0, pause_s - waited_s))

    async def _is_gone(self, leases: Sequence[Lease]) -> bool:
        """Whether these are leases of processes that have ended, all of them: their computers refuse connections."""

        async def refuses(lease: Lease) -> bool:
            try:
                await self._presence.transport.connect(lease.peer, lease.addresses, DIAL_S)
            except PeerUnavailable as error:
                return isinstance(error, PeerRefusing)
            return False

        if not leases or len(leases) > MAX_DIALLED:
            return False
        return all(await asyncio.gather(*map(refuses, leases)))

    async def _look(self) -> Move | None:
        stages: dict[int, Sequence[Lease]] = {
            **where_they_are({stage: await self._directory.peers(stage) for stage in range(self._num_stages)})
        }
        here = {self._presence.me, *self._mates()}
        stages[self._stage] = [lease for lease in stages[self._stage] if lease.peer in here]
        peers = self._linked()
        linked = set(peers.values())
        refused = [stage for stage in self._beside if stage not in linked and await self._is_gone(stages[stage])]
        stages |= {stage: [] for stage in refused}
        claimant = Claimant(self._presence.me, self._fits, self._presence.is_dialable)
        stage = self._empty.to_take_over(
            stages, claimant, self._stage, linked=linked, refused=refused, beside=self._beside, now=time.monotonic()
        )
        scant, why = self._scant.to_fill(
            stages, claimant, self._stage, self._start_peers, time.monotonic(), linked=peers, beside=self._beside
        )
        if self._is_paused():
            return None
        if stage is None:
            return None if scant is None else Move(scant, why)
        return Move(stage, f"nobody holds it, and stage {self._stage} has {len(stages[self._stage])} peers")


def _speaking(status: ConveyorStatus, now: float) -> dict[PeerId, int]:
    """Linked peers that are heard, with their stages."""
    return {peer: stage for peer, stage in status.linked.items() if now - status.heard.get(peer, now) < SILENT_S}


def takeover_of(
    presence: Presence,
    stage: int,
    manifest: Manifest,
    settings: SessionSettings,
    directory: Directory,
    conveyor: Conveyor,
    pauses: Pauses,
    machine: RoundMachine,
) -> Takeover:
    """Of a peer whose volunteer did not insist on a stage."""
    reads = can_read(manifest, settings)
    return Takeover(
        presence,
        stage,
        num_stages=manifest.stages.count,
        start_peers=manifest.rounds.start_peers,
        fits=[each for each in fitting_stages(manifest, settings.wish) if each > 0 or reads],
        linked=lambda: _speaking(conveyor.status(), time.monotonic()),
        mates=lambda: {*machine.roster, *machine.alive(asyncio.get_running_loop().time())},
        is_paused=lambda: pauses.is_paused,
        directory=directory,
    )
