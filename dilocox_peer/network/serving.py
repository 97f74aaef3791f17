"""What others fetch of us: their requests read, their replies sent, and bounds on all of it.

A member's stream stays open after a whole reply, for its next request (fetches.py), which counts and is weighed like the first of a new stream.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from dilocox_peer.admission import Right
from dilocox_peer.errors import DilocoxError, ProtocolError
from dilocox_peer.network.bandwidth import Bandwidth
from dilocox_peer.network.bulk import (
    Receipts,
    Reply,
    discard_request,
    receive_request,
    send_refusal,
    send_reply,
    until_heard,
)
from dilocox_peer.network.crowding import to_give_up
from dilocox_peer.network.doorkeeper import Budgeted, Budgets
from dilocox_peer.network.flow import Flows
from dilocox_peer.network.upload_shares import Upload
from dilocox_peer.types import PeerId

FetchHandler = Callable[[PeerId, dict[str, Any]], Awaitable[Reply]]

_REQUEST_TIMEOUT_S = 10.0
PATIENT_S = 1.0  # with a stranger that has a stream and asks nothing, when others wait
KEPT_S = 120.0  # that a stream stays open for the next request
MAX_KEPT_PER_PEER = 8  # such streams
MAX_UNHEARD = 128  # streams whose reply was sent, that wait for their fetchers to ask again or close them; more are closed at once
SLOW_AFTER_S, SLOW_BYTES_PER_S = 30.0, 8 * 1024.0  # who reads less is served while nobody waits

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TransportLimits:
    """Bounds on what others can make us do."""

    streams: int = 32  # replies being sent at once, to all peers
    streams_per_peer: int = 4  # replies being sent or waiting, to one peer
    streams_waiting: int = 128  # beyond these a stream is dropped unread
    handler_timeout_s: float = 30.0  # for a handler to produce its reply
    stall_timeout_s: float = 30.0  # for a fetcher to take one chunk
    reply_timeout_s: float = 3600.0  # for a whole reply
    allowed: Mapping[Budgeted, Budgets] = field(
        default_factory=dict
    )  # where other budgets than the doorkeeper's are to hold
    told_bytes_per_s: float = 4e6  # of pages of the chain, to all strangers together
    upload_bytes_per_s: float | None = None  # of fetched bodies and of activations, to all peers together
    download_bytes_per_s: float | None = None  # of bodies we fetch and of activations, from all peers together


@dataclass(slots=True)
class _UnderWay:
    """A request, from its stream's first byte to the reply's last. began: of the reply, once it is being sent, else of the stream."""

    peer: PeerId
    place: str
    is_stranger: bool
    began: float
    is_read: bool = False
    is_sending: bool = False
    num_bytes: int = 0  # of the reply, that were acknowledged

    def is_worth_less(self, now: float) -> bool:
        """Whether who waits for a place may have this one: nothing was asked yet, or hardly anything is taken."""
        took_s = now - self.began
        if not self.is_read:
            return took_s > PATIENT_S
        return self.is_sending and took_s > SLOW_AFTER_S and self.num_bytes < SLOW_BYTES_PER_S * took_s


@dataclass(frozen=True, slots=True)
class _ServedStream:
    """A stream of a peer's, the task that answers what is asked on it, and how."""

    task: asyncio.Task[Any]
    peer: PeerId
    kind: str
    handler: FetchHandler
    right: Right | None
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


async def _alone(peer: PeerId) -> str:
    return str(peer)


