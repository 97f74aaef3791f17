"""What a peer does about the directives of the run's owner: hears them, hands them on, pauses by them, and goes if it is told to.

A shell. When one applies the round machine decides (rounds/directing.py); training reads it in its timetable. What is here
binds this peer alone: a volunteer's program that is older than the owner asks for, or that is banned, leaves and says why.
"""

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress

from dilocox_peer import __version__
from dilocox_peer.dht.directory import Directory
from dilocox_peer.errors import RunRefused, RunUnreachable
from dilocox_peer.peer.links.conveyor import Conveyor
from dilocox_peer.peer.pauses import Pauses
from dilocox_peer.peer.rounds.contract import Input, OwnerSpoke
from dilocox_peer.peer.rounds.machine import RoundMachine
from dilocox_peer.types import PeerId
from dilocox_peer.wire.directives import Directive

LOOK_S = 20.0  # between two looks into the directory, of all peers of a stage together: they tell each other at once
MOST_LOOKED_S = 180.0  # between two of one peer, which also writes what is about to be forgotten there
STEER_S = 0.5
REWRITE_S = 95.0  # left of the record in the directory, out of 120
FIRST_LOOK_S = 5.0
OWNER = "owner"  # as a holder of training (pauses.py)


async def check_welcome(directory: Directory, me: PeerId) -> None:
    """Raises RunRefused for a peer that the run's owner does not want as it is."""
    with suppress(RunUnreachable):  # the others will tell it
        found = await directory.directive(FIRST_LOOK_S)
        if found is not None and (reason := why_unwelcome(found[0], me)) is not None:
            raise RunRefused(reason)


def why_unwelcome(directive: Directive, me: PeerId, version: str = __version__) -> str | None:
    """Why a peer with this program is not to take part, or None."""
    if me in directive.banned:
        return f"the run's owner has banned this peer ({me}): ask the owner, whose `dilocox-peer owner unban` takes it back"
    return directive.why_too_old(version)


class Steering:
    """`run` until cancelled."""

    def __init__(
        self,
        me: PeerId,
        *,
        machine: RoundMachine,
        post: Callable[[Input], None],
        directory: Directory,
        pauses: Pauses,
        conveyor: Conveyor | None,
    ) -> None:
        """post: to the round machine. conveyor: of a run with several stages."""
        self._me = me
        self._machine = machine
        self._post = post
        self._directory = directory
        self._pauses = pauses
        self._conveyor = conveyor
        self._rng = random.Random(me)

    async def run(self) -> None:
        """Raises RunRefused when the owner wants this peer to go."""
        looking = asyncio.create_task(self._keep_looking(), name="directives")
        try:
            while not looking.done():
                self._steer()
                await asyncio.sleep(STEER_S)
            looking.result()
        finally:
            looking.cancel()

    def _steer(self) -> None:
        machine, newest = self._machine, self._machine.directive
        if newest is None:
            return
        if (reason := why_unwelcome(newest, self._me)) is not None:
            raise RunRefused(reason)
        self._directory.banned = newest.banned
        if self._conveyor is not None:
            self._conveyor.ban(newest.banned)
        applies = machine.schedule.directive_for(machine.training_round)
        if newest.paused and applies is not None and applies.paused:
            said = f': "{newest.said}"' if newest.said else ""
            self._pauses.pause(OWNER, f"the run's owner has paused the run{said}", is_everybody=True)
        else:
            self._pauses.resume(OWNER, "the run's owner has the run go on")

    async def _keep_looking(self) -> None:
        while True:
            with suppress(RunUnreachable):  # nobody took it, or they know a newer one: the next look reads it
                await self._look()
            num_peers = len(self._machine.alive(asyncio.get_running_loop().time()))
            await asyncio.sleep(min(LOOK_S * num_peers, MOST_LOOKED_S) * self._rng.uniform(0.5, 1.0))

    async def _look(self) -> None:
        """Reads the newest, and writes the one we know before it is forgotten: it outlives the bootstrap."""
        read = await self._directory.directive()
        found, left_s = read if read is not None else (None, 0.0)
        if found is not None:
            self._post(OwnerSpoke(found))
        known = self._machine.directive
        if known is None:
            return
        if found is None or known.number > found.number or (known == found and left_s < REWRITE_S):
            await self._directory.publish_directive(known)
