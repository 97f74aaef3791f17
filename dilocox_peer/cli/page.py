"""The run's page beside a bootstrap: `--web-port`."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from dilocox_peer.errors import ConfigError, why_not_bound
from dilocox_peer.events import Listener

if TYPE_CHECKING:
    from dilocox_peer.peer.archivist import Archivist
    from dilocox_peer.peer.lookout import Lookout


def check_port(host: str, port: int) -> None:
    """Raises ConfigError when the page could not listen there."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.create_server((host, port), family=family):
            return
    except (OSError, UnicodeError) as error:
        reason = why_not_bound(error)
    raise ConfigError(
        f"--web-port: cannot listen on {host} port {port} ({reason}): pass another one, or another --web-host"
    )


@asynccontextmanager
async def page_of(
    kept: "Sequence[tuple[Archivist, Callable[[], str], Lookout]]", *, host: str, port: int, listener: Listener
) -> AsyncIterator[str]:
    """The page's address, where it is served until the block ends. kept: the runs, open, what gives the link that others join each
    with, and what looks out for its troubles. Raises ConfigError: it cannot listen there."""
    from dilocox_peer.web.document import RunPage
    from dilocox_peer.web.server import PageServer
    from dilocox_peer.web.watcher import RunWatcher

    pages = {archivist.manifest.run_id: RunPage(archivist.manifest) for archivist, _, _ in kept}
    with PageServer(pages, host=host, port=port, listener=listener) as server:
        watchers = [
            RunWatcher(archivist, link, lookout, partial(server.show, archivist.manifest.run_id))
            for archivist, link, lookout in kept
        ]
        tasks = [asyncio.create_task(watcher.run(), name="the run's page") for watcher in watchers]
        try:
            yield server.url
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
