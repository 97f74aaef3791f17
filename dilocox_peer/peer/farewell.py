"""How a peer leaves: what it says to whom, and what it waits for, a few seconds at most.

The last peer of a stage does not go before who keeps the run has its last round. Five seconds are all that a Ctrl-C may take, whatever the
stage's size: a contribution of a large one cannot be on its way for long, and is on this disk for who comes back.
"""

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress

from dilocox_peer.contract import Leaving
from dilocox_peer.dht.directory import Directory
from dilocox_peer.dht.records import Lease
from dilocox_peer.errors import PeerUnavailable, ProtocolError, RunUnreachable
from dilocox_peer.events import Failed, Listener
from dilocox_peer.network.transport import Transport
from dilocox_peer.peer.rounds.driver import RoundDriver
from dilocox_peer.peer.rounds.machine import RoundMachine
from dilocox_peer.peer.state.backup_exchange import Summary, fetch_summary, trusted_first

HAND_OVER_S, SAY_GOODBYE_S = 2.5, 1.0
ASK_S = 1.5
AGAIN_S = 0.2
MAX_KEEPERS = 4


class Parting:
    """The end of something that takes its time in a thread: begun once, by whoever asks for it first."""

    def __init__(self, stop: Callable[[float], None], timeout_s: float, what_follows: str, listener: Listener) -> None:
        """stop: raises TimeoutError when it is not done in so many seconds, which is told, with what follows then."""
        self._stop = stop
        self._timeout_s = timeout_s
        self._what_follows = what_follows
        self._listener = listener
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """In the loop; `over` has to be awaited later."""
        if self._task is None:
            self._task = asyncio.create_task(asyncio.to_thread(self._stop, self._timeout_s), name="ending")

    async def over(self) -> None:
        self.begin()
        assert self._task is not None
        try:
            await self._task
        except TimeoutError as error:
            self._listener(Failed("leaving", f"{error}{self._what_follows}"))


async def say_goodbye(
    stage: int, machine: RoundMachine, driver: RoundDriver, transport: Transport, directory: Directory
) -> None:
    """Tells who keeps the run, then roster and directory, for HAND_OVER_S and SAY_GOODBYE_S at most."""
    with suppress(TimeoutError, RunUnreachable):
        async with asyncio.timeout(HAND_OVER_S):
            await hand_over(stage, machine, transport, directory)
    driver.post(Leaving())
    with suppress(TimeoutError, RunUnreachable):
        async with asyncio.timeout(SAY_GOODBYE_S):
            await directory.leave(timeout_s=SAY_GOODBYE_S)
            await driver.drained()


async def hand_over(stage: int, machine: RoundMachine, transport: Transport, directory: Directory) -> None:
    """Returns once a keeper has our newest round, or none is there, or others of the stage are. Raises RunUnreachable; give it HAND_OVER_S."""
    keepers = trusted_first(await directory.keepers(timeout_s=ASK_S), transport, random.Random(), MAX_KEEPERS)
    missing = [lease for lease in keepers if lease.peer in transport.named] or keepers  # anybody may say that it has it

    async def ask(lease: Lease) -> Summary | None:
        with suppress(PeerUnavailable, ProtocolError):
            await transport.connect(lease.peer, lease.addresses, ASK_S)
            return await fetch_summary(transport, lease.peer, stage, ASK_S, own_round=machine.round)
        return None

    while missing and machine.round > 0 and _is_last(machine):
        said = await asyncio.gather(*map(ask, missing))
        if any(summary is not None and summary.reached >= machine.round for summary in said):
            return
        missing = [lease for lease, summary in zip(missing, said, strict=True) if summary is not None]
        await asyncio.sleep(AGAIN_S)


def _is_last(machine: RoundMachine) -> bool:
    now = asyncio.get_running_loop().time()
    return len(machine.alive(now) & set(machine.roster)) <= 1
