"""One link inside linkd: its connections are read, its queues written, until one of these fails. Needs trio, not libp2p.

    small ──▶ control stream     frames with a small body or none, pings, pongs; many in one write
    bulk  ──▶ bulk stream        bodies, in chunks of one yamux frame
    ParentQueue ◀── both streams of every session

A session (StreamPair) is a connection with its two streams; a link has one, or two when both sides dialled at once: the first is written
to, all are read. Whatever goes wrong ends the link as a whole: `end` closes the sockets, by which shielded writes end.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import trio

from dilocox_peer.errors import ProtocolError
from dilocox_peer.network.frames import MAX_HEADER_BYTES, Buffer, pack_header
from dilocox_peer.network.link_frames import (
    CREDIT_SHARE,
    MAX_UNPROVED_BYTES,
    SMALL_BODY_BYTES,
    ChunkReader,
    Frame,
    FrameKind,
    frame_cost,
    header_field,
    rest_of,
)
from dilocox_peer.token_bucket import TokenBucket

CHUNK_BYTES = 64 * 1024 - 12  # with its header exactly one yamux frame, and four TLS records
READ_BYTES = 256 * 1024
LAST_READ_S = 1.0  # for one of two streams to be read to its end when the other has ended
GATHER_PARTS = 64  # buffers in one sendmsg; the kernel takes 1024
BATCH_BYTES = 64 * 1024  # of frames handed to the parent in one sendmsg, at least one frame
FRAMES_AT_ONCE = 64
# Pings and their answers of a neighbour, which sends one of each in two seconds; at once.
MOST_BEATS_A_S, MOST_BEATS = 8.0, 64.0
MAX_UNTOLD = 1000  # frames for a parent that does not take any; beyond these it is told no round trips


class LinkLost(Exception):
    """The reason, for the parent."""


class Stream(Protocol):
    """What is used of a stream of yamux. Its write must not be cancelled; its read may be, and fails or is empty at the end."""

    async def read(self, n: int) -> bytes: ...
    async def write(self, data: Buffer) -> None: ...
    async def close(self) -> None: ...


@dataclass(eq=False)
class StreamPair:
    """A connection with its two streams, by role: "control" and "bulk"."""

    conn: Any  # the host's
    abort: Callable[[], None]  # closes it; again is harmless
    streams: dict[str, Stream] = field(default_factory=dict)
    readers: dict[str, ChunkReader] = field(default_factory=dict)
    early: dict[str, list[Frame]] = field(default_factory=dict)  # came with the hello
    generation: int = 0  # ours, as told in it
    is_decided: trio.Event = field(default_factory=trio.Event)  # it is part of a link, or refused
    one_ended: trio.Event = field(default_factory=trio.Event)  # of its streams
    both_ended: trio.Event = field(default_factory=trio.Event)
    over: trio.Event = field(default_factory=trio.Event)

    def add(self, role: str, stream: Stream, reader: ChunkReader, early: list[Frame]) -> None:
        self.streams[role], self.readers[role], self.early[role] = stream, reader, early

    def allow(self, max_body_bytes: int) -> None:
        """Of frames that begin from now on, with headers as large as any."""
        for reader in self.readers.values():
            reader.max_body_bytes, reader.max_header_bytes = max_body_bytes, MAX_HEADER_BYTES

    @property
    def is_complete(self) -> bool:
        return self.streams.keys() == {"control", "bulk"}


class ParentQueue:
    """What waits for the parent, in order."""

    def __init__(self) -> None:
        self._frames: deque[tuple[list[Buffer], LinkStreams | None, int]] = deque()
        self._due = trio.Event()
        self.cost_bytes = 0  # of the frames of neighbours

    def tell(self, kind: FrameKind, header: dict[str, Any]) -> None:
        self._frames.append(([pack_header(kind, header, 0)], None, 0))
        self._due.set()

    def deliver(self, parts: list[Buffer], link: "LinkStreams", cost: int) -> None:
        link.undelivered += cost
        self.cost_bytes += cost
        self._frames.append((parts, link, cost))
        self._due.set()

    def drop(self, link: "LinkStreams") -> None:
        """Forgets the frames of a link, but not what there is to tell about it."""
        self._frames = deque(entry for entry in self._frames if entry[1] is not link)
        self.cost_bytes -= link.undelivered
        link.undelivered = 0

    @property
    def is_long(self) -> bool:
        return len(self._frames) >= MAX_UNTOLD

    async def write_to(self, parent: trio.socket.SocketType) -> None:
        while True:
            buffers: list[Buffer] = []
            num_bytes = 0
            while self._frames and num_bytes < BATCH_BYTES:
                parts, link, cost = self._frames.popleft()
                buffers += parts
                num_bytes += sum(map(len, parts))
                if link is not None:  # the socket's buffer and this batch are the parent's
                    link.undelivered -= cost
                    self.cost_bytes -= cost
            if not buffers:
                self._due = trio.Event()
                await self._due.wait()
            while buffers:
                try:
                    sent = await parent.sendmsg(buffers[:GATHER_PARTS])
                except OSError:
                    return  # the parent is gone, which who reads from it notices
                buffers = rest_of(buffers, sent)


class LinkStreams:
    """From Linked to Unlinked. Limits: `queue_bytes` for what the parent queues, and for what it does not take."""

    def __init__(
        self, number: int, theirs: int, session: StreamPair, *, queue_bytes: int, outbox: ParentQueue, is_proved: bool
    ) -> None:
        """is_proved: no proof is asked of it; else `prove` says that it was given."""
        self.number = number
        self.theirs = theirs  # the other side's generation
        self.sessions = [session]
        self.undelivered = 0  # cost of what the parent has not taken
        self.reason = ""  # once it has ended
        self.began_at = trio.current_time()
        self.is_proved = is_proved
        self.over = trio.Event()
        self._queue_bytes = queue_bytes
        self._outbox = outbox
        self._small: deque[tuple[bytes, int]] = deque()  # a whole frame, its cost
        self._bulk: deque[tuple[bytes, memoryview, int]] = deque()
        self._small_due, self._bulk_due = trio.Event(), trio.Event()
        self._queued = 0  # cost of what is in the two, or being written
        self._credit = 0  # cost of what was written and not yet reported
        self._heard_at = trio.current_time()
        self._writing_since: dict[str, float] = {}
        self._ping = 0  # number of the last
        self._answered = 0  # number of the last that was
        self._beats = TokenBucket(MOST_BEATS_A_S, MOST_BEATS, trio.current_time())
        self._ping_sent_at = 0.0
        self._is_ping_due = False
        self._pong_due: int | None = None
        self._nursery: trio.Nursery | None = None

    async def run(self) -> None:
        """Ends when the link does. Its sessions are over then, and their connections closed."""
        try:
            async with trio.open_nursery() as self._nursery:
                for session in self.sessions:
                    self._start_reading(session)
                streams = self.sessions[0].streams
                self._nursery.start_soon(self._guard, partial(self._write_small, streams["control"]))
                self._nursery.start_soon(self._guard, partial(self._write_bulk, streams["bulk"]))
        finally:
            self.end("linkd ends")
            for session in self.sessions:
                session.over.set()

    def prove(self, max_body_bytes: int) -> None:
        """It is known whose link it is: frames that begin from now on may be as large as agreed."""
        self.is_proved = True
        for session in self.sessions:
            session.allow(max_body_bytes)

    def join(self, session: StreamPair) -> None:
        self.sessions.append(session)
        if self._nursery is not None:
            self._start_reading(session)

    def end(self, reason: str) -> None:
        """Gives it up. The first reason counts."""
        self.reason = self.reason or reason
        for session in self.sessions:
            session.abort()
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()

    @property
    def is_writing(self) -> bool:
        return bool(self._queued or self._writing_since)

    def queue(self, frame: Frame) -> None:
        """Takes a frame of the parent's, which knows the bound and keeps to it."""
        header: bytes = frame.header["h"]
        cost = frame_cost(len(header), frame.body_bytes)
        head = pack_header(FrameKind.FRAME, {"h": header}, frame.body_bytes)
        self._queued += cost
        assert self._queued <= self._queue_bytes, f"{self._queued} bytes queued"
        if frame.body_bytes < SMALL_BODY_BYTES:
            self._small.append((b"".join([head, *frame.parts]), cost))
            self._small_due.set()
        else:
            [body] = frame.parts
            self._bulk.append((head, memoryview(body), cost))
            self._bulk_due.set()

    # Time

    def check(self, now: float, dead_s: float) -> None:
        """Ends it if it is silent or stuck."""
        if now - self._heard_at > dead_s:
            self.end(f"silent for {now - self._heard_at:.1f} s")
        elif self._writing_since and now - min(self._writing_since.values()) > dead_s:
            self.end(f"a write took more than {dead_s:g} s")

    def excuse(self, now: float) -> None:
        """Counts no silence before now: it was we who were stopped, and what was sent meanwhile is not read yet."""
        self._heard_at = now
        self._writing_since = dict.fromkeys(self._writing_since, now)

    def ping(self) -> None:
        if not self._is_ping_due:
            self._ping += 1
            self._is_ping_due = True
            self._small_due.set()

    # Reading

    def _start_reading(self, session: StreamPair) -> None:
        assert self._nursery is not None
        for role in ("control", "bulk"):
            self._nursery.start_soon(self._guard, partial(self._read, session, role))

    async def _guard(self, task: Callable[[], Any]) -> None:
        """Runs one of the link's tasks; its failure is the link's end, and nothing else's."""
        try:
            await task()
        except Exception as error:
            self.end(one_line(error))

    async def _read(self, session: StreamPair, role: str) -> None:
        stream, reader = session.streams[role], session.readers[role]
        began_at = trio.current_time()
        for frame in session.early.pop(role, []):
            self._on_frame(frame, 0.0)
        while True:
            try:
                data = await stream.read(READ_BYTES)
            except Exception:
                data = b""  # the end of the process, of the connection and of the stream all look alike
            if not data:
                await self._end_together(session)
                raise LinkLost("the connection ended" + (" inside a frame" if reader.in_frame else ""))
            now = self._heard_at = trio.current_time()
            if not reader.in_frame:
                began_at = now
            for number, frame in enumerate(reader.feed(data), start=1):
                self._on_frame(frame, now - began_at)
                began_at = now
                if number % FRAMES_AT_ONCE == 0:
                    # A read holds ten thousand of the smallest: all neighbours wait meanwhile.
                    await trio.lowlevel.checkpoint()

    async def _end_together(self, session: StreamPair) -> None:
        """Lets the other stream be read to its end too: a neighbour that leaves ends one after the other."""
        if session.one_ended.is_set():
            session.both_ended.set()
        session.one_ended.set()
        with trio.move_on_after(LAST_READ_S):
            await session.both_ended.wait()

    def _on_frame(self, frame: Frame, wire_s: float) -> None:
        match frame.kind:
            case FrameKind.FRAME:
                owners = header_field(frame.header, "h", bytes)
                cost = frame_cost(len(owners), frame.body_bytes)
                most = self._queue_bytes if self.is_proved else MAX_UNPROVED_BYTES
                if self.undelivered + cost > most:
                    self._outbox.drop(self)
                    raise LinkLost(f"more than {most} bytes from it wait to be taken")
                head = pack_header(FrameKind.DATA, {"l": self.number, "h": owners, "w": wire_s}, frame.body_bytes)
                self._outbox.deliver([head, *frame.parts], self, cost)
            case FrameKind.PING | FrameKind.PONG if not self._beats.try_take(1.0, trio.current_time()):
                raise LinkLost(f"more than {MOST_BEATS_A_S:g} pings a second")
            case FrameKind.PING:
                self._pong_due = header_field(frame.header, "i", int)
                self._small_due.set()
            case FrameKind.PONG:
                is_last = header_field(frame.header, "i", int) == self._ping and not self._is_ping_due
                is_answered, self._answered = self._answered == self._ping, self._ping if is_last else self._answered
                if is_last and not is_answered and not self._outbox.is_long:
                    seconds = trio.current_time() - self._ping_sent_at
                    self._outbox.tell(FrameKind.ROUND_TRIP, {"l": self.number, "s": seconds})
            case other:
                raise ProtocolError(None, f"a frame of kind {other} on a link")

    # Writing

    async def _write_small(self, stream: Stream) -> None:
        while True:
            frames, cost, num_bytes = [], 0, 0
            if self._pong_due is not None:
                frames.append(pack_header(FrameKind.PONG, {"i": self._pong_due}, 0))
                self._pong_due = None
            while self._small and num_bytes < CHUNK_BYTES:
                frame, cost_bytes = self._small.popleft()
                frames.append(frame)
                num_bytes += len(frame)
                cost += cost_bytes
            if self._is_ping_due:
                frames.append(pack_header(FrameKind.PING, {"i": self._ping}, 0))
                self._is_ping_due, self._ping_sent_at = False, trio.current_time()
            if not frames:
                self._small_due = trio.Event()
                await self._small_due.wait()
                continue
            await self._write("control", stream, b"".join(frames))
            self._written(cost)

    async def _write_bulk(self, stream: Stream) -> None:
        while True:
            if not self._bulk:
                self._bulk_due = trio.Event()
                await self._bulk_due.wait()
                continue
            head, body, cost = self._bulk.popleft()
            first = CHUNK_BYTES - len(head) % CHUNK_BYTES
            await self._write("bulk", stream, b"".join([head, body[:first]]))
            for start in range(first, len(body), CHUNK_BYTES):
                await self._write("bulk", stream, body[start : start + CHUNK_BYTES])
            self._written(cost)

    async def _write(self, role: str, stream: Stream, data: Buffer) -> None:
        await trio.lowlevel.checkpoint()  # here a link's end takes effect; inside the write nothing does
        self._writing_since[role] = trio.current_time()
        try:
            with trio.CancelScope(shield=True):
                await stream.write(data)
        except Exception as error:  # the other side's end is met by who writes as often as by who reads
            raise LinkLost(f"the connection ended: {one_line(error)}") from None
        finally:
            self._writing_since.pop(role, None)

    def _written(self, cost: int) -> None:
        self._queued -= cost
        self._credit += cost
        if self._credit >= self._queue_bytes // CREDIT_SHARE:
            self._outbox.tell(FrameKind.CREDIT, {"l": self.number, "b": self._credit})
            self._credit = 0


async def first_frame(stream: Stream, reader: ChunkReader) -> tuple[Frame, list[Frame]]:
    """The first frame of a stream, and those that came with it. Raises LinkLost, ProtocolError, and what read raises."""
    while True:
        data = await stream.read(READ_BYTES)
        if not data:
            raise LinkLost("the connection ended before a hello")
        frames: Iterator[Frame] = reader.feed(data)
        for frame in frames:
            return frame, list(frames)


async def write_whole(stream: Stream, data: bytes) -> None:
    with trio.CancelScope(shield=True):
        await stream.write(data)


def say(text: str) -> None:
    """One line to the parent's log. Never blocks; lost when nobody reads."""
    with suppress(OSError):
        os.write(2, f"{text.splitlines()[0] if text else ''}\n".encode()[:4096])


def one_line(error: BaseException) -> str:
    """The root of an error, for a log line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, trio.TooSlowError):
        return "does not answer in time"
    if isinstance(error, ProtocolError):
        return error.reason
    return " ".join(str(error).split())[:300] or type(error).__name__


def new_generation(last: int) -> int:
    """Larger than the last, and than any of an earlier process of this peer while its clock does not go back."""
    return max(time.time_ns(), last + 1)
