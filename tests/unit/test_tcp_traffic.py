"""What a process moved over TCP, by the kernel's count."""

import asyncio
import os
import socket
import struct
import sys
import threading
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox_peer.events_of_costs import LineUsed
from dilocox_peer.network.tcp_traffic import Traffic, connections_in, is_last, look
from dilocox_peer.peer.tally import line_told


def test_connections_that_close_are_kept_in_the_sum_and_new_ones_are_added():
    traffic = Traffic()
    traffic.take({1: (100, 10), 2: (5, 5)})
    traffic.take({2: (7, 6), 3: (1, 1)})
    traffic.take({3: (4, 1)})
    assert (traffic.sent, traffic.received) == (100 + 7 + 4, 10 + 6 + 1)


def test_a_look_that_saw_nothing_counts_nothing_twice():
    """As after a restart of p2pd: its connections are others."""
    traffic = Traffic()
    traffic.take({1: (100, 10)})
    traffic.take({})
    traffic.take({9: (3, 3)})
    assert (traffic.sent, traffic.received) == (103, 13)


def test_what_a_look_missed_is_not_counted_again():
    """After a failed look all open connections were, and a month's traffic was used up."""
    traffic = Traffic()
    traffic.take({1: (10**9, 10)})
    for found in ({}, {1: (10**9 + 5, 10)}, {2: (1, 1)}, {1: (10**9 + 7, 10), 2: (1, 1)}):
        traffic.take(found)
    assert (traffic.sent, traffic.received) == (10**9 + 8, 11)


@given(st.binary(max_size=400))
def test_whatever_the_kernel_says_is_read_to_its_end(answer: bytes):
    list(connections_in(answer))
    is_last(answer)


def test_an_error_ends_the_answer():
    assert is_last(struct.pack("=IHHIIi", 20, 2, 0, 1, 0, -1))


@pytest.mark.skipif(sys.platform != "linux", reason="sock_diag is Linux's")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_real_connection_is_counted_at_both_ends(host):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        server = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"this system has no {host}")
    with server, socket.create_connection(server.getsockname()[:2]) as one:
        other, _ = server.accept()
        with other:
            before = look(os.getpid())
            if not before:
                pytest.skip("this system does not say")
            sender = threading.Thread(target=one.sendall, args=(bytes(1_000_000),))
            sender.start()
            left = 1_000_000
            while left:
                left -= len(other.recv(left))
            sender.join(20)
            other.sendall(b"x")
            assert one.recv(1) == b"x"  # so what was sent before has been acknowledged
            traffic = Traffic()
            traffic.take(before)
            traffic.take(look(os.getpid()))
    assert traffic.received >= 1_000_001
    assert traffic.sent >= 1_000_000
    assert look(2**31 - 1) == {}


@pytest.mark.skipif(sys.platform != "linux", reason="sock_diag is Linux's")
@pytest.mark.parametrize("fails", [False, True])
async def test_what_a_start_moves_is_told_however_it_ends(fails: bool) -> None:
    told: list[Any] = []
    traffic = Traffic()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        if not look(os.getpid()):
            pytest.skip("this system does not say")
        with other, suppress(LookupError):
            async with line_told(traffic, os.getpid(), told.append) as is_started:
                one.sendall(bytes(50_000))
                await asyncio.to_thread(other.recv, 50_000, socket.MSG_WAITALL)
                if fails:
                    raise LookupError
                await is_started()
                assert len(told) == 1
    assert len(told) == 1, "once at the end"
    assert isinstance(told[0], LineUsed)
    assert told[0].received >= 50_000
