"""One request and one large reply on a byte stream, with a deadline on everything.

A fetch is REQUEST (header) one way, then REPLY (header, raw body) and END the other way, or REFUSAL (reason) instead. An END may say that
the next REQUEST is waited for on the same stream. While a body comes, its receiver acknowledges: 8 bytes, big-endian, say how many have
come; flow.py says what follows from it. The stream of a killed peer ends without an error, so a reply counts only with its announced length
and its END. Nothing here knows what carries the stream; transport.py brings hivemind's.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from dilocox_peer.errors import PeerUnavailable, ProtocolError
from dilocox_peer.network.flow import Flow
from dilocox_peer.network.frames import PREFIX_BYTES, Buffer, Prefix, pack_header, unpack_header, unpack_prefix
from dilocox_peer.types import PeerId

REQUEST: Final = 1
REPLY: Final = 2
END: Final = 3
REFUSAL: Final = 4
OPEN: Final = "open"  # in an END: the stream stays open

CHUNK_BYTES = 512 * 1024  # fastest of 64 KiB, 512 KiB, 2 MiB over p2pd [m]
MAX_REASON_CHARS = 300
JOINED_BYTES = 64 * 1024  # that are copied to go in one write
RECEIPT_BYTES = 8
# Of one body, and one more for so many bytes of it: an honest receiver tells of each piece that it reads.
MOST_RECEIPTS, BYTES_A_RECEIPT = 1024, 256
RECEIPTS_AT_ONCE = 64
LOOK_S = 0.1
HEARD_S = 5.0  # for the other to read what was said last
MAX_UNREAD_BYTES = 64 * 1024  # that it may still send
MAX_RECEIPTS_BYTES = 64 * 1024  # that wait to be sent; of a sender that reads none of them no more are kept

Permit = Callable[[int], Awaitable[None]]
"""Returns when so many bytes may be sent."""

ChunkSize = Callable[[], int]
"""Bytes that should be sent at a time, by now."""

Take = Callable[[bytes], Awaitable[bool]]
"""Is given a body piece by piece as it comes; False: no more is wanted."""


class PeerGone(PeerUnavailable):
    """Nobody is there: the connection was refused or broke. Known at once, so no use in waiting."""


class PeerRefusing(PeerGone):
    """Its computer answers, and refuses the connection: the process has ended."""


class PeerSilent(PeerUnavailable):
    """Nothing came before the deadline: slow, frozen, or behind a dead link."""


class RequestRefused(PeerUnavailable):
    """The peer is there and does not serve this: another run, not ready, too busy, or it has not what was asked for."""


class TransportDown(PeerUnavailable):
    """Not the peer's fault: this process's own p2pd has ended. See Transport.wait_for_failure."""


@dataclass(frozen=True, slots=True)
class Streamed:
    """A body that is read while it is sent. pieces() gives exactly num_bytes; what it raises ends the stream early."""

    num_bytes: int
    pieces: Callable[[], AsyncIterator[Buffer]]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Reply:
    """What a handler serves. The body's buffers are sent one after another and not copied; do not change them meanwhile."""

    header: dict[str, Any]
    body: Sequence[Buffer] | Streamed = ()
    is_urgent: bool = False  # a round waits for it

    @property
    def body_bytes(self) -> int:
        if isinstance(self.body, Streamed):
            return self.body.num_bytes
        return sum(memoryview(part).nbytes for part in self.body)

    async def parts(self) -> AsyncIterator[Buffer]:
        """The body's buffers, one after another."""
        if isinstance(self.body, Streamed):
            async for part in self.body.pieces():
                yield part
        else:
            for part in self.body:
                yield part


async def send_request(writer: asyncio.StreamWriter, header: dict[str, Any]) -> None:
    writer.write(pack_header(REQUEST, header, 0))
    await writer.drain()


async def receive_request(reader: asyncio.StreamReader) -> dict[str, Any]:
    """The header of a REQUEST. Raises ProtocolError, IncompleteReadError."""
    prefix, header = await _receive_head(reader, max_body_bytes=0)
    if prefix.kind != REQUEST:
        raise ProtocolError(None, f"frame of kind {prefix.kind} in place of a request")
    return header


async def discard_request(reader: asyncio.StreamReader) -> None:
    """Takes a REQUEST off the stream, of somebody who is refused whatever it is; its header is not decoded. Raises
    ProtocolError, IncompleteReadError."""
    prefix = unpack_prefix(await reader.readexactly(PREFIX_BYTES), max_body_bytes=0)
    await reader.readexactly(prefix.header_bytes)


