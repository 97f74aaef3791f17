"""py-libp2p as linkd uses it: a host with TLS and yamux, its connections and streams, mDNS. The one door of libp2p.

What py-libp2p 0.8.1 demands, and what happens otherwise:
 1. A write is never cancelled: half a frame breaks every stream of its connection. It is shielded, in chunks, and a
    write that does not end is ended by closing the socket below it.
 2. Nothing raised in a stream handler may leave it: the host would end, and this process.
 3. Streams are read at once, whatever happens to the bytes: 5 s after its window is used up a sender gives up. What
    bounds memory is a cap on what the parent has not taken, per neighbour; who exceeds it loses the link.
 4. Connections are dialled address by address: dial_peer tries one TCP address only, and refuses for a minute after a
    failure. The auto-connector and the resource manager are off; connections without a link end after IDLE_S.
 5. What handles a connection that others made ends with it. The swarm's own stays until the swarm ends, and holds one of
    max_connections: after so many, in all its life, a linkd would hear no newcomer any more.
 6. What others say before a protocol is chosen is read by us: it takes lines of any length, and one that is not UTF-8
    raises what nothing of it catches, as 2 says.
 7. Nothing is asked or heard of libp2p's identify and ping: what peers say there of themselves is kept for ever.
 8. Yamux takes any number of streams, each with a task, and any number of bytes on a stream that is not read; and it gathers 16 MiB
    of a frame before it looks whether there is such a stream, or room on it.
"""

import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from typing import Any

import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.exceptions import ParseError
from libp2p.io.utils import read_exactly
from libp2p.network.config import ConnectionConfig
from libp2p.network.connection.exceptions import RawConnError
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from libp2p.protocol_muxer import multiselect_communicator
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.security.tls.transport import PROTOCOL_ID as TLS_ID
from libp2p.security.tls.transport import TLSTransport
from libp2p.stream_muxer import muxer_multistream
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX_ID
from libp2p.stream_muxer.yamux.yamux import Yamux
from libp2p.utils.address_validation import expand_wildcard_address
from libp2p.utils.varint import decode_uvarint_from_stream
from multiaddr import Multiaddr

from dilocox_peer.invitation import place_of
from dilocox_peer.network.kernel_pace import NO_PACE, SO_MAX_PACING_RATE
from dilocox_peer.network.link_gate import LinkGate
from dilocox_peer.network.link_streams import READ_BYTES, LinkLost, Stream
from dilocox_peer.network.tcp_traffic import HOME_RTT_S, LEAST_RTT_AT, UNKNOWN_RTT, leaves_home

UNSENT_BYTES = 128 * 1024  # of a connection in the kernel; a ping waits behind these at most
UNSENT_S, LEAST_UNSENT_BYTES = 0.02, 8 * 1024  # and no more than is sent in so long, where there is a pace
# A body that comes in over a slow link wakes us for every few segments, 0.2 ms of CPU each time: more than all else. While
# that is so we let them gather; small frames alone are never held up.
GATHER_S, SEGMENT_BYTES, PLENTY_BYTES = 0.001, 1024, 64 * 1024
MDNS_SERVICE = "_p2p._udp.local."
MAX_LINE_BYTES = 1024  # of what is said until a protocol is chosen: the name of one
MAX_STREAMS = 16  # at once on a connection; a link has two of each side
MAX_YAMUX_BYTES = 64 * 1024  # of one frame of yamux; py-libp2p and go-libp2p send none that is larger


async def _read_line(reader: Any) -> bytes:
    """In place of libp2p's read_delim: 6 of the module. Raises ParseError, and what read raises."""
    length = await decode_uvarint_from_stream(reader)
    if not 0 < length <= MAX_LINE_BYTES:
        raise ParseError(f"a line of {length} bytes, at most {MAX_LINE_BYTES}")
    line: bytes = await read_exactly(reader, length)
    try:
        line.decode()
    except UnicodeDecodeError as error:
        raise ParseError(f"a line that is no text: {error}") from None
    if line[-1:] != b"\n":
        raise ParseError("a line without an end")
    return line[:-1]


