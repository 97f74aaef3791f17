"""hivemind's go-libp2p daemon: started, mended where hivemind's bindings hang or leak, watched, called, and stopped.

The only place beside the directory that uses hivemind, and only inside functions: loading it (hivemind_parts.py) pulls in torch. What surrounds
the process without hivemind is p2pd.py; what calls and streams mean is decided elsewhere.
"""

import asyncio
import os
import signal
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dilocox_peer.errors import ConfigError, LackedForNow, PeerUnavailable, RunUnreachable, not_started
from dilocox_peer.invitation import Address, parse_multiaddr
from dilocox_peer.network.bulk import PeerGone, PeerRefusing, PeerSilent, RequestRefused, TransportDown
from dilocox_peer.network.hivemind_parts import load_hivemind
from dilocox_peer.network.p2pd import (
    RELAY_FLAGS,
    FairReader,
    HandlerTasks,
    PendingCalls,
    address_text,
    diagnose,
    launch_command,
    one_line,
    remember,
)
from dilocox_peer.network.runtime_dir import RuntimeDir
from dilocox_peer.types import PeerId

if TYPE_CHECKING:
    from hivemind.p2p import P2P


MAX_CALL_BYTES = 4 * 1024 * 1024  # p2pd's own limit
_REQUEST_TIMEOUT_S = 10.0

# In what p2pd says of a dial that tells nothing of who was dialled: it may be our own line, or a gate on it.
_IN_VAIN = (
    "timeout", "deadline exceeded", "unreachable", "no route to host", "network is down", "undialable", "failed to negotiate",
)  # fmt: skip

