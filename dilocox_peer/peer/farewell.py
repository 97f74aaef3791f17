"""The last peer of a stage does not go before who keeps the run has its last round: a few seconds at most."""

import asyncio
import random
from contextlib import suppress

from dilocox_peer.dht.directory import Directory
from dilocox_peer.dht.records import Lease
from dilocox_peer.errors import PeerUnavailable, ProtocolError
from dilocox_peer.network.transport import Transport
from dilocox_peer.peer.rounds.machine import RoundMachine
from dilocox_peer.peer.state.backup_exchange import Summary, fetch_summary, trusted_first

HAND_OVER_S = 4.0
ASK_S = 1.5
AGAIN_S = 0.2
MAX_KEEPERS = 4


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
