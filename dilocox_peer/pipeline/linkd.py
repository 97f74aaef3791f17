"""linkd: moves frames between this peer and its neighbours, over libp2p, in a process of its own.

    python -m dilocox_peer.pipeline.linkd SOCKET PARENT     (started by link.py, never by hand)

It understands nothing of what it moves. Its parent speaks to it over the inherited socket; when that ends, so does linkd.
A process of its own because py-libp2p cannot be imported beside hivemind, because its threads of Python would take the
trainer's GIL, and because its crash must not be ours.

A link to a neighbour is one TLS connection with two streams: `control` for small frames, pings and pongs, and `bulk` for
bodies, so that a small frame waits for one chunk of a body, not for the body. Who dials opens both. When both sides dial
at once, both connections are read and each side writes to the one it had first (link_frames.judge). A link is lost as a
whole: when a connection ends, a frame is malformed, a neighbour is silent, or a write does not end, all its connections
are closed, the parent is told, and a neighbour that we dial is dialled again.

What py-libp2p 0.8.1 demands, and what happens otherwise:
 1. A write is never cancelled: half a frame breaks every stream of its connection. It is shielded, in chunks, and a
    write that does not end is ended by closing the socket below it.
 2. Nothing raised in a stream handler may leave it: the host would end, and this process.
 3. Streams are read at once, whatever happens to the bytes: 5 s after its window is used up a sender gives up. What
    bounds memory is a cap on what the parent has not taken, per neighbour; who exceeds it loses the link.
 4. Connections are dialled address by address: dial_peer tries one TCP address only, and refuses for a minute after a
    failure. The auto-connector and the resource manager are off; connections without a link end after IDLE_S.
"""

import ctypes
import gc
import logging
import os
import random
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.network.config import ConnectionConfig
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.security.tls.transport import PROTOCOL_ID as TLS_ID
from libp2p.security.tls.transport import TLSTransport
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX_ID
from libp2p.stream_muxer.yamux.yamux import Yamux
from libp2p.utils.address_validation import expand_wildcard_address
from multiaddr import Multiaddr

from dilocox_peer.pipeline.frames import pack_header
from dilocox_peer.pipeline.link_frames import (
    Backoff,
    BufferReader,
    ChunkReader,
    Frame,
    Kind,
    Verdict,
    header_field,
    judge,
)
from dilocox_peer.pipeline.link_streams import (
    READ_BYTES,
    Link,
    LinkLost,
    Outbox,
    Session,
    first_frame,
    new_generation,
    one_line,
    write_whole,
)

UNSENT_BYTES = 128 * 1024  # of a connection in the kernel; a ping waits behind these at most
IDLE_S = 15.0  # a connection that has not become part of a link by then is closed
DIAL_TIMEOUT_S = 10.0
STAGGER_S = 0.5  # between the attempts at a neighbour's addresses
OPEN_TIMEOUT_S = 10.0
REDIAL_FIRST_S, REDIAL_MOST_S = 0.5, 15.0
FLUSH_TIMEOUT_S = 1.0  # for what is still queued when the parent has closed its socket
# A body that comes in over a slow link wakes us for every few segments, 0.2 ms of CPU each time: more than all else. While
# that is so we let them gather; small frames alone are never held up.
GATHER_S, SEGMENT_BYTES, PLENTY_BYTES = 0.001, 1024, 64 * 1024
STRANGER_LINES_PER_MINUTE = 20  # of the log
MDNS_SERVICE = "_p2p._udp.local."


def say(text: str) -> None:
    """One line to the parent's log. Never blocks; lost when nobody reads."""
    with suppress(OSError):
        os.write(2, f"{text.splitlines()[0] if text else ''}\n".encode()[:4096])


