"""linkd: moves frames between this peer and its neighbours, over libp2p, in a process of its own.

    python -m dilocox_peer.network.linkd SOCKET PARENT     (started by link.py, never by hand)

It understands nothing of what it moves. Its parent speaks to it over the inherited socket; when that ends, so does linkd.
A process of its own because py-libp2p cannot be imported beside hivemind, because its threads of Python would take the
trainer's GIL, and because its crash must not be ours.

This file is the process, and what passes between it and its parent. Its parts:

    link_neighbours.py   whom we dial, who dials us, links       link_frames.py   frames, what both sides agree on
    link_streams.py      one link: what it reads and writes      link_host.py     py-libp2p, and what it demands
"""

import ctypes
import gc
import logging
import os
import signal
import socket
import sys
import traceback
from contextlib import suppress
from typing import NoReturn

import trio

from dilocox_peer.network.autogroup import follow_niceness
from dilocox_peer.network.frames import pack_header
from dilocox_peer.network.link_frames import BufferReader, Frame, FrameKind
from dilocox_peer.network.link_host import Host, choose_ports
from dilocox_peer.network.link_neighbours import Config, Neighbours
from dilocox_peer.network.link_streams import LinkLost, ParentQueue, one_line, say

FLUSH_TIMEOUT_S = 1.0  # for what is still queued when the parent has closed its socket


class Linkd:
    def __init__(self, parent: trio.socket.SocketType, config: Config) -> None:
        self._parent = parent
        self._config = config
        self._host = Host(config.key_seed, config.protocol, max_connections=4 * config.max_neighbours + 32)
        self._outbox = ParentQueue()
        self._neighbours = Neighbours(self._host, config, self._outbox)

    async def run(self, reader: BufferReader) -> None:
        """Ends when the parent's socket does, by leaving the process."""
        listen = choose_ports(self._config.listen, self._config.ports)
        async with self._host.run(listen), trio.open_nursery() as nursery:
            ports, addresses = self._host.listening(listen)
            self._neighbours.start(nursery)
            self._outbox.tell(FrameKind.READY, {"n": self._host.link_id, "a": addresses, "p": ports})
            if self._config.mdns:
                nursery.start_soon(self._announce, addresses)
            nursery.start_soon(self._outbox.write_to, self._parent)
            await self._read_parent(reader)
            await self._leave()

    async def _read_parent(self, reader: BufferReader) -> None:
        while True:
            received = await self._parent.recv_into(reader.space())
            if not received:
                return
            for frame in reader.take(received):
                self._on_order(frame)

    def _on_order(self, frame: Frame) -> None:
        match frame.kind:
            case FrameKind.DATA:
                _, link = self._neighbours.links.get(frame.header["l"], (None, None))
                if link is not None:  # else it has ended, which the parent reads by now or soon
                    link.queue(frame)
            case FrameKind.DIAL:
                self._neighbours.dial(frame.header["n"], frame.header["a"])
            case FrameKind.HANG_UP:
                self._neighbours.hang_up(frame.header["n"])
            case FrameKind.PROVED:
                self._neighbours.proved(frame.header["n"])
            case FrameKind.PACE:
                self._host.pace(frame.header["r"], at_home=frame.header["h"])
            case other:
                raise AssertionError(f"the parent sent a frame of kind {other}")

    async def _leave(self) -> NoReturn:
        """Writes what is queued, for a moment, and ends the process: a shielded write cannot be cancelled.

        Each neighbour ends its link when it has read all. The end of a connection would drop what its muxer holds.
        """
        with trio.move_on_after(FLUSH_TIMEOUT_S):
            while any(link.is_writing for _, link in self._neighbours.links.values()):  # noqa: ASYNC110
                await trio.sleep(0.005)
            for _, link in list(self._neighbours.links.values()):
                for stream in link.sessions[0].streams.values():
                    with suppress(Exception):
                        await stream.close()
            while self._neighbours.links:  # noqa: ASYNC110
                await trio.sleep(0.005)
        os._exit(0)

    async def _announce(self, addresses: list[str]) -> None:
        """Finds linkds on the same network. What fails is said and stays undone."""
        try:
            await self._host.announce(addresses, self._found)
        except Exception as error:
            say(f"no mDNS: {one_line(error)}")

    def _found(self, link_id: str, addresses: list[str]) -> None:
        if link_id != self._host.link_id:
            self._outbox.tell(
                FrameKind.FOUND, {"n": link_id, "a": [f"{address}/p2p/{link_id}" for address in addresses[:16]]}
            )


async def _main(parent_fd: int) -> None:
    parent = trio.socket.fromfd(parent_fd, socket.AF_UNIX, socket.SOCK_STREAM)
    os.close(parent_fd)
    reader = BufferReader(2**62)
    frames: list[Frame] = []
    while not frames:
        received = await parent.recv_into(reader.space())
        if not received:
            return
        frames = reader.take(received)
    [config_frame] = frames  # the parent says no more until we are ready
    config = Config(**config_frame.header)
    try:
        linkd = Linkd(parent, config)
        await linkd.run(reader)
    except* LinkLost as errors:
        await parent.send(pack_header(FrameKind.FAILED, {"reason": one_line(errors)}, 0))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # leaving is the parent's decision
    parent_fd, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit("the parent is gone")
    follow_niceness()
    os.set_blocking(2, False)
    logging.disable(logging.CRITICAL)  # of libp2p: strangers would fill the parent's log
    gc.freeze()
    try:
        trio.run(_main, parent_fd)
    except BaseExceptionGroup as errors:
        traceback.print_exception(errors)
        sys.exit(one_line(errors))  # the last line, which the parent shows


if __name__ == "__main__":
    main()