multiselect_communicator.read_delim = _read_line


@dataclass(slots=True)
class HostTraffic:
    """Bytes through the TCP connections of a host, of TLS and yamux included, since it began. pace: bytes a second that each may
    send; 0: no limit. paces_home: also those that stay in the network at home."""

    received: int = 0
    sent: int = 0
    pace: int = 0
    paces_home: bool = False


class Wire:
    """A TCP connection below TLS: read in large pieces (TLS asks for 4096 bytes at a time), closed without asking."""

    def __init__(self, conn: Any, traffic: HostTraffic) -> None:
        self._conn = conn
        self._traffic = traffic
        self._is_streaming = False  # a body comes in, no faster than we read
        sock = conn.stream.stream
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        self.pace()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._conn, name)

    async def read(self, n: int | None = None) -> bytes:
        if self._is_streaming:
            await trio.sleep(GATHER_S)
        data: bytes = await self._conn.read(READ_BYTES if n is None or n >= 4096 else n)
        self._traffic.received += len(data)
        self._is_streaming = SEGMENT_BYTES <= len(data) < PLENTY_BYTES
        return data

    async def write(self, data: bytes) -> None:
        self._traffic.sent += len(data)
        await self._conn.write(data)

    def pace(self) -> None:
        """Has the kernel send no faster than the host may, and take little more than that."""
        sock, traffic = self._conn.stream.stream, self._traffic
        rate = traffic.pace if traffic.paces_home or not self.is_at_home else 0
        unsent = min(UNSENT_BYTES, max(LEAST_UNSENT_BYTES, int(rate * UNSENT_S))) if rate else UNSENT_BYTES
        with suppress(OSError):
            if hasattr(socket, "TCP_NOTSENT_LOWAT"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, unsent)
            if sys.platform == "linux":
                most = min(rate, NO_PACE) if rate else NO_PACE
                sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, most.to_bytes(4, sys.byteorder))

    @property
    def is_at_home(self) -> bool:
        """Whether it stays in the network at home: by its addresses, and near by the kernel's word, as a private address may be a tunnel's. Not by
        a ping, which waits for busy processes."""
        sock = self._conn.stream.stream
        least_s = least_rtt_s(sock)
        return has_ends_at_home(sock) and (least_s is None or least_s < HOME_RTT_S)

    def abort(self) -> None:
        """Closes the socket. A write that is stuck in it ends, which it does for nothing else."""
        self._conn.stream.stream.socket.close()


def has_ends_at_home(stream: Any) -> bool:
    """Whether the addresses of a TCP connection (trio's) are of the network at home. One of this computer with itself may be a way through p2pd, so it
    does not."""
    try:
        here, there = (
            ipaddress.ip_address(end[0]) for end in (stream.socket.getsockname(), stream.socket.getpeername())
        )
    except (OSError, ValueError):  # it has ended; or an address with a zone
        return False
    return not there.is_loopback and not leaves_home(here.packed, there.packed)


def least_rtt_s(stream: Any) -> float | None:
    """The least round trip of a TCP connection (trio's) in the last minutes, as the kernel has it; None where it does not say, or has none yet."""
    if sys.platform != "linux":
        return None
    try:
        info = stream.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, LEAST_RTT_AT + 4)
    except OSError:
        return None
    if len(info) < LEAST_RTT_AT + 4:
        return None
    (least,) = struct.unpack_from("=I", info, LEAST_RTT_AT)
    return None if least == UNKNOWN_RTT else least / 1e6


class Tls:
    """libp2p's TLS over a Wire."""

    def __init__(self, key_pair: Any, traffic: HostTraffic) -> None:
        self._transport = TLSTransport(key_pair)
        self._traffic = traffic

    async def secure_inbound(self, conn: Any) -> Any:
        return await self._transport.secure_inbound(Wire(conn, self._traffic))

    async def secure_outbound(self, conn: Any, peer_id: Any) -> Any:
        return await self._transport.secure_outbound(Wire(conn, self._traffic), peer_id)


