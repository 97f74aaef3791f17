"""Replies that hold a whole state, read once for all who fetch it at the same time: memory for each of them would be
anybody's to take. One is given back when the last of them has it."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from weakref import WeakValueDictionary

from dilocox_peer.network.bulk import Reply


class BeingSent:
    """By any key that names what is in a reply."""

    def __init__(self) -> None:
        self._reading = asyncio.Lock()
        self._replies: WeakValueDictionary[Hashable, Reply] = WeakValueDictionary()

    async def reply(self, key: Hashable, read: Callable[[], Awaitable[Reply]]) -> Reply:
        """The one that is being sent, else what read gives; one is read at a time."""
        async with self._reading:
            if (reply := self._replies.get(key)) is None:
                reply = self._replies[key] = await read()
            return reply
