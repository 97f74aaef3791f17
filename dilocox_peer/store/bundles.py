"""Small things of one donor in one request: those that are wanted of it at the same moment, checked by their names.

A run that averages in slices fetches some fifty things a round, of a small model of a few kilobytes each: a request of its own costs each as
much as its bytes. A thing of more than BUNDLED_BYTES is fetched by pull.py, in ranges, from several donors.

A few requests go at once, so that the first are here soon. A donor that sends a byte now and then would hold its place for TIMEOUT_S, and as many of
them as there are places all of them for ever: what takes longer than PLACE_S has no place any more, and goes on beside the others.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from dilocox_peer.errors import PeerUnavailable, ProtocolError
from dilocox_peer.store.pull import STORE_SERVICE, Fetches
from dilocox_peer.types import DIGEST_BYTES, Digest, PeerId, sha256

BUNDLED_BYTES = 64 * 1024  # of one thing, at most
MAX_BUNDLED = 16  # things a request
GATHER_S = 0.02  # that the first of them waits for others
TIMEOUT_S = 30.0
PLACE_S = 2.0  # of a MiB at most; where a line is slower a few more go on it
ABSENT = -1  # in place of the size of what is not here


@dataclass(frozen=True, slots=True)
class _Want:
    name: Digest
    max_bytes: int
    answer: "asyncio.Future[bytes | None]"


class Bundles:
    """Things of up to BUNDLED_BYTES, of any donors."""

    def __init__(
        self,
        transport: Fetches,
        start: Callable[[Coroutine[Any, Any, None], str], object],
        *,
        at_once: int,
        stall_s: float,
        on_failed: Callable[[PeerId, str, bool], None],
        place_s: float = PLACE_S,
    ) -> None:
        """start: a task, whose owner ends it. at_once: requests, to all donors together, and what takes longer than place_s beside them; one donor has
        one. on_failed(donor, why, whether it lied)."""
        self._transport = transport
        self._start = start
        self._stall_s = stall_s
        self._on_failed = on_failed
        self._place_s = place_s
        self._free = asyncio.Semaphore(at_once)
        self._waiting: dict[PeerId, list[_Want]] = {}  # for whoever is being asked, and what follows

    async def get(self, name: Digest, donors: Sequence[PeerId], max_bytes: int) -> bytes | None:
        """The thing, of the first of donors that gives it; None: none does. max_bytes: of it. Raises what a request raised beside PeerUnavailable
        and ProtocolError, which are told to on_failed."""
        assert max_bytes <= BUNDLED_BYTES, f"a thing of up to {max_bytes} bytes"
        for donor in donors:
            want = _Want(name, max_bytes, asyncio.get_running_loop().create_future())
            if donor in self._waiting:
                self._waiting[donor].append(want)
            else:
                self._waiting[donor] = [want]
                self._start(self._ask(donor), f"small things of {donor}")
            if (raw := await want.answer) is not None:
                return raw
        return None

    async def _ask(self, donor: PeerId) -> None:
        """Until nothing is wanted of it."""
        waiting, asked = self._waiting[donor], list[_Want]()
        try:
            await asyncio.sleep(GATHER_S)
            while waiting:
                async with self._place():
                    asked = [want for want in waiting[:MAX_BUNDLED] if not want.answer.done()]
                    del waiting[:MAX_BUNDLED]
                    given = await self._given(donor, asked) if asked else []
                for want, raw in zip(asked, given, strict=True):
                    if not want.answer.done():
                        want.answer.set_result(raw)
        except Exception as error:  # a task boundary: it is theirs who asked
            for want in (*asked, *waiting):
                if not want.answer.done():
                    want.answer.set_exception(error)
        finally:
            del self._waiting[donor]
            for want in (*asked, *waiting):
                if not want.answer.done():
                    want.answer.set_result(None)

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """One of a few, for place_s at most."""
        await self._free.acquire()
        is_held = True

        def leave() -> None:
            nonlocal is_held
            if is_held:
                is_held = False
                self._free.release()

        late = asyncio.get_running_loop().call_later(self._place_s, leave)
        try:
            yield
        finally:
            late.cancel()
            leave()

    async def _given(self, donor: PeerId, asked: Sequence[_Want]) -> Sequence[bytes | None]:
        """What the donor gives of what is asked."""
        nothing = [None] * len(asked)
        try:
            header, body = await self._transport.fetch(
                donor, STORE_SERVICE, {"names": b"".join(want.name for want in asked)},
                max_body_bytes=sum(want.max_bytes for want in asked), timeout_s=TIMEOUT_S, stall_timeout_s=self._stall_s,
            )  # fmt: skip
            return _taken_apart(donor, asked, header, body)
        except PeerUnavailable as error:  # or busy for now
            self._on_failed(donor, str(error), False)
        except ProtocolError as error:
            self._on_failed(donor, error.reason, True)
        return nothing


def _taken_apart(
    donor: PeerId, asked: Sequence[_Want], header: dict[str, Any], body: bytearray
) -> Sequence[bytes | None]:
    """Raises ProtocolError for anything but what was asked for."""
    sizes = header.get("sizes")
    if not isinstance(sizes, list) or len(sizes) != len(asked):
        raise ProtocolError(donor, "an answer without a size for each thing asked for")
    given: list[bytes | None] = []
    at = 0
    for want, size_bytes in zip(asked, sizes, strict=True):
        if size_bytes == ABSENT and type(size_bytes) is int:
            given.append(None)
            continue
        if type(size_bytes) is not int or not 0 <= size_bytes <= min(want.max_bytes, len(body) - at):
            raise ProtocolError(donor, f"a thing of more than {want.max_bytes} bytes, or than there are")
        raw = bytes(memoryview(body)[at : at + size_bytes])
        at += size_bytes
        if sha256(raw) != want.name:
            raise ProtocolError(donor, "not the thing of that name")
        given.append(raw)
    if at != len(body):
        raise ProtocolError(donor, f"{len(body) - at} bytes more than the things asked for")
    return given


def names_in(packed: bytes) -> list[Digest] | None:
    """The names that a request asks for; None if it is none."""
    if not packed or len(packed) % DIGEST_BYTES or len(packed) > MAX_BUNDLED * DIGEST_BYTES:
        return None
    return [Digest(packed[at : at + DIGEST_BYTES]) for at in range(0, len(packed), DIGEST_BYTES)]
