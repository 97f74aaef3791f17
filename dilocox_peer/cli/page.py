"""The run's page beside a bootstrap: `--web-port`."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from dilocox_peer.events import Listener
from dilocox_peer.manifest import Manifest

if TYPE_CHECKING:
    from dilocox_peer.dht.directory import Directory
    from dilocox_peer.network.transport import Transport


@dataclass(frozen=True)
class WatchedRun:
    """A run that is served by this process. link: as others join it now."""

    manifest: Manifest
    transport: "Transport"
    directory: "Directory"
    link: Callable[[], str]


@asynccontextmanager
async def page_of(runs: Sequence[WatchedRun], *, host: str, port: int, listener: Listener) -> AsyncIterator[str]:
    """The page's address, where it is served until the block ends. Raises ConfigError: it cannot listen there."""
    from dilocox_peer.model.architecture import prepare
    from dilocox_peer.web.document import RunPage
    from dilocox_peer.web.server import PageServer
    from dilocox_peer.web.watcher import RunWatcher

    for run in runs:
        await asyncio.to_thread(prepare, run.manifest)
    pages: dict[str, RunPage] = {run.manifest.run_id: RunPage(run.manifest) for run in runs}
    with PageServer(pages, host=host, port=port, listener=listener) as server:
        watchers = [
            RunWatcher(
                run.manifest,
                transport=run.transport,
                directory=run.directory,
                link=run.link,
                show=partial(server.show, run.manifest.run_id),
                listener=listener,
            )
            for run in runs
        ]
        tasks = [asyncio.create_task(watcher.run(), name="the run's page") for watcher in watchers]
        try:
            yield server.url
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
