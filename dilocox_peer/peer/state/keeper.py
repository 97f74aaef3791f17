"""What of a peer survives a restart: the journal of its rounds, the contributions it holds, checkpoints of the anchor.

Where they disagree the journal wins: it says which head the peer is at. The round machine brings a checkpoint from
further back forward, by the certificates and contributions since, or asks others for the state.
"""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dilocox_peer.events import Failed, Listener, Remark
from dilocox_peer.events_of_states import CheckpointWritten
from dilocox_peer.files import make_durable, sweep_parts
from dilocox_peer.manifest import Manifest
from dilocox_peer.model.architecture import layout_of
from dilocox_peer.peer.rounds.chain import Chain
from dilocox_peer.peer.rounds.durable import LOST_VOTES_VIEWS, Durable, Votes
from dilocox_peer.peer.rounds.genesis import genesis_of
from dilocox_peer.peer.rounds.journal import Journal
from dilocox_peer.peer.state.anchors import keep_manifest
from dilocox_peer.peer.state.backup import CHECKPOINTS, Backup, copy_folder
from dilocox_peer.peer.state.checkpoint import (
    KEEP,
    GrowingCheckpoint,
    load_newest,
    path_of,
    prune,
    read_checkpoint,
    read_head,
    stored_checkpoints,
    write_checkpoint,
)
from dilocox_peer.peer.state.left import LeftBranches
from dilocox_peer.peer.training.anchor_state import AnchorState, GrowingInMemory, GrowingState
from dilocox_peer.peer.training.outer import initial_state
from dilocox_peer.store.shelf import Shelf
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.checkpoints import Checkpoint

if TYPE_CHECKING:
    from dilocox_peer.model.weights import ModelFolder

RESTS = 100  # times as long as a checkpoint took is none written that may wait
DURABLE_ROUNDS = 8  # though it has not rested: contributions of 16 rounds are kept at least
CLOSE_S = 1.0
LARGE_BYTES = 256 << 20
THINGS_BYTES = 50 << 30  # of files that others may need too


