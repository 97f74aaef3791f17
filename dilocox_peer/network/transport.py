"""Messages and bulk fetches between the peers of a run, over hivemind's go-libp2p daemon in our own asyncio loop.

The daemon (p2pd, daemon.py) is a child process in a session of its own, so that Ctrl-C in a terminal does not end it before
we could say goodbye; it dies with us. libp2p authenticates the sender. Here are deadlines and size caps; what the bytes mean is
decided elsewhere. Importing this module does not import hivemind (that pulls in torch); `Transport.create` does.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from dilocox_peer.admission import NOTHING_SHOWN, Admission, Right
from dilocox_peer.invitation import address_range, parse_multiaddr, parse_multiaddrs
from dilocox_peer.network.bandwidth import Bandwidth
from dilocox_peer.network.bulk import (
    PeerGone,
    PeerRefusing,
    PeerSilent,
    Reply,
    RequestRefused,
    Take,
    TransportDown,
)
from dilocox_peer.network.daemon import Daemon, OnStream, Via
from dilocox_peer.network.doors import Doors
from dilocox_peer.network.fetches import BulkFetches
from dilocox_peer.network.lasting import lasting
from dilocox_peer.network.lead_budget import LeadBudget, TooManyLeads
from dilocox_peer.network.messages import MessageHandler, Messages
from dilocox_peer.network.p2pd import Refusal, check_listenable, remember
from dilocox_peer.network.serving import FetchHandler, Serving, TransportLimits
from dilocox_peer.network.upload_watch import UploadWatch
from dilocox_peer.types import PeerId

__all__ = [
    "FetchHandler",
    "MessageHandler",
    "PeerGone",
    "PeerRefusing",
    "PeerSilent",
    "Reply",
    "RequestRefused",
    "Transport",
    "TransportDown",
    "TransportLimits",
    "Via",
]  # fmt: skip

_LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)

BytesHandler = Callable[[PeerId], None]


def named_peers(addresses: Sequence[str]) -> frozenset[PeerId]:
    """The peers that these multiaddrs end at."""
    found = (parse_multiaddr(text, "peer").peer for text in addresses)
    return frozenset(peer for peer in found if peer is not None)


class Transport:
    """See the module. One per process and identity; `create`, then handlers, finally `close`."""

    def __init__(
        self,
        *,
        daemon: Daemon,
        peer_id: PeerId,
        namespace: str,
        initial_peers: tuple[str, ...],
        limits: TransportLimits,
        addresses: tuple[str, ...],
    ) -> None:
        self.daemon = daemon
        self.peer_id = peer_id
        self.initial_peers = initial_peers
        self.named = named_peers(initial_peers)  # by the run's link or its user; the others are strangers that we met
        self.addresses = addresses
        self.bandwidth = Bandwidth(limits.upload_bytes_per_s, limits.download_bytes_per_s, limits.told_bytes_per_s)
        self._prefix = f"/dilocox/1/{namespace}"
        self.message_protocol = f"{self._prefix}/messages/3"
        self.pass_protocol = f"{self._prefix}/pass"
        self.admission: Admission | None = None
        self._leads = LeadBudget()
        self.heard: OrderedDict[PeerId, float] = (
            OrderedDict()
        )  # when, monotonic, the last message or byte of a body came
        self._bytes_handler: BytesHandler = lambda _peer: None
        self.doors = Doors(daemon, limits.allowed)
        self.doors.keeper.befriend(lambda peer: peer in self.named)
        self._serving = Serving(
            limits,
            self.bandwidth,
            self._refusal,
            self._on_bytes,
            self.doors.malformed,
            self.is_at_home,
            self.doors.holder,
        )
        self.line = UploadWatch(self.bandwidth, lambda: None if daemon.is_down else daemon.pid)
        self._watching: asyncio.Task[None] | None = None
        self._messages = Messages(
            daemon, self.doors, self.bandwidth, self.message_protocol,
            lambda peer: self._refusal(peer, Right.JOIN), self._on_heard,
        )  # fmt: skip
        self._fetches = BulkFetches(daemon, self.bandwidth, self.fetch_protocol, self._on_bytes)
        self.doors.keeper.keep(self.is_busy)
        self._is_closed = False

    # -- start and end ------------------------------------------------------------------------------------------------

    @classmethod
    async def create(
        cls,
        identity_path: str | Path,
        peer_id: PeerId,
        *,
        namespace: str,
        runtime_dir: Path,
        initial_peers: Sequence[str] = (),
        host_maddrs: Sequence[str] = _LOOPBACK,
        announce_maddrs: Sequence[str] = (),
        is_public: bool = False,
        limits: TransportLimits = TransportLimits(),
        startup_timeout_s: float = 30.0,
    ) -> "Transport":
        """A running transport. namespace: the run id; peers of another namespace are refused. is_public: others can dial it, which
        p2pd is told, as it takes minutes to find out (a bootstrap server); else p2pd is told that they cannot, which ends nothing
        but its waiting before it punches holes.

        One reachable address of initial_peers is enough. Raises ConfigError (address, port, folder, identity, p2pd does
        not start), LackedForNow (it is not ready in time) or RunUnreachable (nobody of initial_peers answers); then, and when cancelled, nothing is left behind.
        """
        initial = tuple(
            text for text in parse_multiaddrs(initial_peers, "peer") if not text.endswith(f"/p2p/{peer_id}")
        )
        hosts = [parse_multiaddr(text, "listen") for text in host_maddrs]
        announced = parse_multiaddrs(announce_maddrs, "announce")
        for host in hosts:
            check_listenable(host)
        daemon = await Daemon.start(
            identity_path,
            peer_id,
            runtime_dir=runtime_dir,
            initial=[parse_multiaddr(text, "peer") for text in initial],
            hosts=hosts,
            announced=announced,
            is_public=is_public,
            timeout_s=startup_timeout_s,
        )
        try:
            self = cls(
                daemon=daemon, peer_id=peer_id, namespace=namespace, initial_peers=initial, limits=limits,
                addresses=await daemon.addresses(latest=False),
            )  # fmt: skip
            await self._messages.serve()
            self._watching = asyncio.create_task(
                lasting(self.line.run, "the look at the upload", self.doors.tell), name="upload"
            )
        except BaseException:
            await daemon.close(timeout_s=2.0)
            raise
        self.doors.start()
        return self

    async def close(self, timeout_s: float = 3.0) -> None:
        """Ends serving, p2pd and its sockets within about timeout_s. May be called twice.

        When cancelled it still kills p2pd and deletes the sockets.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._fetches.close()
        tasks = self._serving.end() | self._messages.end()
        if self._watching is not None:
            self._watching.cancel()
            tasks.add(self._watching)
        try:
            await self.doors.close()
        finally:
            await self.daemon.close(timeout_s)
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    async def wait_for_failure(self) -> str:
        """Why this transport no longer works, as soon as it does not. Calls in flight have ended with TransportDown."""
        return await self.daemon.wait_for_failure()

    @property
    def is_down(self) -> bool:
        return self.daemon.is_down

    @property
    def daemon_pid(self) -> int:
        return self.daemon.pid

    @property
    def p2p(self) -> Any:
        """hivemind's P2P, which the directory uses too."""
        return self.daemon.p2p

    # -- who is heard -------------------------------------------------------------------------------------------------

    async def guard(self, admission: Admission) -> None:
        """Of a run that is not open, before a handler is set: from here on messages and requests are answered to those
        whom the gate lets, before anything of theirs is decoded. To others who do not know our pass it is shown."""
        self.admission = admission
        await self.daemon.answer(self.pass_protocol, self._on_pass)

    def _refusal(self, peer: PeerId, right: Right | None) -> str | None:
        return (
            None if self.admission is None or right is None else self.admission.gate.refusal(peer, right, time.time())
        )

    async def _on_pass(self, peer: PeerId, raw: bytes) -> None:
        """Called by hivemind in a task of its own; what is raised here reaches the sender as repr()."""
        if (reason := self.doors.message(peer, 1, len(raw))) is not None:
            raise Refusal(reason)
        assert self.admission is not None
        reason = self.admission.gate.show(peer, raw, time.time())
        if reason is not None:
            raise Refusal(reason)

    async def _showed_pass(self, peer: PeerId, reason: str, timeout_s: float) -> bool:
        """Whether what peer refused was for want of our pass and it has been shown now: then ask again. Raises PeerUnavailable."""
        if self.admission is None or not self.admission.own_pass or NOTHING_SHOWN not in reason:
            return False
        await self.daemon.call(peer, self.pass_protocol, self.admission.own_pass, timeout_s)
        return True

    def _check_not_out(self, peer: PeerId) -> None:
        """Raises PeerGone for a peer that has no right in the run any more: it is told nothing, and not waited for."""
        if reason := self.why_out(peer):
            raise PeerGone(peer, reason)

    def why_out(self, peer: PeerId) -> str | None:
        """Why peer has no right in the run any more, whoever brings its words; None: it has, or may have."""
        return None if self.admission is None else self.admission.gate.is_out(peer, time.time())

    def why_not_in(self, peer: PeerId) -> str | None:
        """Why nothing of peer's is taken that another brings: it has shown nobody here what lets it take part. None: the run is open, or it has, itself or
        with its lease."""
        return self._refusal(peer, Right.JOIN)

    # -- addresses ----------------------------------------------------------------------------------------------------

    async def refresh_addresses(self, timeout_s: float = 5.0) -> tuple[str, ...]:
        """Asks p2pd again where others reach us (the router may have opened a port) and returns `addresses`. Raises TransportDown."""
        self.daemon.check_up(self.peer_id)
        with suppress(TimeoutError, TransportDown):
            async with asyncio.timeout(timeout_s):
                self.addresses = await self.daemon.addresses(latest=True)
        return self.addresses

    async def connect(self, peer: PeerId, addresses: Sequence[str], timeout_s: float = 10.0) -> None:
        """Dials peer at these addresses (of a lease, say) unless connected; p2pd remembers them. Of one that was never heard, at as many as
        lead_budget.py allows. Raises PeerUnavailable, TooManyLeads of those where it was not dialled."""
        dialled = [parse_multiaddr(text, "lease") for text in addresses]
        is_met = peer in self.heard or peer in self.named or peer in await self._connected()
        if dialled and not is_met:
            dialled = self._leads.allowed(dialled, {*self.heard, *self.named}, time.monotonic())
            if not dialled:
                raise TooManyLeads(peer, "too many leases lead to where it is said to be")
        await self.daemon.dial(peer, [address.dialled_bytes() for address in dialled], timeout_s)

    async def _connected(self) -> Collection[PeerId]:
        try:
            return await self.paths()
        except TimeoutError:
            return ()

    async def paths(self, timeout_s: float = 5.0) -> dict[PeerId, Via]:
        """The peers with an open connection, directory-only ones too, and how each is reached: "relayed" where every connection
        with it goes through a relay. Raises PeerUnavailable, TimeoutError."""
        self.daemon.check_up(self.peer_id)
        async with asyncio.timeout(timeout_s):
            changed, paths = await self.daemon.paths()
        self._messages.on_paths_changed(changed)
        self._fetches.kept.drop(changed)
        return paths

    async def open_stream(
        self, peer: PeerId, protocol: str, timeout_s: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A stream of that protocol to peer, which the caller closes. Raises PeerUnavailable."""
        return await self.daemon.open_stream(peer, protocol, timeout_s)

    def stream_protocol(self, kind: str) -> str:
        return f"{self._prefix}/stream/{kind}"

    async def take_streams(self, kind: str, on_stream: OnStream, *, right: Right) -> None:
        """Streams of that kind that peers open go to on_stream(peer, reader, writer), which bounds and ends them. right: as `serve`."""
        await self.take_protocol(self.stream_protocol(kind), on_stream, right=right)

    async def take_protocol(self, protocol: str, on_stream: OnStream, *, right: Right | None) -> None:
        """As `take_streams`, of a protocol that is not this run's alone."""

        async def take(peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if self._is_closed or self.doors.stream(peer) is not None or self._refusal(peer, right) is not None:
                writer.transport.abort()
            else:
                await on_stream(peer, reader, writer)

        self.daemon.check_up(self.peer_id)
        await self.daemon.accept(protocol, take)

    async def leads_to(self, peer: PeerId, timeout_s: float = 5.0) -> list[str]:
        """Multiaddresses of peer's ends of our open connections with it, as we see them, relayed ones left out. Raises
        PeerUnavailable, TimeoutError."""
        self.daemon.check_up(self.peer_id)
        async with asyncio.timeout(timeout_s):
            connections = await self.daemon.connections()
        texts = [text for connected, addresses in connections if connected == peer for text in addresses]
        return [text for text in texts if "/p2p-circuit" not in text and text.startswith(("/ip4/", "/ip6/"))]

    async def seen_at(self, peer: PeerId, timeout_s: float = 5.0) -> list[str]:
        """The hosts of `leads_to`."""
        return [text.split("/")[2] for text in await self.leads_to(peer, timeout_s)]

    def is_at_home(self, peer: PeerId) -> bool:
        """Whether all our connections with peer stay in the network at home, as they were seen in the last seconds."""
        hosts = self.doors.hosts_of(peer)
        return bool(hosts) and self.line.home_hosts.issuperset(hosts)

    def is_busy(self, peer: PeerId) -> bool:
        """Whether something is fetched of peer, or by it."""
        return self._fetches.is_fetching(peer) or self._serving.is_serving(peer)

    async def hang_up(self, peer: PeerId, timeout_s: float = 5.0) -> None:
        """Ends all connections with peer, and what is under way on them. Raises PeerUnavailable."""
        await self.daemon.hang_up(peer, timeout_s)

    async def range_of(self, peer: PeerId) -> str:
        """The range of addresses that our connection with peer leads to; empty if that says nothing. Raises PeerUnavailable."""
        try:
            hosts = await self.seen_at(peer)
        except TimeoutError:
            return ""
        return next((found for found in map(address_range, hosts) if found), "")

    # -- messages -----------------------------------------------------------------------------------------------------

    def set_message_handler(self, handler: MessageHandler) -> None:
        """handler(sender, raw) for every message from now on; in the loop, so it must be quick. Its ProtocolError is told to
        the sender; any other exception is logged, and the sender told no more than that."""
        self._messages.handler = handler

    def set_bytes_handler(self, handler: BytesHandler) -> None:
        """handler(peer) whenever bytes of a body have come from peer, or it has acknowledged some; often, in the loop."""
        self._bytes_handler = handler

    def set_members(self, is_member: Callable[[PeerId], bool]) -> None:
        """Half of what is answered at once is kept for requests of these peers; budgets of strangers are not theirs."""
        self._serving.set_members(is_member)
        self.doors.keeper.befriend(is_member)
        self.doors.keeper.set_settled(lambda: is_member(self.peer_id))

    def _on_heard(self, peer: PeerId) -> None:
        remember(self.heard, peer, time.monotonic())

    def _on_bytes(self, peer: PeerId) -> None:
        self._on_heard(peer)
        self._bytes_handler(peer)

    async def send(self, peer: PeerId, raw: bytes, timeout_s: float) -> None:
        """Hands raw to peer's message handler; returns when that has run.

        Raises PeerGone at once when nobody is there, PeerSilent after timeout_s, RequestRefused, TransportDown: all of them
        PeerUnavailable. When cancelled, peer may or may not have got it.
        """
        if reason := (await self.send_all(peer, [raw], timeout_s))[0]:
            raise RequestRefused(peer, reason)

    async def send_all(self, peer: PeerId, messages: Sequence[bytes], timeout_s: float) -> list[str]:
        """As `send`, of several at once: why each of them is not taken; empty: it is. Raises ValueError for more than fit into one
        batch (message_frames.num_in_batch)."""
        self._check_not_out(peer)
        reasons = await self._messages.send(peer, messages, timeout_s)
        if await self._showed_pass(peer, reasons[0], timeout_s):
            reasons = await self._messages.send(peer, messages, timeout_s)
        return reasons

    @property
    def message_bytes_sent(self) -> int:
        """Of messages that were answered, as they went: deflated, without the frames of streams and packets."""
        return self._messages.bytes_sent

    # -- bulk ---------------------------------------------------------------------------------------------------------

    async def serve(self, kind: str, handler: FetchHandler, *, right: Right | None = Right.JOIN) -> None:
        """Answers `fetch(kind, header)` of any peer with what handler(peer, header) returns.

        right: what it takes to be answered, in a run that is not open; None: nothing. A DilocoxError of the handler is told to the fetcher, any other exception is logged.
        """

        async def on_stream(peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if self.doors.stream(peer) is not None:
                writer.transport.abort()
                return
            await self._serving.serve(
                peer, kind, handler, right, reader, writer, may_ask=lambda: self.doors.stream(peer) is None
            )

        self.daemon.check_up(self.peer_id)
        await self.daemon.accept(self.fetch_protocol(kind), on_stream)

    async def fetch(
        self,
        peer: PeerId,
        kind: str,
        header: dict[str, Any],
        *,
        max_body_bytes: int,
        timeout_s: float,
        stall_timeout_s: float = 15.0,
        take: Take | None = None,
    ) -> tuple[dict[str, Any], bytearray]:
        """Header and body of what peer serves as kind for this header: whole, or an error.

        take: gets the body instead, piece by piece, as far as it wants. Raises PeerGone, PeerSilent, RequestRefused, TransportDown (PeerUnavailable all), and
        ProtocolError for a body above max_body_bytes or another malformed reply.
        """
        self._check_not_out(peer)

        async def once() -> tuple[dict[str, Any], bytearray]:
            return await self._fetches.once(
                peer, kind, header, max_body_bytes=max_body_bytes, timeout_s=timeout_s,
                stall_timeout_s=stall_timeout_s, take=take,
            )  # fmt: skip

        try:
            return await once()
        except RequestRefused as refused:
            if not await self._showed_pass(peer, refused.reason, stall_timeout_s):
                raise
            return await once()

    def fetch_protocol(self, kind: str) -> str:
        return f"{self._prefix}/fetch/{kind}"
