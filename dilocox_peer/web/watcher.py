"""Looks at a run again and again for its page: what its stages have agreed on, and who announces to hold them. A thin shell.

Takes no part in the run. A stage whose peers are slow to answer keeps the others' news from nobody: each has a task of its own.
"""

import asyncio
import gc
import time
from collections.abc import Callable

from dilocox_peer.dht.directory import Directory
from dilocox_peer.errors import PeerUnavailable, RunUnreachable
from dilocox_peer.events import Event, Failed, Listener
from dilocox_peer.manifest import Manifest
from dilocox_peer.network.transport import Transport
from dilocox_peer.peer.state.survey import Survey, surveys
from dilocox_peer.web.facts import Holder, RunFacts, StageFacts

LOOK_S = 2.0  # between two looks, and between two documents: the page is never older than two of them
LOOKS_A_S = 8  # of a run with very many stages, each is looked at less often
RETRY_S = 5.0
FREEZE_EVERY = 512  # certificates


class RunWatcher:
    """`run` until cancelled."""

    def __init__(
        self,
        manifest: Manifest,
        *,
        transport: Transport,
        directory: Directory,
        link: Callable[[], str],
        show: Callable[[RunFacts], None],
        listener: Listener,
    ) -> None:
        """link: for others to join with. show: is given what was seen, every LOOK_S."""
        self._surveys = surveys(manifest, transport=transport, directory=directory, listener=self._quiet)
        self._link = link
        self._show = show
        self._listener = listener
        self._troubles: dict[int, str] = {}
        self._frozen = 0

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for survey in self._surveys:
                tasks.create_task(self._keep_looking(survey), name=f"looks at stage {survey.stage}")
            while True:
                self._spare_collections()
                self._show(self._facts(time.time()))
                await asyncio.sleep(LOOK_S)

    async def _keep_looking(self, survey: Survey) -> None:
        while True:
            try:
                await survey.look()
            except (RunUnreachable, PeerUnavailable) as error:
                self._troubles[survey.stage] = str(error)
            except Exception as error:  # a task boundary: the other stages are looked at all the same
                self._troubles[survey.stage] = "what its peers answer cannot be read"
                self._listener(Failed("the run's page", f"{type(error).__name__}: {error}; looking again"))
                await asyncio.sleep(RETRY_S)
            else:
                self._troubles.pop(survey.stage, None)
            await asyncio.sleep(max(LOOK_S, len(self._surveys) / LOOKS_A_S))

    def _spare_collections(self) -> None:
        """Certificates stay: a collection that looks at those of 5,000 rounds again holds every thread for a quarter of a second."""
        known = sum(len(survey.annals.certificates) for survey in self._surveys)
        if known >= self._frozen + FREEZE_EVERY:
            self._frozen = known
            gc.freeze()

    def _facts(self, now: float) -> RunFacts:
        trouble = "; ".join(f"stage {stage}: {why}" for stage, why in sorted(self._troubles.items()))
        return RunFacts(now, self._link(), tuple(map(_stage, self._surveys)), trouble=trouble)

    def _quiet(self, event: Event) -> None:
        """What is out of the ordinary alone: it looks every other second."""
        if event.level == "error":
            self._listener(event)


def _stage(survey: Survey) -> StageFacts:
    reached = set(survey.reached)
    holders = tuple(
        Holder(
            peer=lease.peer,
            tokens_per_s=lease.tokens_per_s,
            round=lease.round,
            reachability=lease.reachability,
            answers=lease.peer in reached,
        )
        for lease in survey.leases
    )
    annals = survey.annals
    return StageFacts(tuple(annals.certificates), holders, annals.place.roster, is_over=annals.is_over)