class FewStreams(dict[int, Any]):
    """Those of a connection. Raises RawConnError for one more than MAX_STREAMS, which ends it."""

    def __setitem__(self, number: int, stream: Any) -> None:
        if len(self) >= MAX_STREAMS and number not in self:
            raise RawConnError(f"more than {MAX_STREAMS} streams at once")
        super().__setitem__(number, stream)


class Unread(bytearray):
    """What has come on a stream and is not read. Raises TooSlowError for more than the sender was told that it may send, which ends the
    connection."""

    def __init__(self, streams: FewStreams, number: int) -> None:
        super().__init__()
        self._streams, self._number = streams, number

    def extend(self, data: Any) -> None:
        most = self._streams[self._number].recv_window
        if len(data) > most:
            raise trio.TooSlowError(f"{len(data)} bytes, where {most} may come")
        super().extend(data)


class UnreadOfStreams(dict[int, bytearray]):
    """By stream."""

    def __init__(self, streams: FewStreams) -> None:
        super().__init__()
        self._streams = streams

    def __setitem__(self, number: int, _empty: bytearray) -> None:
        super().__setitem__(number, Unread(self._streams, number))


class BoundedYamux(Yamux):  # type: ignore[misc, unused-ignore]
    """8 of the module."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.streams = streams = FewStreams()
        self.stream_buffers = UnreadOfStreams(streams)

    async def _read_data_body(self, length: int) -> bytes:
        """Raises TooSlowError, which ends the connection, for more than one frame may have: nothing of it is gathered."""
        if length > MAX_YAMUX_BYTES:
            raise trio.TooSlowError(f"a frame of {length} bytes, at most {MAX_YAMUX_BYTES}")
        body: bytes = await super()._read_data_body(length)
        return body


muxer_multistream.Yamux = BoundedYamux  # it makes one by this name, whatever a host is given


def wire_of(conn: Any) -> Wire:
    """What is below the muxer and TLS of a connection of the host."""
    wire: Wire = conn.muxed_conn.secured_conn.conn.stream_writer.raw_connection
    return wire


def abort(conn: Any) -> None:
    """Closes a connection of the host from below; its muxer notices and cleans up."""
    wire_of(conn).abort()


class Host:
    """This linkd's libp2p: its identity, what it listens on, the connections it has."""

    def __init__(self, key_seed: bytes, protocol: str, *, max_connections: int) -> None:
        self._protocol = TProtocol(protocol)
        self.traffic = HostTraffic()
        self._gate = LinkGate(trio.current_time())
        key_pair = create_new_key_pair(key_seed)
        self._host = new_host(
            key_pair=key_pair,
            sec_opt={TLS_ID: Tls(key_pair, self.traffic)},
            muxer_opt={TProtocol(YAMUX_ID): Yamux},
            connection_config=ConnectionConfig(
                max_connections=max_connections,
                high_watermark=max_connections,
                low_watermark=0,
                min_connections=0,
            ),
        )
        self._swarm = self._host.get_network()
        self._swarm.set_resource_manager(None)
        self._swarm._do_handle_inbound_connection = self._hold_inbound  # 5 of the module
        for protocol in self._host.get_mux().get_protocols():  # 7 of the module
            if protocol is not None:
                self._host.remove_stream_handler(protocol)
        self._host._schedule_identify = lambda *_args, **_options: None
        self._hear = self._swarm.common_stream_handler
        self._swarm.set_stream_handler(self._hear_stream)
        self.link_id = str(self._host.get_id())

    async def _hold_inbound(self, stream: Any, maddr: Any, _failure: Any) -> None:
        """Called by the host for a connection that somebody made to us; it counts as one of max_connections until this ends."""
        raw = RawConnection(stream, False)
        remote = raw.get_remote_address()
        place = place_of(remote[0]) if remote is not None else ""
        if not self._gate.knocks(place, trio.current_time()):
            with suppress(Exception):
                await raw.close()
            return
        try:
            muxed: Any = await self._swarm.upgrade_inbound_raw_conn(raw, maddr)
            await muxed.event_closed.wait()
        except Exception:  # no TLS, no yamux, too many connections: whatever a stranger does is no fault of the host
            with suppress(Exception):
                await raw.close()
        finally:
            self._gate.left(place)

    async def _hear_stream(self, stream: Any) -> None:
        """Called by the host for each stream that others open: whatever goes wrong until its handler has it is no fault of the host."""
        try:
            await self._hear(stream)
        except Exception:
            with suppress(Exception):
                await stream.reset()

    # Listening

    def run(self, listen: Iterable[str]) -> AbstractAsyncContextManager[None]:
        """Listens while it is entered; `listen` from choose_ports."""
        running: AbstractAsyncContextManager[None] = self._host.run([Multiaddr(address) for address in listen])
        return running

    def on_stream(self, handler: Callable[[Any], Awaitable[None]]) -> None:
        """handler gets every stream of our protocol that others open, and must not raise."""
        self._host.set_stream_handler(self._protocol, handler)

    def listening(self, listen: Iterable[str]) -> tuple[list[int], list[str]]:
        """Ports, and addresses for others. Raises LinkLost where it does not listen."""
        ports, addresses = [], []
        for address in listen:
            listener = self._swarm.listeners.get(str(Multiaddr(address)))
            if listener is None:
                raise LinkLost(f"cannot listen on {address}")
            for bound in listener.get_addrs():
                port = int(bound.value_for_protocol("tcp"))
                addresses += [f"{one}/p2p/{self.link_id}" for one in expand_wildcard_address(bound, port)]
            ports.append(port)
        return ports, list(dict.fromkeys(addresses))

    # Connections

    @property
    def connections(self) -> list[Any]:
        return list(self._swarm.get_connections())

    def pace(self, bytes_per_s: int, *, at_home: bool) -> None:
        """Each connection, those to come too, sends no faster; 0: no limit. at_home: also those that stay in the network at home."""
        self.traffic.pace, self.traffic.paces_home = bytes_per_s, at_home
        for conn in self.connections:
            wire_of(conn).pace()

    async def dial(self, link_id: str, address: str) -> Any:
        """A connection to one address of a peer. Raises what went wrong."""
        return await self._swarm.dial_addr(Multiaddr(address.removesuffix(f"/p2p/{link_id}")), ID.from_string(link_id))

    async def open_stream(self, conn: Any, *, timeout_s: int) -> Stream:
        """A stream of our protocol on a connection."""
        stream = await conn.new_stream()
        await self._host.multiselect_client.select_one_of([self._protocol], MultiselectCommunicator(stream), timeout_s)
        muxed: Stream = stream.muxed_stream
        return muxed

    # Others on the same network

    async def announce(self, addresses: list[str], found: Callable[[str, list[str]], None]) -> None:
        """Announces and looks for linkds by multicast, until the process ends; found(link id, its addresses) of others.
        Raises whatever zeroconf does."""
        token = trio.lowlevel.current_trio_token()

        def found_in_thread(info: Any) -> None:  # in a thread of zeroconf's
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(found, str(info.peer_id), [str(address) for address in info.addrs])

        await trio.to_thread.run_sync(_start_mdns, self.link_id, addresses, found_in_thread)


def choose_ports(listen: Iterable[str], ports: Iterable[int]) -> list[str]:
    """What to listen on: where a port may be any, the one listened on before (of ports), if it is free.

    Raises LinkLost if a port is taken. libp2p listens with SO_REUSEPORT: it would start, and get half the callers.
    """
    chosen = []
    for address, before in zip(listen, ports, strict=True):
        base, _, port = address.rpartition("/tcp/")
        if port == "0" and before and _why_taken(base, before) is None:
            port = str(before)
        reason = _why_taken(base, int(port)) if port != "0" else None
        if reason:
            raise LinkLost(f"cannot listen on {address} ({reason})")
        chosen.append(f"{base}/tcp/{port}")
    return chosen


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
