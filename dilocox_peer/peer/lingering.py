"""How long a peer stays after its run's last round: until who is behind has it, and who wants the final state has fetched it."""

import asyncio

from dilocox_peer.network.transport import Transport
from dilocox_peer.peer.averaging import Averaging
from dilocox_peer.peer.links.conveyor import Conveyor

LINGER_S = 3.0  # after everybody has the last head, and after the last state sent: for followers that still fetch
LINGER_MAX_S = 30.0
VOUCHED_S = 12.0  # of waiting for the owner's word that the run is over: its bootstrap asks every five, if there is one
SERVE_OUT_S = 300.0  # a whole state over a slow uplink


async def linger(
    averaging: Averaging, conveyor: Conveyor | None, transport: Transport, leaving: "asyncio.Future[str]"
) -> None:
    """Serves the last state until everybody in the roster has it, the stages behind know that the last round is over, the run's owner
    has vouched for it, and followers had time to ask for it; what is on its way then is sent to its end."""
    loop = asyncio.get_running_loop()
    deadline, vouched_by = loop.time() + LINGER_MAX_S, loop.time() + VOUCHED_S
    total = averaging.machine.schedule.last_round or 0

    def is_needed() -> bool:
        behind = total if conveyor is None else conveyor.bench.behind
        return not averaging.driver.everybody_at_head() or behind < total

    def is_vouched() -> bool:
        checkpoint = averaging.machine.checkpoint
        return checkpoint is not None and checkpoint.is_last

    while not leaving.done() and loop.time() < deadline:
        if not is_needed() and (is_vouched() or loop.time() >= vouched_by):
            break
        await asyncio.wait({leaving}, timeout=0.2)
    deadline, quiet_since = loop.time() + SERVE_OUT_S, loop.time()
    while not leaving.done() and loop.time() < min(deadline, quiet_since + LINGER_S):
        await asyncio.wait({leaving}, timeout=0.2)
        if transport.bandwidth.uplink.is_sending:
            quiet_since = loop.time()
