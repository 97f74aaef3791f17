"""How fast the kernel lets a real linkd's connections send."""

import ctypes
import os
import socket
import sys
from pathlib import Path

import pytest

from dilocox_peer.network.link import Arrived
from tests.shell.test_link import MB, Link, MakeLink, content, linked_pair, make_link, until

__all__ = ["make_link"]  # the fixture

SO_MAX_PACING_RATE = 47
PIDFD_GETFD = 438  # of every architecture, since Linux 5.6
NO_PACE = 0xFFFFFFFF

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not pace")


def paces(link: Link) -> set[int]:
    """Of the established TCP connections of its linkd."""
    libc, process = ctypes.CDLL(None, use_errno=True), os.pidfd_open(link.linkd)
    found = set()
    try:
        for entry in Path(f"/proc/{link.linkd}/fd").iterdir():
            if not os.readlink(entry).startswith("socket:"):
                continue
            copy = libc.syscall(PIDFD_GETFD, process, int(entry.name), 0)
            if copy < 0:
                pytest.skip(f"cannot look at another process's sockets: {os.strerror(ctypes.get_errno())}")
            with socket.socket(fileno=copy) as sock:
                if sock.type != socket.SOCK_STREAM or sock.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                try:
                    sock.getpeername()
                except OSError:
                    continue  # it listens
                raw = sock.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 4)
                found.add(int.from_bytes(raw, sys.byteorder))
    finally:
        os.close(process)
    return found


def test_the_kernel_paces_connections_there_are_and_those_to_come(make_link: MakeLink) -> None:
    one, two = linked_pair(make_link)
    assert paces(one) == paces(two) == {NO_PACE}
    one.pace(500_000)
    two.pace(700_000)
    until(lambda: (paces(one), paces(two)) == ({500_000}, {700_000}), one, two)
    one.hang_up(two.link_id)
    until(lambda: not one.is_linked and not two.is_linked, one, two)
    two.dial(one.link_id, one.addresses)
    until(lambda: one.is_linked and two.is_linked, one, two)
    assert (paces(one), paces(two)) == ({500_000}, {700_000})
    body = content(MB // 4, 1)
    assert one.send(two.link_id, b"paced", body)
    until(lambda: bool(two.of(Arrived)), one, two)
    assert two.of(Arrived)[0].body == body
    one.pace(0)
    until(lambda: paces(one) == {NO_PACE}, one, two)


def test_a_linkd_that_is_started_again_is_paced_as_before(make_link: MakeLink) -> None:
    one, two = linked_pair(make_link)
    one.pace(500_000)
    until(lambda: paces(one) == {500_000}, one, two)
    os.kill(one.linkd, 9)
    until(lambda: not one.is_linked, one, two)
    one.restart(60)
    until(lambda: one.is_linked and two.is_linked, one, two)
    until(lambda: paces(one) == {500_000}, one, two)
