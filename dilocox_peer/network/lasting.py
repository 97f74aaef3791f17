"""Tasks that nobody waits for, but for their end."""

import asyncio
from collections.abc import Awaitable, Callable

from dilocox_peer.errors import first_failure
from dilocox_peer.events import Failed, Listener

AGAIN_S, MOST_AGAIN_S = 1.0, 60.0


async def lasting(work: Callable[[], Awaitable[None]], what: str, tell: Listener) -> None:
    """Does the work until it ends or is cancelled, and again when it ends by what nobody foresaw, which is told as of `what`: else a task that others
    rely on would be gone without a word. Each time in a row it waits twice as long, from AGAIN_S to MOST_AGAIN_S; who worked for that long begins anew."""
    again_s, loop = AGAIN_S, asyncio.get_running_loop()
    while True:
        began_at = loop.time()
        try:
            return await work()
        except Exception as error:  # a task boundary
            if loop.time() - began_at > MOST_AGAIN_S:
                again_s = AGAIN_S
            first = first_failure(error)
            tell(Failed(what, f"{type(first).__name__}: {first}; going on in {again_s:.0f} s"))
            await asyncio.sleep(again_s)
            again_s = min(2 * again_s, MOST_AGAIN_S)


async def ended(task: "asyncio.Task[None]") -> None:
    """Cancels it, and returns when it has ended, by whatever."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
