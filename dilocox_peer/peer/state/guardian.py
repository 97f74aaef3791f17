"""Keeps copies of other stages' agreed states, so that a stage outlives all who train it.

One stage by default. A copy is the whole state, which is as much as some dozens of contributions: so it is made anew every
16 rounds at most, and so seldom that all who copy from one peer take no more than a tenth of its time. Where nobody keeps the run, two
peers of each stage's copies also take the contributions to the rounds since, as they come, and no more than a tenth of what the
lines of the stage carry. docs/pipeline.md.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path

from dilocox_peer.admission import Right
from dilocox_peer.compression.sizes import blob_limits
from dilocox_peer.dht.directory import Directory
from dilocox_peer.dht.records import Lease
from dilocox_peer.dht.turns import known_first
from dilocox_peer.errors import PeerUnavailable, ProtocolError, RunUnreachable, StateCorrupt, ThingUnavailable
from dilocox_peer.events import Event, Failed, Listener
from dilocox_peer.events_of_states import StageCopied, StageFollowed
from dilocox_peer.manifest import Manifest
from dilocox_peer.model.architecture import layout_of
from dilocox_peer.network.endpoint import Endpoint
from dilocox_peer.peer.rounds.patience import Patience
from dilocox_peer.peer.state.backup import (
    Annals,
    copy_folder,
    followers,
    is_due,
    reached_with,
    rest_s,
    stages_to_keep,
    worth_asking,
)
from dilocox_peer.peer.state.backup_exchange import BACKUP_SERVICE, BackupServer, Kept, fetch_chain, fetch_summary
from dilocox_peer.peer.state.backup_store import BackupStore, backup_store
from dilocox_peer.peer.state.keeping import Allowance, LookPace
from dilocox_peer.peer.state.statesync import Agreed, fetch_state
from dilocox_peer.store.shelf import Shelf
from dilocox_peer.store.store import Store
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.chain import Certificate

FIRST_COPY_S, LOOK_S = 5.0, 20.0
ASK_S = 10.0
COPY_TIMEOUT_S = 3600.0
BLOB_TIMEOUT_S = 600.0
PATIENCE_S = 60.0  # with view changes that a minority signed: two looks
DONORS_TRIED = 3


class Guardian:
    """`serve`, then `run` it."""

    def __init__(
        self,
        endpoint: Endpoint,
        stage: int,
        *,
        manifest: Manifest,
        count: int,
        run_folder: Path,
        directory: Directory,
        certificates: Callable[[], Sequence[Certificate]],
        listener: Listener,
        site: str = "",
    ) -> None:
        """site: where our volunteer says that we are. count: stages to keep copies of. certificates: of our own stage's chain."""
        self._me = endpoint.me
        self._transport = endpoint.transport
        self._rng = random.Random(f"{endpoint.me} {endpoint.incarnation} copies")
        self._stage = stage
        self._manifest = manifest
        self._count = min(count, manifest.stages.count - 1)
        self._run_folder = run_folder
        self._directory = directory
        self._listener = listener
        self._site = site
        self._patience = {stage: Patience(PATIENCE_S) for stage in range(manifest.stages.count)}
        self._kept: dict[int, Kept] = {}
        self._heads: dict[int, Digest] = {}  # of the states that are kept
        self._allowances: dict[int, Allowance] = {}
        self._paces: dict[int, LookPace] = {}
        self._leases: dict[int, list[Lease]] = {}
        self._keepers: list[Lease] = []
        self._unreached: Counter[PeerId] = Counter()  # how often it gave nothing when it was asked
        self._in_vain: Counter[int] = Counter()  # looks in a row at a stage of which a copy was due, and nobody gave it
        self._rest_s = 0.0
        self._copy_at = 0.0
        self._stores: dict[int, BackupStore] = {}
        self._contributions: Shelf | None = None
        self._server = BackupServer(stage, certificates=certificates, kept=self._kept)

    async def serve(self, stack: AsyncExitStack) -> None:
        """Finds what is on disk from before, and answers who asks. stack: that ends when nothing of it runs any more."""
        stack.push_async_callback(self._close)
        for stage in range(self._manifest.stages.count):
            if stage != self._stage:
                if not copy_folder(self._run_folder, stage).is_dir():
                    continue
                try:
                    await self._take_up(stage)
                except OSError as error:  # it is made anew
                    self._listener(Failed("copy of another stage", f"{error.strerror or error}; trying again"))
        await self._transport.serve(BACKUP_SERVICE, self._server.serve, right=Right.READ)

    async def run(self) -> None:
        """Copies until cancelled; what fails is told and tried again."""
        await asyncio.sleep(FIRST_COPY_S * self._rng.uniform(1.0, 2.0))
        if not self._count:
            await asyncio.Event().wait()  # nothing to copy, only to answer
        while True:
            try:
                pause_s = await self._go_on()
            except (PeerUnavailable, ProtocolError, RunUnreachable, StateCorrupt, ValueError) as error:
                # ValueError: of a block of certificates that has gone bad on the disk (rounds/past.py)
                self._listener(Failed("copy of another stage", f"{error}; trying again"))
                pause_s = FIRST_COPY_S
            except OSError as error:
                self._listener(Failed("copy of another stage", f"{error.strerror or error}; trying again"))
                pause_s = LOOK_S
            await asyncio.sleep(pause_s * self._rng.uniform(1.0, 1.5))

    async def _go_on(self) -> float:
        """What is due by now. Seconds until the next."""
        now = time.monotonic()
        if now >= self._copy_at:
            self._rest_s = 0.0
            self._copy_at = now + FIRST_COPY_S
            await self._copy_all()
            self._copy_at = time.monotonic() + (max(LOOK_S, self._rest_s) if self._kept else FIRST_COPY_S)
        pauses = [await self._follow(stage) for stage in self._followed()]
        return max(0.0, min([self._copy_at - time.monotonic(), *pauses]))

    def _followed(self) -> list[int]:
        """The kept stages to whose rounds we take the contributions."""
        if self._keepers:
            return []
        found = []
        for stage in self._heads:
            others = {lease.peer for other, leases in self._leases.items() if other != stage for lease in leases}
            if self._leases.get(stage) and self._me in followers(stage, others | {self._me}):
                found.append(stage)
        return found

    async def _follow(self, stage: int) -> float:
        """The rounds of a stage since its state that is kept here, oldest first. Seconds until the next look. Raises as _copy does."""
        pace, kept, head = self._paces.setdefault(stage, LookPace()), self._kept[stage], self._heads[stage]
        store, annals = self._store(stage), kept.annals
        donors = self._donors(stage)
        lease = self._rng.choice(donors)
        try:
            await self._transport.connect(lease.peer, lease.addresses)
            await fetch_chain(self._transport, lease.peer, annals, ASK_S)
        except PeerUnavailable:  # it may be the stage's end: what is kept stays as it is
            return LOOK_S / 4
        finally:
            if is_left := not annals.holds(head):
                await self._take_up(stage)
        if is_left:  # another branch: a state of that one is copied
            self._copy_at = 0.0
            return LOOK_S / 4
        since, layout = annals.since(head), layout_of(self._manifest, stage)
        allowance = self._allowances.setdefault(stage, Allowance(layout.state_bytes))
        spare, took = allowance.spare_bytes(annals.certificates, time.monotonic()), 0
        fetching = Store(self._transport, [store.contributions])
        with suppress(ThingUnavailable, TimeoutError):  # the next look tries again
            for name in (name for each in since for name in each.value.blobs):
                if name in store.contributions:
                    continue
                if spare is not None and took >= spare:
                    break
                path = await fetching.fetch(
                    name,
                    donors=[each.peer for each in donors],
                    max_bytes=blob_limits(layout)[1],
                    timeout_s=BLOB_TIMEOUT_S,
                )
                took += path.stat().st_size
        allowance.taken(took)
        if (growth := store.unwritten()) is not None:
            store.settle(await asyncio.to_thread(store.write_chain, growth))
        reached = reached_with(since, store.contributions)
        number = reached[-1].value.round if reached else kept.round
        if number > kept.reached:
            self._listener(StageFollowed(stage, number, took))
        self._kept[stage] = Kept(annals, kept.round, number)
        return pace.pause_s(annals.place.round, time.monotonic(), is_complete=annals.is_over, is_alone=False)

    async def _take_up(self, stage: int) -> None:
        """What is on disk is what we have and serve: also where a chain has gone on, on another branch, without a state of that one."""
        self._kept.pop(stage, None)
        self._heads.pop(stage, None)
        found = await asyncio.to_thread(_kept_in, self._store(stage))
        if trouble := self._store(stage).trouble:
            self._listener(Failed("copy of another stage", f"{trouble}; it is made anew where nothing is left"))
        if found is not None:
            self._kept[stage], self._heads[stage] = found
            found[0].annals.patience = self._patience[stage]

    def _store(self, stage: int) -> BackupStore:
        """With the shelf that is served."""
        if stage not in self._stores:
            self._stores[stage] = backup_store(self._run_folder, self._manifest, stage)
            self._stores[stage].contributions = self.contributions
        return self._stores[stage]

    async def _close(self) -> None:
        self._kept.clear()  # nothing of it is served any more
        for store in self._stores.values():
            await asyncio.to_thread(store.close)

    @property
    def contributions(self) -> Shelf:
        """To rounds of the stages that are kept; for others to fetch. Raises OSError."""
        if self._contributions is None:
            self._contributions = backup_store(self._run_folder, self._manifest, self._stage).contributions
        return self._contributions

    async def _let_go(self) -> None:
        """Of contributions that lead on from no state that is here. Raises OSError."""
        since = (each for stage, head in self._heads.items() for each in self._kept[stage].annals.since(head))
        unwanted = self.contributions.held - {name for each in since for name in each.value.blobs}

        def forget() -> None:
            for name in unwanted:
                self.contributions.forget(name)

        await asyncio.to_thread(forget)

    async def _copy_all(self) -> None:
        leases = {
            stage: await self._directory.peers(stage)
            for stage in range(self._manifest.stages.count)
            if stage != self._stage
        }
        self._leases = {**leases, self._stage: await self._directory.peers(self._stage)}
        self._keepers = await self._directory.keepers()
        listed = {lease.peer for each in leases.values() for lease in each}
        self._unreached = Counter({peer: times for peer, times in self._unreached.items() if peer in listed})
        replicas = {stage: len(found) for stage, found in leases.items()}
        for stage in stages_to_keep(self._stage, replicas, self._kept, self._count, self._me):
            self._leases[stage] = known_first(leases[stage], self._transport, self._rng)
            started = time.monotonic()
            if await self._copy(stage, self._donors(stage)[:DONORS_TRIED]):
                seconds = time.monotonic() - started
                self._rest_s += rest_s(seconds, replicas, self._stage, stage, self._count)

    def _donors(self, stage: int) -> list[Lease]:
        leases = sorted(self._leases[stage], key=lambda lease: self._unreached[lease.peer])
        return worth_asking(leases, self._transport.addresses, self._site, in_vain=self._in_vain[stage])

    async def _copy(self, stage: int, donors: Sequence[Lease]) -> bool:
        """From the first donor that has something new enough, and its proof; whether there was one."""
        store = self._store(stage)
        self._in_vain[stage] += bool(donors)
        for number, lease in enumerate(donors, 1):
            try:
                if await self._copy_from(lease, store):
                    return True
            except (PeerUnavailable, ProtocolError, StateCorrupt):
                self._unreached[lease.peer] += 1  # it may be nothing but a lease
                if number == len(donors):
                    raise
        return False

    async def _copy_from(self, lease: Lease, store: BackupStore) -> bool:
        stage, kept = store.stage, self._kept.get(store.stage)
        await self._transport.connect(lease.peer, lease.addresses)
        summary = await fetch_summary(self._transport, lease.peer, stage, ASK_S)
        if summary is None or not is_due(summary.round, kept.round if kept is not None else None):
            self._in_vain[stage] = 0
            return False
        word = await self._directory.word(stage)
        annals = await asyncio.to_thread(store.open) if kept is None else kept.annals
        annals.patience = self._patience[stage]
        if word is not None:
            annals.hear(word[0])
        try:
            await fetch_chain(self._transport, lease.peer, annals)
            return await self._copy_newest(lease, store, annals, is_first=kept is None)
        finally:
            if stage in self._heads and not self._kept[stage].annals.holds(self._heads[stage]):
                await self._take_up(stage)

    async def _reached(self, leases: Sequence[Lease]) -> list[PeerId]:
        """Of these, for what a slow donor would be late with (store/fetch.py)."""
        found = await asyncio.gather(
            *(self._transport.connect(each.peer, each.addresses) for each in leases), return_exceptions=True
        )
        return [each.peer for each, failure in zip(leases, found, strict=True) if failure is None]

    async def _copy_newest(self, lease: Lease, store: BackupStore, annals: Annals, *, is_first: bool) -> bool:
        stage, started = store.stage, time.monotonic()
        others = await self._reached([each for each in self._donors(stage) if each.peer != lease.peer])
        for head, digest in annals.newest_proven():
            if head == self._heads.get(stage):
                return False
            round_number = annals.round_at(head)
            assert round_number is not None, "a head of this chain"
            state = await fetch_state(
                self._transport, [lease.peer, *others], Agreed(round_number, head, digest), layout=layout_of(self._manifest, stage),
                timeout_s=COPY_TIMEOUT_S, listener=_only_failures(self._listener), shelf=store.arrivals,
            )  # fmt: skip
            if state is None:
                continue
            assert state.digest == annals.digest_at(state.head), "a state without its proof"
            store.settle(await asyncio.to_thread(store.save, state, store.unwritten()))
            self._kept[stage], self._heads[stage] = Kept(annals, state.round, state.round), state.head
            self._in_vain[stage] = 0
            await self._let_go()
            seconds = round(time.monotonic() - started, 3)
            self._listener(StageCopied(stage, state.round, lease.peer, state.size_bytes, seconds, is_first))
            return True
        return False


def _kept_in(store: BackupStore) -> tuple[Kept, Digest] | None:
    """And the head of the state."""
    store.open()
    found = store.read()
    if found is None:
        return None
    annals, state = found
    reached = reached_with(annals.since(state.head), store.contributions)
    return Kept(annals, state.round, reached[-1].value.round if reached else state.round), state.head


def _only_failures(listener: Listener) -> Listener:
    def tell(event: Event) -> None:
        if event.level == "warning":
            listener(event)

    return tell
