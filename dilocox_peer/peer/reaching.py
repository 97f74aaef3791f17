"""How this peer and the others of its stage come to be connected: asks whether others can dial us, has relays pass on to us where
they cannot, is a relay itself where they can, and dials those whom the directory lists until a connection is there. Where our line is
another one, or somebody falls silent, connections are made anew.

p2pd punches a hole through two routers once, at the beginning of a connection through a relay, if both of its ends know by then
where they come out; and a router that has seen one of them knock alone spoils it for two minutes. So p2pd is told first (outside_address.py),
and until then nobody is told where relays pass on to us, and nobody whom only a relay leads to is dialled.

The decisions are network/relay_choice.py's and dial_plan.py's; here are the clock, the tasks and p2pd.
"""

import asyncio
import hashlib
import os
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any

from dilocox_peer.dht.records import Lease
from dilocox_peer.errors import PeerUnavailable, ProtocolError
from dilocox_peer.events import Failed, Listener
from dilocox_peer.events_of_reach import LineChanged, PassingOn, PortOpened, Reach, ReachChanged
from dilocox_peer.invitation import address_range, all_loopback, parse_multiaddr
from dilocox_peer.network.bulk import PeerSilent
from dilocox_peer.network.lasting import ended
from dilocox_peer.network.lead_budget import TooManyLeads
from dilocox_peer.network.outside_address import OutsideAddress
from dilocox_peer.network.own_hosts import own_hosts
from dilocox_peer.network.p2pd import greets
from dilocox_peer.network.port_opener import PortOpener
from dilocox_peer.network.relaying import Relay
from dilocox_peer.network.reservations import Reservations
from dilocox_peer.network.transport import Transport
from dilocox_peer.network.tunnels import Tunnels, own_door
from dilocox_peer.peer.dial_plan import DialPlan, to_ask_for_relays
from dilocox_peer.peer.dial_slots import DialSlots
from dilocox_peer.peer.dialback import SERVICE, DialbackVerdict, connect_anew
from dilocox_peer.peer.line_watch import LineWatch
from dilocox_peer.peer.links.conveyor import Conveyor
from dilocox_peer.peer.presence import links_at
from dilocox_peer.types import PeerId

TICK_S = 2.0
SETTLE_S = 16.0  # by then p2pd knows where we come out, or will not
TELL_S = 10.0  # of the start: by then a relay has answered, or none will soon
ASK_AGAIN_S = (8.0, 20.0, 60.0)  # then the last of them again and again; a router opens its port after some seconds
DIRECT_AGAIN_S = 180.0  # where others could dial us: what is tried for all behind one range of addresses is bounded
ASK_MOVED_S = (4.0, 8.0)  # after our line became another one
DIALS_AT_ONCE = 8
TRY_S = 5.0  # for a short question to a peer that is silent
IDLE_MAX_S, IDLE_LOOK_S = 10.0, 0.1  # that a moment is waited for in which nothing is fetched of a peer
LOOKED_S = 10.0  # that a relay's new connection counts as such
MOVES_S = 60.0  # between two times at which all connections are made anew because others see us elsewhere
LOOK_EVERY_S, LOOK_MAX_S = 6.0, 60.0  # at the directory, for the newest addresses of those we miss; ever more seldom

OnDialled = Callable[[PeerId, str], None]