class Serving:
    """The replies that are being sent, or wait to be.

    Members (`is_member`) have half of all places to themselves: replies may be read slowly, and identities cost nothing, so
    without that eight strangers keep all contributions from all members for as long as a reply may take. A peer that has not said
    in a second what it wants, or reads next to nothing, makes room for the next: a stranger for anybody, a member for a member. Of strangers the range of
    addresses that has most makes room for one that has fewer, and no range has more than half of the replies that are sent to strangers.
    """

    def __init__(
        self,
        limits: TransportLimits,
        bandwidth: Bandwidth,
        refusal: Callable[[PeerId, Right | None], str | None],
        on_acknowledged: Callable[[PeerId], None],
        on_malformed: Callable[[PeerId], None],
        is_at_home: Callable[[PeerId], bool],
        holder: Callable[[PeerId], Awaitable[str]] = _alone,
    ) -> None:
        """holder: by whom what a stranger holds is counted, such as its range of addresses. refusal: why a peer has no answer that takes this right, or None. on_acknowledged: a peer has received more. on_malformed: what it
        sent in place of a request cannot be read. is_at_home: what goes to a peer stays in the network at home."""
        self._limits = limits
        self._bandwidth = bandwidth
        self._refusal = refusal
        self._on_acknowledged = on_acknowledged
        self._on_malformed = on_malformed
        self._is_at_home = is_at_home
        self._holder = holder
        self._free_for: dict[str, asyncio.Semaphore] = {}  # strangers of that range, as long as there are some
        self._num_from: Counter[str] = Counter()
        self._flows, self._flows_at_home = Flows(lambda: bandwidth.carries), Flows()
        self._under_way: dict[asyncio.Task[Any], _UnderWay] = {}
        self._unheard: dict[asyncio.Task[Any], PeerId] = {}
        self._free = asyncio.Semaphore(limits.streams)
        self._free_for_others = asyncio.Semaphore(limits.streams)
        self._is_member: Callable[[PeerId], bool] | None = None  # none are known: all are alike
        self._is_over = False

    def set_members(self, is_member: Callable[[PeerId], bool]) -> None:
        """From now on others than these have half of the places at most."""
        self._is_member = is_member
        self._free_for_others = asyncio.Semaphore(self._limits.streams // 2)

    def is_serving(self, peer: PeerId) -> bool:
        return any(each.peer == peer for each in self._under_way.values())

    def end(self) -> set[asyncio.Task[Any]]:
        """Nothing is answered any more. Gives back the tasks that end now."""
        self._is_over = True
        tasks = {*self._under_way, *self._unheard}
        for task in tasks:
            task.cancel()
        return tasks

    async def serve(
        self,
        peer: PeerId,
        kind: str,
        handler: FetchHandler,
        right: Right | None,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        may_ask: Callable[[], bool] = lambda: True,
    ) -> None:
        """Answers the requests on this stream. may_ask: asked and counted before each but the first. In a task that does nothing else."""
        task = asyncio.current_task()
        assert task is not None
        served = _ServedStream(task, peer, kind, handler, right, reader, writer)
        header: dict[str, Any] | None = None  # of the request, once it has been read
        try:
            while await self._take(served, header) and (header := await self._next(served)) is not None and may_ask():
                pass
        except ProtocolError:
            self._on_malformed(peer)
            writer.transport.abort()
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            writer.transport.abort()  # the fetcher is gone, frozen, or speaks something else: it sees the stream end early
        except asyncio.CancelledError:
            # Not raised again: this is all that the task does, and Python 3.11 prints a traceback for a stream's handler
            # that was cancelled.
            writer.transport.abort()
        finally:
            writer.close()
            self._under_way.pop(task, None)
            self._unheard.pop(task, None)

    async def _take(self, served: _ServedStream, header: dict[str, Any] | None) -> bool:
        """Answers one request, if there is a place for it. header: None if it was not read yet. Whether the next one is waited for. Raises as
        _respond."""
        peer = served.peer
        place = str(peer) if self._is_first(peer) else await self._holder(peer)
        num_of_peer = sum(each.peer == peer for each in self._under_way.values())
        most_of_peer = self._limits.streams_per_peer
        is_stranger = not self._is_first(peer)
        if not self._is_over and num_of_peer < most_of_peer:
            self._make_room(place, is_stranger=is_stranger)
        if self._is_over or self._is_full(is_stranger=is_stranger) or num_of_peer >= 4 * most_of_peer:
            served.writer.transport.abort()  # a flood: not even read
            return False
        mine = self._under_way[served.task] = _UnderWay(peer, place, is_stranger, time.monotonic())
        stays_open = await self._respond(mine, served, header, is_one_too_many=num_of_peer >= most_of_peer)
        self._under_way.pop(served.task, None)  # its place is free
        if not stays_open and len(self._unheard) < MAX_UNHEARD:
            self._unheard[served.task] = peer
            await until_heard(served.reader)
        return stays_open

    def _stays_open(self, served: _ServedStream) -> bool:
        """Whether the stream is kept for another request. Its place is taken from now on."""
        num_of_peer = sum(each == served.peer for each in self._unheard.values())
        if not self._is_first(served.peer) or num_of_peer >= MAX_KEPT_PER_PEER or len(self._unheard) >= MAX_UNHEARD:
            return False
        self._unheard[served.task] = served.peer
        return True

    async def _next(self, served: _ServedStream) -> dict[str, Any] | None:
        """The next request on a stream that is kept, None if there is none. Raises ProtocolError, OSError."""
        try:
            async with asyncio.timeout(KEPT_S):
                return await receive_request(served.reader)
        except (TimeoutError, asyncio.IncompleteReadError):
            return None
        finally:
            self._unheard.pop(served.task, None)

    async def _respond(
        self, asked: _UnderWay, served: _ServedStream, header: dict[str, Any] | None, *, is_one_too_many: bool
    ) -> bool:
        """Whether all of a reply was sent and the next request may follow. Raises ProtocolError, TimeoutError, OSError, IncompleteReadError."""
        reader, writer = served.reader, served.writer
        async with asyncio.timeout(_REQUEST_TIMEOUT_S):
            if (reason := self._refusal(asked.peer, served.right)) is not None:
                if header is None:
                    await discard_request(reader)
                await send_refusal(writer, reason)
                return False
            if header is None:
                header = await receive_request(reader)
            asked.is_read = True
            if is_one_too_many:
                await send_refusal(
                    writer, f"busy: at most {self._limits.streams_per_peer} fetches at once for one peer"
                )
                return False
        turn = self._turn_of(asked.place) if asked.is_stranger else nullcontext()
        async with asyncio.timeout(self._limits.reply_timeout_s), turn, self._free:
            asked.began, asked.is_sending = time.monotonic(), True
            return await self._answer(asked, served, header)

    @asynccontextmanager
    async def _turn_of(self, place: str) -> AsyncIterator[None]:
        """A stranger's. Those of a range wait for one another before they wait for the others: in one line a crowd of names would stand before everybody."""
        if self._is_member is None:
            async with self._free_for_others:
                yield
            return
        free = self._free_for.setdefault(place, asyncio.Semaphore(max(2, self._limits.streams // 4)))
        self._num_from[place] += 1
        try:
            async with free, self._free_for_others:
                yield
        finally:
            self._num_from[place] -= 1
            if not self._num_from[place]:
                del self._num_from[place], self._free_for[place]

    def _is_first(self, peer: PeerId) -> bool:
        return self._is_member is not None and self._is_member(peer)

    def _is_full(self, *, is_stranger: bool) -> bool:
        """Whether as many requests as may be are answered or wait; of others than members, half as many."""
        most = self._limits.streams + self._limits.streams_waiting
        if not is_stranger or self._is_member is None:
            return len(self._under_way) >= most
        return sum(each.is_stranger for each in self._under_way.values()) >= most // 2

    def _make_room(self, place: str, *, is_stranger: bool) -> None:
        """Ends what is worth least, if all places are taken that the next one may have, waiting or being answered: for a stranger of
        strangers' requests, for a member of all. For a stranger from there also the oldest of a range that has more than its own."""
        num_sending = self._limits.streams // (2 if is_stranger and self._is_member is not None else 1)
        now = time.monotonic()
        found = {task: each for task, each in self._under_way.items() if each.is_stranger or not is_stranger}
        sending = {task: each for task, each in found.items() if each.is_sending}
        is_full = self._is_full(is_stranger=is_stranger)
        if not is_full and len(sending) < num_sending:
            return
        poor = [task for task, each in found.items() if each.is_worth_less(now)]
        ends = min(poor, key=lambda task: (found[task].num_bytes, found[task].began), default=None)
        if ends is None and is_stranger and self._is_member is not None:
            of = {task: each.place for task, each in (found if is_full else sending).items()}
            ends = to_give_up(of, place)
        if ends is not None:
            del self._under_way[ends]  # its place is free now; it ends with the next turn of the loop
            ends.cancel()

    async def _answer(self, asked: _UnderWay, served: _ServedStream, header: dict[str, Any]) -> bool:
        """Whether all of a reply was sent and has come, and the next request may follow."""
        peer, kind, writer = served.peer, served.kind, served.writer
        try:
            async with asyncio.timeout(self._limits.handler_timeout_s):
                reply = await served.handler(peer, header)
        except TimeoutError:
            await send_refusal(writer, f"{kind} was not ready within {self._limits.handler_timeout_s:g} s")
            return False
        except ProtocolError as error:
            await send_refusal(writer, error.reason)
            return False
        except DilocoxError as error:
            await send_refusal(writer, str(error))
            return False
        except Exception:  # task boundary: a fault in a handler must not end the transport
            _logger.exception("fetch of %s by %s could not be served", kind, peer)
            await send_refusal(writer, "internal error")
            return False
        asked.began = time.monotonic()
        at_home = self._is_at_home(peer)
        is_spared = self._bandwidth.spares(at_home=at_home)  # then it says nothing of our line
        if not is_spared:
            self._bandwidth.uplink.begin(asked.began)
        # What stays at home is not on the line, and gives way to nothing that is.
        flow = (self._flows_at_home if at_home else self._flows).to(peer, is_urgent=reply.is_urgent)

        def on_received(num_bytes: int) -> None:
            asked.num_bytes += num_bytes
            if not is_spared:
                self._bandwidth.uplink.sent(num_bytes)
            self._on_acknowledged(peer)

        async def pace(num_bytes: int) -> None:
            since = time.monotonic()
            turn: Upload = "rounds" if reply.is_urgent else "states"
            await self._bandwidth.pace_upload(num_bytes, turn, at_home=at_home)
            asked.began += time.monotonic() - since  # it was us who took the time, not who reads

        try:
            async with Receipts(served.reader, flow, on_received, num_bytes=reply.body_bytes) as receipts:
                stays_open = self._stays_open(served)
                await send_reply(
                    writer,
                    reply,
                    chunk_bytes=self._bandwidth.chunk_bytes,
                    pace=pace,
                    stall_timeout_s=self._limits.stall_timeout_s,
                    receipts=receipts,
                    stays_open=stays_open,
                )
            return stays_open and receipts.are_complete
        finally:
            if not is_spared:
                self._bandwidth.uplink.end(time.monotonic())
