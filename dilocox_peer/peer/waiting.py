"""What a peer waits for that only others can give, told in one line: the owner's signature, somebody who holds the run's
state, the word that the run is over, a connection to anybody at all, a place in the roster, or nothing any more, because the run is over. The machine decides, this tells.
"""

import asyncio

from dilocox_peer.events import Event, Listener, OwnerAwaited
from dilocox_peer.events_of_states import EndAwaited, PeersUnreached, RunIsOver, StageFull, StateAwaited
from dilocox_peer.manifest import Manifest
from dilocox_peer.peer.rounds.adoption import Wait
from dilocox_peer.peer.rounds.machine import RoundMachine
from dilocox_peer.types import PeerId

TELL_S = 5.0  # of waiting before it is told: most is over sooner
ALONE_S = 120.0  # of peers in the directory and none heard: leases of the dead have lapsed by then
FULL_S = 30.0  # of a roster without a place for us: one that has just gone is still in it
OVER_S = 20.0  # of nobody with the final model before we go: the directory has been read many times by then
LOOK_S = 1.0


class Waiting:
    """`run` it, or `look` now and then."""

    def __init__(
        self, manifest: Manifest, stage: int, me: PeerId, machine: RoundMachine, listener: Listener, link: str = ""
    ) -> None:
        """link: of the run."""
        self._link = link
        self._start_peers, self._max_peers = manifest.rounds.start_peers, manifest.limits.max_peers
        self._me = me
        self._stage = stage
        self._machine = machine
        self._listener = listener
        self._wait: Wait | None = None
        self._since = 0.0
        self._told: object = None
        self._alone_since: float | None = None
        self._told_alone = False
        self._full_since: float | None = None
        self._told_full = False

    async def run(self) -> None:
        """Returns when the run is over and its model not to be had."""
        while True:
            if self.look(asyncio.get_running_loop().time()):
                return
            await asyncio.sleep(LOOK_S)

    def look(self, now: float) -> bool:
        """Whether there is nothing to wait for any more: the run is complete, and nobody who holds its model is here."""
        self._look_for_company(now)
        self._look_for_a_place(now)
        machine, checkpoint = self._machine, self._machine.checkpoint
        wait = machine.waits_for(now)
        if wait != self._wait:
            self._wait, self._since = wait, now
        waited_s = now - self._since
        if wait is None or waited_s < TELL_S:
            return False
        if wait == "state" and checkpoint is not None and checkpoint.is_last:
            if waited_s < OVER_S:
                return False
            self._listener(RunIsOver(checkpoint.round, machine.round, checkpoint.head.hex(), self._link))
            return True
        event: Event
        match wait:
            case "owner":
                event = OwnerAwaited(self._stage, self._start_peers)
            case "end":
                event = EndAwaited(self._stage, machine.round)
            case "state":
                event = StateAwaited(self._stage, None if checkpoint is None else checkpoint.round)
        if event != self._told:
            self._told = event
            self._listener(event)
        return False

    def _look_for_company(self, now: float) -> None:
        if not (unreached := self._machine.unreached):
            self._alone_since, self._told_alone = None, False
            return
        if self._alone_since is None:
            self._alone_since = now
        if now - self._alone_since >= ALONE_S and not self._told_alone:
            self._told_alone = True
            self._listener(PeersUnreached(self._stage, tuple(unreached)))

    def _look_for_a_place(self, now: float) -> None:
        machine, roster = self._machine, self._machine.roster
        is_with_them = machine.is_ready and machine.waits_for(now) is None
        if not is_with_them or len(roster) < self._max_peers or self._me in roster:
            self._full_since, self._told_full = None, False
            return
        if self._full_since is None:
            self._full_since = now
        if now - self._full_since >= FULL_S and not self._told_full:
            self._told_full = True
            self._listener(StageFull(self._stage, self._max_peers))