async def send_refusal(writer: asyncio.StreamWriter, reason: str) -> None:
    writer.write(pack_header(REFUSAL, {"reason": reason[:MAX_REASON_CHARS]}, 0))
    await writer.drain()


async def until_heard(reader: asyncio.StreamReader) -> None:
    """Until the other end has closed the stream; HEARD_S at most. For whoever has said the last words, before closing: p2pd may reset a
    stream while it closes it, and a reset drops what the other p2pd has not handed on yet."""
    left = MAX_UNREAD_BYTES
    with suppress(OSError):  # TimeoutError is one
        async with asyncio.timeout(HEARD_S):
            while left > 0 and (data := await reader.read(left)):
                left -= len(data)


async def send_reply(
    writer: asyncio.StreamWriter,
    reply: Reply,
    *,
    chunk_bytes: ChunkSize,
    pace: Permit,
    stall_timeout_s: float,
    receipts: "Receipts | None" = None,
    stays_open: bool = False,
) -> None:
    """Sends all of reply. receipts: of what has come; None: nothing waits for them. stays_open: the next request may follow.

    Raises TimeoutError when a chunk is not taken, or nothing acknowledged, in stall_timeout_s, ConnectionError."""
    # The head goes with the first piece and the end with the last, where they are short: each write is a packet or two of the line's.
    ahead, num_left = pack_header(REPLY, reply.header, reply.body_bytes), reply.body_bytes
    end = pack_header(END, {OPEN: True} if stays_open else {}, 0)
    async for part in reply.parts():
        view = memoryview(part).cast("B")
        while view.nbytes:
            most = chunk_bytes() if receipts is None else min(chunk_bytes(), receipts.flow.piece_bytes)
            chunk, view = view[:most], view[most:]
            num_left -= chunk.nbytes
            await pace(chunk.nbytes)
            async with asyncio.timeout(stall_timeout_s):
                if receipts is not None:
                    await receipts.room_for(chunk.nbytes)
                behind = b"" if num_left else end
                pieces: tuple[Buffer, ...] = (ahead, chunk, behind)
                for piece in [b"".join(pieces)] if chunk.nbytes <= JOINED_BYTES else pieces:
                    writer.write(piece)
                await writer.drain()
            ahead = b""
    async with asyncio.timeout(stall_timeout_s):
        if ahead:  # of no bytes
            writer.write(ahead + end)
            await writer.drain()
        if receipts is not None:
            await receipts.all_in()


class Receipts:
    """What the receiver of one reply acknowledges. `async with`, around the sending. num_sent: bytes of its body so far."""

    def __init__(
        self, reader: asyncio.StreamReader, flow: Flow, on_received: Callable[[int], None], *, num_bytes: int
    ) -> None:
        """flow: to this peer; streams share it. on_received: told how many bytes more have come. num_bytes: of the whole body; once they have
        come nothing more is read, as the next request may follow."""
        self.flow = flow
        self._reader = reader
        self._on_received = on_received
        self._num_bytes = num_bytes
        self._sent: deque[tuple[int, float]] = deque()  # (bytes of the body up to here, when), not acknowledged
        self.num_sent, self._acknowledged = 0, 0
        self._changed = asyncio.Event()
        self._is_over = False
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Receipts":
        self._task = asyncio.create_task(self._read(), name="receipts")
        self.flow.opened()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        assert self._task is not None
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self.flow.closed(self.num_sent - self._acknowledged)

    @property
    def are_complete(self) -> bool:
        """Whether all of the body has come."""
        return self._acknowledged >= self._num_bytes

    async def room_for(self, num_bytes: int) -> None:
        """Waits until so many may be on their way, and counts them. Raises ConnectionResetError: the receiver is gone."""
        while not self.flow.may_send(num_bytes, time.monotonic(), of_stream=self.num_sent - self._acknowledged):
            await self._change()
        self.num_sent += num_bytes
        self._sent.append((self.num_sent, time.monotonic()))
        self.flow.sent(num_bytes, self._sent[-1][1])

    async def all_in(self) -> None:
        """Waits until all has come, or the receiver, who may want no more of it, is gone."""
        with suppress(ConnectionResetError):
            while self._acknowledged < self.num_sent:
                await self._change()

    async def _change(self) -> None:
        if self._is_over:
            raise ConnectionResetError("the receiver is gone")
        self._changed.clear()
        with suppress(TimeoutError):  # room may come of what others do: it is looked for now and then
            async with asyncio.timeout(LOOK_S):
                await self._changed.wait()

    async def _read(self) -> None:
        num_receipts = 0
        try:
            while self._acknowledged < self._num_bytes:
                total = int.from_bytes(await self._reader.readexactly(RECEIPT_BYTES), "big")
                num_receipts += 1
                if num_receipts > MOST_RECEIPTS + self.num_sent // BYTES_A_RECEIPT:
                    raise ConnectionResetError("more receipts than pieces can have come")
                if num_receipts % RECEIPTS_AT_ONCE == 0:
                    await asyncio.sleep(0)  # those that are here already are read without a pause
                now_s, come, sent_s = time.monotonic(), self._acknowledged, 0.0
                if total > self.num_sent:
                    continue  # not of this body
                while self._sent and self._sent[0][0] <= total:
                    come, sent_s = self._sent.popleft()
                if come > self._acknowledged:  # else in the middle of a piece
                    self.flow.acknowledged(come - self._acknowledged, now_s - sent_s, now_s)
                    self._on_received(come - self._acknowledged)
                    self._acknowledged = come
                    self._changed.set()
        except (asyncio.IncompleteReadError, OSError):
            self._is_over = True
            self._changed.set()


