"""Messages and bulk fetches between the peers of a run, over hivemind's go-libp2p daemon in our own asyncio loop.

The daemon (p2pd) is a child process in a session of its own, so that Ctrl-C in a terminal does not end it before we could
say goodbye; it dies with us. libp2p authenticates the sender. Here are deadlines, size caps and the shortcomings of
hivemind's bindings that would otherwise hang or leak (each named where it is mended); what the bytes mean is decided
elsewhere. Importing this module does not import hivemind (that pulls in torch); `Transport.create` does.
"""

import asyncio
import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from dilocox_peer.admission import NOTHING_SHOWN, Admission, Right
from dilocox_peer.errors import ConfigError, DilocoxError, PeerUnavailable, ProtocolError
from dilocox_peer.invitation import address_range, parse_multiaddr, parse_multiaddrs
from dilocox_peer.network.bandwidth import Bandwidth
from dilocox_peer.network.bulk import (
    PeerGone,
    PeerSilent,
    Reply,
    RequestRefused,
    Take,
    TransportDown,
    discard_request,
    receive_reply,
    receive_request,
    send_refusal,
    send_reply,
    send_request,
)
from dilocox_peer.network.daemon import (
    daemon_class,
    mend_bindings,
    one_line,
    raw_peer,
    start_daemon,
    stop_daemon,
    visible_addresses,
)
from dilocox_peer.network.p2pd import check_listenable
from dilocox_peer.network.runtime_dir import RuntimeDir
from dilocox_peer.token_bucket import TokenBucket
from dilocox_peer.types import PeerId

if TYPE_CHECKING:
    from hivemind.p2p import P2P

__all__ = [
    "FetchHandler",
    "MessageHandler",
    "PeerGone",
    "PeerSilent",
    "Relay",
    "Reply",
    "RequestRefused",
    "Transport",
    "TransportDown",
    "TransportLimits",
]  # fmt: skip

MAX_MESSAGE_BYTES = 1024 * 1024  # p2pd's own limit is 4 MiB; larger things are fetched
_LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
_REQUEST_TIMEOUT_S = 10.0
_KNOWN_PEERS = 1024  # per-peer bookkeeping is kept for so many

MessageHandler = Callable[[PeerId, bytes], None]
FetchHandler = Callable[[PeerId, dict[str, Any]], Awaitable[Reply]]
Reachability = Literal["public", "private"]

V = TypeVar("V")

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Relay:
    """How to be reached behind a NAT. use_auto_relay: look for a relay when we cannot be dialled.

    force_reachability: "public" (a bootstrap server: serve as a relay at once) or "private" (we know that nobody can dial
    us: be reached through the initial peers) instead of minutes of finding out.
    """

    use_relay: bool = True
    use_auto_relay: bool = False
    force_reachability: Reachability | None = None


@dataclass(frozen=True, slots=True)
class TransportLimits:
    """Bounds on what others can make us do."""

    streams: int = 32  # replies being sent at once, to all peers
    streams_per_peer: int = 4  # replies being sent or waiting, to one peer
    streams_waiting: int = 128  # beyond these a stream is dropped unread
    handler_timeout_s: float = 30.0  # for a handler to produce its reply
    stall_timeout_s: float = 30.0  # for a fetcher to take one chunk
    reply_timeout_s: float = 3600.0  # for a whole reply
    messages_per_s: float = 200.0  # from one peer; a swarm in training sends below 10
    messages_burst: float = 400.0
    upload_bytes_per_s: float | None = None  # of fetched bodies and of activations, to all peers together
    download_bytes_per_s: float | None = None  # of bodies we fetch and of activations, from all peers together


