"""What surrounds the p2pd process, without hivemind: its command line, its ports, why nobody answered, its call tables,
what is kept of each peer.

daemon.py puts these together with hivemind's P2P.
"""

import asyncio
import ipaddress
import os
import socket
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

from dilocox_peer.errors import ConfigError
from dilocox_peer.invitation import Address
from dilocox_peer.types import PeerId

DIAGNOSIS_TIMEOUT_S = 2.0
DIAL_S = 3.0
MAX_LOOKED_UP = 2  # names at once
_KNOWN_PEERS = 1024  # per-peer bookkeeping is kept for so many
GREETING: Final = b"\x13/multistream/1.0.0\n"
_LOGIN: Final = "this network may want a login in a web page first: open any page in a browser"

_HOST_BYTES: Final = {0x04: 4, 0x29: 16}  # of ip4 and ip6, by what a multiaddress begins with
_CIRCUIT: Final = b"\xa2\x02"

_look_ups = threading.Semaphore(MAX_LOOKED_UP)

V = TypeVar("V")

# Runs before p2pd in its process: own session; death with the parent (Linux; elsewhere p2pd ends by itself 0.2 s after its
# last client connection closed [m]); only errors of its own logger, which hivemind would parse line by line; and the session
# is as nice as we are (autogroup.py).
_LAUNCHER = """
import os, sys
os.setsid()
os.environ["GOLOG_LOG_LEVEL"] = "error"
if (nice := os.getpriority(os.PRIO_PROCESS, 0)) > 0:
    try:
        with open("/proc/self/autogroup", "w") as group:
            group.write(str(nice))
    except OSError:
        pass
if sys.platform == "linux":
    import ctypes
    PR_SET_PDEATHSIG, SIGKILL = 1, 9
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the parent is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


RELAY_FLAGS: Final = ("-relayService=0",)  # one of its two relays; the other, which no flag ends, relaying.py replaces


def launch_command(command: Sequence[str]) -> list[str]:
    """p2pd's command line, started through _LAUNCHER. The process keeps its pid when it becomes p2pd."""
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command]


def check_listenable(address: Address, *, flag: str = "--host-maddrs") -> None:
    """Raises ConfigError if a port is taken. p2pd listens with SO_REUSEPORT: it would start, and get half the callers.

    flag: by which another is given.
    """
    if address.port == 0:
        return
    family = socket.AF_INET6 if address.host_kind == "ip6" else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # connections of a predecessor in TIME_WAIT do not count
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise ConfigError(
                f"cannot listen on {address.text} ({reason}): stop what uses it or pass another {flag}"
            ) from None


async def greets(address: Address) -> bool:
    """Whether something of libp2p answers at a new TCP connection. Of a name, while others are being looked up: taken for granted."""
    try:
        async with asyncio.timeout(DIAL_S):
            host = address.host
            if address.host_kind.startswith("dns") and (host := await _looked_up(address)) == "":
                return True
            reader, writer = await asyncio.open_connection(host, address.port)
            try:
                writer.write(GREETING)
                return await reader.readexactly(len(GREETING)) == GREETING
            finally:
                writer.transport.abort()
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return False


async def _looked_up(address: Address) -> str:
    """An address of the name's; "": too many are being looked up. Raises OSError. Leases name what they like, and a name whose server does not
    answer keeps a thread of those that all share for half a minute, also when nobody waits for it any more."""
    if not _look_ups.acquire(blocking=False):
        return ""
    found = asyncio.get_running_loop().run_in_executor(None, _look_up, address)
    found.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved: nobody may be left to do it
    return await asyncio.shield(found)


def _look_up(address: Address) -> str:
    family = socket.AF_INET6 if address.host_kind == "dns6" else socket.AF_INET
    try:
        return str(socket.getaddrinfo(address.host, address.port, family, socket.SOCK_STREAM)[0][4][0])
    finally:
        _look_ups.release()


async def diagnose(addresses: Sequence[Address]) -> str:
    """Why none of these answered, address by address, and what to do."""
    shown = addresses[:3]
    found = await asyncio.gather(*(_probe(address) for address in shown))
    reasons = "; ".join(f"{address.text} {reason}" for address, reason in zip(shown, found, strict=True))
    more = f"; and {len(addresses) - len(shown)} more" if len(addresses) > len(shown) else ""
    return f"no peer of the run answers: {reasons}{more}. Is the run still on? Ask its owner for a new link, or try again later"


