"""Keeps copies of other stages' agreed states, so that a stage outlives all who train it.

One stage by default, copied whole again and again: at most every 20 s, and so seldom that copying takes no more than a
tenth of the time. What that costs and brings: docs/pipeline.md.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dilocox_peer.dht.directory import Directory
from dilocox_peer.dht.records import Lease
from dilocox_peer.errors import PeerUnavailable, ProtocolError, RunUnreachable, StateCorrupt
from dilocox_peer.events import Event, Failed, Listener, StageCopied
from dilocox_peer.manifest import Manifest
from dilocox_peer.peer.backup import BackupStore, stages_to_keep
from dilocox_peer.peer.backup_exchange import BACKUP_SERVICE, BackupServer, Kept, fetch_chain
from dilocox_peer.peer.chain import Certificate
from dilocox_peer.peer.presence import Presence
from dilocox_peer.peer.statesync import fetch_state
from dilocox_peer.pipeline.model import layout_of
from dilocox_peer.signing import verify
from dilocox_peer.types import Digest

FIRST_COPY_S, COPY_EVERY_S = 5.0, 20.0
COPY_SHARE = 0.1  # of the time
COPY_TIMEOUT_S = 3600.0
DONORS_TRIED = 3


def backup_store(run_folder: Path, manifest: Manifest, stage: int) -> BackupStore:
    """Where a peer keeps its copy of a stage that it does not train."""
    return BackupStore(run_folder / "backup" / f"stage{stage}", manifest, stage, verify)


class Guardian:
    """`serve`, then `run` it."""

    def __init__(
        self,
        presence: Presence,
        stage: int,
        *,
        manifest: Manifest,
        count: int,
        run_folder: Path,
        directory: Directory,
        certificates: Callable[[], Sequence[Certificate]],
        listener: Listener,
    ) -> None:
        """count: stages to keep copies of. certificates: of our own stage's chain."""
        self._me = presence.me
        self._transport = presence.transport
        self._rng = random.Random(f"{presence.me} {presence.incarnation} copies")
        self._stage = stage
        self._manifest = manifest
        self._count = min(count, manifest.stages.count - 1)
        self._run_folder = run_folder
        self._directory = directory
        self._listener = listener
        self._kept: dict[int, Kept] = {}
        self._server = BackupServer(stage, certificates=certificates, kept=self._kept)

    async def serve(self) -> None:
        """Finds what is on disk from before, and answers who asks."""
        for stage in range(self._manifest.stages.count):
            if stage != self._stage:
                store = backup_store(self._run_folder, self._manifest, stage)
                if (kept := await asyncio.to_thread(_kept_in, store)) is not None:
                    self._kept[stage] = kept
        await self._transport.serve(BACKUP_SERVICE, self._server.serve)

    async def run(self) -> None:
        """Copies until cancelled; what fails is told and tried again."""
        await asyncio.sleep(FIRST_COPY_S * self._rng.uniform(1.0, 2.0))
        while True:
            started = time.monotonic()
            try:
                await self._copy_all()
            except (PeerUnavailable, ProtocolError, RunUnreachable, StateCorrupt) as error:
                self._listener(Failed("copy of another stage", f"{error}; trying again"))
            except OSError as error:
                self._listener(Failed("copy of another stage", f"{error.strerror or error}; trying again"))
            seconds = time.monotonic() - started
            pause_s = FIRST_COPY_S if not self._kept else max(COPY_EVERY_S, seconds / COPY_SHARE)
            await asyncio.sleep(pause_s * self._rng.uniform(1.0, 1.5))

    async def _copy_all(self) -> None:
        if not self._count:
            await asyncio.sleep(COPY_EVERY_S)
            return
        leases = {
            stage: await self._directory.peers(stage)
            for stage in range(self._manifest.stages.count)
            if stage != self._stage
        }
        replicas = {stage: len(found) for stage, found in leases.items()}
        for stage in stages_to_keep(self._stage, replicas, self._kept, self._count, self._me):
            donors = leases[stage]
            self._rng.shuffle(donors)
            await self._copy(stage, donors[:DONORS_TRIED])

    async def _copy(self, stage: int, donors: Sequence[Lease]) -> None:
        """From the first donor that has something newer, and its proof."""
        store = backup_store(self._run_folder, self._manifest, stage)
        for number, lease in enumerate(donors, 1):
            try:
                if await self._copy_from(lease, store):
                    return
            except (PeerUnavailable, ProtocolError, StateCorrupt):
                if number == len(donors):
                    raise

    async def _copy_from(self, lease: Lease, store: BackupStore) -> bool:
        kept, started = self._kept.get(store.stage), time.monotonic()
        await self._transport.connect(lease.peer, lease.addresses)
        annals = await asyncio.to_thread(store.annals)
        await fetch_chain(self._transport, lease.peer, annals)
        layout = layout_of(self._manifest, store.stage)
        for head, digest in annals.newest_proven():
            if kept is not None and kept.annals.digest_at(head) == digest:
                return True  # nothing newer is certified
            state = await fetch_state(
                self._transport, [lease.peer], {"head": Digest(head)}, layout=layout, expected=digest,
                timeout_s=COPY_TIMEOUT_S, listener=_only_failures(self._listener),
            )  # fmt: skip
            if state is None:
                continue
            await asyncio.to_thread(store.save, annals, state)
            self._kept[store.stage] = Kept(store, annals, state.round)
            seconds = round(time.monotonic() - started, 3)
            self._listener(StageCopied(store.stage, state.round, lease.peer, state.size_bytes, seconds, kept is None))
            return True
        return False


def _kept_in(store: BackupStore) -> Kept | None:
    backup = store.load()
    return Kept(store, store.annals(), backup.state.round) if backup is not None else None


def _only_failures(listener: Listener) -> Listener:
    def tell(event: Event) -> None:
        if event.level == "warning":
            listener(event)

    return tell
