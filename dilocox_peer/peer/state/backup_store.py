"""One stage's copy on disk, where it is kept by a peer that does not train it. What it holds: backup.py."""

from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from dilocox_peer.errors import StateCorrupt
from dilocox_peer.manifest import Manifest
from dilocox_peer.model.architecture import layout_of
from dilocox_peer.peer.rounds.chain import Verifier
from dilocox_peer.peer.rounds.durable import Durable
from dilocox_peer.peer.rounds.past import Block
from dilocox_peer.peer.state.backup import CHECKPOINTS, Annals, Backup, copy_folder, reached_with
from dilocox_peer.peer.state.chain_log import ChainLog, read_chain
from dilocox_peer.peer.state.checkpoint import (
    keep_only,
    named_in,
    read_checkpoint,
    stored_checkpoints,
    write_checkpoint,
)
from dilocox_peer.peer.training.anchor_state import AnchorState
from dilocox_peer.signing import verify
from dilocox_peer.store.shelf import Shelf


class BackupStore:
    """Blocking, but for `unwritten` and `settle`; one process owns the folder. What only reads it need not `open` it."""

    def __init__(self, folder: Path, manifest: Manifest, stage: int, verify: Verifier) -> None:
        self._folder = folder
        self._manifest = manifest
        self._verify = verify
        self._log: ChainLog | None = None
        self._proven: Path | None = None  # the state's file, by the chain that is on the disk
        self.stage = stage

    @cached_property
    def arrivals(self) -> Shelf:
        """Where the next state is put together. Raises OSError."""
        return Shelf(self._folder / "arrivals")

    @cached_property
    def contributions(self) -> Shelf:
        """To the rounds since the states of all stages that are kept beside this one. Raises OSError."""
        return Shelf(self._folder.parent / "contributions")

    # ---- what is here ----

    def annals(self) -> Annals:
        """The chain; that of a damaged file, or of none, is what verifies of it."""
        if self._log is not None:
            return self._log.annals
        with suppress(OSError):
            return read_chain(self._path, self._manifest, self.stage, self._verify)
        return Annals(self._manifest, self.stage, self._verify)

    def load(self) -> Backup | None:
        """What was saved last, verified, as far as contributions lead on; None if there is nothing whole."""
        found = self.read()
        if found is None:
            return None
        annals, state = found
        since = reached_with(annals.since(state.head), self.contributions)
        return Backup(annals.up_to(state.head), state, since)

    def read(self) -> tuple[Annals, AnchorState] | None:
        """The same as the whole chain, proof included, and the state."""
        annals, layout = self.annals(), layout_of(self._manifest, self.stage)
        for path in stored_checkpoints(self._folder / CHECKPOINTS):
            try:
                state = read_checkpoint(path, self._manifest.run_id, layout)
            except (StateCorrupt, OSError):
                continue
            if state.digest == annals.digest_at(state.head):
                return annals, state
        return None

    # ---- what comes ----

    @property
    def _path(self) -> Path:
        return self._folder / "chain.log"

    def open(self) -> Annals:
        """To go on with. What it has from then on is written when `unwritten` says so. Raises OSError; ConfigError where another version
        wrote the chain."""
        self.close()
        self._log = ChainLog(self._path, self._manifest, self.stage, self._verify)
        (self._folder / "chain").unlink(missing_ok=True)  # as copies were before: written anew with every round
        self._proven = self._proven_by(self._log.annals)
        return self._log.annals

    @property
    def trouble(self) -> str:
        """What was wrong with the chain's files when they were opened, for people; "": nothing, or they are not open."""
        return self._log.trouble if self._log is not None else ""

    def unwritten(self) -> Durable | None:
        """What the disk lacks of the open chain, None: nothing."""
        return self._opened.unwritten()

    def write_chain(self, growth: Durable) -> Sequence[Block]:
        """The chain has gone on, with the state in it. For `settle`. Raises OSError."""
        return self._opened.write(growth)

    def save(self, state: AnchorState, growth: Durable | None) -> Sequence[Block]:
        """Replaces the state that is there, as the chain with this growth proves it; killed at any point, the old one or the new one can be
        loaded. For `settle`. Raises OSError."""
        folder, run_id = self._folder / CHECKPOINTS, self._manifest.run_id
        path = write_checkpoint(folder, run_id, state, keep=2, spare=self._proven)
        blocks = self.write_chain(growth) if growth is not None else ()
        self._proven = path
        keep_only(path)
        return blocks

    def _proven_by(self, annals: Annals) -> Path | None:
        for path in stored_checkpoints(self._folder / CHECKPOINTS):
            if (named := named_in(path)) is not None and annals.digest_at(named[0]) == named[1]:
                return path
        return None

    def settle(self, blocks: Sequence[Block]) -> None:
        """What lies in these need not be in memory."""
        self._opened.settle(blocks)

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
        self._log = None

    @property
    def _opened(self) -> ChainLog:
        assert self._log is not None, f"the copy of stage {self.stage}, which is not open"
        return self._log


def backup_store(run_folder: Path, manifest: Manifest, stage: int) -> BackupStore:
    """Where a peer keeps its copy of a stage that it does not train."""
    return BackupStore(copy_folder(run_folder, stage), manifest, stage, verify)
