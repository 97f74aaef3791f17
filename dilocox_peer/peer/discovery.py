"""Finds the other peers of the run: reads the directory again and again, and has what it finds dialled.

The peers of our stage are made known to the rounds, those of the stages beside ours to the pipeline; of the others we only
tell how many there are.
"""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from dilocox_peer.dht.directory import Directory
from dilocox_peer.dht.records import Lease
from dilocox_peer.errors import RunUnreachable
from dilocox_peer.events import Failed, Listener, SeenPeer, SwarmSeen
from dilocox_peer.peer.acquaintances import Acquaintances
from dilocox_peer.peer.links.conveyor import Conveyor
from dilocox_peer.peer.links.dialling import LinkAddress
from dilocox_peer.peer.presence import Presence
from dilocox_peer.peer.reaching import Reaching
from dilocox_peer.peer.rounds.machine import RoundMachine
from dilocox_peer.peer.rounds.timing import stretch
from dilocox_peer.peer.stage_leases import leases_of_stages
from dilocox_peer.types import LinkId, PeerId
from dilocox_peer.wire.checkpoints import Checkpoint

FIRST_LOOKS, FIRST_LOOK_S, LOOK_S = 20, 1.0, 60.0  # the directory is read often until the swarm is known
FAR_EVERY = 10  # of the first looks, one reads the stages that are no neighbours of ours too: for the screen
REWRITE_S = 95.0  # left of the owner's word, out of 120