class Transport:
    """See the module. One per process and identity; `create`, then handlers, finally `close`."""

    def __init__(
        self,
        *,
        p2p: "P2P",
        peer_id: PeerId,
        namespace: str,
        initial_peers: tuple[str, ...],
        directory: RuntimeDir,
        limits: TransportLimits,
        relay: Relay,
        addresses: tuple[str, ...],
    ) -> None:
        self.p2p = p2p
        self.peer_id = peer_id
        self.initial_peers = initial_peers
        self._relay = relay
        self.addresses = self._with_circuits(addresses)
        self.bandwidth = Bandwidth(limits.upload_bytes_per_s, limits.download_bytes_per_s)
        self._prefix = f"/dilocox/1/{namespace}"
        self._directory = directory
        self._limits = limits
        self._message_handler: MessageHandler | None = None
        self._admission: Admission | None = None
        self._message_rates: OrderedDict[PeerId, TokenBucket] = OrderedDict()
        self._last_failures: OrderedDict[PeerId, type[PeerUnavailable]] = OrderedDict()
        self._serving: dict[asyncio.Task[Any], PeerId] = {}
        self._free_streams = asyncio.Semaphore(limits.streams)
        self._failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._watcher: asyncio.Task[None] | None = None
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
        relay: Relay = Relay(),
        limits: TransportLimits = TransportLimits(),
        startup_timeout_s: float = 30.0,
    ) -> "Transport":
        """A running transport. namespace: the run id; peers of another namespace are refused.

        One reachable address of initial_peers is enough. Raises ConfigError (address, port, folder, identity, p2pd does
        not start) or RunUnreachable (nobody of initial_peers answers); then, and when cancelled, nothing is left behind.
        """
        initial = tuple(
            text for text in parse_multiaddrs(initial_peers, "peer") if not text.endswith(f"/p2p/{peer_id}")
        )
        hosts = [parse_multiaddr(text, "listen") for text in host_maddrs]
        announced = parse_multiaddrs(announce_maddrs, "announce")
        for host in hosts:
            check_listenable(host)
        directory = RuntimeDir.open(runtime_dir, peer_id)
        output: deque[str] = deque(maxlen=20)
        started: list[P2P] = []
        try:
            p2p = await start_daemon(
                daemon_class(directory.path, output, started),
                initial_peers=list(initial),
                host_maddrs=[host.text for host in hosts],
                announce_maddrs=list(announced) or None,
                identity_path=str(identity_path),
                check_if_identity_free=False,  # it reads RSA keys only, and starts a second daemon; we hold a lock on the file
                use_relay=relay.use_relay,
                use_auto_relay=relay.use_auto_relay,
                force_reachability=relay.force_reachability,
                nat_port_map=not all(host.host in ("127.0.0.1", "::1") for host in hosts),
                startup_timeout=startup_timeout_s,
                persistent_conn_max_msg_size=4 * MAX_MESSAGE_BYTES,
                output=output,
                initial=[parse_multiaddr(text, "peer") for text in initial],
            )
            if str(p2p.peer_id) != peer_id:
                raise ConfigError(
                    f"p2pd runs as {p2p.peer_id}, not {peer_id}: is {identity_path} the key of this peer?"
                )
            await mend_bindings(p2p)
            self = cls(
                p2p=p2p, peer_id=peer_id, namespace=namespace, initial_peers=initial, directory=directory, limits=limits,
                relay=relay, addresses=await visible_addresses(p2p, latest=False),
            )  # fmt: skip
            await p2p._client.add_unary_handler(self._message_protocol, self._on_message)
        except BaseException:
            for daemon in started:
                await stop_daemon(daemon, timeout_s=2.0)
            directory.close()
            raise
        self._watcher = asyncio.create_task(self._watch(), name="p2pd-watcher")
        return self

    async def close(self, timeout_s: float = 3.0) -> None:
        """Ends serving, p2pd and its sockets within about timeout_s. May be called twice.

        When cancelled it still kills p2pd and deletes the sockets.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if not self._failure.done():
            self._failure.set_result("closed")
        tasks: set[asyncio.Task[Any]] = set(self._serving)
        if self._watcher is not None:
            tasks.add(self._watcher)
        for task in tasks:
            task.cancel()
        self._fail_pending("the transport is closed")
        try:
            await stop_daemon(self.p2p, timeout_s=timeout_s)
            if tasks:
                await asyncio.wait(tasks, timeout=timeout_s)
        finally:
            self._directory.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    async def wait_for_failure(self) -> str:
        """Why this transport no longer works, as soon as it does not. Calls in flight have ended with TransportDown."""
        return await asyncio.shield(self._failure)

    @property
    def is_down(self) -> bool:
        return self._failure.done()

    @property
    def daemon_pid(self) -> int:
        return int(self.p2p._child.pid)

    # -- who is heard -------------------------------------------------------------------------------------------------

    async def guard(self, admission: Admission) -> None:
        """Of a run that is not open, before a handler is set: from here on messages and requests are answered to those
        whom the gate lets, before anything of theirs is decoded. To others who do not know our pass it is shown."""
        self._admission = admission
        async with asyncio.timeout(_REQUEST_TIMEOUT_S):
            await self.p2p._client.add_unary_handler(self._pass_protocol, self._on_pass)

    @property
    def _pass_protocol(self) -> str:
        return f"{self._prefix}/pass"

    def _refusal(self, peer: PeerId, right: Right | None) -> str | None:
        return (
            None if self._admission is None or right is None else self._admission.gate.refusal(peer, right, time.time())
        )

    async def _on_pass(self, raw: bytes, remote: Any) -> bytes:
        """As _on_message."""
        peer = PeerId(str(remote))
        if not self._rate_of(peer).try_take(1.0, time.monotonic()):
            raise _Refusal(f"more than {self._limits.messages_per_s:g} messages a second")
        assert self._admission is not None
        reason = self._admission.gate.show(peer, raw, time.time())
        if reason is not None:
            raise _Refusal(reason)
        return b""

    async def _showed_pass(self, refused: RequestRefused, timeout_s: float) -> bool:
        """Whether refused was for want of our pass and it has been shown now: then ask again. Raises PeerUnavailable."""
        if self._admission is None or not self._admission.own_pass or NOTHING_SHOWN not in refused.reason:
            return False
        await self._call(refused.peer, self._pass_protocol, self._admission.own_pass, timeout_s)
        return True

    def _check_not_out(self, peer: PeerId) -> None:
        """Raises PeerGone for a peer that has no right in the run any more: it is told nothing, and not waited for."""
        if self._admission is not None and (reason := self._admission.gate.is_out(peer, time.time())):
            raise PeerGone(peer, reason)

    # -- addresses ----------------------------------------------------------------------------------------------------

    async def refresh_addresses(self, timeout_s: float = 5.0) -> tuple[str, ...]:
        """Asks p2pd again where others reach us (a relay may have been found) and returns `addresses`."""
        self._check_up(self.peer_id)
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(timeout_s):
                self.addresses = self._with_circuits(await visible_addresses(self.p2p, latest=True))
        return self.addresses

    def _with_circuits(self, addresses: tuple[str, ...]) -> tuple[str, ...]:
        """For a peer known to be private: p2pd itself names only relays with public addresses [m]."""
        if not (self._relay.use_auto_relay and self._relay.force_reachability == "private"):
            return addresses
        circuits = (f"{text}/p2p-circuit/p2p/{self.peer_id}" for text in self.initial_peers)
        return tuple(dict.fromkeys([*(text for text in addresses if "/p2p-circuit" in text), *circuits]))

    async def connect(self, peer: PeerId, addresses: Sequence[str], timeout_s: float = 10.0) -> None:
        """Dials peer at these addresses (of a lease, say) unless connected; p2pd remembers them. Raises PeerUnavailable."""
        from hivemind.proto import p2pd_pb2

        dialled = [parse_multiaddr(text, "lease").dialled_bytes() for text in addresses]
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.CONNECT, connect=p2pd_pb2.ConnectRequest(peer=raw_peer(peer), addrs=dialled)
        )
        _, _, writer = await self._daemon_request(peer, request, timeout_s)
        writer.close()

    async def connected_peers(self, timeout_s: float = 5.0) -> list[PeerId]:
        """Peers with an open connection, directory-only ones too."""
        self._check_up(self.peer_id)
        async with asyncio.timeout(timeout_s):
            return sorted(PeerId(str(info.peer_id)) for info in await self.p2p.list_peers())

    async def seen_at(self, peer: PeerId, timeout_s: float = 5.0) -> list[str]:
        """Hosts that our open connections with peer lead to, relayed ones left out."""
        self._check_up(self.peer_id)
        async with asyncio.timeout(timeout_s):
            infos = [info for info in await self.p2p.list_peers() if str(info.peer_id) == peer]
        texts = [str(address) for info in infos for address in info.addrs]
        return [
            text.split("/")[2] for text in texts if "/p2p-circuit" not in text and text.startswith(("/ip4/", "/ip6/"))
        ]

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
        self._message_handler = handler

    async def send(self, peer: PeerId, raw: bytes, timeout_s: float) -> None:
        """Hands raw to peer's message handler; returns when that has run.

        Raises PeerGone at once when nobody is there, PeerSilent after timeout_s, RequestRefused, TransportDown: all of them
        PeerUnavailable. When cancelled, peer may or may not have got it.
        """
        if len(raw) > MAX_MESSAGE_BYTES:
            raise ValueError(f"message of {len(raw)} bytes, at most {MAX_MESSAGE_BYTES}: serve it for fetch instead")
        self._check_not_out(peer)
        try:
            await self._call(peer, self._message_protocol, raw, timeout_s)
        except RequestRefused as refused:
            if not await self._showed_pass(refused, timeout_s):
                raise
            await self._call(peer, self._message_protocol, raw, timeout_s)
        self.bandwidth.bytes_sent += len(raw)

    async def _call(self, peer: PeerId, protocol: str, raw: bytes, timeout_s: float) -> None:
        """Has peer's handler of that protocol run. Raises as `send`."""
        from hivemind.p2p import P2PDaemonError, P2PHandlerError, PeerID

        self._check_up(peer)
        try:
            async with asyncio.timeout(timeout_s):
                await self.p2p._client.call_unary_handler(PeerID(raw_peer(peer)), protocol, bytes(raw))
        except TimeoutError:
            raise self._unavailable(peer, PeerSilent, f"no answer within {timeout_s:g} s") from None
        except P2PHandlerError as error:
            raise RequestRefused(peer, one_line(str(error))) from None
        except (P2PDaemonError, OSError) as error:
            raise self._classified(peer, str(error)) from None
        self._last_failures.pop(peer, None)

    @property
    def _message_protocol(self) -> str:
        return f"{self._prefix}/message"

    async def _on_message(self, raw: bytes, remote: Any) -> bytes:
        """Called by hivemind in a task of its own; what is raised here reaches the sender as repr()."""
        peer = PeerId(str(remote))
        if len(raw) > MAX_MESSAGE_BYTES:
            raise _Refusal(f"message of {len(raw)} bytes, at most {MAX_MESSAGE_BYTES}")
        if not self._rate_of(peer).try_take(1.0, time.monotonic()):
            raise _Refusal(f"more than {self._limits.messages_per_s:g} messages a second")
        if self._message_handler is None or self._is_closed:
            raise _Refusal("not ready")
        if (reason := self._refusal(peer, Right.JOIN)) is not None:
            raise _Refusal(reason)
        self.bandwidth.bytes_received += len(raw)
        try:
            self._message_handler(peer, raw)
        except ProtocolError as error:
            raise _Refusal(error.reason) from None
        except Exception:  # task boundary: a fault in a handler must not end the transport
            _logger.exception("message from %s could not be handled; it was dropped", peer)
            raise _Refusal("internal error") from None
        return b""

    def _rate_of(self, peer: PeerId) -> TokenBucket:
        bucket = self._message_rates.get(peer)
        if bucket is None:
            bucket = TokenBucket(self._limits.messages_per_s, self._limits.messages_burst, time.monotonic())
        return _remember(self._message_rates, peer, bucket)

    # -- bulk ---------------------------------------------------------------------------------------------------------

    async def serve(self, kind: str, handler: FetchHandler, *, right: Right | None = Right.JOIN) -> None:
        """Answers `fetch(kind, header)` of any peer with what handler(peer, header) returns.

        right: what it takes to be answered, in a run that is not open; None: nothing. A DilocoxError of the handler is told to the fetcher, any other exception is logged.
        """

        async def on_stream(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._serve_stream(PeerId(str(info.peer_id)), kind, handler, right, reader, writer)

        self._check_up(self.peer_id)
        async with asyncio.timeout(_REQUEST_TIMEOUT_S):
            await self.p2p.add_binary_stream_handler(self._fetch_protocol(kind), on_stream)

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
            return await self._fetch_once(
                peer, kind, header, max_body_bytes=max_body_bytes, timeout_s=timeout_s,
                stall_timeout_s=stall_timeout_s, take=take,
            )  # fmt: skip

        try:
            return await once()
        except RequestRefused as refused:
            if not await self._showed_pass(refused, stall_timeout_s):
                raise
            return await once()

    async def _fetch_once(
        self,
        peer: PeerId,
        kind: str,
        header: dict[str, Any],
        *,
        max_body_bytes: int,
        timeout_s: float,
        stall_timeout_s: float,
        take: Take | None,
    ) -> tuple[dict[str, Any], bytearray]:
        from hivemind.proto import p2pd_pb2

        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.STREAM_OPEN,
            streamOpen=p2pd_pb2.StreamOpenRequest(peer=raw_peer(peer), proto=[self._fetch_protocol(kind)]),
        )
        seen = 0

        def count(num_bytes: int) -> None:
            nonlocal seen
            self.bandwidth.bytes_received += num_bytes
            seen += num_bytes

        try:
            async with asyncio.timeout(timeout_s):
                _, reader, writer = await self._daemon_request(peer, request, stall_timeout_s)
                try:
                    await send_request(writer, header)
                    reply = await receive_reply(
                        reader, peer, max_body_bytes=max_body_bytes, stall_timeout_s=stall_timeout_s, on_bytes=count,
                        pace=self.bandwidth.pace_download, take=take,
                    )  # fmt: skip
                finally:
                    writer.transport.abort()
        except TimeoutError:
            raise self._unavailable(
                peer, PeerSilent, f"{kind} was not complete within {timeout_s:g} s ({seen} bytes)"
            ) from None
        except OSError as error:
            raise self._unavailable(peer, PeerGone, f"{kind}: {error}") from None
        except PeerGone:
            await self._check_daemon(peer)  # the stream of our own killed p2pd ends just like the peer's
            raise
        return reply

    def _fetch_protocol(self, kind: str) -> str:
        return f"{self._prefix}/fetch/{kind}"

    async def _serve_stream(
        self,
        peer: PeerId,
        kind: str,
        handler: FetchHandler,
        right: Right | None,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        num_serving, num_of_peer = len(self._serving), Counter(self._serving.values())[peer]
        most, most_of_peer = self._limits.streams + self._limits.streams_waiting, self._limits.streams_per_peer
        if self._is_closed or num_serving >= most or num_of_peer >= 4 * most_of_peer:
            writer.transport.abort()  # a flood: not even read
            return
        self._serving[task] = peer
        try:
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                if (reason := self._refusal(peer, right)) is not None:
                    await discard_request(reader)
                    await send_refusal(writer, reason)
                    return
                header = await receive_request(reader)
                if num_of_peer >= most_of_peer:
                    await send_refusal(writer, f"busy: at most {most_of_peer} fetches at once for one peer")
                    return
            async with asyncio.timeout(self._limits.reply_timeout_s), self._free_streams:
                await self._answer(peer, kind, handler, header, writer)
        except (TimeoutError, OSError, asyncio.IncompleteReadError, ProtocolError):
            writer.transport.abort()  # the fetcher is gone, frozen, or speaks something else: it sees the stream end early
        except asyncio.CancelledError:
            # Not raised again: this is all that the task does, and Python 3.11 prints a traceback for a stream's handler
            # that was cancelled.
            writer.transport.abort()
        finally:
            writer.close()
            del self._serving[task]

    async def _answer(
        self, peer: PeerId, kind: str, handler: FetchHandler, header: dict[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        try:
            async with asyncio.timeout(self._limits.handler_timeout_s):
                reply = await handler(peer, header)
        except TimeoutError:
            await send_refusal(writer, f"{kind} was not ready within {self._limits.handler_timeout_s:g} s")
            return
        except ProtocolError as error:
            await send_refusal(writer, error.reason)
            return
        except DilocoxError as error:
            await send_refusal(writer, str(error))
            return
        except Exception:  # task boundary: a fault in a handler must not end the transport
            _logger.exception("fetch of %s by %s could not be served", kind, peer)
            await send_refusal(writer, "internal error")
            return
        self.bandwidth.uplink.begin(time.monotonic())
        try:
            await send_reply(
                writer,
                reply,
                chunk_bytes=self.bandwidth.chunk_bytes,
                pace=self.bandwidth.pace_upload,
                stall_timeout_s=self._limits.stall_timeout_s,
            )
        finally:
            self.bandwidth.uplink.end(time.monotonic())

    # -- the daemon ---------------------------------------------------------------------------------------------------

    async def _daemon_request(
        self, peer: PeerId, request: Any, timeout_s: float
    ) -> tuple[Any, asyncio.StreamReader, asyncio.StreamWriter]:
        """p2pd's answer to request, and the connection it came on, which for STREAM_OPEN has become the stream to peer.

        hivemind's own stream_open and connect leave the connection open when they fail or are cancelled: a descriptor
        here and in p2pd for every dial of a dead peer.
        """
        from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe, write_pbmsg
        from hivemind.proto import p2pd_pb2

        self._check_up(peer)
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await self.p2p._client.control.daemon_connector.open_connection()
                await write_pbmsg(writer, request)
                response = p2pd_pb2.Response()
                await read_pbmsg_safe(reader, response)
            if response.type == p2pd_pb2.Response.ERROR:
                raise self._classified(peer, response.error.msg)
        except BaseException as error:
            if writer is not None:
                writer.transport.abort()
            match error:
                case TimeoutError():
                    raise self._unavailable(peer, PeerSilent, f"could not be dialled within {timeout_s:g} s") from None
                case OSError() | asyncio.IncompleteReadError():
                    raise TransportDown(peer, "this peer's own p2pd does not answer") from None
                case _:
                    raise
        self._last_failures.pop(peer, None)
        return response, reader, writer

    def _classified(self, peer: PeerId, message: str) -> PeerUnavailable:
        """p2pd's error as one of ours. It tells by its text alone."""
        if self._failure.done():
            return TransportDown(peer, self._failure.result())
        text = one_line(message)
        if "protocols not supported" in text:
            return RequestRefused(peer, "it is there, but not (yet) in this run, or of another version")
        if "timeout" in text or "deadline exceeded" in text:
            return self._unavailable(peer, PeerSilent, text)
        if "dial backoff" in text and "refused" not in text:
            # p2pd does not dial again for some seconds after a failure: what it was then still holds.
            return self._unavailable(peer, self._last_failures.get(peer, PeerGone), text)
        return self._unavailable(peer, PeerGone, text)

    def _unavailable(self, peer: PeerId, kind: type[PeerUnavailable], reason: str) -> PeerUnavailable:
        _remember(self._last_failures, peer, kind)
        return kind(peer, reason)

    def _check_up(self, peer: PeerId) -> None:
        if self._failure.done():
            raise TransportDown(peer, self._failure.result())

    async def _check_daemon(self, peer: PeerId) -> None:
        """Raises TransportDown if p2pd is gone, even if the watcher has not seen it yet."""
        self._check_up(peer)
        try:
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                _, writer = await self.p2p._client.control.daemon_connector.open_connection()
            writer.transport.abort()
        except OSError:  # TimeoutError is one
            raise TransportDown(peer, "this peer's own p2pd does not answer") from None

    async def _watch(self) -> None:
        """Notices that p2pd ended or closed its connection: hivemind goes on as if alive, and its calls hang for ever."""
        child = self.p2p._child
        ended = asyncio.create_task(child.wait())
        try:
            await asyncio.wait({ended, self.p2p._client.control._read_task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        if not self._failure.done():
            self._failure.set_result(f"this peer's own p2pd (process {child.pid}) has ended")
        self._fail_pending(self._failure.result())

    def _fail_pending(self, reason: str) -> None:
        from hivemind.p2p import P2PDaemonError

        for call in list(self.p2p._client.control._pending_calls.values()):
            if not call.done():
                call.set_exception(P2PDaemonError(reason))
                call.exception()  # retrieved: nobody may be left to do it


class _Refusal(Exception):
    """Its repr() is what hivemind sends to the caller."""

    def __repr__(self) -> str:
        return str(self)


def _remember(table: OrderedDict[PeerId, V], key: PeerId, value: V) -> V:
    """Puts value into table as its newest entry; the oldest make room."""
    table[key] = value
    table.move_to_end(key)
    while len(table) > _KNOWN_PEERS:
        table.popitem(last=False)
    return value
