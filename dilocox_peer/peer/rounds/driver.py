"""Runs the round machine: feeds it what happens, carries out what it wants, in order. Decides nothing.

One task owns the machine. The journal is written in a thread of its own and awaited before later actions (an ACK promises
what is on disk); fetches, and all that reads and checks whole contributions, run beside it and come back as inputs: while the
machine waited for those it would send no heartbeats, and the others would think it dead.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Protocol, assert_never

from dilocox_peer.contract import Note, Tick
from dilocox_peer.errors import MalformedBlob, PeerUnavailable, ProtocolError, ThingUnavailable
from dilocox_peer.events import Failed, Listener, MessageRefused
from dilocox_peer.network.transport import PeerGone, RequestRefused, Transport, TransportDown
from dilocox_peer.peer.rounds.carrying import Carrying
from dilocox_peer.peer.rounds.contract import (
    Action,
    Apply,
    AverageSlice,
    BlobHeld,
    BlobMissing,
    BlobPart,
    BlobRefused,
    BytesCame,
    Closed,
    FetchBlob,
    FetchState,
    ForgetBlobs,
    Input,
    OwnerSpoke,
    OwnerVouched,
    PeerRefused,
    PeerUnreached,
    Persist,
    Received,
    RoundProgress,
    Send,
    SliceAveraged,
    StateMissing,
)
from dilocox_peer.peer.rounds.disk import until_written
from dilocox_peer.peer.rounds.durable import Durable
from dilocox_peer.peer.rounds.fetch_slots import CONCURRENT_FETCHES, FetchSlots
from dilocox_peer.peer.rounds.journal import Journal
from dilocox_peer.peer.rounds.machine import RoundMachine
from dilocox_peer.peer.rounds.outbox import Outbox
from dilocox_peer.peer.rounds.refusals import Refusals
from dilocox_peer.store.bundles import BUNDLED_BYTES, Bundles
from dilocox_peer.store.fetch import Fetch
from dilocox_peer.store.pull import Closing, Pull
from dilocox_peer.store.shelf import Shelf
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.rounds import (
    Carried,
    Heartbeat,
    Message,
    Passed,
    decode_message,
    encode_message,
    passed_beat,
)

_logger = logging.getLogger(__name__)

MAX_INPUTS = 4096
MAX_QUEUED_BYTES = 8 * 1024 * 1024  # of messages in wire form; decoded they take some times as much
MAX_REPEATED = 3072  # of what is said again anyway, messages and progress: beyond, it is dropped
_REPEATED = (Received, BytesCame, PeerUnreached, PeerRefused, RoundProgress, OwnerSpoke, OwnerVouched)
SEND_TIMEOUT_S = 5.0
BLOB_TIMEOUT_S = 3600.0
BLOB_STALL_S = 10.0  # a source that sends nothing for so long is left for the next one
LOOK_S = 1.0  # at what is late, while other things wait for its place
BYTES_EVERY_S = 0.5  # is told, at most, that bytes come from a peer
MAX_BYTES_FROM = 512  # peers of which it is remembered

CheckBlob = Callable[[Digest, memoryview], object]
"""Raises MalformedBlob when a blob of that name is no acceptable contribution. Runs in a worker thread."""


class Slices(Protocol):
    """Of a run that averages in slices (peer/training/slice_desk.py). Blocking: called in worker threads."""

    def max_bytes(self, part: BlobPart) -> int: ...
    def check(self, blob: memoryview, part: BlobPart) -> tuple[Digest, ...]: ...
    def average(self, action: AverageSlice) -> Sequence[Input]: ...


class RoundDriver:
    """The shell of one RoundMachine. inputs: what waits for it, in order."""

    def __init__(
        self,
        machine: RoundMachine,
        *,
        transport: Transport,
        blobs: Shelf,
        journal: Journal,
        disk: Executor,
        check_blob: CheckBlob,
        max_blob_bytes: int,
        on_apply: Callable[[Apply], None],
        on_fetch_state: Callable[[FetchState], Awaitable[None]],
        on_change: Callable[[], None],
        listener: Listener,
        slices: Slices | None = None,
    ) -> None:
        self.machine = machine
        self._transport = transport
        self._blobs = blobs
        self._journal = journal
        self._disk = disk
        self._check_blob = check_blob
        self._max_blob_bytes = max_blob_bytes
        self._slices = slices
        self._on_apply = on_apply
        self._on_fetch_state = on_fetch_state
        self._on_change = on_change
        self._listener = listener
        self.inputs: asyncio.Queue[Input] = asyncio.Queue(MAX_INPUTS)
        self.sizes: dict[int, int] = {}  # in wire form, of messages in the queue, by identity
        self._queued_bytes = 0
        self._refusals = Refusals()
        self._fetching: dict[Digest, asyncio.Task[None]] = {}
        self._closing = Closing()
        self._slots = FetchSlots()
        self._looking: asyncio.TimerHandle | None = None
        self._bundles: dict[bool, Bundles] = {}  # of what is small; of who often does not deliver apart
        self._bytes_at: dict[PeerId, float] = {}  # when it was told that some came
        self._carrying = Carrying()
        self._outbox: Outbox | None = None
        # The newest message sent, and as it goes, after what is beside it: it goes to a whole roster.
        self._encoded: tuple[Message, tuple[bytes, ...]] | None = None
        self._tasks: asyncio.TaskGroup | None = None

    def everybody_at_head(self) -> bool:
        """Whether every peer of the roster that is alive has said that it is at our head."""
        now = asyncio.get_running_loop().time()
        return self.machine.alive(now) & set(self.machine.roster) <= self.machine.at_head(now)

    async def drained(self) -> None:
        """Returns when all inputs are handled and all messages out; give it a deadline."""
        await self.inputs.join()
        if self._outbox is not None:
            await self._outbox.drained()

    def receive(self, sender: PeerId, raw: bytes) -> None:
        """A message from the transport; a malformed one is dropped, and told now and then."""
        if self._queued_bytes + len(raw) > MAX_QUEUED_BYTES:
            return  # the machine waits for the disk; it is said again
        try:
            message = decode_message(raw, sender)
        except ProtocolError as error:
            self._transport.doors.malformed(sender)
            self._tell_refusal(sender, error.reason, asyncio.get_running_loop().time())
            return
        if isinstance(message, Passed) and (
            self._transport.why_not_in(message.origin) or self._transport.why_out(message.to)
        ):
            return  # put out of the run, or never let in, as far as is known here: nobody speaks for it, or to it
        if isinstance(message, Carried):
            if sender in self.machine.roster:
                self._carrying.came(sender, message.raw)
            return
        received = Received(sender, message)
        if self._put(received):
            self.sizes[id(received)] = len(raw)
            self._queued_bytes += len(raw)

    def bytes_came(self, peer: PeerId) -> None:
        """From the transport, of bodies either way."""
        now = asyncio.get_running_loop().time()
        if now - self._bytes_at.get(peer, float("-inf")) < BYTES_EVERY_S:
            return
        if len(self._bytes_at) >= MAX_BYTES_FROM:
            self._bytes_at.clear()
        self._bytes_at[peer] = now
        self._put(BytesCame(peer))

    def _tell_refusal(self, peer: PeerId, reason: str, now: float) -> None:
        """Once a second and peer at most: a flood of nonsense must not become a flood of events."""
        if self._refusals.is_due(peer, now):
            self._listener(MessageRefused(peer, reason))

    def post(self, happened: Input) -> None:
        """Queues an input."""
        if isinstance(happened, Closed):
            self._carrying.closed(happened)
        self._put(happened)

    def _put(self, happened: Input) -> bool:
        """Whether it was queued. What others send, what is told ten times a second while a disk is slow, and what is read again
        with every look at the directory, never takes the room of what happens once: a contribution fetched, a round closed."""
        if isinstance(happened, _REPEATED) and self.inputs.qsize() >= MAX_REPEATED:
            return False
        self.inputs.put_nowait(happened)
        return True

    async def run(self) -> None:
        """Owns the machine until cancelled."""
        loop = asyncio.get_running_loop()
        async with self._journal_thread(), asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self._bundles = {False: self._bundles_of(tasks, CONCURRENT_FETCHES), True: self._bundles_of(tasks, 1)}
            self._outbox = Outbox(tasks, self._transport_send, self._on_send_failure)
            happened: Input = Tick()
            try:
                while True:
                    for action in self.handled(happened, loop.time()):
                        await self._carry_out(action)
                    self._on_change()
                    if not isinstance(happened, Tick):
                        self.inputs.task_done()
                    happened = await self._next_input()
            finally:
                if self._looking is not None:
                    self._looking.cancel()

    def _bundles_of(self, tasks: asyncio.TaskGroup, at_once: int) -> Bundles:
        return Bundles(
            self._transport, lambda ask, name: tasks.create_task(ask, name=name), at_once=at_once, stall_s=BLOB_STALL_S,
            on_failed=self._on_source_failed,
        )  # fmt: skip

    def handled(self, happened: Input, now: float) -> Iterable[Action]:
        """What the machine does about it. A fault that a message of another peer finds in the machine costs that message,
        not the process: what it would have done is not done, and nothing was promised by it."""
        more = not self.inputs.empty()
        if not isinstance(happened, Received):
            return self.machine.handle(happened, now, more=more)
        self._queued_bytes -= self.sizes.pop(id(happened), 0)
        try:
            return self.machine.handle(happened, now, more=more)
        except OSError:  # of our own disk, where the chain's past lies: what has moved in memory is not in the log
            raise
        except Exception as error:  # the boundary to other peers
            _logger.exception("a message of %s could not be handled; it was dropped", happened.sender)
            self._tell_refusal(happened.sender, f"{type(error).__name__} in handling it", now)
            return ()

    @asynccontextmanager
    async def _journal_thread(self) -> AsyncIterator[None]:
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="dilocox-journal")
        self._averager = ThreadPoolExecutor(1, thread_name_prefix="dilocox-slices")
        try:
            yield
        finally:
            self._writer.shutdown(wait=False)
            self._averager.shutdown(wait=False, cancel_futures=True)

    async def _next_input(self) -> Input:
        deadline = self.machine.deadline()
        try:
            async with asyncio.timeout_at(deadline):
                return await self.inputs.get()
        except TimeoutError:
            return Tick()

    async def _carry_out(self, action: Action) -> None:
        assert self._tasks is not None
        assert self._outbox is not None
        match action:
            case Send(to, message):
                kind = b"heartbeat" if isinstance(message, Heartbeat) else passed_beat(message)
                if self._encoded is None or self._encoded[0] is not message:
                    self._encoded = message, tuple(map(encode_message, self._carrying.together(message)))
                for raw in self._encoded[1]:
                    self._outbox.post(to, raw, kind=kind)
            case Persist(state):
                await self._persist(state)
            case FetchBlob():
                if (slow := self._fetching.get(action.blob)) is not None:
                    slow.cancel()  # other sources instead; the fetch that is started now answers
                if self._is_bundled(action):
                    self._fetch(action)
                else:
                    self._fetch_all(self._slots.ask(action, asyncio.get_running_loop().time()))
            case AverageSlice():
                self._tasks.create_task(self._average(action), name=f"average slice {action.slice}")
            case Apply():
                self._on_apply(action)
            case FetchState():
                self._tasks.create_task(self._fetch_state(action), name="fetch state")
            case ForgetBlobs(blobs):
                self._tasks.create_task(self._forget_blobs(blobs), name="forget contributions")
            case Note(event):
                self._listener(event)
            case _:
                assert_never(action)

    async def _persist(self, state: Durable) -> None:
        """Until it is durable: what follows in the list promises it to others."""
        loop = asyncio.get_running_loop()
        blocks = await until_written(
            lambda: loop.run_in_executor(self._writer, self._journal.write, state), "the log of rounds", self._listener
        )
        if blocks:
            self.machine.history.seal(blocks)

    async def _transport_send(self, peer: PeerId, messages: Sequence[bytes]) -> list[str]:
        return await self._transport.send_all(peer, messages, SEND_TIMEOUT_S)

    def _on_send_failure(self, error: PeerUnavailable) -> None:
        if isinstance(error, PeerGone):
            self.post(PeerRefused(error.peer))
        # It is there, or nobody is to blame but we, or it was put out of the run.
        if not isinstance(error, RequestRefused | TransportDown) and not self._transport.why_out(error.peer):
            self.post(PeerUnreached(error.peer))

    async def _fetch_state(self, action: FetchState) -> None:
        try:
            await self._on_fetch_state(action)
        except Exception as error:  # a task boundary: the machine asks again
            self._note_failure("state fetch", error)
            self.post(StateMissing(action.head))

    def _fetch_all(self, actions: Iterable[FetchBlob]) -> None:
        for action in actions:
            self._fetch(action)
        if self._slots.is_anything_waiting and self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        self._looking = None
        self._fetch_all(self._slots.look(asyncio.get_running_loop().time()))

    def _fetch(self, action: FetchBlob) -> None:
        assert self._tasks is not None
        self._fetching[action.blob] = self._tasks.create_task(
            self._fetch_blob(action), name=f"fetch {action.blob.hex()[:8]}"
        )

    async def _fetch_blob(self, action: FetchBlob) -> None:
        """Cancelled where another fetch has taken its place, or nothing is fetched any more."""
        answer: Input = BlobMissing(action.blob)
        try:
            if self._is_bundled(action):
                within_s = BLOB_TIMEOUT_S if action.within_s is None else action.within_s
                answer = await self._within(within_s, self.bundled(action)) or answer
            else:
                answer = await self._within(action.within_s, self.fetched(action)) or answer
        except Exception as error:  # a task boundary: the machine asks again or goes on without the blob
            self._note_failure("fetch of a contribution", error)
        if self._fetching.get(action.blob) is asyncio.current_task():
            del self._fetching[action.blob]
        self.post(answer)
        now = asyncio.get_running_loop().time()
        self._fetch_all(self._slots.ended(action.blob, now, has_come=isinstance(answer, BlobHeld)))

    async def _within(self, seconds: float | None, answer: Awaitable[Input]) -> Input | None:
        try:
            async with asyncio.timeout(seconds):
                return await answer
        except TimeoutError:
            return None

    def _is_bundled(self, action: FetchBlob) -> bool:
        """Whether it is small, and goes with others of its donor."""
        return action.part is not None and self._most_bytes(action.part) <= BUNDLED_BYTES

    async def bundled(self, action: FetchBlob) -> Input:
        """The answer to it, of something small."""
        loop = asyncio.get_running_loop()
        if (here := await loop.run_in_executor(self._disk, self._here, action)) is not None:
            return here
        raw = self._carrying.take(action.blob)
        if raw is None:
            raw = await self._bundles[action.doubted].get(action.blob, action.sources, self._most_bytes(action.part))
        if raw is None:
            return BlobMissing(action.blob)

        def check_and_store() -> tuple[Digest, ...]:
            parts = self._checked(action, memoryview(raw))
            self._blobs.put(raw, durable=action.must_last)
            return parts

        try:
            parts = await loop.run_in_executor(self._disk, check_and_store)
            return BlobHeld(action.blob, len(raw), parts, action.part)
        except MalformedBlob as error:  # the author's fault, not the sources'
            return BlobRefused(action.blob, str(error), action.part)

    def _here(self, action: FetchBlob) -> BlobHeld | BlobRefused | None:
        """What is on our disk, checked as what it is wanted as: as another it may have come. In a worker thread."""
        if (here := self._blobs.mapped(action.blob)) is None:
            return None
        if action.must_last:
            self._blobs.flush(action.blob)
        is_slice = action.part is not None and action.part.kind == "slice"  # that is looked at where it is averaged
        try:
            return BlobHeld(action.blob, len(here), () if is_slice else self._checked(action, here), action.part)
        except MalformedBlob as error:
            return BlobRefused(action.blob, str(error), action.part)

    async def fetched(self, action: FetchBlob) -> Input:
        """The answer to it, always one of the three that the contract names."""
        loop = asyncio.get_running_loop()
        await self._closing.wait(action.blob, BLOB_TIMEOUT_S)
        if (here := await loop.run_in_executor(self._disk, self._here, action)) is not None:
            return here
        partial = await loop.run_in_executor(self._disk, self._blobs.partial, action.blob)
        resumed = await loop.run_in_executor(self._disk, partial.resumed)

        size_bytes, parts = 0, tuple[Digest, ...]()

        def check_and_store() -> None:
            nonlocal size_bytes, parts
            try:
                view = partial.view()
                size_bytes = len(view)
                parts = self._checked(action, view)
            except MalformedBlob:
                partial.discard()
                raise
            partial.finish(durable=action.must_last)

        pull = Pull(
            Fetch(action.blob, action.sources, tries=1, resumed=resumed),
            partial,
            transport=self._transport,
            max_bytes=self._most_bytes(action.part),  # not what an offer says: it may name a blob of another's
            timeout_s=BLOB_TIMEOUT_S,
            stall_s=BLOB_STALL_S,
            finish=check_and_store,
            on_failed=self._on_source_failed,
        )
        try:
            await pull.run()
        except (ThingUnavailable, TimeoutError):
            return BlobMissing(action.blob)
        except MalformedBlob as error:  # the author's fault, not the sources'
            return BlobRefused(action.blob, str(error), action.part)
        finally:
            self._closing.add(action.blob, pull)
        return BlobHeld(action.blob, size_bytes, parts, action.part)

    def _most_bytes(self, part: BlobPart | None) -> int:
        return self._max_blob_bytes if part is None or self._slices is None else self._slices.max_bytes(part)

    def _checked(self, action: FetchBlob, view: memoryview) -> tuple[Digest, ...]:
        """The slices that it names, of a table. Raises MalformedBlob. In a worker thread."""
        if action.part is not None and self._slices is not None:
            return self._slices.check(view, action.part)
        self._check_blob(action.blob, view)
        return ()

    async def _average(self, action: AverageSlice) -> None:
        assert self._slices is not None, "a run that averages all to all"
        try:
            happened = await asyncio.get_running_loop().run_in_executor(self._averager, self._slices.average, action)
        except Exception as error:  # a task boundary: the next in order averages it
            self._note_failure("averaging a slice", error)
            happened = (SliceAveraged(action.inputs, action.slice, None),)
        for each in happened:
            self.post(each)

    def _on_source_failed(self, source: PeerId, reason: str, is_lying: bool) -> None:
        if is_lying:
            self.accused(source, reason)

    def accused(self, donor: PeerId, reason: str) -> None:
        """It sent something else when asked for a thing by its name."""
        now = asyncio.get_running_loop().time()
        self._tell_refusal(donor, f"sent nothing of that name when asked for it: {reason}", now)

    async def _forget_blobs(self, blobs: tuple[Digest, ...]) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._disk, self._forget, blobs)
        except OSError as error:  # they cost room; a later start tries again
            self._note_failure("deleting old contributions", error)

    def _forget(self, blobs: tuple[Digest, ...]) -> None:
        for blob in blobs:
            self._blobs.forget(blob)

    def _note_failure(self, where: str, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, OSError) and error.strerror:
            reason = error.strerror.lower()
        self._listener(Failed(where, reason))
