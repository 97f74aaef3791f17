"""Shards of a run go from peer to peer, by their hash: who has a folder of them serves it, who lacks one asks everybody.

The catalogue itself is such a thing, and the tokenizer.json. What was fetched is served too.
"""

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from dilocox_peer.data.catalogue import CATALOGUE_FILE, MAX_CATALOGUE_BYTES, Catalogue, Shard, catalogue_of
from dilocox_peer.data.feed import Feed
from dilocox_peer.data.tokenizer import FILE_NAME
from dilocox_peer.errors import ConfigError, DilocoxError, ThingUnavailable
from dilocox_peer.events import Failed, Listener
from dilocox_peer.events_of_data import ShardFetched, ShardRefused
from dilocox_peer.peer.web_folder import NothingCame
from dilocox_peer.store.outline import CHUNK_BYTES, MAX_THING_BYTES, Outline
from dilocox_peer.store.shelf import FileContent
from dilocox_peer.store.store import Store
from dilocox_peer.types import Digest, PeerId, sha256

LOOK_S = 0.5
AGAIN_S = 5.0  # before the same shard is asked for again; twice as long each time that it came and was damaged on the disk since
MOST_AGAIN_S = 600.0
# The most of a web server that does not answer, or has no such file yet: it may be right a minute later.
NOTHING_S = 60.0
FETCH_S = 3600.0
ENTER_S = 120.0
PEERS_S = 30.0  # that peers have for the catalogue before the web is asked: one that trickles it keeps nobody from it
LEAST_BYTES_PER_S = 50_000  # beside PEERS_S, for a shard
LEFT_OUT_S = 600.0
"""So long are those not asked for shards of whom one did not come in that time, where the web has it: who trickled cannot be told."""

Donors = Callable[[], Awaitable[Sequence[PeerId]]]


class SharedFolders:
    """A store's source: the shards, catalogue and tokenizer in folders of a person's own. From any thread."""

    def __init__(self, folders: Sequence[Path], catalogue: Catalogue, name: str) -> None:
        names = {shard.sha256: shard.file_name for shard in catalogue.shards}
        names |= {name: CATALOGUE_FILE, catalogue.tokenizer: FILE_NAME}
        self._folders, self._names = tuple(folders), names
        self._outlines: dict[
            tuple[Path, int, int], Outline | None
        ] = {}  # (path, size, mtime); None: it is of another name

    def is_unread(self, name: Digest) -> bool:
        """Whether `content` would look through a file first."""
        return any(seen not in self._outlines for seen in self._files(name))

    def content(self, name: Digest, most_bytes: int = MAX_THING_BYTES) -> FileContent | None:
        """Of a file whose bytes are of that name; the first time they are looked through, a chunk at a time. None also for a larger one, which
        is not looked through."""
        for seen in self._files(name):
            path, size_bytes, _ = seen
            try:
                if size_bytes > most_bytes:
                    continue
                if seen not in self._outlines:
                    self._outlines[seen] = _outline_of_file(path, name)
                if (outline := self._outlines[seen]) is not None:
                    return FileContent(path, outline)
            except OSError:
                continue
        return None

    def _files(self, name: Digest) -> Iterator[tuple[Path, int, int]]:
        """(path, size, mtime) of those that should be of that name."""
        file_name = self._names.get(name.hex())
        for folder in self._folders if file_name else ():
            path = folder / str(file_name)
            with suppress(OSError):
                status = path.stat()
                yield path, status.st_size, status.st_mtime_ns


def _outline_of_file(path: Path, name: Digest) -> Outline | None:
    """None: its bytes are not of that name. Raises OSError."""
    whole, chunks, size_bytes = hashlib.sha256(), list[Digest](), 0
    with path.open("rb", buffering=0) as file:
        while raw := file.read(CHUNK_BYTES):
            whole.update(raw)
            chunks.append(sha256(raw))
            size_bytes += len(raw)
    return Outline(size_bytes, tuple(chunks)) if whole.digest() == name else None


class Web(Protocol):
    """Where else files are; a WebFolder on a shelf is one."""

    async def fetch(self, file_name: str, name: Digest, *, max_bytes: int, is_exact: bool) -> None:
        """Onto the shelf. Raises DilocoxError, OSError."""


async def fetch_catalogue(store: Store, wanted: str, donors: Donors, web: Web | None = None) -> tuple[Catalogue, Path]:
    """(the catalogue of that sha256, where it lies now), from whoever has it. Raises ConfigError when nobody does."""
    name, deadline, said = Digest(bytes.fromhex(wanted)), time.monotonic() + ENTER_S, ""
    peers_s = ENTER_S if web is None else PEERS_S
    while True:
        try:
            path: Path | None = await store.fetch(
                name, donors=await donors(), max_bytes=MAX_CATALOGUE_BYTES, timeout_s=peers_s
            )
        except (ThingUnavailable, OSError) as error:  # one who lies about its size may be all there is to ask now
            path = None
            if isinstance(error, OSError) and not isinstance(error, TimeoutError):
                said = f"; {error}"
            if web is not None:
                try:
                    await web.fetch(CATALOGUE_FILE, name, max_bytes=MAX_CATALOGUE_BYTES, is_exact=False)
                    path = await store.path(name)
                except DilocoxError as error:
                    said = f"; {error}"
        if path is not None:
            found = await asyncio.to_thread(_catalogue_at, path, name)
            if found is not None:
                return found, path
            await store.forget(name)
            said = f"; {path} is damaged"
        if time.monotonic() > deadline:
            raise ConfigError(
                f"nobody in the run has its catalogue ({wanted[:16]}{said}): pass --data with a folder of the run's shards"
            )
        await asyncio.sleep(AGAIN_S)


