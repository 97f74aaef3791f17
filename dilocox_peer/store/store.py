"""One store of things named by their hash: files, contributions, anchor states. Served to peers, fetched from several at once.

    shelf = Shelf(folder, quota_bytes=20 << 30)         # on disk; see shelf.py
    store = Store(transport, [shelf])
    await store.serve()                                 # from here on peers may fetch what is here

    name = await store.add(Path("tokenizer.json"))      # the SHA-256 of its bytes, as sha256sum prints it
    path = await store.fetch(name, donors=peers, max_bytes=1 << 30)     # at once if it is here; else from whoever has it
    view = await store.open(name)                       # its bytes, memory-mapped; None if it is not here

A file on its way is checked chunk by chunk and whole, survives restarts in part, and is moved in when it is right. donors: peers that
may or may not have it, those first that are trusted most; a dozen is plenty. A name, a size limit and peers are all it takes: nothing
about things is in the directory. What peers may ask is `{name, want: "outline"}`, `{name, start, stop}` and, of small things, `{names}`
(docs/protocol.md). Whoever may read the run may ask; bandwidth limits are the transport's.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dilocox_peer.admission import Right
from dilocox_peer.errors import PeerUnavailable, ProtocolError, StateCorrupt
from dilocox_peer.network.bulk import Reply, Streamed
from dilocox_peer.network.frames import Buffer
from dilocox_peer.network.transport import Transport
from dilocox_peer.store.bundles import ABSENT, BUNDLED_BYTES, names_in
from dilocox_peer.store.fetch import Fetch
from dilocox_peer.store.outline import CHUNK_BYTES, Outline
from dilocox_peer.store.pull import STORE_SERVICE, Closing, Pull
from dilocox_peer.store.shelf import FileContent, Shelf
from dilocox_peer.types import DIGEST_BYTES, Digest, PeerId

FETCH_TIMEOUT_S = 24 * 3600.0
MAX_OPEN = 32  # things that nobody fetches right now
KEPT_OPEN_S = (
    600.0  # so long after it was last asked for can a thing be gone on with that was dropped from its shelf meanwhile
)

NOTHING = Reply({})


class Content(Protocol):
    """A thing that can be read in parts, from any thread."""

    @property
    def outline(self) -> Outline: ...

    def chunk(self, index: int) -> Buffer:
        """Blocking. Raises StateCorrupt when it is no longer what it was, OSError."""
        ...


@dataclass(slots=True)
class _Open:
    """A thing that is served. users: streams under way."""

    content: Content
    users: int = 0
    used_s: float = 0.0


class Source(Protocol):
    """Where things are, a shelf or something like one. Its methods may block, and are called from worker threads."""

    def content(self, name: Digest) -> Content | None: ...


class Folders(Protocol):
    """Where files are that have to be looked through before they are served, which may take minutes: that is done in a thread of its own, one file
    at a time, so that nobody's asking for these keeps the others waiting."""

    def is_unread(self, name: Digest) -> bool:
        """Whether `content` would look through one first."""
        ...

    def content(self, name: Digest, most_bytes: int = ...) -> Content | None:
        """As of a Source. One of more than most_bytes is not looked through, and None."""
        ...