OnCall = Callable[[PeerId, bytes], Awaitable[None]]
OnStream = Callable[[PeerId, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Via = Literal["direct", "relayed"]


def client_of(p2p: "P2P") -> Any:
    """What speaks with its p2pd: calls that hivemind's own methods do not offer."""
    return p2p._client


def calls_under_way(p2p: "P2P") -> list[Any]:
    """Futures of calls that were sent to its p2pd and are not answered yet."""
    return list(client_of(p2p).control._pending_calls.values())


def handlers_under_way(p2p: "P2P") -> list[Any]:
    """Tasks of our handlers that answer what its p2pd has passed on."""
    return list(client_of(p2p).control._handler_tasks)


class Daemon:
    """p2pd under watch. `start`, then its calls and streams, finally `close`."""

    def __init__(self, p2p: "P2P", directory: RuntimeDir) -> None:
        self.p2p = p2p
        self._directory = directory
        self.folder = directory.path  # of its sockets
        self._last_failures: OrderedDict[PeerId, type[PeerUnavailable]] = OrderedDict()
        self._vias: OrderedDict[PeerId, Via] = OrderedDict()  # of each peer, when it was seen connected last
        self.on_asking: Callable[[PeerId], None] = lambda _peer: None  # told of whom something is asked
        self._failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._watcher = asyncio.create_task(self._watch(), name="p2pd-watcher")

    @classmethod
    async def start(
        cls,
        identity_path: str | Path,
        peer_id: PeerId,
        *,
        runtime_dir: Path,
        initial: Sequence[Address],
        hosts: Sequence[Address],
        announced: Sequence[str],
        is_public: bool,
        timeout_s: float,
    ) -> "Daemon":
        """Raises ConfigError (address, port, folder, identity, p2pd does not start) or RunUnreachable (nobody of initial answers);
        then, and when cancelled, nothing is left behind. is_public: others can dial it."""
        directory = RuntimeDir.open(runtime_dir, peer_id)
        output: deque[str] = deque(maxlen=20)
        started: list[P2P] = []
        try:
            p2p = await start_daemon(
                daemon_class(directory.path, output, started),
                initial_peers=[address.text for address in initial],
                host_maddrs=[host.text for host in hosts],
                announce_maddrs=list(announced) or None,
                identity_path=str(identity_path),
                check_if_identity_free=False,  # it reads RSA keys only, and starts a second daemon; we hold a lock on the file
                force_reachability="public" if is_public else "private",  # else it takes minutes to punch holes
                nat_port_map=not all(host.host in ("127.0.0.1", "::1") for host in hosts),
                startup_timeout=timeout_s,
                persistent_conn_max_msg_size=MAX_CALL_BYTES,
                output=output,
                initial=initial,
            )
            if str(p2p.peer_id) != peer_id:
                raise ConfigError(
                    f"p2pd runs as {p2p.peer_id}, not {peer_id}: is {identity_path} the key of this peer?"
                )
            await mend_bindings(p2p)
        except BaseException:
            for each in started:
                await stop_daemon(each, timeout_s=2.0)
            directory.close()
            raise
        return cls(p2p, directory)

    async def close(self, timeout_s: float) -> None:
        """Ends p2pd and its sockets within about timeout_s. When cancelled it still kills p2pd and deletes the sockets."""
        if not self._failure.done():
            self._failure.set_result("closed")
        self._watcher.cancel()
        self._fail_pending("the transport is closed")
        try:
            await stop_daemon(self.p2p, timeout_s=timeout_s)
            await asyncio.wait({self._watcher}, timeout=timeout_s)
        finally:
            self._directory.close()

    # -- whether it is up ---------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        return int(self.p2p._child.pid)

    @property
    def is_down(self) -> bool:
        return self._failure.done()

    async def wait_for_failure(self) -> str:
        """Why it no longer works, as soon as it does not. Calls in flight have ended with TransportDown."""
        return await asyncio.shield(self._failure)

    async def addresses(self, *, latest: bool) -> tuple[str, ...]:
        """Where others reach us. latest: p2pd is asked again, as the router may have opened a port. Raises TransportDown."""
        from hivemind.utils.multiaddr import Multiaddr

        if latest:
            answer = await self._asked("IDENTIFY")
            self.p2p._visible_maddrs = [Multiaddr(raw) for raw in answer.identify.addrs]
        try:
            found = [str(address) for address in await self.p2p.get_visible_maddrs()]
        except ValueError:  # none yet
            return ()
        usable = []
        for text in found:
            with suppress(ConfigError):  # QUIC addresses of a relay, say
                usable.append(parse_multiaddr(text, "lease").text)
        return tuple(usable)

    async def connections(self) -> list[tuple[PeerId, list[str]]]:
        """Peers with an open connection, and the addresses it leads to. Raises TransportDown."""
        from hivemind.p2p import PeerID
        from hivemind.utils.multiaddr import Multiaddr

        peers = (await self._asked("LIST_PEERS")).peers
        return [(PeerId(str(PeerID(each.id))), [address_text(raw, Multiaddr) for raw in each.addrs]) for each in peers]

    async def paths(self) -> tuple[list[PeerId], dict[PeerId, Via]]:
        """Peers that are reached in another way than at the last look, and how each connected peer is; see Transport.paths."""
        found: dict[PeerId, Via] = {}
        for peer, addresses in await self.connections():
            is_relayed = all("/p2p-circuit" in address for address in addresses)
            if not is_relayed or peer not in found:
                found[peer] = "relayed" if is_relayed else "direct"
        changed = [peer for peer, via in found.items() if self._vias.get(peer, via) != via]
        for peer, via in found.items():
            remember(self._vias, peer, via)
        return changed, found

    async def _asked(self, what: Literal["IDENTIFY", "LIST_PEERS"]) -> Any:
        """What p2pd answers about itself. Raises TransportDown, also for one whose watcher has not seen its death yet."""
        from hivemind.proto import p2pd_pb2

        me = PeerId(str(self.p2p.peer_id))
        request = p2pd_pb2.Request(type=getattr(p2pd_pb2.Request, what))
        try:
            response, _, writer = await self._exchanged(me, request, _REQUEST_TIMEOUT_S)
        except PeerUnavailable:
            raise TransportDown(me, "this peer's own p2pd does not answer") from None
        writer.close()
        return response

    def check_up(self, peer: PeerId) -> None:
        """Raises TransportDown."""
        if self._failure.done():
            raise TransportDown(peer, self._failure.result())

    async def check(self, peer: PeerId) -> None:
        """Raises TransportDown if p2pd is gone, even if the watcher has not seen it yet. One that is slow is not gone.

        It has to answer: of a killed one the socket that it listens on may outlive the streams.
        """
        from hivemind.proto import p2pd_pb2

        with suppress(PeerSilent):
            _, _, writer = await self._exchanged(
                peer, p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY), _REQUEST_TIMEOUT_S
            )
            writer.close()

    async def _watch(self) -> None:
        """Notices that p2pd ended or closed its connection: hivemind goes on as if alive, and its calls hang for ever."""
        child = self.p2p._child
        ended = asyncio.create_task(child.wait())
        try:
            await asyncio.wait({ended, client_of(self.p2p).control._read_task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        if not self._failure.done():
            self._failure.set_result(f"this peer's own p2pd (process {child.pid}) has ended")
        self._fail_pending(self._failure.result())

    def _fail_pending(self, reason: str) -> None:
        from hivemind.p2p import P2PDaemonError

        for call in calls_under_way(self.p2p):
            if not call.done():
                call.set_exception(P2PDaemonError(reason))
                call.exception()  # retrieved: nobody may be left to do it

    # -- calls and streams --------------------------------------------------------------------------------------------

    async def answer(self, protocol: str, on_call: OnCall) -> None:
        """Calls of this protocol are answered once on_call(sender, raw) has returned; what it raises reaches the sender as repr()."""

        async def on_raw(raw: bytes, remote: Any) -> bytes:
            await on_call(PeerId(str(remote)), raw)
            return b""

        async with asyncio.timeout(_REQUEST_TIMEOUT_S):
            await client_of(self.p2p).add_unary_handler(protocol, on_raw)

    async def accept(self, protocol: str, on_stream: OnStream) -> None:
        async def on_any(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await on_stream(PeerId(str(info.peer_id)), reader, writer)

        async with asyncio.timeout(_REQUEST_TIMEOUT_S):
            await self.p2p.add_binary_stream_handler(protocol, on_any)

    async def call(self, peer: PeerId, protocol: str, raw: bytes, timeout_s: float) -> None:
        """Has peer's handler of that protocol run. Raises PeerGone, PeerSilent, RequestRefused, TransportDown."""
        from hivemind.p2p import P2PDaemonError, P2PHandlerError, PeerID

        self.check_up(peer)
        self.on_asking(peer)
        try:
            async with asyncio.timeout(timeout_s):
                await client_of(self.p2p).call_unary_handler(PeerID(raw_peer(peer)), protocol, bytes(raw))
        except TimeoutError:
            raise self.unavailable(peer, PeerSilent, f"no answer within {timeout_s:g} s") from None
        except P2PHandlerError as error:
            raise RequestRefused(peer, one_line(str(error))) from None
        except (P2PDaemonError, OSError) as error:
            raise self._classified(peer, str(error)) from None
        self._last_failures.pop(peer, None)

    async def dial(self, peer: PeerId, addresses: Sequence[bytes], timeout_s: float) -> None:
        """Unless connected; p2pd remembers the addresses. Raises as `call`."""
        from hivemind.proto import p2pd_pb2

        connect = p2pd_pb2.ConnectRequest(peer=raw_peer(peer), addrs=addresses)
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=connect)
        _, writer = await self._request(peer, request, timeout_s)
        writer.close()

    async def hang_up(self, peer: PeerId, timeout_s: float) -> None:
        """Ends all connections with peer. Raises as `call`."""
        from hivemind.proto import p2pd_pb2

        end = p2pd_pb2.DisconnectRequest(peer=raw_peer(peer))
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.DISCONNECT, disconnect=end)
        _, writer = await self._request(peer, request, timeout_s)
        writer.close()

    async def open_stream(
        self, peer: PeerId, protocol: str, timeout_s: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """To peer's handler of that protocol. Raises as `call`."""
        from hivemind.proto import p2pd_pb2

        self.on_asking(peer)
        opening = p2pd_pb2.StreamOpenRequest(peer=raw_peer(peer), proto=[protocol])
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=opening)
        return await self._request(peer, request, timeout_s)

    async def _request(
        self, peer: PeerId, request: Any, timeout_s: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The connection that p2pd has answered on, which for STREAM_OPEN has become the stream to peer."""
        _, reader, writer = await self._exchanged(peer, request, timeout_s)
        self._last_failures.pop(peer, None)
        return reader, writer

    async def _exchanged(
        self, peer: PeerId, request: Any, timeout_s: float
    ) -> tuple[Any, asyncio.StreamReader, asyncio.StreamWriter]:
        """p2pd's response, and the connection that it came on.

        hivemind's own stream_open, connect, list_peers and identify leave the connection open when they fail or are
        cancelled: a descriptor here and in p2pd for every dial of a dead peer. Raises as `call`.
        """
        from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe, write_pbmsg
        from hivemind.proto import p2pd_pb2

        self.check_up(peer)
        response = p2pd_pb2.Response()
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await client_of(self.p2p).control.daemon_connector.open_connection()
                await write_pbmsg(writer, request)
                await read_pbmsg_safe(reader, response)
            if response.type == p2pd_pb2.Response.ERROR:
                raise self._classified(peer, response.error.msg)
        except BaseException as error:
            if writer is not None:
                writer.transport.abort()
            match error:
                case TimeoutError():
                    raise self.unavailable(peer, PeerSilent, f"could not be dialled within {timeout_s:g} s") from None
                case OSError() | asyncio.IncompleteReadError():
                    raise TransportDown(peer, "this peer's own p2pd does not answer") from None
                case _:
                    raise
        return response, reader, writer

    def _classified(self, peer: PeerId, message: str) -> PeerUnavailable:
        """p2pd's error as one of ours. It tells by its text alone."""
        if self._failure.done():
            return TransportDown(peer, self._failure.result())
        text = one_line(message)
        if "protocols not supported" in text:
            return RequestRefused(peer, "it is there, but not (yet) in this run, or of another version")
        if any(each in text for each in _IN_VAIN):
            return self.unavailable(peer, PeerSilent, text)
        kind: type[PeerUnavailable] = PeerRefusing if "refused" in text else PeerGone
        if "dial backoff" in text:
            # p2pd does not dial again for some seconds after a failure: what it was then still holds.
            kind = self._last_failures.get(peer, kind)
        return self.unavailable(peer, kind, text)

    def unavailable(self, peer: PeerId, kind: type[PeerUnavailable], reason: str) -> PeerUnavailable:
        """The error to raise, which is remembered for the next dial."""
        if issubclass(kind, PeerGone) and (self._vias.get(peer) == "relayed" or "/p2p-circuit" in reason):
            kind = PeerSilent  # it may be the relay that is gone, or that knows nothing of the peer yet
        remember(self._last_failures, peer, kind)
        return kind(peer, reason)


async def mend_bindings(p2p: "P2P") -> None:
    """To be called before there is a handler or a call: it moves them to another connection with p2pd."""
    control = p2p._client.control
    control._pending_calls = PendingCalls(control._pending_calls)
    control._handler_tasks = HandlerTasks()
    reader, writer = await control.daemon_connector.open_persistent_connection()
    before = {control._read_task, control._write_task}
    control._read_task = asyncio.create_task(control._read_from_persistent_conn(FairReader(reader)))
    control._write_task = asyncio.create_task(control._write_to_persistent_conn(writer))
    for task in before:
        task.cancel()
    await asyncio.wait(before)


def daemon_class(socket_dir: Path, output: deque[str], started: list["P2P"]) -> type["P2P"]:
    """hivemind's P2P with sockets in socket_dir, p2pd started by launch_command, its lines kept in output, and every
    instance put into `started` at once: create() does not stop its p2pd when it fails or is cancelled."""
    load_hivemind()
    from hivemind.p2p import P2P

    class QuietP2P(P2P):  # type: ignore[misc, unused-ignore]
        _UNIX_SOCKET_PREFIX = f"/unix{socket_dir}/"
        _child: Any

        def __init__(self) -> None:
            super().__init__()
            started.append(self)

        @staticmethod
        def _make_process_args(*args: Any, **kwargs: Any) -> list[str]:
            command: list[str] = P2P._make_process_args(*args, **kwargs)
            return launch_command([*command, *RELAY_FLAGS])

        def _terminate(self) -> None:
            """As hivemind's, but Popen.terminate polls before it signals: a p2pd that has just ended is reaped there, and
            asyncio's own watcher then says "Unknown child process" on the terminal. And sockets that a disk keeps, as it is read-only now,
            keep nobody from ending."""
            child, self._child = self._child, None
            try:
                with suppress(OSError):  # the socket, which comes last
                    super()._terminate()
            finally:
                self._child = child
            if child is not None and child.returncode is None:
                with suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGTERM)
                with suppress(OSError, TypeError):
                    os.remove(self._daemon_listen_maddr["unix"])

        @staticmethod
        def _log_p2pd_message(line: str) -> None:
            output.append(line)

    return QuietP2P


async def start_daemon(
    daemon: type["P2P"], *, output: deque[str], initial: Sequence[Address], **arguments: Any
) -> "P2P":
    """P2P.create with our errors: the stage that failed, what it was about, and the remedy."""
    from hivemind.p2p import P2PDaemonError

    try:
        return await daemon.create(**arguments)
    except P2PDaemonError as error:
        message = one_line(str(error).removeprefix("Daemon failed to start:"))
        if "failed to connect to bootstrap peers" in message:
            raise RunUnreachable(await diagnose(initial)) from None
        if "failed to listen" in message:
            hosts = ", ".join(arguments["host_maddrs"])
            raise ConfigError(f"cannot listen on {hosts} ({message}): pass another --host-maddrs") from None
        if "failed to start in" in message and initial:  # without anybody to dial it takes 0.1 s
            raise RunUnreachable(await diagnose(initial)) from None
        if "failed to start in" in message:
            raise LackedForNow(
                f"p2pd was not ready within {arguments['startup_timeout']:g} s: the machine is overloaded; try again when it has less to do"
            ) from None
        last = one_line(output[-1]) if output else message
        raise ConfigError(f"p2pd did not start: {last or 'it ended without a word'}") from None
    except OSError as error:
        raise not_started("p2pd", error, "hivemind has to be installed with its binary") from None


async def stop_daemon(p2p: "P2P", timeout_s: float) -> None:
    """Ends p2pd and what hivemind left running for it. When cancelled, p2pd is killed at once."""
    child = p2p._child
    tasks = {task for task in (p2p._reader_task, p2p._listen_task) if task is not None}
    if p2p._client is not None:
        tasks |= {
            task for task in (p2p._client.control._read_task, p2p._client.control._write_task) if task is not None
        }
    p2p._terminate()
    for task in tasks:
        task.cancel()  # hivemind's own cancelling does nothing when its loop is not the current one
    try:
        if child is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(child.wait(), timeout_s)
            if child.returncode is None:  # frozen, say
                child.kill()
                await child.wait()
    except BaseException:
        with suppress(ProcessLookupError):
            child.kill()
        raise
    finally:
        if child is not None:
            child._transport.close()  # its pipe; else "Event loop is closed" at exit
    if tasks:
        done, _ = await asyncio.wait(tasks, timeout=timeout_s)
        for task in done:
            if not task.cancelled():
                task.exception()  # retrieved; the daemon is gone, so it failed


def raw_peer(peer: PeerId) -> bytes:
    """Raises PeerGone for a name that is no PeerID: the next roster is what a leader wrote, and we greet all of it."""
    from hivemind.p2p import PeerID

    try:
        raw: bytes = PeerID.from_base58(peer).to_bytes()
    except ValueError:
        raise PeerGone(peer, "that is not the name of a peer") from None
    return raw
