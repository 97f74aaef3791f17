"""linkd as a child process: started until it listens, its words handed on, written to, and reaped."""

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import islice

from dilocox_peer.errors import DilocoxError, ProtocolError
from dilocox_peer.network.frames import pack_header
from dilocox_peer.network.link_frames import (
    CREDIT_SHARE,
    MAX_OWNER_HEADER_BYTES,
    BufferReader,
    Frame,
    FrameKind,
    frame_cost,
)
from dilocox_peer.types import LinkId

SOCKET_BUFFER_BYTES = 1024 * 1024  # asked for; the kernel gives what its limit allows
GATHER_PARTS = 64
MAX_LINE_BYTES = 4096
_REAP_TIMEOUT_S = 1.0
NOT_YET = LinkId("")


class LinkFailed(DilocoxError):
    """linkd did not start, for the reason: without it there is no pipeline."""


@dataclass(frozen=True, slots=True)
class LinkSettings:
    key_seed: bytes  # 32 bytes, of the link's own Ed25519 identity: one PeerID must not be p2pd's and linkd's at once
    listen: tuple[str, ...]  # like /ip4/127.0.0.1/tcp/0
    protocol: str  # libp2p protocol id, with the run's id in it: neighbours of another run are refused
    max_body_bytes: int
    queue_bytes: int  # bound of what waits for one neighbour, and of what one neighbour may make wait for us
    max_neighbours: int = 64  # links that others may make; ours are not counted
    max_unproved: int | None = (
        None  # of those, that have not proved who they are (Link.proved), and hold next to nothing; None: no proof is asked
    )
    mdns: bool = False
    ping_s: float = 2.0
    dead_s: float = 15.0  # nothing heard from a neighbour for so long, or a write stuck for so long: the link is lost

    def __post_init__(self) -> None:
        if len(self.key_seed) != 32:
            raise ValueError(f"the seed of an Ed25519 key has 32 bytes, not {len(self.key_seed)}")
        least = frame_cost(MAX_OWNER_HEADER_BYTES, self.max_body_bytes) * CREDIT_SHARE // (CREDIT_SHARE - 1) + 1
        if self.queue_bytes < least:
            raise ValueError(f"queue_bytes {self.queue_bytes} holds no frame of max_body_bytes: at least {least}")


@dataclass(slots=True)
class NeighbourLink:
    neighbour: LinkId
    number: int
    outstanding: int = 0  # cost of what was sent and not reported as written


@dataclass
class LinkdProcess:
    """A running linkd, and what is under way to it and from it."""

    process: "subprocess.Popen[bytes]"
    sock: socket.socket
    reader: BufferReader
    on_log: Callable[[str], None]
    link_id: LinkId = NOT_YET
    addresses: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    early: list[Frame] = field(default_factory=list)  # came with READY
    out: deque[memoryview] = field(default_factory=deque)
    links: dict[LinkId, NeighbourLink] = field(default_factory=dict)
    by_number: dict[int, NeighbourLink] = field(default_factory=dict)
    line: bytes = b""  # of its standard error, the last, as far as it is here
    last_line: str = ""

    @classmethod
    def start(
        cls, settings: LinkSettings, ports: tuple[int, ...], deadline: float, on_log: Callable[[str], None]
    ) -> "LinkdProcess":
        """One that listens, on these ports where they are free. Raises LinkFailed."""
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        command = [sys.executable, "-P", "-m", "dilocox_peer.network.linkd", str(theirs.fileno()), str(os.getpid())]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise LinkFailed(f"linkd cannot be run: {error}") from None
        finally:
            theirs.close()
        linkd = cls(process, ours, BufferReader(settings.max_body_bytes), on_log)
        os.set_blocking(linkd.stderr_fd, False)
        try:
            ours.sendall(pack_header(FrameKind.CONFIG, asdict(settings) | {"ports": ports}, 0))
            ours.setblocking(False)
            linkd._await_ready(deadline)
        except BaseException as error:
            process.kill()
            ended = linkd.reap()
            if isinstance(error, OSError | ProtocolError):
                raise LinkFailed(linkd.last_line or ended) from None
            raise
        return linkd

    def _await_ready(self, deadline: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self.sock, selectors.EVENT_READ)
            selector.register(self.stderr_fd, selectors.EVENT_READ)
            while True:
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise LinkFailed("linkd did not get ready in time")
                for key, _ in ready:
                    if key.fd == self.stderr_fd:
                        if not self.read_lines():
                            selector.unregister(self.stderr_fd)
                        continue
                    received = self.sock.recv_into(self.reader.space())
                    if not received:
                        ended = "ended at once"
                        try:
                            self.process.wait(max(0.1, deadline - time.monotonic()))
                        except subprocess.TimeoutExpired:
                            ended = "closed its socket and does not end"
                        self.read_lines()
                        raise LinkFailed(self.last_line or f"linkd {ended}")
                    for frame in self.reader.take(received):
                        match frame.kind:
                            case FrameKind.READY:
                                self.link_id = LinkId(frame.header["n"])
                                self.addresses = tuple(frame.header["a"])
                                self.ports = tuple(frame.header["p"])
                            case FrameKind.FAILED:
                                raise LinkFailed(frame.header["reason"])
                            case _:
                                self.early.append(frame)
                    if self.link_id:
                        return

    @property
    def stderr_fd(self) -> int:
        assert self.process.stderr is not None
        return self.process.stderr.fileno()

    def read_lines(self) -> bool:
        """Hands on what linkd said. False when it can say no more."""
        while True:
            try:
                data = os.read(self.stderr_fd, 65536)
            except BlockingIOError:
                return True
            *lines, rest = (self.line + data).split(b"\n")
            self.line = rest[:MAX_LINE_BYTES]
            if not data:
                lines.append(self.line)
                self.line = b""
            for line in filter(None, lines):
                self.last_line = line[:MAX_LINE_BYTES].decode(errors="replace")
                self.on_log(self.last_line)
            if not data:
                return False

    def reap(self) -> str:
        """Ends what is left of it, and says how it ended."""
        with suppress(OSError):
            self.sock.close()
        try:
            code = self.process.wait(_REAP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        if self.process.stderr is not None and not self.process.stderr.closed:
            self.read_lines()
            self.process.stderr.close()
        if code < 0:
            return f"linkd was ended by {signal.Signals(-code).name}"
        return f"linkd ended with {code}" + (f": {self.last_line}" if self.last_line else "")

    def write(self) -> None:
        """As much of what is queued as the socket takes. Raises BlockingIOError and other OSErrors."""
        sent = self.sock.sendmsg(list(islice(self.out, GATHER_PARTS)))
        while sent:
            first = self.out[0]
            if sent < len(first):
                self.out[0] = first[sent:]
                return
            sent -= len(first)
            self.out.popleft()

    def finish(self, deadline: float) -> None:
        """Hands over what is queued, closes the socket, which it leaves by, and reaps it."""
        with suppress(OSError):
            while self.out and (left_s := deadline - time.monotonic()) > 0:
                self.sock.settimeout(left_s)
                self.write()
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, deadline - time.monotonic()))
        self.process.kill()
        self.reap()
