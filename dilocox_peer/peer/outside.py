"""Addresses at which a stranger's run may have a peer ask for something: not this machine's, nor those of its network.

A name is looked up once, and what it stood for then is dialled: an answer that is another the next time leads nowhere else.
"""

import ipaddress
import socket
import time
from typing import Any
from urllib.parse import urlsplit

DIAL_S = 30.0
"""A name may stand for thousands of addresses at which nobody answers: after so long the one that is being dialled is the last."""

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_NOT_ROUTED = tuple(map(ipaddress.IPv6Network, ("::/96", "64:ff9b:1::/48", "fec0::/10")))


class Inside(OSError):
    """One line: what is asked for lies on this machine or in its network, and what to do where that is meant."""


def is_outside(address: str) -> bool:
    """Whether it is one of the internet's, as far as an address says; of those that carry one of IPv4, whether that is too."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        if any(found in network for network in _NOT_ROUTED):
            return False
        within = [found.ipv4_mapped, found.sixtofour, *(found.teredo or ())]
        if found in _NAT64:
            within.append(ipaddress.IPv4Address(int(found) & 0xFFFFFFFF))
        if not all(is_outside(str(each)) for each in within if each is not None):
            return False
        if found.ipv4_mapped is not None:
            return True
    return found.is_global and not found.is_multicast


def outside_places(host: str, port: int) -> list[tuple[str, int]]:
    """Where a name leads, without what is inside. Blocking. Raises Inside where nothing is left; OSError."""
    found = [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    places = [(address, port) for address in dict.fromkeys(found) if is_outside(address)]
    if not places:
        raise inside(host)
    return places


def dial_outside(place: tuple[str, int], *options: Any) -> socket.socket:
    """As socket.create_connection, to what is outside alone. Raises Inside, OSError."""
    places, until = outside_places(*place), time.monotonic() + DIAL_S
    for each in places[:-1]:
        try:
            return socket.create_connection(each, *options)
        except OSError:
            if time.monotonic() > until:
                raise
    return socket.create_connection(places[-1], *options)


def inside(host: str) -> Inside:
    return Inside(
        f"{host[:100]} is this machine or in its network, where strangers have nothing asked: pass --local-data-url if the run is yours"
    )


def why_not_asked(url: str) -> str:
    """Why a stranger's run has nothing fetched from there; "" where nothing is known against it. Blocking: it looks the name up."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or 443
        if parts.scheme != "https":
            return str(inside(host))
        outside_places(host, port)
    except Inside as error:
        return str(error)
    except (OSError, ValueError):
        return ""
    return ""