class Acknowledging:
    """Tells the sender of a body, as far as it hears it, how many bytes have come. is_told: the last time it could."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.is_told = True

    def __call__(self, total: int) -> None:
        self.is_told = self._writer.transport.get_write_buffer_size() < MAX_RECEIPTS_BYTES
        if self.is_told:
            self._writer.write(total.to_bytes(RECEIPT_BYTES, "big"))


async def receive_reply(
    reader: asyncio.StreamReader,
    peer: PeerId,
    *,
    max_body_bytes: int,
    stall_timeout_s: float,
    on_bytes: Callable[[int], None],
    pace: Permit | None = None,
    take: Take | None = None,
    tell: Callable[[int], None] = lambda _total: None,
    stays_open: Callable[[], None] = lambda: None,
) -> tuple[dict[str, Any], bytearray]:
    """Header and whole body of peer's reply. on_bytes(number) after every piece; pace: waited for after it; then tell(bytes so far). take: gets the
    pieces, and the body given back is empty; when it wants no more, the rest of the reply is not read. stays_open: called at the end if the next request
    may follow.

    Raises PeerGone when the stream ends early, PeerSilent when nothing comes for stall_timeout_s, RequestRefused, and
    ProtocolError for a reply above max_body_bytes (known before memory is taken) or no reply at all.
    """
    received, total = 0, 0
    try:
        async with asyncio.timeout(stall_timeout_s):
            prefix, header = await _receive_head(reader, max_body_bytes=max_body_bytes)
        if prefix.kind == REFUSAL:
            raise RequestRefused(peer, str(header.get("reason", "no reason given"))[:MAX_REASON_CHARS])
        if prefix.kind != REPLY:
            raise ProtocolError(peer, f"frame of kind {prefix.kind} in place of a reply")
        total = prefix.body_bytes
        body = bytearray(total if take is None else 0)
        while received < total:
            async with asyncio.timeout(stall_timeout_s):
                piece = await reader.read(min(CHUNK_BYTES, total - received))
            if not piece:
                raise PeerGone(peer, f"the stream ended after {received} of {total} bytes")
            if take is None:
                body[received : received + len(piece)] = piece
            received += len(piece)
            on_bytes(len(piece))
            if pace is not None:
                await pace(len(piece))
            goes_on = take is None or await take(piece)
            tell(received)
            if not goes_on:
                return header, body
        async with asyncio.timeout(stall_timeout_s):
            end, said = await _receive_head(reader, max_body_bytes=0)
    except TimeoutError:
        raise PeerSilent(peer, f"nothing for {stall_timeout_s:g} s after {received} of {total} bytes") from None
    except (asyncio.IncompleteReadError, ConnectionError):
        raise PeerGone(peer, f"the stream ended after {received} of {total} bytes, without its end mark") from None
    except ProtocolError as error:
        raise ProtocolError(peer, error.reason) from None
    if end.kind != END:
        raise ProtocolError(peer, f"frame of kind {end.kind} in place of the end mark")
    if said.get(OPEN) is True:
        stays_open()
    return header, body


async def _receive_head(reader: asyncio.StreamReader, *, max_body_bytes: int) -> tuple[Prefix, dict[str, Any]]:
    prefix = unpack_prefix(await reader.readexactly(PREFIX_BYTES), max_body_bytes=max_body_bytes)
    return prefix, unpack_header(await reader.readexactly(prefix.header_bytes))
