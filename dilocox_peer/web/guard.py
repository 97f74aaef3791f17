"""One visitor's connection: one request, in a bounded number of bytes and seconds, before any of it reaches the web framework."""

import asyncio
from collections.abc import Callable
from typing import cast

from dilocox_peer.invitation import place_of
from dilocox_peer.network.crowding import to_give_up

MAX_CONNECTIONS = 192
MAX_HEAD_BYTES = 8192  # of the request line and all headers
MAX_MORE_BYTES = 65536  # behind it, which nobody reads
CONNECTION_S = 15.0  # from the connection to the end of the answer
WRITE_BUFFER_BYTES = 65536
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_END = b"\r\n\r\n"


class Guard(asyncio.Protocol):
    """Stands before the framework's protocol, which gets the head of one request at once and nothing else: so nobody keeps it
    busy with one byte a second, pipelined requests or a body. guards: all that are open; one more than `most` is ended at once, or one of the range of
    addresses that has most, if that has more than this one's would: behind a proxy all are of one."""

    def __init__(self, make: Callable[[], asyncio.Protocol], guards: "set[Guard]", most: int = MAX_CONNECTIONS) -> None:
        self._make = make
        self._guards = guards
        self._most = most
        self._inner: asyncio.Protocol | None = None
        self._transport: asyncio.Transport | None = None
        self._head = bytearray()
        self._more_bytes = 0
        self._is_asked = False
        self.until_s = float("inf")  # of the loop's clock; cut then
        self.place = ""

    def cut(self) -> None:
        """Ends it now; what is not sent yet is not sent."""
        if self._transport is not None:
            self._transport.abort()

    def stay(self) -> None:
        """It is a stream, which has no end of its own."""
        self.until_s = float("inf")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        remote = transport.get_extra_info("peername")
        self.place = place_of(str(remote[0])) if remote else ""
        if len(self._guards) >= self._most:
            oldest_first = sorted(self._guards, key=lambda each: each.until_s)
            if (crowding := to_give_up({each: each.place for each in oldest_first}, self.place)) is None:
                self._transport.abort()
                return
            self._guards.discard(crowding)
            crowding.cut()
        self._guards.add(self)
        self.until_s = asyncio.get_running_loop().time() + CONNECTION_S
        self._transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)
        self._inner = self._make()
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._inner is None:
            return
        if self._is_asked:
            self._more_bytes += len(data)
            if self._more_bytes > MAX_MORE_BYTES:
                self.cut()
            return
        self._head = (self._head + data[: MAX_HEAD_BYTES + 1]).lstrip(b"\r\n")
        end = self._head.find(_END, 0, MAX_HEAD_BYTES)
        if end >= 0:
            self._is_asked = True
            head, self._head = bytes(self._head[: end + len(_END)]), bytearray()
            self._inner.data_received(head)
        elif len(self._head) >= MAX_HEAD_BYTES and self._transport is not None:
            self._is_asked, self._head = True, bytearray()
            self._transport.write(TOO_LARGE)
            self._transport.close()

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._inner is not None else None

    def pause_writing(self) -> None:
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._inner is not None:
            self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._guards.discard(self)
        self.until_s = float("inf")
        if self._inner is not None:
            self._inner.connection_lost(exc)
