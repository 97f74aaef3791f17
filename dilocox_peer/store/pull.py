"""Carries out a Fetch: asks donors over the transport, checks and keeps chunks in a worker thread, in bounded memory."""

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, assert_never

from dilocox_peer.errors import PeerUnavailable, ProtocolError, ThingUnavailable, first_failure
from dilocox_peer.network.bulk import RequestRefused, Take
from dilocox_peer.store.actions import (
    Accused,
    AskOutline,
    AskRange,
    CheckChunk,
    CheckWhole,
    FetchAction,
    Finished,
    GaveUp,
    Shorten,
)
from dilocox_peer.store.fetch import Fetch
from dilocox_peer.store.outline import CHUNK_BYTES, Outline, num_chunks
from dilocox_peer.types import DIGEST_BYTES, Digest, PeerId, sha256

STORE_SERVICE = "store"
STALL_S = 15.0
OUTLINE_S = 60.0
MAX_UNCHECKED = 8  # chunks in memory that wait for their check


class Sink(Protocol):
    """Where a thing is put together. Its methods block, and are called in one worker thread."""

    def begin(self, outline: Outline) -> None: ...
    def write(self, start: int, raw: bytes | bytearray | memoryview) -> None: ...
    def is_whole(self) -> bool: ...
    def close(self) -> None: ...


class Fetches(Protocol):
    """What of a Transport is used."""

    async def fetch(
        self,
        peer: PeerId,
        kind: str,
        header: dict[str, Any],
        *,
        max_body_bytes: int,
        timeout_s: float,
        stall_timeout_s: float = ...,
        take: Take | None = ...,
    ) -> tuple[dict[str, Any], bytearray]: ...


