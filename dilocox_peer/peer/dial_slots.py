"""How many dials are under way at once, so that leases which lead nowhere hold up nobody: whoever was heard before has places of its own, and
of one range of addresses a few are dialled at a time, however many leases name it."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from dilocox_peer.dht.turns import first_range
from dilocox_peer.types import PeerId

KNOWN_AT_ONCE = 8  # peers that were heard before
STRANGERS_AT_ONCE = 16  # each may take the whole time of a dial
OF_A_RANGE = 4  # of these; a house may have several peers


class DialSlots:
    """Used in one event loop."""

    def __init__(self) -> None:
        self._known = asyncio.Semaphore(KNOWN_AT_ONCE)
        self._strangers = asyncio.Semaphore(STRANGERS_AT_ONCE)
        self._ranges: dict[str, asyncio.Semaphore] = {}
        self._users: Counter[str] = Counter()

    @asynccontextmanager
    async def slot(self, peer: PeerId, addresses: Sequence[str], *, is_known: bool) -> AsyncIterator[None]:
        """Waits for a place to dial peer at these addresses, and has it until the block ends. Cancelled, it takes none."""
        if is_known:
            async with self._known:
                yield
            return
        range_ = first_range(addresses)
        self._users[range_] += 1
        try:
            async with self._ranges.setdefault(range_, asyncio.Semaphore(OF_A_RANGE)), self._strangers:
                yield
        finally:
            self._users[range_] -= 1
            if not self._users[range_]:
                del self._users[range_], self._ranges[range_]
