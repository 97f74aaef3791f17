"""How this peer and the others of its stage come to be connected: asks whether others can dial us, has relays pass on to us where
they cannot, and dials those whom the directory lists until a connection is there.

The decisions are network/relay_choice.py's and dial_plan.py's; here are the clock, the tasks and p2pd.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress

from dilocox_peer.dht.records import Lease
from dilocox_peer.errors import PeerUnavailable
from dilocox_peer.events import Listener
from dilocox_peer.events_of_reach import Reach, ReachChanged
from dilocox_peer.invitation import all_loopback
from dilocox_peer.network.reservations import Reservations
from dilocox_peer.network.transport import Transport, Via
from dilocox_peer.network.tunnels import Tunnels, own_door
from dilocox_peer.peer.dial_plan import DialPlan
from dilocox_peer.peer.dialback import DialbackVerdict
from dilocox_peer.peer.links.conveyor import Conveyor
from dilocox_peer.types import PeerId

TICK_S = 2.0
TELL_S = 10.0  # of the start: by then a relay has answered, or none will soon
ASK_AGAIN_S = (8.0, 20.0, 60.0)  # then the last of them again and again; a router opens its port after some seconds
DIALS_AT_ONCE = 8
LOOK_EVERY_S, LOOK_MAX_S = 6.0, 60.0  # at the directory, for the newest addresses of those we miss; ever more seldom

OnDialled = Callable[[PeerId, str], None]


class Reaching:
    """`start` it once."""

    def __init__(
        self, transport: Transport, reachability: DialbackVerdict, *, look_now: asyncio.Event, listener: Listener
    ) -> None:
        """look_now: set when the directory should be read, for the addresses of peers that we lack a connection with."""
        self.reservations = Reservations(transport)
        self.tunnels = Tunnels(transport)
        self.paths: Mapping[PeerId, Via] = {}
        self._transport = transport
        self._reachability = reachability
        self._look_now = look_now
        self._listener = listener
        self._plan = DialPlan(transport.peer_id)
        self._on_dialled: OnDialled | None = None
        self._on_paths: Callable[[], None] | None = None
        self._nudge = asyncio.Event()
        self._slots = asyncio.Semaphore(DIALS_AT_ONCE)
        self._told: Reach | None = None
        self._look_at, self._look_s = 0.0, LOOK_EVERY_S

    def start(self, stack: AsyncExitStack) -> "asyncio.Task[None]":
        """It ends only by failing, or with the stack."""
        self._weigh(is_settled=False)
        self.reservations.offer(self._transport.initial_peers)
        task = asyncio.create_task(self._run(), name="reaching")
        stack.callback(self.tunnels.close)
        stack.push_async_callback(_end, task)
        return task

    def found(self, leases: Sequence[Lease], on_dialled: OnDialled, on_paths: Callable[[], None]) -> None:
        """The peers of our stage, as the directory lists them now. on_dialled: for each once it was dialled for the first time,
        whether it answered or not, with the range of addresses that it is seen in. on_paths: whenever `paths` are others."""
        self._on_dialled, self._on_paths = on_dialled, on_paths
        self._plan.listed(leases)
        self._nudge.set()

    async def take_links(self, conveyor: Conveyor) -> None:
        """From here on neighbours that cannot dial our linkd reach it through p2pd."""
        with suppress(PeerUnavailable, TimeoutError):  # p2pd is gone, which others tell
            await self.tunnels.serve(lambda: own_door(conveyor.addresses))

    async def ways_to_links(self, leases: Sequence[Lease]) -> dict[PeerId, tuple[str, ...]]:
        """Where linkd dials each of these neighbours; one that is passed on to by relays, through p2pd at last."""
        relayed = [lease for lease in leases if lease.is_relayed]
        self.tunnels.keep({lease.peer for lease in relayed})
        ways = {lease.peer: lease.link_addresses for lease in leases}
        for lease in relayed:
            with suppress(OSError):
                door = await self.tunnels.towards(lease.peer, lease.addresses)
                if door is not None:
                    ways[lease.peer] = (*lease.link_addresses, f"{door}/p2p/{lease.link}")
        return ways

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.reservations.run(), name="reservations")
            tasks.create_task(self._keep_asking(), name="dial-back")
            await self._keep_dialling(tasks)

    async def _keep_dialling(self, tasks: asyncio.TaskGroup) -> None:
        clock = asyncio.get_running_loop().time
        started = clock()
        while True:
            self._nudge.clear()
            with suppress(TimeoutError, PeerUnavailable):
                before, self.paths = self.paths, await self._transport.paths()
                if self.paths != before and self._on_paths is not None:
                    self._on_paths()
                for peer, addresses in self._plan.due(self.paths, clock()):
                    tasks.create_task(self._dial(peer, addresses), name="dial")
                self._look_for_missing(clock())
            self._weigh(is_settled=clock() - started >= TELL_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._nudge.wait()

    def _look_for_missing(self, now: float) -> None:
        if not self._plan.missing(self.paths):
            self._look_at, self._look_s = now + LOOK_EVERY_S, LOOK_EVERY_S
        elif now >= self._look_at:
            self._look_s = min(2 * self._look_s, LOOK_MAX_S)
            self._look_at = now + self._look_s
            self._look_now.set()

    async def _dial(self, peer: PeerId, addresses: Sequence[str]) -> None:
        seen_in, is_there = "", False
        async with self._slots:
            with suppress(PeerUnavailable):
                await self._transport.connect(peer, addresses)
                is_there = True
                seen_in = await self._transport.range_of(peer)
        if self._plan.dialled(peer, asyncio.get_running_loop().time(), is_there=is_there) and self._on_dialled:
            self._on_dialled(peer, seen_in)

    async def _keep_asking(self) -> None:
        """Whether others can dial us: the router may have opened a port, or closed it."""
        if all_loopback(self._transport.addresses):
            return
        waits = iter(ASK_AGAIN_S)
        while True:
            await asyncio.sleep(next(waits, ASK_AGAIN_S[-1]))
            with suppress(PeerUnavailable):
                await self._transport.refresh_addresses()
                await self._reachability.ask_entries(self._transport)

    def _weigh(self, *, is_settled: bool) -> None:
        addresses = self._transport.addresses
        is_direct = self._reachability.is_known_direct or all_loopback(addresses)
        self.reservations.need(not is_direct)
        reach: Reach = "direct" if is_direct else "relayed" if self.reservations.held else "outgoing"
        if all_loopback(addresses) or reach == self._told or (reach == "outgoing" and not is_settled):
            return
        self._told = reach
        self._listener(ReachChanged(reach, len(self.reservations.held)))


async def _end(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