class Pull:
    """Of one thing into one sink; `run` it once."""

    def __init__(
        self,
        fetch: Fetch,
        sink: Sink,
        *,
        transport: Fetches,
        max_bytes: int,
        timeout_s: float,
        stall_s: float = STALL_S,
        finish: Callable[[], Any],
        on_failed: Callable[[PeerId, str, bool], None],
    ) -> None:
        """max_bytes: of the thing; a donor that says more is not believed. finish: what becomes of the whole sink, in its thread.
        on_failed(donor, why, whether it lied)."""
        self._fetch = fetch
        self._sink = sink
        self._transport = transport
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._stall_s = stall_s
        self._finish = finish
        self._on_failed = on_failed
        self._buffers: dict[int, bytearray] = {}  # chunks that have come in part, of the outline gone by
        self._gone_by: Outline | None = None
        self._ranges: dict[PeerId, list[int]] = {}  # at, stop
        self._asking: dict[PeerId, asyncio.Task[None]] = {}
        self._begun: Outline | None = None
        self._room = asyncio.Semaphore(MAX_UNCHECKED)
        self._changed = asyncio.Event()
        self._end: Finished | GaveUp | None = None
        self._has_begun = False
        self._no_room: OSError | None = None  # for an outline that may be false
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dilocox-fetch")
        # Of a run that has ended: done when its thread has, and the sink is closed.
        self.closed: Future[None] | None = None

    @property
    def share(self) -> float:
        """How much of the thing is here, 0 to 1."""
        return self._fetch.share

    def join(self, donors: Iterable[PeerId]) -> None:
        """While it runs: those of them that are not asked yet are asked, too."""
        if self._has_begun and self._end is None:
            self._carry_out(self._fetch.join(donors, asyncio.get_running_loop().time()))

    async def run(self) -> Any:
        """What finish gives, once the sink is whole. Raises ThingUnavailable, TimeoutError, OSError of the sink. When it raises or is
        cancelled nothing of it goes on but what its thread is at, which may be finish, for seconds: `closed` tells of its end."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout_s), asyncio.TaskGroup() as self._tasks:
                self._has_begun = True
                self._carry_out(self._fetch.begin(loop.time()))
                while self._end is None:
                    self._changed.clear()
                    try:
                        async with asyncio.timeout_at(self._fetch.deadline()):
                            await self._changed.wait()
                    except TimeoutError:
                        self._carry_out(self._fetch.tick(loop.time()))
                for task in self._asking.values():
                    task.cancel()
            if isinstance(self._end, GaveUp):
                if self._no_room is not None:
                    raise self._no_room
                raise ThingUnavailable(f"{self._fetch.name.hex()[:12]} is not to be had: {self._end.reason}")
            return await self._in_thread(self._finished)
        except BaseExceptionGroup as failures:
            raise first_failure(failures) from None
        finally:
            self.closed = self._thread.submit(self._sink.close)  # after what is under way
            self._thread.shutdown(wait=False)

    def _carry_out(self, actions: list[FetchAction]) -> None:
        if self._fetch.outline is not self._gone_by:
            self._gone_by = self._fetch.outline
            self._buffers.clear()  # another outline's chunks are of other bytes, the last of another size
        for action in actions:
            match action:
                case AskOutline(donor):
                    self._start(donor, self._ask_outline(donor))
                case AskRange(donor, start, stop):
                    self._ranges[donor] = [start, stop]
                    self._start(donor, self._ask_range(donor, start, stop))
                case Shorten(donor, stop):
                    self._ranges[donor][1] = stop
                    if self._ranges[donor][0] >= stop:
                        self._asking[donor].cancel()
                case CheckChunk():
                    assert self._gone_by is not None
                    raw = self._buffers.pop(action.index)
                    self._tasks.create_task(self._check_chunk(action, self._gone_by, raw))
                case CheckWhole():
                    self._tasks.create_task(self._check_whole(action))
                case Accused(donor, reason):
                    self._on_failed(donor, reason, True)
                case Finished() | GaveUp():
                    self._end = action
                case _:
                    assert_never(action)
        self._changed.set()

    def _start(self, donor: PeerId, asking: Any) -> None:
        self._asking[donor] = self._tasks.create_task(asking, name=f"ask {donor}")

    async def _in_thread(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(call, *arguments))

    # ---- outlines ----

    async def _ask_outline(self, donor: PeerId) -> None:
        loop = asyncio.get_running_loop()
        try:
            header, body = await self._transport.fetch(
                donor,
                STORE_SERVICE,
                {"name": self._fetch.name, "want": "outline"},
                max_body_bytes=max(CHUNK_BYTES, num_chunks(self._max_bytes) * DIGEST_BYTES),
                timeout_s=OUTLINE_S,
                stall_timeout_s=self._stall_s,
            )
            outline, is_here = self._outline(donor, header, body)
        except RequestRefused as error:
            self._carry_out(self._fetch.failed(donor, str(error), loop.time(), for_good=True))
        except PeerUnavailable as error:
            self._on_failed(donor, str(error), False)
            self._carry_out(self._fetch.failed(donor, str(error), loop.time()))
        except ProtocolError as error:
            self._on_failed(donor, error.reason, True)
            self._carry_out(self._fetch.failed(donor, error.reason, loop.time(), for_good=True))
        else:
            await self._take_outline(donor, outline, body if is_here else None)

    def _outline(self, donor: PeerId, header: dict[str, Any], body: bytearray) -> tuple[Outline, bool]:
        """And whether the body is the thing itself. Raises RequestRefused, ProtocolError."""
        if not header:
            raise RequestRefused(donor, "it has it not")
        match header:
            case {"size": int(size_bytes)} if 0 <= size_bytes <= self._max_bytes:
                pass
            case _:
                raise ProtocolError(donor, f"an outline with no size, or of more than {self._max_bytes} bytes")
        if num_chunks(size_bytes) == 1 and len(body) == size_bytes:
            return Outline(size_bytes, (sha256(body),)), True
        try:
            return Outline.unpacked(size_bytes, body), False
        except ValueError as error:
            raise ProtocolError(donor, str(error)) from None

    async def _take_outline(self, donor: PeerId, outline: Outline, body: bytearray | None) -> None:
        actions = self._fetch.outlined(donor, outline, asyncio.get_running_loop().time(), is_here=body is not None)
        ends: list[FetchAction] = [action for action in actions if isinstance(action, Finished)]
        # At once: whoever sends by the outline of before would go on into what this one does not have.
        self._carry_out([action for action in actions if action not in ends])
        if body is not None and self._fetch.outline == outline:
            await self._in_thread(self._write, outline, 0, body)
        self._carry_out(ends)

    # ---- ranges ----

    async def _ask_range(self, donor: PeerId, start: int, stop: int) -> None:
        loop = asyncio.get_running_loop()
        mine = self._ranges[donor]

        async def take(piece: bytes) -> bool:
            async with self._room:
                pass  # not more unchecked chunks in memory than that
            return self._take(donor, mine, piece)

        reason, is_lying = "it broke off", False
        try:
            await self._transport.fetch(
                donor,
                STORE_SERVICE,
                {"name": self._fetch.name, "start": start, "stop": stop},
                max_body_bytes=stop - start,
                timeout_s=self._timeout_s,
                stall_timeout_s=self._stall_s,
                take=take,
            )
        except PeerUnavailable as error:
            reason = str(error)
        except ProtocolError as error:
            reason, is_lying = error.reason, True
        if self._ranges.get(donor) is mine and mine[0] < mine[1]:
            self._on_failed(donor, reason, is_lying)
            self._carry_out(self._fetch.failed(donor, reason, loop.time(), for_good=is_lying))

    def _take(self, donor: PeerId, mine: list[int], piece: bytes) -> bool:
        if self._ranges.get(donor) is not mine or self._gone_by is not self._fetch.outline:
            return False
        view = memoryview(piece)[: mine[1] - mine[0]]
        at = mine[0]
        while view.nbytes:
            index = at // CHUNK_BYTES
            assert self._fetch.outline is not None
            first, last = self._fetch.outline.span(index)
            buffer = self._buffers.setdefault(index, bytearray(last - first))
            part = view[: last - at]
            buffer[at - first : at - first + part.nbytes] = part
            view, at = view[part.nbytes :], at + part.nbytes
        num_bytes, mine[0] = at - mine[0], at
        if num_bytes:
            self._carry_out(self._fetch.received(donor, num_bytes, asyncio.get_running_loop().time()))
        return mine[0] < mine[1] and self._ranges.get(donor) is mine

    # ---- checks ----

    def _begin(self, outline: Outline) -> None:
        if self._begun is not outline:
            self._sink.begin(outline)
            self._begun = outline

    def _write(self, outline: Outline, start: int, raw: bytearray) -> None:
        self._begin(outline)
        self._sink.write(start, raw)

    def _finished(self) -> Any:
        assert self._fetch.outline is not None, "finished without an outline"
        self._begin(self._fetch.outline)  # all of it may have been there from before
        return self._finish()

    def _is_whole(self, outline: Outline) -> bool:
        self._begin(outline)
        return self._sink.is_whole()

    async def _check_chunk(self, check: CheckChunk, outline: Outline, raw: bytearray) -> None:
        def kept() -> Digest:
            digest = sha256(raw)
            if (
                digest == outline.chunks[check.index] and outline is self._fetch.outline
            ):  # else it would begin that one anew
                self._write(outline, outline.span(check.index)[0], raw)
            return digest

        try:
            async with self._room:
                digest: Digest = await self._in_thread(kept)
        except OSError as error:
            self._leave(outline, error)
        else:
            self._carry_out(self._fetch.checked(check, digest, asyncio.get_running_loop().time()))

    async def _check_whole(self, check: CheckWhole) -> None:
        try:
            is_whole: bool = await self._in_thread(self._is_whole, check.outline)
        except OSError as error:
            self._leave(check.outline, error)
        else:
            self._carry_out(self._fetch.checked_whole(check, is_whole, asyncio.get_running_loop().time()))

    def _leave(self, outline: Outline, error: OSError) -> None:
        """What could not be kept may be a liar's, and others may have what can. Raises error where the name proves that it is not."""
        if self._fetch.is_proven(outline):
            raise error
        self._no_room = error
        self._carry_out(self._fetch.no_room(outline, str(error), asyncio.get_running_loop().time()))


class Closing:
    """Fetches that have ended and whose threads have not. The look at a large thing takes seconds, and one that was called off meanwhile goes on
    with it: whoever fetches the same thing next would have its file taken away."""

    def __init__(self) -> None:
        self._ends: dict[Digest, asyncio.Future[None]] = {}

    def add(self, name: Digest, pull: Pull) -> None:
        """The run of it has ended."""
        if pull.closed is None:
            return
        self._ends[name] = ending = asyncio.wrap_future(pull.closed)

        def forget(ended: asyncio.Future[None]) -> None:
            if self._ends.get(name) is ended:
                del self._ends[name]

        ending.add_done_callback(forget)

    async def wait(self, name: Digest, timeout_s: float) -> None:
        """Until no thread is at that thing, at most so long."""
        if (ending := self._ends.get(name)) is not None:
            await asyncio.wait({ending}, timeout=timeout_s)