class Keeper:
    """Opens a run's folder; blocking. `save` may be called from anywhere and does not wait."""

    def __init__(
        self, folder: Path, manifest: Manifest, stage: int, listener: Listener, model: "ModelFolder | None" = None
    ) -> None:
        """model: the folder of a published model, if it is on this machine; without it and without a state on this disk
        there is none until `begin` or `adopt`. Raises OSError when the folder cannot be used, ConfigError when the model in
        its folder is not the run's, or when another version wrote the journal."""
        self._manifest = manifest
        self._listener = listener
        keep_manifest(folder, manifest)
        self.checkpoints = folder / f"stage{stage}" / "checkpoints"
        self.things = Shelf(folder / "store", quota_bytes=THINGS_BYTES)
        self.arrivals = Shelf(folder / f"stage{stage}" / "arrivals")  # of states, on their way
        others = (other for other in range(manifest.stages.count) if other != stage)
        self.state_folders = (self.checkpoints, *(copy_folder(folder, other) / CHECKPOINTS for other in others))
        for each in self.state_folders:
            sweep_parts(each)  # a merge that was killed left all of a state there
        self.blobs = Shelf(folder / f"stage{stage}" / "contributions")
        self._genesis = genesis_of(manifest, stage)
        self.journal = Journal(folder / f"stage{stage}" / "rounds.log", self._genesis)
        self.chain = self.journal.chain  # at the start; whoever takes it over goes on with it
        self.left = LeftBranches(folder)
        self.left.sweep()
        self.durable: Durable | None = self.journal.loaded.durable  # what the journal said at the start
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="dilocox-checkpoint")
        self._lock = threading.Lock()
        self._newest: AnchorState | None = None
        self._durable: Path | None = None  # the newest file that outlives a power cut
        self._durable_round = 0
        self._durable_digest: Digest | None = None
        self._rests_until = 0.0
        self._is_closing = False
        self._writing: Future[None] = Future()  # of _newest, while there is one
        self._layout = layout_of(manifest, stage)
        # Of our own chain alone: a branch given up for a heavier one with fewer rounds leaves files with higher numbers.
        among = self.chain if self.durable else None
        loaded = load_newest(self.checkpoints, manifest.run_id, self._layout, among=among)
        for complaint in loaded.damaged:
            listener(Remark(f"a checkpoint is damaged and not used: {complaint}"))
        if self.journal.damage:
            listener(Failed("log of rounds", self.journal.damage))
        elif self.journal.loaded.reason:
            listener(Remark(f"the journal of rounds was cut short by a crash: {self.journal.loaded.reason}"))
        # Where certificates were lost, at this start or before, a state of a later round may be what is left of the run.
        newer = loaded.elsewhere if self.durable is not None else stored_checkpoints(self.checkpoints)
        self._unexplained = newer[:KEEP] if self.durable is None or self.journal.kept_aside else ()
        self._state = loaded.state
        if loaded.state is not None:
            self._durable_digest = loaded.state.digest
        if self._state is None and (model is not None or not manifest.model.starts_from_files):
            self._state = self._on_disk(initial_state(manifest, stage, folder=model))

    def _on_disk(self, state: AnchorState) -> AnchorState:
        """A state as it is in its file, if it is so large that memory should not be held for it as long as this process runs."""
        if state.size_bytes < LARGE_BYTES:
            return state
        try:
            path = self._written(state, durable=False)
            self._durable_digest = state.digest  # what a power cut takes of it is made again
            return read_checkpoint(path, self._manifest.run_id, self._layout)
        except OSError as error:
            self._tell_refusal(error)
            return state

    def _written(self, state: AnchorState, *, durable: bool = True) -> Path:
        """Its file. Raises OSError."""
        return write_checkpoint(
            self.checkpoints, self._manifest.run_id, state, durable=durable, unexplained=self._unexplained
        )

    @property
    def state(self) -> AnchorState:
        """What was newest on this disk, or the first one."""
        assert self._state is not None, "there is no state yet"
        return self._state

    @property
    def has_state(self) -> bool:
        return self._state is not None

    @property
    def is_empty(self) -> bool:
        """Whether there is no state here that the stage has agreed on."""
        return self._state is None or self._state.round == 0

    def begin(self, state: AnchorState) -> None:
        """Goes on from the state before the first round, which came from elsewhere. Raises OSError."""
        assert state.round == 0, f"a state of round {state.round}"
        self._written(state)
        self._state = state

    def adopt(self, backup: Backup, *, me: PeerId, checkpoint: Checkpoint | None = None) -> None:
        """Goes on from a copy that was kept elsewhere, as if it had been here. checkpoint: the owner's for it, if there is a
        new one. Raises OSError.

        The chain first: killed in between, there is still no state here, and it is done again.
        """
        chain = backup.chain
        head = chain[-1].head
        before, view = self.durable, chain[-1].view
        if before is not None and before.votes.head == head:
            votes = before.votes
        elif before is not None or any(me in each.value.roster for each in chain):
            votes = Votes(head, view_change_signed=view + LOST_VOTES_VIEWS)  # we may have voted there and not know it
        else:
            votes = Votes(head)
        left, known = (
            ((), None) if before is None else (before.left, before.checkpoint)
        )  # which no copy makes us forget
        durable = Durable(0, chain, votes, checkpoint or known, left)
        blocks = self.journal.write(durable)
        self.chain = Chain(self._genesis, chain, self.journal.store)
        self.chain.seal(blocks)
        self.durable = replace(durable, appended=self.chain.as_it_is())
        self._written(backup.state)
        self._state = backup.state

    def grow(self, head: Digest, round_number: int) -> GrowingState:
        """Where the state at head grows: in the file that it is kept in. On a disk that takes no more, which is told, in memory."""
        try:
            return GrowingCheckpoint(self.checkpoints, self._manifest.run_id, self._layout, head, round_number)
        except OSError as error:
            self._tell_refusal(error)
            return GrowingInMemory(self._layout, head, round_number)

    def stored(self, head: Digest) -> AnchorState | None:
        """The state at head from disk (or the initial one), verified; None if it is not here."""
        if self._state is not None and self._state.head == head:
            return self._state
        return read_head(self.checkpoints, self._manifest.run_id, self._layout, head)

    def save(self, state: AnchorState, *, at_once: bool = True) -> "Future[None]":
        """Writes state in the background, so that it outlives a power cut; of several that come while one is being written, the
        newest. Done when that is on disk, or could not be written: then it is told. at_once: False where it may wait for a later
        one: a file that has grown outlives the process as it is, and the rounds since can be replayed."""
        is_recent = state.round - self._durable_round < DURABLE_ROUNDS
        rests = is_recent and time.monotonic() < self._rests_until
        if not at_once and (rests or state.digest == self._durable_digest):  # a certificate that moves the head alone
            done = Future[None]()
            done.set_result(None)
            return done
        with self._lock:
            if self._newest is None:
                self._writing = self.writer.submit(self._write)
            self._newest = state
            return self._writing

    def _write(self) -> None:
        with self._lock:
            state, self._newest = self._newest, None
        if state is None:
            return
        started = time.monotonic()
        try:
            if (path := path_of(self.checkpoints, state)) is not None:
                if not make_durable(path, lambda: not self._is_closing):
                    return
            else:
                path = self._written(state)
            self._durable, self._durable_round, self._durable_digest = path, state.round, state.digest
        except OSError as error:
            self._tell_refusal(error)
            return
        seconds = time.monotonic() - started
        self.rest(RESTS * seconds)
        self._listener(CheckpointWritten(state.round, str(path), state.size_bytes, round(seconds, 4)))

    def rest(self, seconds: float) -> None:
        """So long is nothing written that may wait."""
        self._rests_until = time.monotonic() + seconds

    def tidy(self, state: AnchorState) -> None:
        """Removes what is too old beside the file of state, which has just grown; in the background."""

        def remove() -> None:
            if (path := path_of(self.checkpoints, state)) is not None:
                with suppress(OSError):  # they cost room; the next one tries again
                    prune(path, spare=self._durable, unexplained=self._unexplained)

        self.writer.submit(remove)

    def _tell_refusal(self, error: OSError) -> None:
        self._listener(Failed("checkpoint", f"{error.strerror or error}: the state is in memory only"))

    def close(self) -> None:
        """Finishes the write that runs, and the one that waits, for a second; but of a file that has grown, which outlives the
        process as it is, what a power cut may take is left."""
        self._is_closing = True
        written = self.writer.submit(lambda: None)
        self.writer.shutdown(wait=False)
        with suppress(TimeoutError):
            written.result(CLOSE_S)
        self.journal.close()