class Store:
    """See the module."""

    def __init__(
        self,
        transport: Transport,
        shelves: Sequence[Shelf],
        *,
        sources: Sequence[Source] = (),
        on_accused: Callable[[PeerId, str], None] = lambda _peer, _reason: None,
        on_served: Callable[[Digest, int], None] = lambda _name, _num_bytes: None,
        is_urgent: Callable[[PeerId, Digest], bool] = lambda _peer, _name: False,
    ) -> None:
        """shelves: what is fetched or added goes to the first, and all are served. sources: are served too. on_accused(peer, why):
        of one that sent what is not of the name; on_served(name, bytes): as they go out. is_urgent(peer, name): a round waits for it."""
        self._transport = transport
        self._shelf = shelves[0]
        self._sources: tuple[Source, ...] = (*shelves, *sources)
        self._on_accused = on_accused
        self._on_served = on_served
        self._is_urgent = is_urgent
        self._open: OrderedDict[Digest, _Open] = OrderedDict()  # the least lately asked for first
        self._under_way: dict[Digest, asyncio.Task[Path]] = {}
        self._closing = Closing()
        self._folders: tuple[Folders, ...] = ()
        self._disk = ThreadPoolExecutor(2, thread_name_prefix="dilocox-store")
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="dilocox-read")

    def also_serve(self, sources: Iterable[Source], folders: Iterable[Folders] = ()) -> None:
        """Things that are elsewhere too."""
        self._sources = (*self._sources, *sources)
        self._folders = (*self._folders, *folders)

    async def serve(self, right: Right | None = Right.READ) -> None:
        """Answers peers from here on. right: what it takes to be answered, in a run that is not open."""
        await self._transport.serve(STORE_SERVICE, self._answer, right=right)

    # ---- for this peer ----

    async def add(self, path: Path) -> Digest:
        """Keeps a copy of a file; its name. Raises OSError."""
        name: Digest = await self._in_thread(self._shelf.add, path)
        return name

    async def path(self, name: Digest) -> Path | None:
        """Where the thing is on the shelf."""
        found: Path | None = await self._in_thread(self._shelf.path, name)
        return found

    async def forget(self, name: Digest) -> None:
        """What is on the shelf is damaged. Raises OSError."""
        await self._in_thread(self._shelf.forget, name)

    async def fetch(
        self, name: Digest, *, donors: Iterable[PeerId], max_bytes: int, timeout_s: float = FETCH_TIMEOUT_S
    ) -> Path:
        """Where the thing is: on the shelf at once, unread, or fetched from those of the donors that have it. Several calls for one name share
        one fetch; if that fails the next of them tries. Cancelled, what has come stays for another try.

        max_bytes: a larger one is refused before room is taken. Raises ThingUnavailable, TimeoutError, OSError (no room, quota).
        """
        here = await self.path(name)
        while here is None and (under_way := self._under_way.get(name)) is not None:
            await asyncio.wait({under_way})
            here = await self.path(name)
        if here is not None:
            return here
        task = self._under_way[name] = asyncio.create_task(self._pull(name, donors, max_bytes, timeout_s))
        try:
            return await task
        finally:
            del self._under_way[name]

    async def _pull(self, name: Digest, donors: Iterable[PeerId], max_bytes: int, timeout_s: float) -> Path:
        await self._closing.wait(name, timeout_s)
        if (here := await self.path(name)) is not None:
            return here
        partial = self._shelf.partial(name)
        resumed = await self._in_thread(partial.resumed)
        pull = Pull(
            Fetch(name, donors, resumed=resumed), partial, transport=self._transport, max_bytes=max_bytes,
            timeout_s=timeout_s, finish=partial.finish, on_failed=self._failed,
        )  # fmt: skip
        try:
            found: Path = await pull.run()
        finally:
            self._closing.add(name, pull)
        return found

    def _failed(self, donor: PeerId, reason: str, is_lying: bool) -> None:
        if is_lying:
            self._on_accused(donor, reason)

    async def open(self, name: Digest) -> memoryview | None:
        """The bytes of a thing that is here, memory-mapped and checked; None if it is not. They can be read as long as the view is
        held, also when the thing is dropped meanwhile."""
        view: memoryview | None = await self._in_thread(self._shelf.mapped, name)
        return view

    async def _in_thread(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._disk, call, *arguments)

    # ---- for others ----

    async def _answer(self, peer: PeerId, header: dict[str, Any]) -> Reply:
        """An empty header for a thing that is not here. Raises ProtocolError."""
        match header:
            case {"name": bytes(name), "want": "outline"} if len(name) == DIGEST_BYTES:
                content = await self._content(Digest(name))
                return NOTHING if content is None else await self._outlined(peer, Digest(name), content)
            case {"name": bytes(name), "start": int(start), "stop": int(stop)} if len(name) == DIGEST_BYTES:
                content = await self._content(Digest(name))
                if content is None:
                    raise PeerUnavailable(self._transport.peer_id, "it is not here")
                if not 0 <= start < stop <= content.outline.size_bytes:
                    raise ProtocolError(peer, f"bytes {start} to {stop} of a thing of {content.outline.size_bytes}")
                pieces = Streamed(stop - start, lambda: self._pieces(Digest(name), content, start, stop))
                return Reply({}, pieces, self._is_urgent(peer, Digest(name)))
            case {"names": bytes(packed)} if (names := names_in(packed)) is not None:
                found = await self._in_thread(self._small, names)
                sizes = [ABSENT if raw is None else len(raw) for raw in found]
                for name, raw in zip(names, found, strict=True):
                    if raw is not None:
                        self._on_served(name, len(raw))
                is_urgent = any(self._is_urgent(peer, name) for name in names)
                return Reply({"sizes": sizes}, [raw for raw in found if raw is not None], is_urgent)
            case _:
                raise ProtocolError(peer, "a request that names no thing, or not what is wanted of it")

    async def _content(self, name: Digest) -> Content | None:
        """It, as it was opened when it was first asked for: who fetches a large thing in parts gets all of it, although its shelf has
        dropped it since. What is in memory is not kept for that."""
        now = time.monotonic()
        for other, opened in list(self._open.items()):
            is_stale = now - opened.used_s > KEPT_OPEN_S or len(self._open) > MAX_OPEN
            if not opened.users and (is_stale or not isinstance(opened.content, FileContent)):
                del self._open[other]
        entry = self._open.pop(name, None)
        if entry is None:
            content = await self._in_thread(self._found, name)
            if content is None and await self._in_thread(self._is_unread, name):
                content = await asyncio.get_running_loop().run_in_executor(self._reading, self._looked_through, name)
            if content is None:
                return None
            entry = self._open.pop(name, None) or _Open(content)
        entry.used_s = now
        self._open[name] = entry
        return entry.content

    def _found(self, name: Digest) -> Content | None:
        read = (folder for folder in self._folders if not folder.is_unread(name))
        return next((found for each in (*self._sources, *read) if (found := each.content(name)) is not None), None)

    def _is_unread(self, name: Digest) -> bool:
        return any(folder.is_unread(name) for folder in self._folders)

    def _looked_through(self, name: Digest) -> Content | None:
        return next((found for folder in self._folders if (found := folder.content(name)) is not None), None)

    def _small(self, names: Iterable[Digest]) -> list[Buffer | None]:
        """Those that are here and are small."""
        return [self._whole(name) for name in names]

    def _whole(self, name: Digest) -> Buffer | None:
        small = (found for folder in self._folders if (found := folder.content(name, BUNDLED_BYTES)) is not None)
        content = self._found(name) or next(small, None)
        if content is None or content.outline.size_bytes > BUNDLED_BYTES:
            return None
        try:
            return content.chunk(0) if content.outline.size_bytes else b""
        except (StateCorrupt, OSError):
            return None

    async def _outlined(self, peer: PeerId, name: Digest, content: Content) -> Reply:
        outline = content.outline
        if len(outline.chunks) > 1:
            return Reply({"size": outline.size_bytes}, [outline.packed()])
        try:
            raw = await self._in_thread(content.chunk, 0)
        except (StateCorrupt, OSError):
            self._open.pop(name, None)
            return NOTHING
        self._on_served(name, len(raw))
        return Reply({"size": outline.size_bytes}, [raw], self._is_urgent(peer, name))

    async def _pieces(self, name: Digest, content: Content, start: int, stop: int) -> AsyncIterator[Buffer]:
        entry = self._open.setdefault(name, _Open(content))
        entry.users += 1
        try:
            for index in range(start // CHUNK_BYTES, (stop - 1) // CHUNK_BYTES + 1):
                first, last = content.outline.span(index)
                raw = await self._in_thread(content.chunk, index)
                piece = memoryview(raw)[max(start - first, 0) : min(stop, last) - first]
                self._on_served(name, piece.nbytes)
                yield piece
        except StateCorrupt as error:
            self._open.pop(name, None)
            raise OSError(str(error)) from None  # the stream ends early, as on any fault of a disk
        finally:
            entry.users -= 1
            entry.used_s = time.monotonic()