class Discovery:
    """`run` looks every second at first, then every minute or two, where many are of a stage more seldom, and at once when `look_now` is
    set."""

    def __init__(
        self,
        presence: Presence,
        stage: int,
        *,
        num_stages: int,
        directory: Directory,
        conveyor: Conveyor | None,
        on_found: Callable[[PeerId, str], None],
        on_word: Callable[[Checkpoint], None],
        rounds: RoundMachine,
        look_now: asyncio.Event,
        reaching: Reaching,
        acquaintances: Path,
        look_at_admission: Callable[[], Awaitable[None]] | None,
        listener: Listener,
    ) -> None:
        """conveyor: of a run with several stages. on_found: for each peer of our stage, once, when it has been dialled, with the
        range of addresses that it is seen in.
        on_word: for the owner's newest checkpoint of our stage, each time it is read. rounds: know of a newest one, and whom they hear by way of others.
        acquaintances: the file that the next start reads. look_at_admission: of a run that is not open; raises RunRefused
        when this peer is not let in any more, which ends `run`."""
        self._me = presence.me
        self._rng = random.Random(presence.incarnation)
        self._stage = stage
        self._num_stages = num_stages
        self._directory = directory
        self._conveyor = conveyor
        self._on_found = on_found
        self._on_word = on_word
        self._rounds = rounds
        self._look_now = look_now
        self._reaching = reaching
        self._acquaintances = Acquaintances(acquaintances)
        self._look_at_admission = look_at_admission
        self._listener = listener
        self.seen: dict[int, list[Lease]] = {}  # of each stage, as it was last read

    async def run(self) -> None:
        """Looks until cancelled; a look that fails is told and followed by the next. Raises RunRefused."""
        looks = 0
        if self._conveyor is not None:
            await self._reaching.take_links(self._conveyor)
        while True:
            far = looks % FAR_EVERY == 0 or looks >= FIRST_LOOKS
            try:
                if far and self._look_at_admission is not None:
                    await self._look_at_admission()
                seen = await self._look(far=far)
            except RunUnreachable as error:
                self._listener(Failed("discovery", f"{error}; trying again"))
            else:
                self.seen = {**self.seen, **seen}
                self._tell_swarm(seen)
                self._reaching.listed([lease for leases in seen.values() for lease in leases])
                await self._remember(seen)
                if self._stage in seen:
                    await self._meet(seen[self._stage])
                else:
                    self._listener(Failed("discovery", "the directory does not tell of our stage; trying again"))
                with suppress(RunUnreachable):  # nobody took it, or they know a newer one: the next look reads it
                    await self._pass_on_word()
            looks += 1
            self._look_now.clear()
            pause_s = FIRST_LOOK_S if looks < FIRST_LOOKS else usual_pause_s(self._num_seen(), self._rng)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._look_now.wait()

    def _num_seen(self) -> int:
        """Of our stage. In a run that is not open each looks for revocations as often as if it were alone: nobody tells another of them."""
        return len(self.seen.get(self._stage, ())) if self._look_at_admission is None else 1

    async def _pass_on_word(self) -> None:
        """Reads the owner's newest checkpoint, and writes the one we know before it is forgotten: it outlives the bootstrap."""
        read = await self._directory.word(self._stage)
        found, left_s = read if read is not None else (None, 0.0)
        if found is not None:
            self._on_word(found)
        known = self._rounds.checkpoint
        if known is not None and (known.is_newer(found) or (known == found and left_s < REWRITE_S)):
            await self._directory.publish_word(known)

    async def _look(self, *, far: bool) -> dict[int, list[Lease]]:
        """The leases of our stage and of those beside it, with far of all, by stage; one of which nobody tells is left out. Has the neighbours
        dialled."""
        near = [self._stage] if self._conveyor is None else [self._stage, *self._beside]
        seen = await leases_of_stages(self._directory, range(self._num_stages) if far else near)
        if self._conveyor is not None:
            await self._dial_neighbours(self._conveyor, seen)
        if self._conveyor is not None and 0 in seen:
            self._conveyor.bench.set_listed_origins(len(seen[0]))
        return seen

    @property
    def _beside(self) -> list[int]:
        return [other for other in (self._stage - 1, self._stage + 1) if 0 <= other < self._num_stages]

    async def _dial_neighbours(self, conveyor: Conveyor, seen: Mapping[int, Sequence[Lease]]) -> None:
        """Has the peers of the stages beside ours dialled; of one that was not told of now, those told of last."""
        by_stage = {**self.seen, **seen}
        linked = [lease for other in self._beside for lease in by_stage.get(other, ()) if lease.link]
        ways = await self._reaching.ways_to_links(linked)
        conveyor.set_neighbours(LinkAddress(lease.peer, LinkId(str(lease.link)), ways[lease.peer]) for lease in linked)

    async def _remember(self, seen: Mapping[int, Sequence[Lease]]) -> None:
        """Writes down where those are, of all stages, whom the next start may look for."""
        others = {stage: [lease for lease in leases if lease.peer != self._me] for stage, leases in seen.items()}
        met = [peer for peer, way in self._reaching.paths.items() if way in ("direct", "punched")]
        await self._acquaintances.remember(others, self._stage, met)

    async def _meet(self, leases: Sequence[Lease]) -> None:
        """Has those of our stage dialled, and the new ones made known."""
        self._reaching.found(leases, self._on_found, lambda: self._tell_swarm({self._stage: leases}))

    def _tell_swarm(self, seen: Mapping[int, Sequence[Lease]]) -> None:
        paths = {**dict.fromkeys(self._rounds.passed_on, "passed on"), **self._reaching.paths}
        self._listener(_swarm_seen(seen, self._me, self._stage, paths))


def usual_pause_s(num_peers: int, rng: random.Random) -> float:
    """Between two looks of one of so many peers of a stage. With the root of their number: the more there are the less the directory
    is asked by each, and one of them looks while the owner's word can still be written again before it is forgotten (REWRITE_S)."""
    return LOOK_S * math.sqrt(stretch(num_peers)) * rng.uniform(1.0, 2.0)


def _swarm_seen(
    leases: Mapping[int, Sequence[Lease]], me: PeerId, stage: int, paths: Mapping[PeerId, str]
) -> SwarmSeen:
    """paths: how those are reached that we are connected with. Of ourselves the lease tells what others found."""

    def path(lease: Lease) -> str:
        if lease.peer == me:
            return lease.reachability
        return paths.get(lease.peer, "cut off" if lease.stage == stage else "unknown")

    peers = (
        SeenPeer(lease.peer, lease.stage, round(lease.tokens_per_s, 1), lease.round, path(lease))
        for stage in sorted(leases)
        for lease in sorted(leases[stage], key=lambda lease: lease.peer)
    )
    return SwarmSeen(tuple(sorted(leases)), tuple(peers))
