"""Outgoing protocol messages: one bounded queue and one task a receiver, so that a slow peer delays nobody else. What waits when the
one before has arrived goes in one batch.

A message may be lost, and come twice where a stream broke; the round protocol repeats what matters. A message that waits already is not queued again, and of heartbeats the
newest takes the place of the one that waits: where a line is slow, what is repeated every second would else be told minutes late. When a
queue is full its oldest message goes.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice

from dilocox_peer.errors import PeerUnavailable
from dilocox_peer.network.bulk import RequestRefused
from dilocox_peer.network.message_frames import MAX_BATCH, num_in_batch
from dilocox_peer.types import PeerId

MAX_QUEUED = 64
IDLE_S = 30.0  # a task without work ends; a later message starts another

SendNow = Callable[[PeerId, Sequence[bytes]], Awaitable[list[str]]]
"""Why each of a batch of messages is not taken by the peer; empty: it is. Raises PeerUnavailable."""
OnFailure = Callable[[PeerUnavailable], None]


class Outbox:
    """`post` messages; run inside the task group given."""

    def __init__(self, tasks: asyncio.TaskGroup, send_now: SendNow, on_failure: OnFailure) -> None:
        self._tasks = tasks
        self._send_now = send_now
        self._on_failure = on_failure
        self._queues: dict[PeerId, OrderedDict[bytes, bytes]] = {}  # by what a message is known by
        self._wakers: dict[PeerId, asyncio.Event] = {}
        self._idle: dict[PeerId, asyncio.Event] = {}

    def post(self, peer: PeerId, raw: bytes, *, kind: bytes = b"") -> None:
        """Queues raw for peer; never waits. kind: takes the place of one of this kind that waits; empty: of none but its equal."""
        queue = self._queues.get(peer)
        if queue is None:
            queue = self._queues[peer] = OrderedDict()
            waker = self._wakers[peer] = asyncio.Event()
            self._idle[peer] = asyncio.Event()
            self._tasks.create_task(self._drain(peer, queue, waker), name=f"outbox {peer[-6:]}")
        queue[kind or raw] = raw
        if len(queue) > MAX_QUEUED:
            queue.popitem(last=False)
        self._idle[peer].clear()
        self._wakers[peer].set()

    async def drained(self) -> None:
        """Returns when every queue is empty and its last message delivered or given up; give it a deadline."""
        while busy := [idle for peer, idle in self._idle.items() if peer in self._queues and not idle.is_set()]:
            await busy[0].wait()

    async def _drain(self, peer: PeerId, queue: OrderedDict[bytes, bytes], waker: asyncio.Event) -> None:
        try:
            while True:
                if not queue:
                    self._idle[peer].set()
                    waker.clear()
                    async with asyncio.timeout(IDLE_S):
                        await waker.wait()
                waiting = list(islice(queue.values(), MAX_BATCH))
                batch = waiting[: num_in_batch(list(map(len, waiting)))]
                for _ in batch:
                    queue.popitem(last=False)
                try:
                    reasons = await self._send_now(peer, batch)
                    if reason := next(filter(None, reasons), ""):
                        raise RequestRefused(peer, reason)
                except PeerUnavailable as error:
                    queue.clear()  # stale by the time the peer is back; the protocol repeats itself
                    self._on_failure(error)
        except TimeoutError:
            return
        finally:
            self._idle.pop(peer).set()
            del self._queues[peer]
            del self._wakers[peer]
