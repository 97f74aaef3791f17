"""Looks at a run that is kept here, again and again, for its page. A thin shell."""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable

from dilocox_peer.dht.records import Lease
from dilocox_peer.peer.archivist import Archivist, KeptStage
from dilocox_peer.peer.lookout import Lookout
from dilocox_peer.types import PeerId
from dilocox_peer.web.facts import Holder, RunFacts, StageFacts

LOOK_S = 2.0  # between two documents, and two looks at the run: the page is never older than two of them


class RunWatcher:
    """`run` until cancelled. link: for others to join with, as it is now. show: is given what is known, every LOOK_S."""

    def __init__(
        self, archivist: Archivist, link: Callable[[], str], lookout: Lookout, show: Callable[[RunFacts], None]
    ) -> None:
        self._archivist = archivist
        self._link = link
        self._lookout = lookout
        self._show = show

    async def run(self) -> None:
        while True:
            self._show(self._facts(time.time()))
            if not self._archivist.is_complete:
                self._archivist.look_soon()
            await asyncio.sleep(LOOK_S)

    def _facts(self, now: float) -> RunFacts:
        silent = {peer for each in self._lookout.troubles if each.kind in {"silent", "frozen"} for peer in each.peers}
        return RunFacts(
            now,
            self._link(),
            tuple(_stage(kept, silent) for kept in self._archivist.stages),
            {event.round: event.val_loss for event in self._archivist.evaluations},
            self._archivist.round,
            self._archivist.sampled,
            self._lookout.troubles,
            max(0.0, time.monotonic() - self._lookout.told_at),
        )


def _stage(kept: KeptStage, silent: Collection[PeerId]) -> StageFacts:
    here = {*kept.reached} - {*silent}
    return StageFacts(kept.certificates, holders_of(kept.leases, here), kept.roster, is_over=kept.is_over)


def holders_of(leases: Iterable[Lease], reached: Collection[PeerId]) -> tuple[Holder, ...]:
    """reached: those of them that there is a connection with, and that are not silent."""
    here = set(reached)
    return tuple(
        Holder(
            peer=lease.peer,
            tokens_per_s=lease.tokens_per_s,
            round=lease.round,
            reachability=lease.reachability,
            answers=lease.peer in here,
            is_paused=lease.is_paused,
            name=lease.public_name,
        )
        for lease in leases
    )