class Wire:
    """A TCP connection below TLS: read in large pieces (TLS asks for 4096 bytes at a time), closed without asking."""

    def __init__(self, conn: Any) -> None:
        self._conn = conn
        self._is_streaming = False  # a body comes in, no faster than we read
        sock = conn.stream.stream
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            with suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._conn, name)

    async def read(self, n: int | None = None) -> bytes:
        if self._is_streaming:
            await trio.sleep(GATHER_S)
        data: bytes = await self._conn.read(READ_BYTES if n is None or n >= 4096 else n)
        self._is_streaming = SEGMENT_BYTES <= len(data) < PLENTY_BYTES
        return data

    def abort(self) -> None:
        """Closes the socket. A write that is stuck in it ends, which it does for nothing else."""
        self._conn.stream.stream.socket.close()


class Tls:
    """libp2p's TLS over a Wire."""

    def __init__(self, key_pair: Any) -> None:
        self._transport = TLSTransport(key_pair)

    async def secure_inbound(self, conn: Any) -> Any:
        return await self._transport.secure_inbound(Wire(conn))

    async def secure_outbound(self, conn: Any, peer_id: Any) -> Any:
        return await self._transport.secure_outbound(Wire(conn), peer_id)


def wire_of(conn: Any) -> Wire:
    """What is below the muxer and TLS of a connection of the host."""
    wire: Wire = conn.muxed_conn.secured_conn.conn.stream_writer.raw_connection
    return wire


def abort(conn: Any) -> None:
    """Closes a connection of the host from below; its muxer notices and cleans up."""
    wire_of(conn).abort()


@dataclass(eq=False)
class Neighbour:
    link_id: str
    generation: int
    link: Link | None = None
    linked: trio.Event = field(default_factory=trio.Event)  # replaced when a link ends
    addresses: list[str] = field(default_factory=list)
    dialling: trio.CancelScope | None = None
    dial_now: trio.Event = field(default_factory=trio.Event)


@dataclass(frozen=True)
class Config:
    key_seed: bytes
    listen: list[str]
    ports: list[int]
    protocol: str
    max_body_bytes: int
    max_neighbours: int
    queue_bytes: int
    mdns: bool
    ping_s: float
    dead_s: float