async def _probe(address: Address) -> str:
    try:
        async with asyncio.timeout(DIAGNOSIS_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(address.host, address.port)
        try:
            return await _whose_answer(reader, writer)
        finally:
            writer.transport.abort()
    except TimeoutError:
        return f"does not answer within {DIAGNOSIS_TIMEOUT_S:g} s (offline, or a firewall)"
    except ConnectionRefusedError:
        return "refuses the connection (nothing runs there)"
    except socket.gaierror:
        return "has a host name that cannot be resolved"
    except OSError as error:
        return f"cannot be reached ({(error.strerror or str(error)).lower()})"


async def _whose_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
    """What answers at this connection in a peer's place. A network that wants a login in a web page first takes all connections."""
    said = b""
    with suppress(TimeoutError, ConnectionError):
        writer.write(GREETING)
        async with asyncio.timeout(DIAGNOSIS_TIMEOUT_S):
            said = await reader.read(len(GREETING))
    if said and GREETING.startswith(said):
        return "answers, but is not this peer (it was set up anew)"
    if said.startswith(b"HTTP/"):
        return f"is answered by a web server ({_LOGIN}; or another program has the port)"
    if said:
        return f"answers, but not as a peer does (another program has the port; or {_LOGIN})"
    return f"takes the connection and says nothing (another program has the port; or {_LOGIN})"


def address_text(raw: bytes, decode: Callable[[bytes], object]) -> str:
    """Of a multiaddress, as decode, hivemind's, has it. That raises at protocols it does not know, and p2pd dials a stranger over
    WebTransport if it says that it listens there: then the host, and whether the way leads through a relay."""
    try:
        return str(decode(raw))
    except ValueError:
        size = _HOST_BYTES.get(raw[0], 0) if raw else 0
        known = len(raw) > size > 0
        host = f"/ip{4 if size == 4 else 6}/{ipaddress.ip_address(raw[1 : 1 + size])}" if known else ""
        return f"{host}/unknown" + ("/p2p-circuit" if raw.endswith(_CIRCUIT) else "")


class PendingCalls(dict[Any, "asyncio.Future[Any]"]):
    """hivemind's table of calls, in which a cancelled call no longer counts.

    Else an answer that arrives between a call's cancellation and its clean-up raises InvalidStateError in hivemind's
    reader task, which ends, and with it every later call of the process, silently.
    """

    def __contains__(self, call_id: object) -> bool:
        call = self.get(call_id)
        return call is not None and not call.done()


class HandlerTasks(dict[Any, "asyncio.Task[Any]"]):
    """hivemind's table of running handlers; it forgets to remove those that were cancelled."""

    def __setitem__(self, call_id: Any, task: "asyncio.Task[Any]") -> None:
        super().__setitem__(call_id, task)
        task.add_done_callback(lambda _task: self.pop(call_id, None))

    def pop(self, call_id: Any, default: Any = None) -> Any:
        return super().pop(call_id, default)


class FairReader:
    """The stream that p2pd's requests come on, to hivemind's reader task, which lets the loop go on after every few.

    Else the task takes all that is in the buffer, a thousand small requests, and starts a handler for each before the loop
    has its turn: it then runs a thousand handlers in one round.
    """

    _READS = 32  # of a request: one for each byte of its length, one for the rest

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._num_reads = 0

    async def readexactly(self, n: int) -> bytes:
        self._num_reads += 1
        if self._num_reads % self._READS == 0:
            await asyncio.sleep(0)
        return await self._reader.readexactly(n)


class Refusal(Exception):
    """What the handler of a call raises: its repr() is what hivemind sends to the caller."""

    def __repr__(self) -> str:
        return str(self)


def one_line(text: str) -> str:
    return " ".join(text.split())[:300]


def remember(table: OrderedDict[PeerId, V], key: PeerId, value: V) -> V:
    """Puts value into table as its newest entry; the oldest make room."""
    table[key] = value
    table.move_to_end(key)
    while len(table) > _KNOWN_PEERS:
        table.popitem(last=False)
    return value
