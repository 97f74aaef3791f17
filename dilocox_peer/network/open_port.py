"""Asks the router to have a port of its own lead to one of ours: by NAT-PMP, else by UPnP.

    python -m dilocox_peer.network.open_port PORT OUTSIDE SECONDS PARENT WAY     (started by port_opener.py, never by hand)

OUTSIDE: the port of the router wished for. SECONDS 0: to close it again. WAY: NAT-PMP or UPnP alone, or any. Says what is open in a line, or nothing. A process of its own: what answers to UPnP is anybody on the
local network, and its XML is read by a library in C.
"""

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dilocox_peer.invitation import address_range
from dilocox_peer.network import nat_pmp

ANY_WAY, NAT_PMP, UPNP = "any", "NAT-PMP", "UPnP"
WAITS_S = (0.25, 0.5, 1.0)  # for an answer to a packet
DISCOVER_MS = 2000
OTHER_PORTS = 3  # that are tried where somebody has ours
ROUTES = Path("/proc/net/route")


class RouterPort(NamedTuple):
    """way host port seconds: of the router's port that leads to ours."""

    way: str
    host: str
    port: int
    seconds: int


def gateway(routes: str) -> str | None:
    """The router's address, in the kernel's table of routes."""
    for line in routes.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[1] == "00000000" and fields[7] == "00000000" and len(fields[2]) == 8:
            return socket.inet_ntoa(bytes.fromhex(fields[2])[::-1])
    return None


def by_nat_pmp(router: tuple[str, int], port: int, wished: int, seconds: int) -> RouterPort | None:
    """What is open then."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.connect(router)  # others are not heard

        def ask(request: bytes) -> Iterable[bytes]:
            for wait_s in WAITS_S:
                udp.settimeout(wait_s)
                udp.send(request)
                with suppress(TimeoutError):
                    yield udp.recv(nat_pmp.MAX_ANSWER_BYTES)

        host = next(filter(None, map(nat_pmp.read_address, ask(nat_pmp.ASK_ADDRESS))), None)
        if host is None:
            return None
        request = nat_pmp.ask_mapping(port, wished if seconds else 0, seconds)
        for answer in ask(request):
            if (mapped := nat_pmp.read_mapping(answer, port)) is not None and (mapped.seconds or not seconds):
                return RouterPort(NAT_PMP, host, mapped.port, mapped.seconds)
    return None


def by_upnp(port: int, wished: int, seconds: int) -> RouterPort | None:
    """As by_nat_pmp. Raises whatever miniupnpc does."""
    import miniupnpc

    router = miniupnpc.UPnP()
    router.discoverdelay = DISCOVER_MS
    if not router.discover():
        return None
    router.selectigd()
    if not seconds:
        router.deleteportmapping(wished, "TCP")
        return None
    host = router.externalipaddress()
    for outside in range(wished, min(wished + 1 + OTHER_PORTS, 65536)):
        for lease in (seconds, 0):  # some know none but for ever: they are closed by us
            with suppress(Exception):
                if router.addportmapping(outside, "TCP", router.lanaddr, port, "dilocox-peer", "", lease):
                    return RouterPort(UPNP, host, outside, seconds)
    return None


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    port, wished, seconds, parent = (int(each) for each in sys.argv[1:5])
    way = sys.argv[5]
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent is gone")
    found = None
    with suppress(OSError):
        if way != UPNP and (router := gateway(ROUTES.read_text())) is not None:
            found = by_nat_pmp((router, nat_pmp.PORT), port, wished, seconds)
    is_nowhere = found is None or (seconds and not address_range(found.host))
    if way != NAT_PMP and is_nowhere:  # of a router behind another, the port leads nowhere
        with suppress(Exception):  # no router, or one that refuses: the peer is reached by other ways
            found = by_upnp(port, wished, seconds)
    if seconds and found is not None and address_range(found.host):
        print(*found, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