class Linkd:
    def __init__(self, parent: trio.socket.SocketType, config: Config) -> None:
        self._parent = parent
        self._config = config
        self._protocol = TProtocol(config.protocol)
        key_pair = create_new_key_pair(config.key_seed)
        self._host = new_host(
            key_pair=key_pair,
            sec_opt={TLS_ID: Tls(key_pair)},
            muxer_opt={TProtocol(YAMUX_ID): Yamux},
            connection_config=ConnectionConfig(
                max_connections=4 * config.max_neighbours + 32,
                high_watermark=4 * config.max_neighbours + 32,
                low_watermark=0,
                min_connections=0,
            ),
        )
        self._swarm = self._host.get_network()
        self._swarm.set_resource_manager(None)
        self._link_id = str(self._host.get_id())
        self._neighbours: dict[str, Neighbour] = {}
        self._links: dict[int, tuple[Neighbour, Link]] = {}
        self._num_links = 0
        self._halves: dict[Any, Session] = {}  # of connections that others dialled, with one of two streams
        self._seen_at: dict[Any, float] = {}  # connections without a link
        self._outbox = Outbox()
        self._strangers_since = trio.current_time()
        self._num_strangers = 0
        self._rng = random.Random()
        self._nursery: trio.Nursery

    async def run(self, reader: BufferReader) -> None:
        """Ends when the parent's socket does, by leaving the process."""
        listen = self._choose_ports()
        async with self._host.run([Multiaddr(address) for address in listen]), trio.open_nursery() as self._nursery:
            ports, addresses = self._listening(listen)
            self._host.set_stream_handler(self._protocol, self._on_stream)
            self._outbox.tell(Kind.READY, {"n": self._link_id, "a": addresses, "p": ports})
            if self._config.mdns:
                self._nursery.start_soon(self._announce, addresses)
            self._nursery.start_soon(self._outbox.write_to, self._parent)
            self._nursery.start_soon(self._watch)
            await self._read_parent(reader)
            await self._leave()

    # Listening

    def _choose_ports(self) -> list[str]:
        """What to listen on: where a port may be any, the one listened on before, if it is free.

        Raises LinkLost if a port is taken. libp2p listens with SO_REUSEPORT: it would start, and get half the callers.
        """
        chosen = []
        for address, before in zip(self._config.listen, self._config.ports, strict=True):
            base, _, port = address.rpartition("/tcp/")
            if port == "0" and before and _why_taken(base, before) is None:
                port = str(before)
            reason = _why_taken(base, int(port)) if port != "0" else None
            if reason:
                raise LinkLost(f"cannot listen on {address} ({reason})")
            chosen.append(f"{base}/tcp/{port}")
        return chosen

    def _listening(self, listen: list[str]) -> tuple[list[int], list[str]]:
        ports, addresses = [], []
        for address in listen:
            listener = self._swarm.listeners.get(str(Multiaddr(address)))
            if listener is None:
                raise LinkLost(f"cannot listen on {address}")
            for bound in listener.get_addrs():
                port = int(bound.value_for_protocol("tcp"))
                addresses += [f"{one}/p2p/{self._link_id}" for one in expand_wildcard_address(bound, port)]
            ports.append(port)
        return ports, list(dict.fromkeys(addresses))

    # The parent

    async def _read_parent(self, reader: BufferReader) -> None:
        while True:
            received = await self._parent.recv_into(reader.space())
            if not received:
                return
            for frame in reader.take(received):
                self._on_order(frame)

    def _on_order(self, frame: Frame) -> None:
        match frame.kind:
            case Kind.DATA:
                _, link = self._links.get(frame.header["l"], (None, None))
                if link is not None:  # else it has ended, which the parent reads by now or soon
                    link.queue(frame)
            case Kind.DIAL:
                self._dial(frame.header["n"], frame.header["a"])
            case Kind.HANG_UP:
                self._hang_up(frame.header["n"])
            case other:
                raise AssertionError(f"the parent sent a frame of kind {other}")

    async def _leave(self) -> NoReturn:
        """Writes what is queued, for a moment, and ends the process: a shielded write cannot be cancelled.

        Each neighbour ends its link when it has read all. The end of a connection would drop what its muxer holds.
        """
        with trio.move_on_after(FLUSH_TIMEOUT_S):
            while any(link.is_writing for _, link in self._links.values()):  # noqa: ASYNC110
                await trio.sleep(0.005)
            for _, link in list(self._links.values()):
                for stream in link.sessions[0].streams.values():
                    with suppress(Exception):
                        await stream.close()
            while self._links:  # noqa: ASYNC110
                await trio.sleep(0.005)
        os._exit(0)

    # Dialling

    def _neighbour(self, link_id: str) -> Neighbour:
        if link_id not in self._neighbours:
            self._neighbours[link_id] = Neighbour(link_id, new_generation(0))
        return self._neighbours[link_id]

    def _forget(self, neighbour: Neighbour) -> None:
        """Drops what nobody needs, so that strangers who come and go leave nothing behind."""
        if neighbour.link is None and neighbour.dialling is None:
            self._neighbours.pop(neighbour.link_id, None)

    def _dial(self, link_id: str, addresses: list[str]) -> None:
        neighbour = self._neighbour(link_id)
        neighbour.addresses = addresses
        neighbour.dial_now.set()
        if neighbour.dialling is None:
            neighbour.dialling = trio.CancelScope()
            self._nursery.start_soon(self._keep_dialled, neighbour, neighbour.dialling)

    def _hang_up(self, link_id: str) -> None:
        neighbour = self._neighbours.get(link_id)
        if neighbour is None:
            return
        if neighbour.dialling is not None:
            neighbour.dialling.cancel()
            neighbour.dialling = None
        if neighbour.link is not None:
            neighbour.link.end("hung up")
        self._forget(neighbour)

    async def _keep_dialled(self, neighbour: Neighbour, scope: trio.CancelScope) -> None:
        backoff = Backoff(REDIAL_FIRST_S, REDIAL_MOST_S, self._rng)
        said = ""
        with scope:
            while True:
                if neighbour.link is not None:
                    backoff.reset()
                    said = ""
                    await neighbour.link.over.wait()
                neighbour.dial_now = trio.Event()
                reasons: list[str] = []
                async with trio.open_nursery() as nursery:  # an address that swallows packets must not hold up others
                    for index, address in enumerate(neighbour.addresses):
                        nursery.start_soon(self._attempt, neighbour, address, index, reasons, nursery.cancel_scope)
                if neighbour.link is not None:
                    continue
                text = f"no link to {neighbour.link_id}: {'; '.join(reasons) or 'no address'}"
                if text != said:
                    say(text)
                    said = text
                with trio.move_on_after(backoff.next_s()):
                    await self._news(neighbour)

    async def _news(self, neighbour: Neighbour) -> None:
        """Returns when a link came from the other side, or other addresses from the parent."""
        async with trio.open_nursery() as nursery:
            for event in (neighbour.linked, neighbour.dial_now):
                nursery.start_soon(_cancel_when, event, nursery.cancel_scope)

    async def _attempt(
        self, neighbour: Neighbour, address: str, index: int, reasons: list[str], all_attempts: trio.CancelScope
    ) -> None:
        """Tries one address, unless there is a link when its turn comes; adds why there is none."""
        await trio.sleep(index * STAGGER_S)
        if neighbour.link is None:
            try:
                await self._try(neighbour, address)
            except Exception as error:
                reasons.append(f"{address} {one_line(error)}")
                return
        all_attempts.cancel()

    async def _try(self, neighbour: Neighbour, address: str) -> None:
        """Makes a link over a connection to one address. Raises what went wrong; no connection stays then."""
        peer_id = ID.from_string(neighbour.link_id)
        with trio.fail_after(DIAL_TIMEOUT_S):
            conn = await self._swarm.dial_addr(Multiaddr(address.removesuffix(f"/p2p/{neighbour.link_id}")), peer_id)
        session = Session(conn, partial(abort, conn))
        self._seen_at[conn] = trio.current_time()
        try:
            session.generation = neighbour.generation
            with trio.fail_after(OPEN_TIMEOUT_S):
                for role in ("control", "bulk"):
                    await self._open(session, role)
                answer, session.early["control"] = await first_frame(
                    session.streams["control"], session.readers["control"]
                )
            if answer.kind == Kind.REFUSED:
                raise LinkLost(f"refused: {header_field(answer.header, 'reason', str)}")
            if answer.kind != Kind.HELLO:
                raise LinkLost(f"answered with a frame of kind {answer.kind}")
            refusal = await self._admit(neighbour, session, header_field(answer.header, "g", int))
            if refusal:
                raise LinkLost(refusal)
        except BaseException:
            abort(conn)
            raise

    async def _open(self, session: Session, role: str) -> None:
        stream = await session.conn.new_stream()
        await self._host.multiselect_client.select_one_of(
            [self._protocol], MultiselectCommunicator(stream), int(OPEN_TIMEOUT_S)
        )
        session.add(role, stream.muxed_stream, ChunkReader(self._config.max_body_bytes), [])
        await write_whole(
            stream.muxed_stream, pack_header(Kind.HELLO, {"role": role, "g": session.generation}, body_bytes=0)
        )

    # Being dialled

    async def _on_stream(self, net_stream: Any) -> None:
        """Handler of the host: reads the hello, and stays until the session is over."""
        conn = net_stream.swarm_conn
        try:
            session = await self._greet(conn, net_stream)
            with trio.fail_after(OPEN_TIMEOUT_S):
                await session.is_decided.wait()
            await session.over.wait()
        except Exception as error:  # would end the host
            self._say_of_stranger(f"dropped a connection of {conn.muxed_conn.peer_id}: {one_line(error)}")
            abort(conn)
        finally:
            half = self._halves.pop(conn, None)
            if half is not None:  # its other handler need not wait
                half.is_decided.set()
                half.over.set()

    def _say_of_stranger(self, text: str) -> None:
        now = trio.current_time()
        if now - self._strangers_since > 60.0:
            self._strangers_since, self._num_strangers = now, 0
        self._num_strangers += 1
        if self._num_strangers <= STRANGER_LINES_PER_MINUTE:
            say(text)

    async def _greet(self, conn: Any, net_stream: Any) -> Session:
        stream, reader = net_stream.muxed_stream, ChunkReader(self._config.max_body_bytes)
        with trio.fail_after(OPEN_TIMEOUT_S):
            hello, early = await first_frame(stream, reader)
        if hello.kind != Kind.HELLO:
            raise LinkLost(f"a stream began with a frame of kind {hello.kind}")
        role, generation = header_field(hello.header, "role", str), header_field(hello.header, "g", int)
        session = self._halves.setdefault(conn, Session(conn, partial(abort, conn)))
        if role not in ("control", "bulk") or role in session.streams:
            raise LinkLost(f"a second stream {role[:20]!r}")
        session.add(role, stream, reader, early)
        if session.is_complete:
            neighbour = self._neighbour(str(conn.muxed_conn.peer_id))
            try:
                refusal = self._why_not(neighbour) or await self._admit(neighbour, session, generation, answer=True)
            finally:
                self._forget(neighbour)
            session.is_decided.set()
            if refusal:
                await self._refuse(session, refusal)
        return session

    def _why_not(self, neighbour: Neighbour) -> str | None:
        if neighbour.link is not None or neighbour.dialling is not None:
            return None
        others = sum(other.dialling is None for other, _ in self._links.values())
        if others >= self._config.max_neighbours:
            return f"it has {others} neighbours already"
        if self._outbox.cost_bytes > 2 * self._config.queue_bytes:  # or many in turn could each leave a queue behind
            return "it does not keep up with its neighbours"
        return None

    async def _refuse(self, session: Session, reason: str) -> None:
        """Says so, and lets the other side close: closing at once could overtake the reason."""
        control = session.streams["control"]
        await write_whole(control, pack_header(Kind.REFUSED, {"reason": reason}, 0))
        with trio.move_on_after(OPEN_TIMEOUT_S), suppress(Exception):
            while await control.read(READ_BYTES):
                pass
        session.abort()
        session.over.set()

    # Links

    async def _admit(self, neighbour: Neighbour, session: Session, theirs: int, *, answer: bool = False) -> str | None:
        """Makes the session a link, or part of the one there is; or says why not."""
        while True:
            verdict = judge(neighbour.link.theirs if neighbour.link else None, theirs)
            if verdict is Verdict.STALE:
                return str(verdict.value)
            if verdict is Verdict.JOIN or neighbour.link is None:
                break
            neighbour.link.end(verdict.value)
            await neighbour.link.over.wait()
        if answer:
            session.generation = neighbour.generation
            hello = pack_header(Kind.HELLO, {"role": "control", "g": session.generation}, 0)
            await write_whole(session.streams["control"], hello)
        if self._neighbours.setdefault(neighbour.link_id, neighbour) is not neighbour:
            return "a link was made meanwhile"
        if session.generation != neighbour.generation or (neighbour.link and neighbour.link.theirs != theirs):
            return "a link was lost meanwhile"
        self._seen_at.pop(session.conn, None)
        if neighbour.link is None:
            self._num_links += 1
            link = Link(self._num_links, theirs, session, queue_bytes=self._config.queue_bytes, outbox=self._outbox)
            neighbour.link = link
            self._links[link.number] = (neighbour, link)
            neighbour.linked.set()
            self._outbox.tell(Kind.LINKED, {"n": neighbour.link_id, "l": link.number})
            self._nursery.start_soon(self._run_link, neighbour, link)
        else:
            neighbour.link.join(session)
        return None

    async def _run_link(self, neighbour: Neighbour, link: Link) -> None:
        try:
            await link.run()
        finally:
            del self._links[link.number]
            neighbour.link = None
            neighbour.linked = trio.Event()
            neighbour.generation = new_generation(neighbour.generation)
            self._outbox.tell(Kind.UNLINKED, {"l": link.number, "reason": link.reason})
            link.over.set()
            self._forget(neighbour)

    # Watching

    async def _watch(self) -> None:
        """Pings, and ends what is silent, stuck or idle."""
        config = self._config
        tick_s = min(config.ping_s, config.dead_s / 4)
        last_at = trio.current_time()
        pinged_at = last_at
        while True:
            await trio.sleep(tick_s)
            now = trio.current_time()
            if now - last_at > tick_s + config.dead_s / 2:
                for _, link in self._links.values():
                    link.excuse(now)
            last_at = now
            is_ping_due = now - pinged_at >= config.ping_s - tick_s / 2
            if is_ping_due:
                pinged_at = now
            for _, link in list(self._links.values()):
                link.check(now, config.dead_s)
                if is_ping_due:
                    link.ping()
            self._end_idle(now)

    def _end_idle(self, now: float) -> None:
        used = {session.conn for _, link in self._links.values() for session in link.sessions}
        idle = [conn for conn in self._swarm.get_connections() if conn not in used]
        self._seen_at = {conn: self._seen_at.get(conn, now) for conn in idle}
        for conn, seen_at in self._seen_at.items():
            if now - seen_at > IDLE_S:
                abort(conn)

    # Neighbours on the same network

    async def _announce(self, addresses: list[str]) -> None:
        """Announces and looks for linkds by multicast. What fails is said and stays undone."""
        token = trio.lowlevel.current_trio_token()

        def found(info: Any) -> None:  # in a thread of zeroconf's
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(self._found, str(info.peer_id), [str(address) for address in info.addrs])

        try:
            await trio.to_thread.run_sync(_start_mdns, self._link_id, addresses, found)
        except Exception as error:
            say(f"no mDNS: {one_line(error)}")

    def _found(self, link_id: str, addresses: list[str]) -> None:
        if link_id != self._link_id:
            self._outbox.tell(
                Kind.FOUND, {"n": link_id, "a": [f"{address}/p2p/{link_id}" for address in addresses[:16]]}
            )


