"""Outgoing protocol messages: one bounded queue and one task a receiver, so that a slow peer delays nobody else. What is posted within
LINGER_S of a batch goes together in the next, unless that one was answered sooner; on a line that answers late no more than a few batches are under way.

A message may be lost, and come twice where a stream broke; the round protocol repeats what matters. A message that waits already is not queued again, and of heartbeats the
newest takes the place of the one that waits: where a line is slow, what is repeated every second would else be told minutes late. When a
queue is full its oldest message goes.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice

from dilocox_peer.errors import PeerUnavailable
from dilocox_peer.network.bulk import RequestRefused
from dilocox_peer.network.message_frames import MAX_BATCH, num_in_batch
from dilocox_peer.types import PeerId

MAX_QUEUED = 64
LINGER_S = 0.25  # what one input of many has us say to a peer is said within that, on a busy machine too
MAX_UNDER_WAY = (
    4  # batches to a peer without an answer; an answer to the third is asked for at once (message_answers.py)
)
IDLE_S = 30.0  # a task without work ends; a later message starts another

SendNow = Callable[[PeerId, Sequence[bytes]], Awaitable[list[str]]]
"""Why each of a batch of messages is not taken by the peer; empty: it is. Raises PeerUnavailable."""
OnFailure = Callable[[PeerUnavailable], None]


@dataclass(slots=True)
class _Queue:
    """To one peer. messages: that wait, by what each is known by. freed: set when a batch is answered or given up. quiet: set while nothing
    waits and nothing is under way."""

    messages: OrderedDict[bytes, bytes] = field(default_factory=OrderedDict)
    posted: asyncio.Event = field(default_factory=asyncio.Event)
    num_under_way: int = 0
    freed: asyncio.Event = field(default_factory=asyncio.Event)
    quiet: asyncio.Event = field(default_factory=asyncio.Event)


class Outbox:
    """`post` messages; run inside the task group given."""

    def __init__(self, tasks: asyncio.TaskGroup, send_now: SendNow, on_failure: OnFailure) -> None:
        self._tasks = tasks
        self._send_now = send_now
        self._on_failure = on_failure
        self._queues: dict[PeerId, _Queue] = {}

    def post(self, peer: PeerId, raw: bytes, *, kind: bytes = b"") -> None:
        """Queues raw for peer; never waits. kind: takes the place of one of this kind that waits; empty: of none but its equal."""
        queue = self._queues.get(peer)
        if queue is None:
            queue = self._queues[peer] = _Queue()
            self._tasks.create_task(self._drain(peer, queue), name=f"outbox {peer[-6:]}")
        queue.messages[kind or raw] = raw
        if len(queue.messages) > MAX_QUEUED:
            queue.messages.popitem(last=False)
        queue.quiet.clear()
        queue.posted.set()

    async def drained(self) -> None:
        """Returns when every queue is empty and its last message delivered or given up; give it a deadline."""
        while busy := [queue for queue in self._queues.values() if not queue.quiet.is_set()]:
            await busy[0].quiet.wait()

    async def _drain(self, peer: PeerId, queue: _Queue) -> None:
        try:
            while True:
                while not queue.messages:  # a batch before that comes to nothing takes what was posted with it
                    queue.posted.clear()
                    async with asyncio.timeout(IDLE_S):
                        await queue.posted.wait()
                waiting = list(islice(queue.messages.values(), MAX_BATCH))
                batch = waiting[: num_in_batch(list(map(len, waiting)))]
                for _ in batch:
                    queue.messages.popitem(last=False)
                queue.num_under_way += 1
                queue.freed.clear()
                self._tasks.create_task(self._send(peer, queue, batch), name=f"batch {peer[-6:]}")
                with suppress(TimeoutError):
                    async with asyncio.timeout(LINGER_S):
                        await queue.freed.wait()
                while queue.num_under_way >= MAX_UNDER_WAY:
                    queue.freed.clear()
                    await queue.freed.wait()
        except TimeoutError:
            return
        finally:
            queue.quiet.set()
            del self._queues[peer]

    async def _send(self, peer: PeerId, queue: _Queue, batch: Sequence[bytes]) -> None:
        try:
            reasons = await self._send_now(peer, batch)
            if reason := next(filter(None, reasons), ""):
                raise RequestRefused(peer, reason)
        except PeerUnavailable as error:
            queue.messages.clear()  # stale by the time the peer is back; the protocol repeats itself
            self._on_failure(error)
        finally:
            queue.num_under_way -= 1
            queue.freed.set()
            if not queue.messages and not queue.num_under_way:
                queue.quiet.set()
