"""Keeps copies of other stages' agreed states, so that a stage outlives all who train it.

One stage by default. A copy is the whole state, which is as much as some dozens of contributions: so it is made anew every
16 rounds at most, and so seldom that all who copy from one peer take no more than a tenth of its time. docs/pipeline.md.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dilocox_peer.admission import Right
from dilocox_peer.dht.directory import Directory
from dilocox_peer.dht.records import Lease
from dilocox_peer.errors import PeerUnavailable, ProtocolError, RunUnreachable, StateCorrupt
from dilocox_peer.events import Event, Failed, Listener
from dilocox_peer.events_of_states import StageCopied
from dilocox_peer.manifest import Manifest
from dilocox_peer.model.architecture import layout_of
from dilocox_peer.network.endpoint import Endpoint
from dilocox_peer.peer.rounds.patience import Patience
from dilocox_peer.peer.state.backup import BackupStore, copy_folder, is_due, rest_s, stages_to_keep
from dilocox_peer.peer.state.backup_exchange import BACKUP_SERVICE, BackupServer, Kept, fetch_chain, fetch_summary
from dilocox_peer.peer.state.statesync import Agreed, fetch_state
from dilocox_peer.signing import verify
from dilocox_peer.wire.chain import Certificate

FIRST_COPY_S, LOOK_S = 5.0, 20.0
ASK_S = 10.0
COPY_TIMEOUT_S = 3600.0
PATIENCE_S = 60.0  # with view changes that a minority signed: two looks
DONORS_TRIED = 3


def backup_store(run_folder: Path, manifest: Manifest, stage: int) -> BackupStore:
    """Where a peer keeps its copy of a stage that it does not train."""
    return BackupStore(copy_folder(run_folder, stage), manifest, stage, verify)


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
    ) -> None:
        """count: stages to keep copies of. certificates: of our own stage's chain."""
        self._me = endpoint.me
        self._transport = endpoint.transport
        self._rng = random.Random(f"{endpoint.me} {endpoint.incarnation} copies")
        self._stage = stage
        self._manifest = manifest
        self._count = min(count, manifest.stages.count - 1)
        self._run_folder = run_folder
        self._directory = directory
        self._listener = listener
        self._patience = Patience(PATIENCE_S)
        self._kept: dict[int, Kept] = {}
        self._rest_s = 0.0
        self._server = BackupServer(stage, certificates=certificates, kept=self._kept)

    async def serve(self) -> None:
        """Finds what is on disk from before, and answers who asks."""
        for stage in range(self._manifest.stages.count):
            if stage != self._stage:
                store = backup_store(self._run_folder, self._manifest, stage)
                if (kept := await asyncio.to_thread(_kept_in, store)) is not None:
                    self._kept[stage] = kept
        await self._transport.serve(BACKUP_SERVICE, self._server.serve, right=Right.READ)

    async def run(self) -> None:
        """Copies until cancelled; what fails is told and tried again."""
        await asyncio.sleep(FIRST_COPY_S * self._rng.uniform(1.0, 2.0))
        if not self._count:
            await asyncio.Event().wait()  # nothing to copy, only to answer
        while True:
            self._rest_s = 0.0
            try:
                await self._copy_all()
            except (PeerUnavailable, ProtocolError, RunUnreachable, StateCorrupt) as error:
                self._listener(Failed("copy of another stage", f"{error}; trying again"))
            except OSError as error:
                self._listener(Failed("copy of another stage", f"{error.strerror or error}; trying again"))
            pause_s = FIRST_COPY_S if not self._kept else max(LOOK_S, self._rest_s)
            await asyncio.sleep(pause_s * self._rng.uniform(1.0, 1.5))

    async def _copy_all(self) -> None:
        leases = {
            stage: await self._directory.peers(stage)
            for stage in range(self._manifest.stages.count)
            if stage != self._stage
        }
        replicas = {stage: len(found) for stage, found in leases.items()}
        for stage in stages_to_keep(self._stage, replicas, self._kept, self._count, self._me):
            donors = leases[stage]
            self._rng.shuffle(donors)
            started = time.monotonic()
            if await self._copy(stage, donors[:DONORS_TRIED]):
                seconds = time.monotonic() - started
                self._rest_s += rest_s(seconds, replicas, self._stage, stage, self._count)

    async def _copy(self, stage: int, donors: Sequence[Lease]) -> bool:
        """From the first donor that has something new enough, and its proof; whether there was one."""
        store = backup_store(self._run_folder, self._manifest, stage)
        for number, lease in enumerate(donors, 1):
            try:
                if await self._copy_from(lease, store):
                    return True
            except (PeerUnavailable, ProtocolError, StateCorrupt):
                if number == len(donors):
                    raise
        return False

    async def _copy_from(self, lease: Lease, store: BackupStore) -> bool:
        kept, started = self._kept.get(store.stage), time.monotonic()
        await self._transport.connect(lease.peer, lease.addresses)
        summary = await fetch_summary(self._transport, lease.peer, store.stage, ASK_S)
        if summary is None or not is_due(summary.round, kept.round if kept is not None else None):
            return False
        word = await self._directory.word(store.stage)
        annals = await asyncio.to_thread(store.annals, word[0] if word is not None else None, self._patience)
        await fetch_chain(self._transport, lease.peer, annals)
        layout = layout_of(self._manifest, store.stage)
        for head, digest in annals.newest_proven():
            if kept is not None and kept.annals.digest_at(head) == digest:
                return False
            round_number = annals.round_at(head)
            assert round_number is not None, "a head of this chain"
            state = await fetch_state(
                self._transport, [lease.peer], Agreed(round_number, head, digest), layout=layout,
                timeout_s=COPY_TIMEOUT_S, listener=_only_failures(self._listener), shelf=store.arrivals,
            )  # fmt: skip
            if state is None:
                continue
            await asyncio.to_thread(store.save, annals, state)
            self._kept[store.stage] = Kept(annals, state.round, state.round)
            seconds = round(time.monotonic() - started, 3)
            self._listener(StageCopied(store.stage, state.round, lease.peer, state.size_bytes, seconds, kept is None))
            return True
        return False


def _kept_in(store: BackupStore) -> Kept | None:
    found = store.read()
    return Kept(found[0], found[1].round, found[1].round) if found is not None else None


def _only_failures(listener: Listener) -> Listener:
    def tell(event: Event) -> None:
        if event.level == "warning":
            listener(event)

    return tell