def _start_mdns(link_id: str, addresses: list[str], found: Callable[[Any], None]) -> None:
    """Blocks for about a second; from then on zeroconf's threads call `found`, until the process ends."""
    from libp2p.discovery.events.peerDiscovery import peerDiscovery
    from libp2p.discovery.mdns.broadcaster import PeerBroadcaster
    from libp2p.discovery.mdns.listener import PeerListener
    from libp2p.discovery.mdns.utils import stringGen
    from zeroconf import Zeroconf

    zeroconf = Zeroconf()
    name = f"{stringGen(63)}.{MDNS_SERVICE}"
    port = int(Multiaddr(addresses[0]).value_for_protocol("tcp"))
    peerDiscovery.register_peer_discovered_handler(found)
    PeerListener(PeerStore(), zeroconf, MDNS_SERVICE, name)
    PeerBroadcaster(zeroconf, MDNS_SERVICE, name, link_id, port, addresses).register()


async def _cancel_when(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


def _why_taken(base: str, port: int) -> str | None:
    """Why nobody can listen on a port of an address like /ip4/127.0.0.1; None if one can."""
    _, family_name, host = base.split("/", 2)
    family = socket.AF_INET6 if family_name == "ip6" else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a predecessor's in TIME_WAIT do not count
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            return os.strerror(error.errno or 0).lower()
    return None


async def _main(parent_fd: int) -> None:
    parent = trio.socket.fromfd(parent_fd, socket.AF_UNIX, socket.SOCK_STREAM)
    os.close(parent_fd)
    reader = BufferReader(2**62)
    frames: list[Frame] = []
    while not frames:
        received = await parent.recv_into(reader.space())
        if not received:
            return
        frames = reader.take(received)
    [config_frame] = frames  # the parent says no more until we are ready
    config = Config(**config_frame.header)
    try:
        linkd = Linkd(parent, config)
        await linkd.run(reader)
    except* LinkLost as errors:
        await parent.send(pack_header(Kind.FAILED, {"reason": one_line(errors)}, 0))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # leaving is the parent's decision
    parent_fd, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit("the parent is gone")
    os.set_blocking(2, False)
    logging.disable(logging.CRITICAL)  # of libp2p: strangers would fill the parent's log
    gc.freeze()
    try:
        trio.run(_main, parent_fd)
    except BaseExceptionGroup as errors:
        traceback.print_exception(errors)
        sys.exit(one_line(errors))  # the last line, which the parent shows


if __name__ == "__main__":
    main()