class Reaching:
    """`start` it once."""

    def __init__(
        self, transport: Transport, reachability: DialbackVerdict, *, look_now: asyncio.Event, listener: Listener
    ) -> None:
        """look_now: set when the directory should be read, for the addresses of peers that we lack a connection with."""
        self.reservations = Reservations(transport, on_regained=self._regained)
        self.tunnels = Tunnels(transport)
        self.ports = PortOpener(
            self._link_port, lambda opened: listener(PortOpened(opened.host, opened.port, opened.way))
        )
        self.relay: Relay | None = None
        self.paths: Mapping[PeerId, str] = {}  # as transport.paths, and "punched"
        self._transport = transport
        self._reachability = reachability
        self._look_now = look_now
        self._listener = listener
        secret = os.urandom(16)
        self._rank = lambda peer: hashlib.sha256(secret + peer.encode()).digest()
        self._plan = DialPlan(transport.peer_id, self._rank)
        self._outside = OutsideAddress(transport.peer_id)
        self._whispering: asyncio.Task[None] | None = None
        self._leases: Sequence[Lease] = ()
        self._num_passed_on = 0
        self._started_at = 0.0
        self._line = LineWatch()
        self._conveyor: Conveyor | None = None
        self._asked_of: tuple[str, ...] = ()  # addresses of linkd that others were asked to dial
        self._anew: set[PeerId] = set()  # whose connections are being made anew
        self._regained_relays: set[PeerId] = set()  # since the last look
        self._looked_from: set[PeerId] = set()  # relays whose connections were made anew lately
        self._comes_out = ""  # the host at which our connections do, as others saw it last
        self._moved_at = float("-inf")
        self._on_dialled: OnDialled | None = None
        self._on_paths: Callable[[], None] | None = None
        self._nudge = asyncio.Event()
        self._slots = asyncio.Semaphore(DIALS_AT_ONCE)  # of connections that are made anew
        self._dialling = DialSlots()
        self._told: Reach | None = None
        self._look_at, self._look_s = 0.0, LOOK_EVERY_S

    def start(self, stack: AsyncExitStack) -> "asyncio.Task[None]":
        """It ends only by failing, or with the stack."""
        self._started_at = asyncio.get_running_loop().time()
        self._weigh(is_settled=False)
        self.reservations.offer(self._transport.initial_peers)
        task = asyncio.create_task(self._run(), name="reaching")
        stack.callback(self.tunnels.close)
        stack.push_async_callback(ended, task)
        return task

    async def pass_on(self, bytes_per_s: float | None, stack: AsyncExitStack) -> None:
        """From here on, as long as others can dial us, we are a relay with that budget; None: we are none, and p2pd is none."""
        self.relay = Relay(self._transport, bytes_per_s, is_open=lambda: self._is_direct)
        stack.push_async_callback(self.relay.close)
        with suppress(PeerUnavailable, TimeoutError):  # p2pd is gone, which others tell
            await self.relay.serve()

    def listed(self, leases: Sequence[Lease]) -> None:
        """Peers of the run, of any stage: those that others can dial may be relays, after those that the link names. Each home asks
        them in an order of its own, which nobody else knows, so that all have some."""
        self._leases = leases
        found = to_ask_for_relays(leases, self._transport.peer_id, self._rank)
        self.reservations.offer((*self._transport.initial_peers, *found))

    def found(self, leases: Sequence[Lease], on_dialled: OnDialled, on_paths: Callable[[], None]) -> None:
        """The peers of our stage, as the directory lists them now. on_dialled: for each once it was dialled for the first time,
        whether it answered or not, with the range of addresses that it is seen in. on_paths: whenever `paths` are others."""
        self._on_dialled, self._on_paths = on_dialled, on_paths
        self._plan.listed(leases, {*self.paths, *self._transport.heard})
        self._nudge.set()

    async def take_links(self, conveyor: Conveyor) -> None:
        """From here on neighbours that cannot dial our linkd reach it through p2pd, and the router is asked for a port that leads to it."""
        self._conveyor = conveyor
        with suppress(PeerUnavailable, TimeoutError):  # p2pd is gone, which others tell
            await self.tunnels.serve(lambda: own_door(conveyor.addresses))

    async def ways_to_links(self, leases: Sequence[Lease]) -> dict[PeerId, tuple[str, ...]]:
        """Where linkd dials each of these neighbours; one whose linkd others cannot dial, through p2pd at last."""
        is_met = self._may_be_met
        closed = [lease for lease in leases if (lease.is_relayed and is_met) or lease.is_link_closed]
        ways = {lease.peer: lease.link_addresses for lease in leases}
        with suppress(OSError):
            await self.tunnels.open_doors({lease.peer: lease.addresses for lease in closed}, self._rank)
        for lease in closed:
            if (door := self.tunnels.door_of(lease.peer)) is not None:
                ways[lease.peer] = (*lease.link_addresses, f"{door}/p2p/{lease.link}")
        return ways

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.reservations.run(), name="reservations")
            tasks.create_task(self._keep_asking(), name="dial-back")
            if not all_loopback(self._transport.addresses):
                tasks.create_task(self.ports.run(), name="port")
            await self._keep_dialling(tasks)

    async def _keep_dialling(self, tasks: asyncio.TaskGroup) -> None:
        clock = asyncio.get_running_loop().time
        started = clock()
        while True:
            self._nudge.clear()
            with suppress(TimeoutError, PeerUnavailable):
                before, self.paths = self.paths, await self._look_at_paths()
                if self.paths and not before:
                    self._plan.line_is_back()
                self.tunnels.reached([peer for peer, how in self.paths.items() if how != "relayed"])
                if self.paths != before and self._on_paths is not None:
                    self._on_paths()
                later = () if self._may_be_met else {each.peer for each in self._leases if each.is_relayed}
                for peer, addresses in self._plan.due(self.paths, clock(), later=later):
                    tasks.create_task(self._guarded(self._dial(peer, addresses), "dial"), name="dial")
                may_punch = not self._is_direct and self._outside.known is not None
                for peer, addresses in self._plan.to_better(self.paths, clock(), may_punch=may_punch):
                    tasks.create_task(self._guarded(self._better(peer, addresses), "better"), name="better")
                self._look_for_missing(clock())
                self._tell_outside(tasks, clock())
                self._watch_line(tasks, clock())
                if (links := self._links()) != self._asked_of:
                    self._asked_of = links
                    tasks.create_task(self._guarded(self._ask_now(), "dial-back"), name="dial-back")
            self._weigh(is_settled=clock() - started >= TELL_S)
            if self.relay is not None and self.relay.num_reserved != self._num_passed_on:
                self._num_passed_on = self.relay.num_reserved
                self._listener(PassingOn(self._num_passed_on, self.relay.num_bytes))
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._nudge.wait()

    async def _guarded(self, work: Coroutine[Any, Any, object], name: str) -> None:
        try:
            await work
        except Exception as error:  # a task boundary: what one peer answers must not end our stay
            self._listener(Failed("reaching others", f"{name}: {type(error).__name__}: {error}"))

    async def _look_at_paths(self) -> dict[PeerId, str]:
        paths: dict[PeerId, str] = {**await self._transport.paths()}
        if self._is_direct:
            return paths
        relayed = {lease.peer for lease in self._leases if lease.is_relayed}
        for peer in [peer for peer, via in paths.items() if via == "direct" and peer in relayed]:
            if self.paths.get(peer) == "punched" or any(map(address_range, await self._transport.seen_at(peer))):
                paths[peer] = "punched"
        return paths

    def _links(self) -> tuple[str, ...]:
        """Where linkd may be dialled from outside."""
        if self._conveyor is None:
            return ()
        found = links_at(self._conveyor, self._transport.addresses, self.ports.port)
        return tuple(text for text in found if address_range(parse_multiaddr(text, "lease").host))

    def _link_port(self) -> int | None:
        """Linkd's, where others than this computer can dial it."""
        addresses = () if self._conveyor is None else self._conveyor.addresses
        parsed = [parse_multiaddr(text, "lease") for text in addresses]
        return next((each.port for each in parsed if each.host_kind == "ip4" and each.host != "127.0.0.1"), None)

    def _tell_outside(self, tasks: asyncio.TaskGroup, now: float) -> None:
        """Has p2pd know where our connections come out, where others cannot dial us."""
        if self._is_direct or (self._whispering is not None and not self._whispering.done()):
            return
        believed = self._reachability.outside.believed(now)
        self._whispering = tasks.create_task(self._whisper(believed), name="outside address")

    async def _whisper(self, address: str | None) -> None:
        if await self._outside.tell(address, self._transport.addresses):
            with suppress(PeerUnavailable):
                await self._transport.refresh_addresses()

    @property
    def _may_be_met(self) -> bool:
        """Whether it is time to be met through relays: a hole can be punched from now on, or none will."""
        if self._outside.known is not None or self._is_direct:
            return True
        return asyncio.get_running_loop().time() - self._started_at > SETTLE_S

    def _watch_line(self, tasks: asyncio.TaskGroup, now: float) -> None:
        """Makes connections anew that lead nowhere, as far as can be told."""
        if self._line.is_another(own_hosts(), now, time.time()):
            self._reachability.moved()
            self._all_anew(tasks, now)
            tasks.create_task(self._guarded(self._ask_where_we_are(), "dial-back"), name="dial-back")
            return
        if self._comes_out_elsewhere(now):
            self._all_anew(tasks, now, but=self._looked_from)
            return
        self.reservations.look(self.paths.keys() | self._anew)
        while self._regained_relays:
            tasks.create_task(
                self._guarded(self._look_from(self._regained_relays.pop()), "dial-back"), name="dial-back"
            )
        silent = self._line.silent(self.paths, self._transport.heard, now)
        relays = self.reservations.held if self._line.is_silent(self.paths, self._transport.heard, now) else ()
        for peer in {*silent, *(relays if silent else ())}:
            tasks.create_task(self._guarded(self._try_out(peer), "try out"), name="try out")

    def _all_anew(self, tasks: asyncio.TaskGroup, now: float, *, but: Collection[PeerId] = ()) -> None:
        self._moved_at = now
        self._plan.line_is_back()
        self.ports.moved()
        self._listener(LineChanged())
        for peer in self._known_addresses():
            if peer not in but:
                tasks.create_task(self._guarded(self._connect_anew(peer), "connect anew"), name="connect anew")

    def _comes_out_elsewhere(self, now: float) -> bool:
        """Whether our router has another address: connections of before lead nowhere, and only new ones tell."""
        believed = self._reachability.outside.believed(now)
        if believed is None:
            return False
        host = parse_multiaddr(believed, "announce").host
        if self._comes_out and host != self._comes_out and now - self._moved_at <= MOVES_S:
            return False  # some carriers have each connection come out at another of their addresses; it is looked at again
        before, self._comes_out = self._comes_out, host
        return before not in ("", host)

    def _regained(self, relay: PeerId) -> None:
        self._regained_relays.add(relay)
        self._nudge.set()

    async def _look_from(self, relay: PeerId) -> None:
        """Where a relay that was lost sees us now. It may have another connection with us, of before, which leads nowhere, and would
        pass others on there."""
        if await self._connect_anew(relay):
            self._looked_from.add(relay)
            await self._ask_now()
            self._nudge.set()
            await asyncio.sleep(LOOKED_S)
            self._looked_from.discard(relay)

    async def _try_out(self, peer: PeerId) -> None:
        began = time.monotonic()
        is_there = await self._answers(peer) or await self._answers(peer)
        # A relay tells nothing but what others send through it.
        heard = self._transport.heard.get(peer) or max(self._transport.heard.values(), default=0.0)
        if not is_there and heard < began:  # else this computer is slow, or that one
            is_there = await self._connect_anew(peer)
        self._line.tried(peer, is_there=is_there)

    async def _answers(self, peer: PeerId) -> bool:
        """Whether it answers a short question, or p2pd knows already that it is not there."""
        try:
            await self._transport.fetch(peer, SERVICE, {}, max_body_bytes=0, timeout_s=TRY_S, stall_timeout_s=TRY_S)
        except PeerSilent:
            return False
        except (PeerUnavailable, ProtocolError):  # nonsense is an answer too
            pass
        return True

    async def _connect_anew(self, peer: PeerId) -> bool:
        addresses = self._known_addresses().get(peer)
        if addresses is None or peer in self._anew:
            return False
        self._anew.add(peer)
        try:
            async with self._slots:
                return await connect_anew(self._transport, peer, addresses)
        finally:
            self._anew.discard(peer)
            self._nudge.set()

    async def _better(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Makes a relayed connection anew, between two contributions if there is such a moment. addresses: direct ones, or of relays
        alone."""
        direct = [parse_multiaddr(text, "lease") for text in addresses if "/p2p-circuit" not in text]
        if direct and not any(await asyncio.gather(*map(greets, direct))):
            return  # others can dial it there; we cannot, as over IPv6 alone
        until = time.monotonic() + IDLE_MAX_S
        while self._transport.is_busy(peer) and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(IDLE_LOOK_S)
        if peer in self._anew:
            return
        self._anew.add(peer)
        try:
            async with self._slots:
                with suppress(PeerUnavailable):
                    await self._transport.hang_up(peer)
                    await self._transport.connect(peer, addresses)
        finally:
            self._anew.discard(peer)
            self._nudge.set()

    def _known_addresses(self) -> dict[PeerId, tuple[str, ...]]:
        """Where those we are connected with are dialled, relays first."""
        named: dict[PeerId, list[str]] = {}
        for text in self._transport.initial_peers:
            if (peer := parse_multiaddr(text, "peer").peer) is not None:
                named.setdefault(peer, []).append(text)
        found = {peer: tuple(texts) for peer, texts in named.items()}
        found |= {each.peer: each.addresses for each in self._leases if each.peer not in found}
        first = [peer for peer in (*self.reservations.held, *named) if peer in found]
        return {peer: found[peer] for peer in dict.fromkeys((*first, *found)) if peer in self.paths}

    def _look_for_missing(self, now: float) -> None:
        if not self._plan.missing(self.paths):
            self._look_at, self._look_s = now + LOOK_EVERY_S, LOOK_EVERY_S
        elif now >= self._look_at:
            self._look_s = min(2 * self._look_s, LOOK_MAX_S)
            self._look_at = now + self._look_s
            self._look_now.set()

    async def _dial(self, peer: PeerId, addresses: Sequence[str]) -> None:
        seen_in, is_there = "", False
        async with self._dialling.slot(peer, addresses, is_known=peer in self._transport.heard):
            try:
                await self._transport.connect(peer, addresses)
                is_there = True
                seen_in = await self._transport.range_of(peer)
            except TooManyLeads:
                self._plan.put_off(peer, asyncio.get_running_loop().time())
                return
            except PeerUnavailable:
                pass
        if self._plan.dialled(peer, asyncio.get_running_loop().time(), is_there=is_there) and self._on_dialled:
            self._on_dialled(peer, seen_in)

    async def _keep_asking(self) -> None:
        """Whether others can dial us: the router may have opened a port, or closed it."""
        if all_loopback(self._transport.addresses):
            return
        waits = iter(ASK_AGAIN_S)
        while True:
            last_s = DIRECT_AGAIN_S if self._reachability.is_known_direct else ASK_AGAIN_S[-1]
            await asyncio.sleep(next(waits, last_s))
            await self._ask_now()

    async def _ask_now(self) -> None:
        with suppress(PeerUnavailable, TimeoutError):
            await self._transport.refresh_addresses()
            await self._reachability.ask_entries(self._transport, self._links())

    async def _ask_where_we_are(self) -> None:
        """On another line, once those we ask are connected with again."""
        for pause_s in ASK_MOVED_S:
            await asyncio.sleep(pause_s)
            await self._ask_now()

    @property
    def _is_direct(self) -> bool:
        return self._reachability.is_known_direct or all_loopback(self._transport.addresses)

    def _weigh(self, *, is_settled: bool) -> None:
        is_direct = self._is_direct
        self.reservations.need(not is_direct)
        self.reservations.tell(self._may_be_met)
        reach: Reach = "direct" if is_direct else "relayed" if self.reservations.held else "outgoing"
        if all_loopback(self._transport.addresses) or reach == self._told or (reach == "outgoing" and not is_settled):
            return
        self._told = reach
        self._listener(ReachChanged(reach, len(self.reservations.held)))
