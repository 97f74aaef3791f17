"""Ports that a router opens for us: what is said to it, when, and how long it is believed."""

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox_peer.network.nat_pmp import ask_mapping, read_address, read_mapping
from dilocox_peer.network.open_port import RouterPort, by_nat_pmp, gateway
from dilocox_peer.network.port_lease import LEASE_S, MOST_LEASE_S, RETRIES_S, OpenPort, PortLease
from dilocox_peer.network.port_opener import said_open

OPEN = OpenPort("31.0.1.1", 4713, "NAT-PMP")
ROUTES = (
    "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
    "eth0\t0001A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
    "eth0\t00000000\t0101A8C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
)


def test_a_port_is_asked_for_again_when_half_of_its_time_is_over() -> None:
    lease = PortLease()
    assert lease.is_due(0.0)
    lease.opened(OPEN, LEASE_S, 10.0)
    assert lease.at(10.0) == OPEN
    assert not lease.is_due(10.0 + LEASE_S / 2 - 1)
    assert lease.is_due(10.0 + LEASE_S / 2)
    assert lease.at(10.0 + LEASE_S) is None


def test_a_router_that_does_not_answer_is_asked_ever_more_seldom_and_what_was_open_stays() -> None:
    lease, now = PortLease(), 0.0
    lease.opened(OPEN, 10_000.0, now)
    assert lease.at(MOST_LEASE_S - 1) == OPEN
    assert lease.at(MOST_LEASE_S) is None, "no router is believed for longer"
    now = MOST_LEASE_S / 2
    for wait_s in (*RETRIES_S, RETRIES_S[-1]):
        assert lease.is_due(now)
        lease.failed(now)
        assert lease.at(now) == OPEN
        assert not lease.is_due(now + wait_s - 0.1)
        now += wait_s


def test_on_another_line_nothing_is_open_and_the_router_is_asked_at_once() -> None:
    lease = PortLease()
    lease.opened(OPEN, LEASE_S, 0.0)
    lease.moved(1.0)
    assert lease.at(1.0) is None
    assert lease.is_due(1.0)


def test_the_messages_are_those_of_the_standard() -> None:
    """RFC 6886, 3.3."""
    assert ask_mapping(4713, 4713, 600) == bytes.fromhex("00020000 1269 1269 00000258")
    assert read_address(bytes.fromhex("0080 0000 00000001 1f000101")) == "31.0.1.1"
    mapped = read_mapping(bytes.fromhex("0082 0000 00000001 1269 126a 00000258"), 4713)
    assert mapped is not None
    assert (mapped.port, mapped.seconds) == (4714, 600)
    ended = read_mapping(bytes.fromhex("0082 0000 00000001 1269 0000 00000000"), 4713)
    assert ended is not None
    assert ended.seconds == 0


@pytest.mark.parametrize(
    "answer",
    [
        "0082 0002 00000001 1269 126a 00000258",  # not authorized
        "0082 0000 00000001 1268 126a 00000258",  # of another port
        "0081 0000 00000001 1269 126a 00000258",  # of UDP
        "0282 0000 00000001 1269 126a 00000258",
        "0082 0000 00000001 1269 0000 00000258",
        "0082 0000 00000001 1269 126a 000002",
    ],
)
def test_what_maps_nothing_is_no_mapping(answer: str) -> None:
    assert read_mapping(bytes.fromhex(answer), 4713) is None


@given(st.binary(max_size=64))
def test_whatever_a_router_says_is_read(answer: bytes) -> None:
    read_address(answer)
    read_mapping(answer, 4713)


def test_the_way_out_is_the_route_to_everywhere() -> None:
    assert gateway(ROUTES) == "192.168.1.1"
    assert gateway(ROUTES.splitlines()[0]) is None
    assert gateway("") is None


@contextmanager
def router(*, silent_for: int = 0, refuses: bool = False) -> Iterator[tuple[str, int]]:
    """A NAT-PMP responder on loopback. silent_for: so many packets."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.bind(("127.0.0.1", 0))
        heard = 0

        def answer() -> None:
            nonlocal heard
            while True:
                request, asker = udp.recvfrom(64)
                if request == b"end":
                    return
                heard += 1
                if heard <= silent_for:
                    continue
                if len(request) == 2:
                    udp.sendto(struct.pack("!BBHI4s", 0, 128, 0, 1, socket.inet_aton("31.0.1.1")), asker)
                else:
                    _, _, _, ours, outside, seconds = struct.unpack("!BBHHHI", request)
                    result = 2 if refuses else 0
                    udp.sendto(struct.pack("!BBHIHHI", 0, 130, result, 1, ours, outside, seconds), asker)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield udp.getsockname()
        finally:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
                end.sendto(b"end", udp.getsockname())
            thread.join(10)


@pytest.mark.parametrize("silent_for", [0, 1, 2])
def test_a_router_that_loses_packets_is_asked_again(silent_for: int) -> None:
    with router(silent_for=silent_for) as address:
        assert by_nat_pmp(address, 4713, 4713, 600) == RouterPort("NAT-PMP", "31.0.1.1", 4713, 600)


def test_a_router_that_refuses_opens_nothing() -> None:
    with router(refuses=True) as address:
        assert by_nat_pmp(address, 4713, 4713, 600) is None


def test_what_no_address_can_be_made_of_is_no_open_port() -> None:
    """Whatever answered on a home's network with an IPv6 address, or a port for no time, ended the peer."""
    assert said_open("UPnP 203.0.113.7 4711 600") == (OpenPort("203.0.113.7", 4711, "UPnP"), 600.0)
    for line in (
        "UPnP 2a00:1450::1 4711 600",
        "UPnP gateway.example 4711 600",
        "NAT-PMP 203.0.113.7 0 0",
        "NAT-PMP 203.0.113.7 4711 0",
        "UPnP 203.0.113.7 65536 600",
        "UPnP 203.0.113.7 4711 nan",
        "UPnP 203.0.113.7 -1 600",
        "",
    ):
        assert said_open(line) is None, line
