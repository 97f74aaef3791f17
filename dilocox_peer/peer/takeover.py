"""Leaving a stage that can spare us for one that nobody holds any more. dht/assignment.py decides which peer goes.

A stage that stands empty stops the whole run, so a peer moves there, if its volunteer did not insist on a stage: after a
while, in which whoever left may come back, and one after another, as all see the same. What the stage had agreed on it
finds as any newcomer does (peer/state/restore.py).
"""

import asyncio
import random
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from dilocox_peer.dht.assignment import Claimant, EmptyStages
from dilocox_peer.dht.directory import Directory
from dilocox_peer.errors import RunUnreachable
from dilocox_peer.peer.presence import Presence

LOOK_S = 15.0
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
        fits: Collection[int],
        linked_stages: Callable[[], Collection[int]],
        is_paused: Callable[[], bool],
        directory: Directory,
    ) -> None:
        """fits: the stages that can be held here. linked_stages: of the peers whose links we have; those are not empty,
        whatever the directory has lost."""
        self._presence = presence
        self._stage = stage
        self._num_stages = num_stages
        self._fits = fits
        self._linked_stages = linked_stages
        self._is_paused = is_paused
        self._directory = directory
        self._empty = EmptyStages()
        self._rng = random.Random(f"{presence.me} {presence.incarnation} takeover")

    async def run(self) -> Move:
        """Looks until it is our turn to take an empty stage over."""
        while True:
            pause_s = LOOK_S * max(1.0, self._num_stages / STAGES_A_LOOK)
            await asyncio.sleep(pause_s * self._rng.uniform(1.0, 1.5))
            try:
                move = await self._look()
            except RunUnreachable:  # the discovery tells it
                continue
            if move is not None:
                return move

    async def _look(self) -> Move | None:
        stages = {stage: await self._directory.peers(stage) for stage in range(self._num_stages)}
        claimant = Claimant(self._presence.me, self._fits, self._presence.is_dialable)
        stage = self._empty.to_take_over(
            stages, claimant, self._stage, linked=self._linked_stages(), now=time.monotonic()
        )
        if stage is None or self._is_paused():
            return None
        return Move(stage, f"nobody holds it, and stage {self._stage} has {len(stages[self._stage])} peers")
