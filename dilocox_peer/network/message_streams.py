"""Messages between two peers on one stream each way that stays open: a call of p2pd's for each message costs ten times its bytes in
negotiation, and a task and a dozen wake-ups at both ends.

`MessageLines` sends: a line to each peer, opened at need, what waits for a peer in one batch. `MessageIntake` takes what comes: counted by
the doors before it is read, and with the right to speak checked before it is decoded.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from dilocox_peer.errors import PeerUnavailable, ProtocolError
from dilocox_peer.network.bulk import PeerGone, PeerSilent
from dilocox_peer.network.message_answers import (
    ANSWER_S,
    NOTHING_TOLD,
    UNASKED,
    AnswersOwed,
    Asking,
    num_answered,
)
from dilocox_peer.network.message_frames import (
    ANSWER_HEAD_BYTES,
    HEAD_BYTES,
    NUMBERS,
    BatchHead,
    Told,
    join_batch,
    read_answer_head,
    read_head,
    split_answer,
)
from dilocox_peer.network.message_packing import Packer, Unpacker
from dilocox_peer.types import PeerId

IDLE_S = 60.0  # without a message a line is closed
KEPT_S = 2 * IDLE_S  # and given up by who listens
STALL_S = 30.0  # for a batch to come whole, once it has begun, and for its answer to be taken
MAX_LINES = 256  # to others; the longest idle is closed for another
MAX_STREAMS, MAX_STREAMS_OF_STRANGERS = 256, 96  # of others; of strangers the longest idle makes room
MAX_STREAMS_PER_PEER = 2  # a new one of a peer whose last broke unseen
LARGE_BYTES = 64 * 1024
LARGE_AT_ONCE = 8  # batches beyond that in memory, of strangers and of members each
LARGE_S = 2.0  # after which one that is not whole makes room for another; who sends waits for SEND_TIMEOUT_S, of which this is less than half
MAX_AWAITED = 64  # batches on one line without an answer
PIECE_BYTES = 64 * 1024
REFUSED_S = 0.02  # after a batch that is refused the next is read: what fills a buffer of them has the loop for no longer than one of these takes

OpenStream = Callable[[PeerId], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
AdmitMessages = Callable[[PeerId, int, int], str | None]
"""Why so many messages, of so many bytes in all, of a peer are not looked at; None: they are, and count."""
TakeMessage = Callable[[PeerId, bytes], str]
"""Why a message is not taken; empty: it is."""
TellTaken = Callable[[PeerId], Told]
"""What to tell a peer of its batches, along with a batch to it."""


class _MessageLine:
    """To one peer. number: of the stream, in what both ends say of it."""

    def __init__(
        self,
        peer: PeerId,
        number: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        tell: TellTaken,
        on_end: Callable[["_MessageLine"], None],
    ) -> None:
        """on_end: nothing goes on it any more; what went may be lost."""
        self.peer, self.number = peer, number
        self.used_at = time.monotonic()
        self.is_over = False
        self._is_retired = False
        self._is_new, self._is_silent = True, False
        self._tell, self._on_end = tell, on_end
        self._reader, self._writer = reader, writer
        self._awaited: deque[tuple[int, asyncio.Future[list[str]]]] = deque()  # messages of a batch, and their answer
        self._told = 0  # batches that were answered, modulo NUMBERS
        self._answered = asyncio.Event()
        self._packer = Packer()
        self._task = asyncio.create_task(self._read(), name=f"line {peer[-6:]}")

    async def send(self, num_messages: int, raw: bytes) -> tuple[list[str], int]:
        """In the order of calls, after those that wait because too many were not answered; the answer, and how many bytes went for
        it. raw: the messages, joined. Raises PeerGone if the line ends before the answer, PeerSilent if it was given up as silent."""
        self.used_at = time.monotonic()
        answer: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        while len(self._awaited) >= MAX_AWAITED and not self.is_over:
            self._answered.clear()
            await self._answered.wait()
        if self.is_over:
            raise self._why_over()
        wants_answer = self._is_new or len(self._awaited) >= UNASKED
        self._is_new = False
        batch = self._packer.pack(num_messages, raw, Asking(self.number, wants_answer, self._tell(self.peer)))
        self._awaited.append((num_messages, answer))
        self._writer.write(batch)
        with suppress(OSError):  # what reads sees it too
            await self._writer.drain()
        return await answer, len(batch)

    async def _read(self) -> None:
        try:
            while True:
                try:
                    async with asyncio.timeout(IDLE_S):
                        head = await self._reader.readexactly(ANSWER_HEAD_BYTES)
                except TimeoutError:
                    if self._is_awaited() or time.monotonic() - self.used_at < IDLE_S:
                        continue  # who waits for an answer has a deadline
                    return
                num_taken, num_bytes = read_answer_head(head)
                async with asyncio.timeout(STALL_S):
                    body = await self._reader.readexactly(num_bytes)
                self.answered(num_taken, body)
        except (OSError, asyncio.IncompleteReadError, ProtocolError, asyncio.CancelledError):
            pass  # whoever waits is told below
        finally:
            self._end()

    def answered(self, num_taken: int, body: bytes = b"") -> None:
        """So many of its batches are taken. body: of the answer, of the last of them. Raises ProtocolError."""
        number = num_answered(num_taken, self._told, len(self._awaited))
        if body and not number:
            raise ProtocolError(self.peer, "an answer to what was never sent")
        reasons = split_answer(self._awaited[number - 1][0], body) if body else []
        for last in range(number, 0, -1):
            count, answer = self._awaited.popleft()
            if not answer.done():  # else nobody waits for it any more
                answer.set_result(reasons if last == 1 and reasons else [""] * count)
        if number:
            self._told = num_taken
            self._answered.set()
        if any(reasons):
            self._packer.forget()
        if self._is_retired and not self._is_awaited():
            self.close()

    def _end(self) -> None:
        if not self.is_over:
            self.is_over = True
            self._on_end(self)
        self._packer.forget()
        self._answered.set()
        self._writer.transport.abort()
        while self._awaited:
            _, answer = self._awaited.popleft()
            if not answer.done():
                answer.set_exception(self._why_over())
                answer.exception()  # retrieved: nobody may be left to do it

    def _why_over(self) -> PeerUnavailable:
        if self._is_silent:
            return PeerSilent(self.peer, "no answer to what was sent before")
        return PeerGone(self.peer, "the stream of messages ended")

    def _is_awaited(self) -> bool:
        return any(not answer.done() for _, answer in self._awaited)

    def retire(self) -> asyncio.Task[None]:
        """It ends once what was sent on it is answered."""
        self._is_retired = True
        if not self._is_awaited():
            self.close()
        return self._task

    def close(self, *, is_silent: bool = False) -> asyncio.Task[None]:
        """is_silent: for want of answers; then what else waits for one is told so, and not that nobody is there."""
        self._is_silent = is_silent
        self._task.cancel()
        self._end()  # a task that has not begun does not
        return self._task


class MessageLines:
    """`send`, and `close` in the end."""

    def __init__(self, open_stream: OpenStream, tell: TellTaken, on_lost: Callable[[PeerId], None]) -> None:
        """open_stream: to the peer's intake; raises PeerUnavailable. tell: what to tell a peer along with a batch. on_lost: what was told to
        the peer so may not have come."""
        self._open_stream = open_stream
        self._tell, self._on_lost = tell, on_lost
        self._lines: dict[PeerId, _MessageLine] = {}
        self._numbered: dict[tuple[PeerId, int], _MessageLine] = {}  # those that are not over, with the retired ones
        self._next_number = 1
        self._opening: dict[PeerId, asyncio.Lock] = {}
        self._num_waiting: dict[PeerId, int] = {}
        self._ended: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def send(self, peer: PeerId, messages: Sequence[bytes], timeout_s: float) -> tuple[list[str], int]:
        """Why each of these messages is not taken; empty: it is; and how many bytes went for them. Raises PeerUnavailable, PeerSilent after timeout_s. A line that was open
        and ends before the answer is opened once more: messages may come twice then. Raises ValueError for more than a batch may have."""
        raw = join_batch(messages)
        line: _MessageLine | None = None
        try:
            async with asyncio.timeout(timeout_s):
                line, is_new = await self._line_to(peer)
                try:
                    return await line.send(len(messages), raw)
                except PeerGone:
                    if is_new:
                        raise
                    line, _ = await self._line_to(peer)
                    return await line.send(len(messages), raw)
        except TimeoutError:
            if line is not None and self._lines.get(peer) is line:  # it may lead nowhere
                del self._lines[peer]
                self._keep_till_ended(line.close(is_silent=True))
            raise PeerSilent(peer, f"no answer within {timeout_s:g} s") from None

    def taken(self, peer: PeerId, told: Told) -> None:
        """The peer has told of batches on a line to it."""
        if told.line and (line := self._numbered.get((peer, told.line))) is not None:
            line.answered(told.num_taken)

    def renew(self, peers: Collection[PeerId]) -> None:
        """The next messages to these peers go on new lines; what is under way is still answered."""
        for peer in peers:
            if (line := self._lines.pop(peer, None)) is not None:
                self._keep_till_ended(line.retire())

    def drop(self, peers: Collection[PeerId]) -> None:
        """As `renew`, and what is under way is not waited for."""
        for peer in peers:
            if (line := self._lines.pop(peer, None)) is not None:
                self._keep_till_ended(line.close())

    def close(self) -> set[asyncio.Task[None]]:
        """Gives back the tasks that end now."""
        self._is_closed = True
        self.drop(list(self._lines))
        for task in self._ended:
            task.cancel()
        return set(self._ended)

    async def _line_to(self, peer: PeerId) -> tuple[_MessageLine, bool]:
        """And whether it was opened for this."""
        if (line := self._lines.get(peer)) is not None and not line.is_over:
            return line, False
        lock = self._opening.setdefault(peer, asyncio.Lock())
        self._num_waiting[peer] = self._num_waiting.get(peer, 0) + 1
        try:
            async with lock:
                if (line := self._lines.get(peer)) is not None and not line.is_over:
                    return line, True
                reader, writer = await self._open_stream(peer)
                if self._is_closed:
                    writer.transport.abort()
                    raise PeerGone(peer, "the transport is closed")
                self.drop([peer])
                while len(self._lines) >= MAX_LINES:
                    self.drop([min(self._lines.values(), key=lambda each: each.used_at).peer])
                number = self._next_number
                self._next_number = number % (NUMBERS - 1) + 1
                line = _MessageLine(peer, number, reader, writer, self._tell, self._over)
                self._lines[peer] = self._numbered[peer, number] = line
                return line, True
        finally:
            self._num_waiting[peer] -= 1
            if not self._num_waiting[peer]:
                del self._num_waiting[peer], self._opening[peer]

    def _over(self, line: _MessageLine) -> None:
        if self._numbered.get((line.peer, line.number)) is line:
            del self._numbered[line.peer, line.number]
        self._on_lost(line.peer)

    def _keep_till_ended(self, task: asyncio.Task[None]) -> None:
        self._ended.add(task)
        task.add_done_callback(self._ended.discard)


async def _next_head(stream: "_Stream", reader: asyncio.StreamReader) -> bytes:
    """What waits to be answered is, if no batch goes the other way meanwhile."""
    if stream.owed.num_owed:
        with suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                return await reader.readexactly(HEAD_BYTES)
        if (answer := stream.owed.due()) is not None:
            stream.writer.write(answer)
    async with asyncio.timeout(KEPT_S):
        return await reader.readexactly(HEAD_BYTES)


@dataclass(slots=True, eq=False)
class _Stream:
    peer: PeerId
    is_stranger: bool
    task: asyncio.Task[Any]
    writer: asyncio.StreamWriter
    used_at: float = field(default_factory=time.monotonic)
    owed: AnswersOwed = field(default_factory=AnswersOwed)


class MessageIntake:
    """`on_stream` for each stream that a peer opens; `end` in the end. `tell` and `tell_again` for who sends to the peers."""

    def __init__(
        self,
        admit: AdmitMessages,
        take: TakeMessage,
        is_stranger: Callable[[PeerId], bool],
        on_malformed: Callable[[PeerId, bool], None],
        on_bytes: Callable[[int], None],
        on_told: Callable[[PeerId, Told], None],
    ) -> None:
        """on_malformed: told of who sent what cannot be read, and whether for its size. on_bytes: of each batch, as it came. on_told: a peer
        tells of batches that were sent to it."""
        self._admit = admit
        self._take = take
        self._is_stranger = is_stranger
        self._on_malformed = on_malformed
        self._on_bytes = on_bytes
        self._on_told = on_told
        self._streams: list[_Stream] = []
        self._large = {False: asyncio.Semaphore(LARGE_AT_ONCE), True: asyncio.Semaphore(LARGE_AT_ONCE)}
        self._large_since: dict[_Stream, float] = {}  # those that have a place there, the longest first
        self._is_over = False

    def end(self) -> set[asyncio.Task[Any]]:
        """Nothing is taken any more. Gives back the tasks that end now."""
        self._is_over = True
        for stream in self._streams:
            stream.task.cancel()
        return {stream.task for stream in self._streams}

    async def on_stream(self, peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """In a task that does nothing else."""
        task = asyncio.current_task()
        assert task is not None
        stream = _Stream(peer, self._is_stranger(peer), task, writer)
        if self._is_over or not self._make_room(stream):
            writer.transport.abort()
            return
        self._streams.append(stream)
        unpacker = Unpacker()
        try:
            while True:
                raw = await _next_head(stream, reader)
                stream.used_at, stream.is_stranger = time.monotonic(), self._is_stranger(peer)
                head = self._read_head(peer, raw)
                self._on_told(peer, head.told)
                async with asyncio.timeout(STALL_S):
                    reasons = await self._reasons(stream, head, unpacker, reader)
                    if (answer := stream.owed.took(head, reasons)) is not None:
                        writer.write(answer)
                        await writer.drain()
                if any(reasons):
                    await asyncio.sleep(REFUSED_S)
        except (OSError, asyncio.IncompleteReadError, ProtocolError):  # TimeoutError is an OSError
            pass
        except asyncio.CancelledError:
            pass  # this is all that the task does, and Python 3.11 prints a traceback for a stream's cancelled handler
        finally:
            writer.transport.abort()
            if stream in self._streams:
                self._streams.remove(stream)

    def _read_head(self, peer: PeerId, raw: bytes) -> BatchHead:
        try:
            return read_head(raw)
        except ProtocolError:
            self._on_malformed(peer, True)
            raise

    def tell(self, peer: PeerId) -> Told:
        """What a batch to the peer takes along: of its batches that wait for an answer, on the stream it opened last."""
        streams = [stream for stream in self._streams if stream.peer == peer]
        return (streams[-1].owed.ride() if streams else None) or NOTHING_TOLD

    def tell_again(self, peer: PeerId) -> None:
        """What went along to the peer may be lost."""
        for stream in self._streams:
            if stream.peer == peer and (answer := stream.owed.again()) is not None:
                stream.writer.write(answer)

    async def _reasons(
        self, stream: _Stream, head: BatchHead, unpacker: Unpacker, reader: asyncio.StreamReader
    ) -> list[str]:
        peer = stream.peer
        reason = self._admit(peer, head.num_messages, head.num_bytes)
        if reason is None and unpacker.is_lost(head):
            reason = "what this goes on with was not looked at"
        if reason is not None:
            unpacker.forget()
            left = head.num_packed
            while left:
                left -= len(await reader.readexactly(min(left, PIECE_BYTES)))
            return [reason] * head.num_messages
        if head.num_packed > LARGE_BYTES:
            body = await self._large_body(stream, head.num_packed, reader)
        else:
            body = await reader.readexactly(head.num_packed)
        self._on_bytes(HEAD_BYTES + head.num_packed)
        try:
            messages = unpacker.unpack(head, body)
        except ProtocolError:
            self._on_malformed(peer, False)
            raise
        return [self._take(peer, message) for message in messages]

    async def _large_body(self, stream: _Stream, num_bytes: int, reader: asyncio.StreamReader) -> bytes:
        places = self._large[stream.is_stranger]
        await self._place(places, stream.is_stranger)
        try:
            self._large_since[stream] = time.monotonic()
            return await reader.readexactly(num_bytes)
        finally:
            self._large_since.pop(stream, None)
            places.release()

    async def _place(self, places: asyncio.Semaphore, is_stranger: bool) -> None:
        """Waits for one. Of those that hold one the first to have held it for LARGE_S is ended: four names that begin batches and do not
        end them would keep all pages of chains out."""
        while True:
            held = ((each, at) for each, at in self._large_since.items() if each.is_stranger == is_stranger)
            slowest, since = next(held, (None, time.monotonic()))
            with suppress(TimeoutError):
                async with asyncio.timeout(max(since + LARGE_S - time.monotonic(), 0.0)):
                    await places.acquire()
                    return
            if slowest is not None and self._large_since.pop(slowest, None) is not None:
                slowest.task.cancel()
                await asyncio.wait({slowest.task}, timeout=LARGE_S)  # its place is free then: no other has to go for it

    def _make_room(self, new: _Stream) -> bool:
        """Whether there is room for it, if need be once others are ended."""
        of_peer = [each for each in self._streams if each.peer == new.peer]
        if len(of_peer) >= MAX_STREAMS_PER_PEER:
            self._put_out(of_peer)
        strangers = [each for each in self._streams if each.is_stranger]
        if new.is_stranger and len(strangers) >= MAX_STREAMS_OF_STRANGERS:
            self._put_out(strangers)
        elif len(self._streams) >= MAX_STREAMS:
            if not strangers:
                return False
            self._put_out(strangers)
        return True

    def _put_out(self, streams: Sequence[_Stream]) -> None:
        """Ends the one of these that was idle longest."""
        idle = min(streams, key=lambda each: each.used_at)
        self._streams.remove(idle)
        idle.task.cancel()