def _catalogue_at(path: Path, name: Digest) -> Catalogue | None:
    """Blocking. None: the bytes are of another name, as a disk may change what a shelf has kept. Raises ConfigError, OSError."""
    raw = path.read_bytes()
    return catalogue_of(raw, source=str(path)) if sha256(raw) == name else None


class ShardFetcher:
    """`run` it: fetches what a feed says it needs next, one shard at a time, and tells the feed."""

    def __init__(
        self,
        feed: Feed,
        store: Store,
        catalogue: Catalogue,
        donors: Donors,
        listener: Listener,
        web: Web | None = None,
    ) -> None:
        """web: is asked for what no peer has."""
        self._web = web
        self._feed, self._store, self._catalogue = feed, store, catalogue
        self._donors, self._listener = donors, listener
        self._not_before: dict[str, float] = {}
        self._fetched: dict[str, int] = {}  # how often it came
        self._left_out: dict[PeerId, float] = {}  # until then
        # How often in a row what the web had was none; not asked before then.
        self._web_refused: dict[str, tuple[int, float]] = {}

    async def run(self) -> None:
        while True:
            now = time.monotonic()
            wanted = [each for each in self._feed.wanted if self._not_before.get(each.sha256, 0.0) <= now]
            if not wanted:
                await asyncio.sleep(LOOK_S)
                continue
            await self._fetch(wanted[0])

    async def _fetch(self, shard: Shard) -> None:
        """Nothing is thrown but cancellation: a shard that cannot be had now is tried again."""
        started = time.monotonic()
        name, size_bytes = Digest(bytes.fromhex(shard.sha256)), self._catalogue.shard_bytes(shard)
        if await self._store.path(name) is not None:  # the feed is at other work, and has not seen it yet
            self._wait_with(shard)
            self._feed.look_again()
            return
        try:
            is_from_web = await self._from_somewhere(shard, name, size_bytes)
        except (ThingUnavailable, TimeoutError):
            self._wait_with(shard)
            return
        except OSError as error:
            self._wait_with(shard)
            reason = f"{(error.strerror or str(error)).lower()}: free some space, or pass another --max-disk"
            self._listener(ShardRefused(shard.sha256[:12], reason))
            return
        except DilocoxError as error:
            self._wait_with(shard)
            self._listener(Failed("fetching a shard", str(error)))
            return
        self._fetched[shard.sha256] = self._fetched.get(shard.sha256, 0) + 1
        self._wait_with(shard)
        self._listener(ShardFetched(shard.sha256, size_bytes, time.monotonic() - started, is_from_web=is_from_web))
        self._feed.look_again()

    async def _from_somewhere(self, shard: Shard, name: Digest, size_bytes: int) -> bool:
        """Whether it came from the web. Raises DilocoxError, TimeoutError, OSError."""
        now = time.monotonic()
        self._left_out = {peer: until for peer, until in self._left_out.items() if until > now}
        donors = [peer for peer in await self._donors() if peer not in self._left_out]
        timeout_s = FETCH_S if self._web is None else PEERS_S + size_bytes / LEAST_BYTES_PER_S
        try:
            await self._store.fetch(name, donors=donors, max_bytes=size_bytes, timeout_s=timeout_s)
        except (ThingUnavailable, TimeoutError) as error:
            times, not_before = self._web_refused.get(shard.sha256, (0, 0.0))
            if self._web is None or time.monotonic() < not_before:
                raise
            try:
                await self._web.fetch(shard.file_name, name, max_bytes=size_bytes, is_exact=True)
            except DilocoxError as refused:  # it may have come whole, and be another: that costs as much each time
                most_s = NOTHING_S if isinstance(refused, NothingCame) else MOST_AGAIN_S
                again_s = min(AGAIN_S * 2 ** min(times + 1, 10), most_s)
                self._web_refused[shard.sha256] = times + 1, time.monotonic() + again_s
                raise
            self._web_refused.pop(shard.sha256, None)
            if isinstance(error, TimeoutError):
                self._left_out |= dict.fromkeys(donors, time.monotonic() + LEFT_OUT_S)
            return True
        return False

    def _wait_with(self, shard: Shard) -> None:
        times = max(0, self._fetched.get(shard.sha256, 0) - 1)
        self._not_before[shard.sha256] = time.monotonic() + min(AGAIN_S * 2 ** min(times, 10), MOST_AGAIN_S)
