"""What somebody who only looks on may know of a run beyond its announcements: where its certificates are, and their losses.

Of runs that anybody may read; of others, and where the model cannot be built here, the announcements are all there is.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dilocox_peer.errors import DilocoxError, RunUnreachable
from dilocox_peer.manifest import Manifest

if TYPE_CHECKING:
    from dilocox_peer.cli.visit import Visit
    from dilocox_peer.dht.records import Lease
    from dilocox_peer.network.transport import Transport
    from dilocox_peer.peer.state.survey import Survey
    from dilocox_peer.web.document import RunPage

LOOK_S = 30.0  # for chains that are read from their beginning; of thousands of rounds that takes seconds


class Onlooker:
    """`look` again and again; the chains are read once."""

    def __init__(
        self, page: "RunPage", surveys: "Sequence[Survey]", link: str, transport: "Transport", manifest: Manifest
    ) -> None:
        from dilocox_peer.peer.lookout import lookout_of_visitor

        self._page = page
        self._surveys = surveys
        self._link = link
        self._found: Mapping[int, Sequence[Lease]] = {}  # as the directory was read last
        self._lookout = lookout_of_visitor(
            transport,
            manifest,
            leases=lambda: self._found,
            is_over=lambda: all(survey.annals.is_over for survey in surveys),
        )

    @classmethod
    async def of(cls, open_visit: "Visit", manifest: Manifest, link: str) -> "Onlooker | None":
        """None where announcements are all that is to be had."""
        from dilocox_peer.model.architecture import prepare
        from dilocox_peer.peer.state.survey import surveys
        from dilocox_peer.web.document import RunPage

        if manifest.admission.mode != "open":
            return None
        try:
            await asyncio.to_thread(prepare, manifest)
        except DilocoxError:
            return None
        found = surveys(
            manifest, transport=open_visit.transport, directory=open_visit.directory, listener=lambda _event: None
        )
        return cls(RunPage(manifest), found, link, open_visit.transport, manifest)

    async def look(self) -> dict[str, Any] | None:
        """The run as its page has it (web/document.py); None when it cannot be read now."""
        from dilocox_peer.peer.state.survey import look_at_all
        from dilocox_peer.web.facts import RunFacts, StageFacts
        from dilocox_peer.web.watcher import holders_of

        try:
            async with asyncio.timeout(LOOK_S):
                await look_at_all(self._surveys)
        except (RunUnreachable, TimeoutError):
            return None
        stages = [
            StageFacts(
                tuple(survey.annals.certificates),
                holders_of(survey.leases, survey.reached),
                survey.annals.place.roster,
                is_over=survey.annals.is_over,
            )
            for survey in self._surveys
        ]
        self._found = {survey.stage: survey.leases for survey in self._surveys}
        troubles = await self._lookout.look_once()
        kept_round = self._lookout.kept_round
        return self._page.take(RunFacts(time.time(), self._link, stages, kept_round=kept_round, troubles=troubles))


async def document_of(open_visit: "Visit", manifest: Manifest, link: str) -> dict[str, Any] | None:
    """The run as its page has it, once; None where its certificates cannot be read, or not now."""
    try:
        onlooker = await Onlooker.of(open_visit, manifest, link)
        return None if onlooker is None else await onlooker.look()
    except DilocoxError:
        return None
