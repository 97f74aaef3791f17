"""Links to the peers of neighbouring stages: this peer's end of linkd, the process that holds them.

The *owner* of a Link (the pipeline's thread) calls dial, hang_up, send and poll. start and restart are called by a thread
that lives as long as the Link, as linkd dies with the thread that started it (PDEATHSIG): the owner, or the main thread. A
restart by the main thread does not disturb the owner: the new linkd is started and greeted aside and handed over; the
owner's next call takes it, dials again what it had dialled, and goes on. Between LinkdEnded and that, poll waits as always,
and send says False. wake and close may be called by any thread.

linkd understands nothing of what it moves, and does not keep it: what was sent and not received when a link is lost is
lost. Frames with a body of at least SMALL_BODY_BYTES go apart from the small ones, which overtake them; each of the two
kinds keeps its order.
"""

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from dilocox_peer.errors import ProtocolError
from dilocox_peer.network.frames import Buffer, pack_header
from dilocox_peer.network.link_frames import MAX_OWNER_HEADER_BYTES, Frame, FrameKind, frame_cost
from dilocox_peer.network.linkd_process import LinkdProcess, LinkSettings, NeighbourLink
from dilocox_peer.types import LinkId

RECEIVES_PER_POLL = 256  # so that a flood from linkd does not keep poll from returning

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LinkUp:
    """Frames can be sent to it. is_at_home: they do not leave the network at home."""

    neighbour: LinkId
    is_at_home: bool = False


@dataclass(frozen=True, slots=True)
class LinkDown:
    """The link is lost, and what was under way on it in both directions."""

    neighbour: LinkId
    reason: str


@dataclass(frozen=True, slots=True)
class Arrived:
    neighbour: LinkId
    header: bytes
    body: memoryview  # writable, of a bytearray that is the receiver's own
    wire_s: float  # from the frame's first bytes at our linkd to its last


@dataclass(frozen=True, slots=True)
class LinkPing:
    """Of a ping; waits for at most one chunk of bodies in each direction, and what the kernel holds."""

    neighbour: LinkId
    seconds: float


@dataclass(frozen=True, slots=True)
class Found:
    """A libp2p peer on this network, of this run or not. Never our own."""

    neighbour: LinkId
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LinkdTraffic:
    """Bytes over TCP since this linkd began, of TLS and yamux included; about as often as a ping, while there are links."""

    received: int
    sent: int


@dataclass(frozen=True, slots=True)
class LinkdEnded:
    """All links are gone, and were reported as LinkDown before this. restart is due."""

    reason: str


LinkEvent = LinkUp | LinkDown | Arrived | LinkPing | Found | LinkdTraffic | LinkdEnded


