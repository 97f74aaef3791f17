"""Writing what a round cannot do without, on a disk that may be full: told once, and tried again until there is room.

A volunteer's disk fills up for reasons of its own. A peer that ended there would have to be looked for by hand; one that waits is away
from its rounds for as long, as with a cable unplugged, and has promised nothing that it does not hold.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from dilocox_peer.errors import disk_remedy
from dilocox_peer.events import Listener
from dilocox_peer.events_of_health import DiskRefused

DISK_RETRY_S = 2.0

Written = TypeVar("Written")


async def until_written(write: Callable[[], Awaitable[Written]], what: str, listener: Listener) -> Written:
    """What write gives, once it does not raise OSError any more; cancelled: at once. what: is written, for people."""
    told = ""
    while True:
        try:
            written = await write()
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            if reason != told:
                listener(DiskRefused(what, reason, remedy=disk_remedy(error) or "look at the disk and its rights"))
            told = reason
            await asyncio.sleep(DISK_RETRY_S)
        else:
            if told:
                listener(DiskRefused(what, told, is_over=True))
            return written
