"""Has the router open a port that leads to one of ours, renews it, and closes it in the end: runs open_port.py when that is due.

p2pd does the same for its own port; linkd has one of its own, and what it moves is most of what a peer of several stages does.
"""

import asyncio
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from ipaddress import IPv4Address

from dilocox_peer.network.open_port import ANY_WAY
from dilocox_peer.network.port_lease import LEASE_S, OpenPort, PortLease

LOOK_S = 2.0  # whether the port is another one
TELL_S = 20.0  # of the process, on a busy machine
CLOSE_S = 4.5  # Python's start, the search for a router that speaks UPnP, and what it is told
MAX_SAID_BYTES = 1000


class PortOpener:
    """`run` until cancelled. `changed` is set whenever `port` is another."""

    def __init__(self, own: Callable[[], int | None], on_open: Callable[[OpenPort], None]) -> None:
        """own: the port of ours, asked for again and again; None: there is none now. on_open: told of each that was not open before."""
        self._own = own
        self._on_open = on_open
        self._lease = PortLease()
        self._for: int | None = None  # ours that it is open for
        self._told: OpenPort | None = None
        self.changed = asyncio.Event()

    @property
    def port(self) -> OpenPort | None:
        return self._lease.at(asyncio.get_running_loop().time())

    def moved(self) -> None:
        """Our line is another one."""
        self._lease.moved(asyncio.get_running_loop().time())

    async def run(self) -> None:
        clock = asyncio.get_running_loop().time
        try:
            while True:
                if (own := self._own()) != self._for:
                    self._for = own
                    self._lease.moved(clock())
                if own is not None and self._lease.is_due(clock()):
                    wished = own if self.port is None else self.port.port
                    said = await _ask(own, wished, int(LEASE_S), TELL_S, ANY_WAY)
                    if said is not None:
                        self._lease.opened(*said, clock())
                    else:
                        self._lease.failed(clock())
                if self.port != self._told:
                    self._told = self.port
                    self.changed.set()
                    if self._told is not None:
                        self._on_open(self._told)
                await asyncio.sleep(LOOK_S)
        finally:
            if self._for is not None and (opened := self.port) is not None:
                await _ask(self._for, opened.port, 0, CLOSE_S, opened.way)


def said_open(line: str) -> tuple[OpenPort, float] | None:
    """What a line of open_port.py says is open, and for how many seconds; None: nothing. Whatever answers on a home's network has its say in it."""
    try:
        way, host, outside, seconds = line.split()
        port, lease_s = int(outside), int(seconds)
        opened = OpenPort(str(IPv4Address(host)), port, way)
    except ValueError:
        return None
    return (opened, float(lease_s)) if 0 < port < 1 << 16 and lease_s > 0 else None


async def _ask(port: int, wished: int, seconds: int, timeout_s: float, way: str) -> tuple[OpenPort, float] | None:
    """What is open now, and for how long. way: that the router is asked in."""
    command = [sys.executable, "-m", "dilocox_peer.network.open_port"]
    command += [str(each) for each in (port, wished, seconds, os.getpid(), way)]
    nowhere, process = asyncio.subprocess.DEVNULL, None
    try:
        async with asyncio.timeout(timeout_s):
            process = await asyncio.create_subprocess_exec(
                *command, stdin=nowhere, stdout=asyncio.subprocess.PIPE, stderr=nowhere, start_new_session=True
            )
            line, _ = await process.communicate()
        return said_open(line[:MAX_SAID_BYTES].decode())
    except (OSError, ValueError):  # TimeoutError is an OSError
        return None
    finally:
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