class Link:
    def __init__(self, settings: LinkSettings, *, on_log: Callable[[str], None] = _log.info) -> None:
        self.link_id = LinkId("")
        self.addresses: tuple[str, ...] = ()
        self._settings = settings
        self._on_log = on_log
        self._ports: tuple[int, ...] = (0,) * len(settings.listen)
        self._using = threading.Lock()  # held by the owner in every call; what follows is under it
        self._linkd: LinkdProcess | None = None
        self._dialled: dict[LinkId, tuple[str, ...]] = {}
        self._pace = (0, True)  # bytes a second, and whether at home too
        self._events: list[LinkEvent] = []
        self._was_refused = False  # a send, for want of room: poll returns when there is room
        self._selector = selectors.DefaultSelector()
        self._handover = threading.Lock()
        self._fresh: LinkdProcess | None = None  # under it: started, and not yet taken by the owner
        self._is_closed = False
        self._wake_in, self._wake_out = socket.socketpair()
        for end in (self._wake_in, self._wake_out):
            end.setblocking(False)
        self._selector.register(self._wake_in, selectors.EVENT_READ)

    # The owner, or the main thread

    def start(self, timeout_s: float) -> None:
        """Starts linkd, and returns when it listens. Raises LinkFailed with a reason of one line.

        linkd dies with the thread that calls this: one that lives as long as the Link, such as its owner. Before the
        owner's first call, or after LinkdEnded (that is restart).
        """
        linkd = LinkdProcess.start(self._settings, self._ports, time.monotonic() + timeout_s, self._on_log)
        self.link_id, self.addresses, self._ports = linkd.link_id, linkd.addresses, linkd.ports
        with self._handover:
            assert self._fresh is None, "started twice"
            self._fresh = linkd
        self.wake()
        if self._is_closed:  # meanwhile
            self.close(0.0)

    def restart(self, timeout_s: float) -> None:
        """Starts linkd again after LinkdEnded: same identity, same ports where they are free. As start, else.

        The owner may poll meanwhile. It dials again what it had dialled.
        """
        self.start(timeout_s)

    # Any thread

    def wake(self) -> None:
        """Makes the poll that waits, or the next one, return."""
        with suppress(BlockingIOError, OSError):
            self._wake_out.send(b"w")

    def close(self, timeout_s: float) -> None:
        """Ends linkd, which may take timeout_s for what is queued. After it poll returns at once, and send is False."""
        deadline = time.monotonic() + timeout_s
        self._is_closed = True
        self.wake()
        with self._using:
            with self._handover:
                fresh, self._fresh = self._fresh, None
            for linkd in (self._linkd, fresh):
                if linkd is not None:
                    linkd.finish(deadline)
            self._linkd = None
            self._events.clear()
            if self._wake_in.fileno() >= 0:
                self._selector.close()
                self._wake_in.close()
                self._wake_out.close()

    @property
    def pid(self) -> int | None:
        """Of linkd, where one runs."""
        linkd = self._linkd
        return linkd.process.pid if linkd is not None else None

    # The owner

    def dial(self, neighbour: LinkId, addresses: tuple[str, ...] | list[str]) -> None:
        """Keeps a link to the neighbour from now on, at any of the addresses; again with others: these from now on."""
        with self._using:
            self._take_fresh()
            self._dialled[neighbour] = tuple(addresses)
            self._order(FrameKind.DIAL, {"n": neighbour, "a": self._dialled[neighbour]})

    def proved(self, neighbour: LinkId) -> None:
        """The neighbour has proved who it is: what it sends from now on may be as large as agreed."""
        with self._using:
            self._take_fresh()
            self._order(FrameKind.PROVED, {"n": neighbour})

    def hang_up(self, neighbour: LinkId) -> None:
        """Ends the link, whoever made it, and keeps none any more. The other side may dial again."""
        with self._using:
            self._take_fresh()
            self._dialled.pop(neighbour, None)
            self._order(FrameKind.HANG_UP, {"n": neighbour})

    def pace(self, bytes_per_s: int, *, at_home: bool = True) -> None:
        """Each connection sends no faster from now on; 0: no limit. at_home: also those that stay in the network at home."""
        with self._using:
            self._take_fresh()
            if (bytes_per_s, at_home) != self._pace:
                self._pace = (bytes_per_s, at_home)
                self._order(FrameKind.PACE, {"r": bytes_per_s, "h": at_home})

    def send(self, neighbour: LinkId, header: bytes, body: Buffer | None = None) -> bool:
        """Queues a frame, or says False: there is no link to it, or too much waits for it already. Never blocks.

        The body must not change until it is written, which nobody tells; a tensor that is sent is not used again.
        """
        view = memoryview(body if body is not None else b"").cast("B")
        if len(header) > MAX_OWNER_HEADER_BYTES or len(view) > self._settings.max_body_bytes:
            raise ValueError(f"header of {len(header)} bytes, body of {len(view)}: more than agreed")
        with self._using:
            self._take_fresh()
            linkd = self._linkd
            link = linkd.links.get(neighbour) if linkd else None
            if linkd is None or link is None:
                return False
            cost = frame_cost(len(header), len(view))
            if link.outstanding + cost > self._settings.queue_bytes:
                self._was_refused = True
                return False
            link.outstanding += cost
            self._order(FrameKind.DATA, {"l": link.number, "h": header}, view)
            return True

    def poll(self, timeout_s: float) -> list[LinkEvent]:
        """What has happened; waits for it until timeout_s or wake, and until there is room again for what send refused.

        What send queued and the socket did not take at once goes out while poll waits.
        """
        deadline = time.monotonic() + timeout_s
        with self._using:
            while not self._is_closed:
                self._take_fresh()
                wait_s = 0.0 if self._events else max(0.0, deadline - time.monotonic())
                is_over = self._turn(wait_s)
                if self._events or is_over or time.monotonic() >= deadline:
                    break
            events, self._events = self._events, []
            return events

    # Under self._using

    def _take_fresh(self) -> None:
        with self._handover:
            linkd, self._fresh = self._fresh, None
        if linkd is None:
            return
        if self._linkd is not None:  # restarted before poll had noticed the end of the last one
            self._lost(self._linkd)
        self._linkd = linkd
        self._selector.register(linkd.sock, selectors.EVENT_READ)
        self._selector.register(linkd.stderr_fd, selectors.EVENT_READ)
        if self._pace[0]:
            self._order(FrameKind.PACE, {"r": self._pace[0], "h": self._pace[1]})
        for neighbour, addresses in self._dialled.items():
            self._order(FrameKind.DIAL, {"n": neighbour, "a": addresses})
        for frame in linkd.early:
            self._on_frame(linkd, frame)

    def _turn(self, wait_s: float) -> bool:
        """Waits once and handles what there is. True if poll should return although there is no event."""
        is_over = False
        for key, mask in self._selector.select(wait_s):
            linkd = self._linkd
            if key.fileobj is self._wake_in:
                with suppress(BlockingIOError):
                    self._wake_in.recv(4096)
                is_over = True
            elif linkd is None:
                continue
            elif key.fd == linkd.stderr_fd:
                if not linkd.read_lines():
                    self._selector.unregister(key.fd)
            else:
                if mask & selectors.EVENT_WRITE:
                    self._flush(linkd)
                if mask & selectors.EVENT_READ:
                    is_over |= self._receive(linkd)
        return is_over

    def _order(self, kind: FrameKind, header: dict[str, object], body: memoryview | None = None) -> None:
        linkd = self._linkd
        if linkd is None:
            return
        was_idle = not linkd.out
        linkd.out.append(memoryview(pack_header(kind, header, len(body) if body else 0)))
        if body:
            linkd.out.append(body)
        if was_idle:
            self._flush(linkd)

    def _flush(self, linkd: LinkdProcess) -> None:
        with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):  # its end is read in poll
            while linkd.out:
                linkd.write()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if linkd.out else 0)
        if self._selector.get_key(linkd.sock).events != events:
            self._selector.modify(linkd.sock, events)

    def _receive(self, linkd: LinkdProcess) -> bool:
        had_refused = self._was_refused
        try:
            for _ in range(RECEIVES_PER_POLL):
                received = linkd.sock.recv_into(linkd.reader.space())
                if not received:
                    self._lost(linkd)
                    break
                for frame in linkd.reader.take(received):
                    self._on_frame(linkd, frame)
        except BlockingIOError:
            pass
        except (OSError, ProtocolError):
            self._lost(linkd)
        return had_refused and not self._was_refused

    def _on_frame(self, linkd: LinkdProcess, frame: Frame) -> None:
        header = frame.header
        if frame.kind == FrameKind.LINKED:
            link = NeighbourLink(LinkId(header["n"]), header["l"])
            linkd.links[link.neighbour] = linkd.by_number[link.number] = link
            self._events.append(LinkUp(link.neighbour, header["h"]))
            return
        if frame.kind == FrameKind.FOUND:
            self._events.append(Found(LinkId(header["n"]), tuple(header["a"])))
            return
        if frame.kind == FrameKind.TRAFFIC:
            self._events.append(LinkdTraffic(header["r"], header["s"]))
            return
        if frame.kind == FrameKind.FAILED:
            return  # the end of the socket follows
        link = linkd.by_number[header["l"]]
        match frame.kind:
            case FrameKind.DATA:
                body = memoryview(frame.parts[0] if frame.parts else b"")
                self._events.append(Arrived(link.neighbour, header["h"], body, header["w"]))
            case FrameKind.CREDIT:
                link.outstanding -= header["b"]
                self._was_refused = False
            case FrameKind.ROUND_TRIP:
                self._events.append(LinkPing(link.neighbour, header["s"]))
            case FrameKind.UNLINKED:
                del linkd.links[link.neighbour], linkd.by_number[link.number]
                self._was_refused = False
                self._events.append(LinkDown(link.neighbour, header["reason"]))
            case other:
                raise AssertionError(f"linkd sent a frame of kind {other}")

    def _lost(self, linkd: LinkdProcess) -> None:
        """linkd has ended: reports every link as lost, then that."""
        self._linkd = None
        self._selector.unregister(linkd.sock)
        with suppress(KeyError):
            self._selector.unregister(linkd.stderr_fd)
        reason = linkd.reap()
        self._events += [LinkDown(neighbour, reason) for neighbour in linkd.links]
        self._events.append(LinkdEnded(reason))
