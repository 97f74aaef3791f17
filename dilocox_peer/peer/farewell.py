"""The last peer of a stage does not go before who keeps the run has its last round: a few seconds at most."""

import asyncio
import random
from contextlib import suppress

from dilocox_peer.dht.directory import Directory
from dilocox_peer.errors import PeerUnavailable, ProtocolError
from dilocox_peer.network.transport import Transport
from dilocox_peer.peer.rounds.machine import RoundMachine
from dilocox_peer.peer.state.backup_exchange import fetch_summary, trusted_first

HAND_OVER_S = 4.0
ASK_S = 1.5
AGAIN_S = 0.2
MAX_KEEPERS = 4


async def hand_over(stage: int, machine: RoundMachine, transport: Transport, directory: Directory) -> None:
    """Returns once a keeper has our newest round, or none is there, or others of the stage are. Raises RunUnreachable; give it HAND_OVER_S."""
    keepers = trusted_first(await directory.keepers(timeout_s=ASK_S), transport, random.Random(), MAX_KEEPERS)
    missing = {lease.peer: lease.addresses for lease in keepers}
    while missing and machine.round > 0 and _is_last(machine):
        for peer, addresses in list(missing.items()):
            summary = None
            with suppress(PeerUnavailable, ProtocolError):
                await transport.connect(peer, addresses, ASK_S)
                summary = await fetch_summary(transport, peer, stage, ASK_S, own_round=machine.round)
            if summary is None:
                del missing[peer]  # it is not there, or keeps nothing of the stage
            elif summary.reached >= machine.round:
                return
        await asyncio.sleep(AGAIN_S)


def _is_last(machine: RoundMachine) -> bool:
    now = asyncio.get_running_loop().time()
    return len(machine.alive(now) & set(machine.roster)) <= 1
