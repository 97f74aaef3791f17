"""What a peer reads and serves of its run's data, as the manifest and the volunteer say."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Protocol

from dilocox_peer.data.allotment import KEPT, Handout, Stretch
from dilocox_peer.data.batches import BatchSource
from dilocox_peer.data.catalogue import Catalogue, has_catalogue, read_catalogue
from dilocox_peer.data.corpus import Corpus, has_text, load_corpus
from dilocox_peer.data.feed import Feed, Handed
from dilocox_peer.data.row import UnitRow
from dilocox_peer.data.shards import ShardFolders
from dilocox_peer.data.sources import Reading
from dilocox_peer.data.taken import Taken
from dilocox_peer.data.tokenizer_files import find_tokenizer, has_tokenizer
from dilocox_peer.dht.directory import Directory
from dilocox_peer.errors import ConfigError
from dilocox_peer.events import Listener, Remark
from dilocox_peer.manifest import SHARDS, Manifest
from dilocox_peer.peer.disk_room import shard_quota
from dilocox_peer.peer.outside import why_not_asked
from dilocox_peer.peer.planning.folded import Folded
from dilocox_peer.peer.presence import Presence
from dilocox_peer.peer.seeding import ShardFetcher, SharedFolders, fetch_catalogue
from dilocox_peer.peer.settings import SessionSettings
from dilocox_peer.peer.web_folder import WebFolder
from dilocox_peer.store.shelf import Shelf
from dilocox_peer.store.store import Source, Store
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.chain import Certificate

# On the event loop: each certificate takes as long as its roster has entries.
MOST_AT_ONCE = 2_000  # entries that one look follows
NAMED_S = 5.0  # to look up the name of a web server's
FOLLOW_S = 0.2  # how often the chain is looked at: what it hands out is for two rounds later


def read_corpus(manifest: Manifest, settings: SessionSettings, listener: Listener) -> Corpus:
    """Takes as long as the text is; not in an event loop. Raises ConfigError."""
    section, choices = manifest.data, settings.choices
    tokenizer = find_tokenizer(section, manifest.model.vocab_size, given=choices.tokenizer, kept=settings.tokenizers)
    reading = Reading(choices.column, refused=lambda line: listener(Remark(line)))
    return load_corpus(
        section.source, choices.data, validation=section.validation, tokenizer=tokenizer, reading=reading
    )


def can_read(manifest: Manifest, settings: SessionSettings) -> bool:
    """Whether this peer has what stage 0 needs, as far as can be told without reading it."""
    section, choices = manifest.data, settings.choices
    if section.source == SHARDS:
        return True  # others have them
    return has_text(section.source, choices.data) and has_tokenizer(
        section, given=choices.tokenizer, kept=settings.tokenizers
    )


@dataclass(slots=True)
class _Handed:
    """What certificates have handed out. own: to us, the newest shares."""

    handout: Handout
    own: deque[tuple[Stretch, ...]] = field(default_factory=lambda: deque(maxlen=KEPT))


class HasChain(Protocol):
    @property
    def chain(self) -> Sequence[Certificate]: ...


@dataclass(frozen=True, slots=True)
class Data:
    """batches: None at a stage that reads none. shards: of a run of shards, what serves and fetches them."""

    batches: BatchSource | None = None
    shards: "ShardRoom | None" = None

    async def run(self, machine: HasChain, store: Store, on_ready: Callable[[], None]) -> None:
        """Heeds what certificates hand out, fetches shards and has store serve them; does not end by itself. on_ready: from a
        thread, when a micro-batch is there again."""
        if self.shards is None:
            await asyncio.Event().wait()
        else:
            await self.shards.run(machine, store, on_ready)


async def open_data(
    manifest: Manifest,
    settings: SessionSettings,
    stage: int,
    presence: Presence,
    directory: Directory,
    listener: Listener,
    stack: AsyncExitStack,
) -> Data:
    """What this stay reads and serves. listener: called from threads too. Raises ConfigError."""
    if manifest.data.source == SHARDS:
        room = ShardRoom(manifest, settings, stage, presence, directory, listener)
        await room.open()
        stack.push_async_callback(room.close)
        return Data(room.feed, room)
    if stage:
        return Data()
    return Data(await asyncio.to_thread(read_corpus, manifest, settings, listener))


@dataclass(frozen=True, slots=True)
class _OnShelf:
    """A Web (seeding.py)."""

    folder: WebFolder
    shelf: Shelf

    async def fetch(self, file_name: str, name: Digest, *, max_bytes: int, is_exact: bool) -> None:
        await asyncio.to_thread(self.folder.fetch, file_name, name, self.shelf, max_bytes=max_bytes, is_exact=is_exact)


class ShardRoom:
    """The shards of one stay: `open`, then `run`."""

    def __init__(
        self,
        manifest: Manifest,
        settings: SessionSettings,
        stage: int,
        presence: Presence,
        directory: Directory,
        listener: Listener,
    ) -> None:
        self._manifest, self._settings, self._stage = manifest, settings, stage
        self._presence, self._directory, self._listener = presence, directory, listener
        self._me = presence.me
        self.feed: Feed | None = None
        self._fetcher: ShardFetcher | None = None
        self._web: _OnShelf | None = None
        self._tokens = manifest.inner.micro_batch * manifest.model.context
        self._served: list[Source] = []
        self._shared: list[SharedFolders] = []
        self._handed: Folded[_Handed] | None = None  # at stage 0

    async def open(self) -> None:
        """Serves the folders that the volunteer has; at stage 0 gets the catalogue too, and begins to make batches ready. Raises
        ConfigError."""
        section, settings = self._manifest.data, self._settings
        folders = [path for path in settings.choices.data if has_catalogue(path)]
        if len(folders) < len(settings.choices.data):
            other = next(path for path in settings.choices.data if path not in folders)
            raise ConfigError(
                f"--data {other}: this run trains on shards; name a folder that `tokenize` wrote, or none"
            )
        catalogue: Catalogue | None = None
        for folder in folders:
            catalogue, _ = await asyncio.to_thread(read_catalogue, folder, wanted=section.catalogue)
        quota_bytes = shard_quota(self._manifest, self._stage, settings.at_most)
        shelf = await asyncio.to_thread(Shelf, settings.run_folder / "shards", quota_bytes=quota_bytes)
        self._served = [shelf]
        if catalogue is not None:
            self._shared = [await asyncio.to_thread(SharedFolders, folders, catalogue, section.catalogue)]
        store = Store(self._presence.transport, [shelf])  # to fetch with; what serves comes later in a start-up
        if self._stage:
            return
        if section.url and await self._may_ask(section.url):
            mbit_s = settings.at_most.max_download
            bytes_per_s = None if mbit_s is None else mbit_s * 1e6 / 8
            web = WebFolder(section.url, bytes_per_s, is_own=settings.choices.local_data_url)
            self._web = _OnShelf(web, shelf)
        if catalogue is None:
            catalogue, _ = await fetch_catalogue(store, section.catalogue, self._donors, self._web)
        if catalogue.vocab_size > self._manifest.model.vocab_size:
            raise ConfigError(
                f"the run's shards have {catalogue.vocab_size:,} tokens, its model knows {self._manifest.model.vocab_size:,}: its "
                "owner has to raise model.vocab_size"
            )
        row = await asyncio.to_thread(UnitRow, catalogue, self._manifest.run.seed)
        self._handed = Folded(lambda: _Handed(Handout(row.row)), self._hand_out)
        self.feed = Feed(
            row,
            ShardFolders(catalogue, folders, kept=shelf),
            Taken(settings.run_folder / "taken.json"),
            seed=self._manifest.run.seed,
            peer=self._me,
            incarnation=self._presence.incarnation,
            batch=self._manifest.inner.micro_batch,
            context=self._manifest.model.context,
            packing=section.packing,
            listener=self._listener,
        )
        self._fetcher = ShardFetcher(self.feed, store, catalogue, self._donors, self._listener, self._web)

    async def _may_ask(self, url: str) -> bool:
        """Whether shards are fetched from there; says once why not. A name that nobody tells is asked for again, and dialled outside alone."""
        if self._settings.choices.local_data_url:
            return True
        reason = ""
        with suppress(TimeoutError):
            reason = await asyncio.wait_for(asyncio.to_thread(why_not_asked, url), NAMED_S)
        if reason:
            self._listener(Remark(f"nothing is fetched from the run's data.url: {reason}"))
        return not reason

    def follow(self, chain: Sequence[Certificate]) -> bool:
        """The chain has changed, or may have: what it hands us now is ours. False: it is long and new to us, and there is more to follow;
        what was handed out halfway is nobody's any more."""
        if self.feed is None:
            return True
        assert self._handed is not None, "a feed without a row"
        if not self._handed.follow(chain, MOST_AT_ONCE):
            return False
        found = self._handed.value
        self.feed.hand(Handed(found.handout.epoch, tuple(stretch for each in found.own for stretch in each)))
        return True

    def _hand_out(self, found: "_Handed", certificate: Certificate, before: Certificate | None) -> None:
        value = certificate.value
        if value.kind == "epoch" and value.round and before is not None:
            found.handout.part(before.value.roster, value.roster)
        handed = found.handout.take(
            value.roster,
            tokens_a_round=value.plan.inner_steps * self._manifest.inner.accumulate * self._tokens,
            reported={entry.peer: entry.micro_batches * self._tokens for entry in value.entries},
        )
        if (share := handed.get(self._me)) is not None:
            found.own.append(share)

    async def run(self, machine: HasChain, store: Store, on_ready: Callable[[], None]) -> None:
        """As Data.run."""
        store.also_serve(self._served, self._shared)
        feed, fetcher = self.feed, self._fetcher
        if feed is None or fetcher is None:
            await asyncio.Event().wait()
            return
        feed.on_ready = on_ready
        is_followed = self.follow(machine.chain)
        feed.start()
        fetching = asyncio.create_task(fetcher.run(), name="shards")
        try:
            while not fetching.done():
                await asyncio.wait({fetching}, timeout=FOLLOW_S if is_followed else 0)
                is_followed = self.follow(machine.chain)
            fetching.result()
        finally:
            fetching.cancel()

    async def close(self) -> None:
        if self._web is not None:
            self._web.folder.stop()
        if self.feed is not None:
            await asyncio.to_thread(self.feed.stop)

    async def _donors(self) -> list[PeerId]:
        """Everybody in the run, those of stage 0 first."""
        peers: list[PeerId] = []
        for stage in range(self._manifest.stages.count):
            peers += [lease.peer for lease in await self._directory.peers(stage) if lease.peer != self._me]
        return list(dict.fromkeys(peers))
