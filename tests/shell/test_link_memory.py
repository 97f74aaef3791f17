"""What strangers make linkd hold before it knows who they are. A real linkd on loopback."""

import subprocess
import sys
import time

import psutil
import pytest

from dilocox_peer.network.link import Link
from dilocox_peer.network.linkd_process import LinkSettings
from tests.shell.conftest import PATIENCE_S
from tests.shell.plain_host import PLAIN_HOST

pytestmark = pytest.mark.usefixtures("no_process_left")

MB = 1 << 20
PROTOCOL = "/dilocox/link/1/0123456789abcdef"
STRANGERS = 4

# Each begins one frame of 16 MiB on a stream that there is not, and keeps its last bytes to itself.
LARGE_FRAMES = (
    PLAIN_HOST
    + """
import struct
from libp2p.exceptions import BaseLibp2pError

async def one(address):
    host = plain_host()
    info = info_from_p2p_addr(Multiaddr(address))
    async with host.run([Multiaddr("/ip4/127.0.0.1/tcp/0")]):
        await host.connect(info)
        secured = host.get_network().get_connections(info.peer_id)[0].muxed_conn.secured_conn
        left, piece = 1 << 24, bytes(1 << 14)
        try:
            await secured.write(struct.pack("!BBHII", 0, 0, 0, 999, left))
            while left > len(piece):
                await secured.write(piece)
                left -= len(piece)
            print("all", flush=True)
        except (BaseLibp2pError, RuntimeError):  # the latter of a TLS connection that has ended
            print("cut", flush=True)

async def main():
    async with trio.open_nursery() as nursery:
        for _ in range(int(sys.argv[2])):
            nursery.start_soon(one, sys.argv[1])

trio.run(main)
"""
)


def test_a_large_frame_of_a_stranger_is_not_gathered():
    settings = LinkSettings(bytes(32), ("/ip4/127.0.0.1/tcp/0",), PROTOCOL, 2 * MB, 32 * MB, max_unproved=16)
    link = Link(settings)
    link.start(PATIENCE_S)
    try:
        link.poll(0.0)
        linkd = psutil.Process(link.pid)
        before = most = linkd.memory_info().rss
        command = [sys.executable, "-W", "ignore", "-c", LARGE_FRAMES, link.addresses[0], str(STRANGERS)]
        strangers = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            deadline = time.monotonic() + PATIENCE_S
            while strangers.poll() is None and time.monotonic() < deadline:
                link.poll(0.05)
                most = max(most, linkd.memory_info().rss)
            said, _ = strangers.communicate(timeout=1.0)
        finally:
            strangers.kill()
            strangers.communicate()
        assert said.split() == ["cut"] * STRANGERS
        assert most - before < 16 * MB, f"{(most - before) / MB:.0f} MiB for {STRANGERS} connections"
        assert linkd.is_running()
    finally:
        link.close(5)
