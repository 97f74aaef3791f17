"""What is counted over a whole session: it goes on when the network daemon, and all that counts with it, is started again."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from dilocox_peer.events import Listener, StageSeen
from dilocox_peer.events_of_costs import LineUsed
from dilocox_peer.network.tcp_traffic import Traffic, look
from dilocox_peer.peer.lag import LoopLag

TOLD_S = 2.0


@dataclass(slots=True)
class Tally:
    """Kept by the session; bulletin.py adds."""

    lag: LoopLag = field(default_factory=LoopLag)
    daemon_traffic: Traffic = field(default_factory=Traffic)
    stage_seen: StageSeen | None = None  # the last that was told


@asynccontextmanager
async def line_told(traffic: Traffic, pid: int, listener: Listener) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Has the listener told what the network daemon of that pid moves, until what it gives is called, or the block ends: however a start ends, what it has
    moved is counted."""

    async def tell() -> None:
        traffic.take(await asyncio.to_thread(look, pid))
        if traffic.sent or traffic.received:  # else the system does not say
            listener(LineUsed(traffic.sent, traffic.received))

    async def keep_telling() -> None:
        while True:
            await asyncio.sleep(TOLD_S)
            await tell()

    is_over = False

    async def end() -> None:
        nonlocal is_over
        if not is_over:
            is_over = True
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)
            await tell()

    telling = asyncio.create_task(keep_telling(), name="line")
    try:
        yield end
    finally:
        await end()
