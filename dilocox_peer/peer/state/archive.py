"""What lies on the disk of who keeps a whole run, stage by stage. It trains nothing; what it has is proved by certificates.

    folder/manifest.json                the run's settings
    folder/stage0/kept.log              the certificates of the stage's chain
    folder/stage0/checkpoints/anchor-N  whole states, of rounds in that chain
    folder/contributions/               contributions to the rounds since

As the folder of a peer has them, but for the log: `export --run-folder` reads both.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import cached_property
from pathlib import Path
from statistics import median

from dilocox_peer.errors import StateCorrupt
from dilocox_peer.events import Listener, Remark
from dilocox_peer.manifest import Manifest
from dilocox_peer.model.architecture import layout_of
from dilocox_peer.peer.state.anchors import keep_manifest
from dilocox_peer.peer.state.chain_log import ChainLog
from dilocox_peer.peer.state.checkpoint import (
    keep_only,
    later_of,
    read_checkpoint,
    stored_checkpoints,
    write_checkpoint,
)
from dilocox_peer.peer.state.keeping import MOST_COUNTED
from dilocox_peer.peer.training.anchor_state import AnchorState
from dilocox_peer.signing import verify
from dilocox_peer.store.shelf import Shelf
from dilocox_peer.types import Digest
from dilocox_peer.wire.chain import Certificate

ARRIVALS = "arrivals"
MAX_STATES = 3  # of a stage: the one that is whole in all stages, the next, and the newest that surely is the run's


class StageArchive:
    """One stage. Blocking but for what reads; one process owns the folder. log: of the chain; who takes in more has it written."""

    def __init__(self, folder: Path, manifest: Manifest, stage: int, listener: Listener) -> None:
        """Raises OSError; ConfigError where another version wrote the log."""
        self.stage = stage
        self.layout = layout_of(manifest, stage)
        self._manifest = manifest
        self._folder = folder / f"stage{stage}"
        self.checkpoints = self._folder / "checkpoints"
        self._states: dict[Digest, tuple[int, Digest]] = {}
        self.log = ChainLog(self._folder / "kept.log", manifest, stage, verify)
        self.annals = self.log.annals
        if self.log.trouble:
            listener(Remark(f"what is kept of stage {stage}: {self.log.trouble}"))
        unproven = []
        for path in stored_checkpoints(self.checkpoints):
            try:
                state = read_checkpoint(path, manifest.run_id, self.layout)
            except (StateCorrupt, OSError) as error:
                listener(Remark(f"a kept state is damaged and not used: {path}: {error}"))
                continue
            if self.annals.digest_at(state.head) in (state.digest, b""):  # of the last round no certificate names it
                self._states[state.head] = (state.round, state.digest)
            if not self.annals.holds(state.head):
                unproven.append(path)
        self.has_lost = self.log.may_lack or (not self.annals.place.height and bool(unproven))
        # Where certificates were lost, a state of a later round may be what is left of the run.
        self._unexplained = tuple(unproven[:MAX_STATES]) if self.has_lost else ()

    @cached_property
    def arrivals(self) -> Shelf:
        """Where the next state is put together. Raises OSError."""
        return Shelf(self._folder / ARRIVALS)

    # ---- what is here ----

    @property
    def newest(self) -> tuple[Digest, int] | None:
        """(head, round) of the newest state that is here, and on the chain that counts."""
        here = [(number, head) for head, (number, _) in self._states.items() if self.annals.round_at(head) == number]
        return max(here)[::-1] if here else None

    @property
    def digests(self) -> Mapping[Digest, Digest]:
        """head -> digest of the states that are here."""
        return {head: digest for head, (_, digest) in self._states.items()}

    @property
    def wanted(self) -> tuple[set[Digest], Sequence[Certificate]]:
        """(heads of the states, certificates with the contributions) to keep: the newest state, and where that may be a stranger's,
        who goes on alone, also the newest one before. What follows them."""
        newest = self.newest
        if newest is None:
            return set(), ()
        here = [(number, head) for head, (number, _) in self._states.items() if self.annals.is_surely(head)]
        if not here or max(here)[1] == newest[0]:
            return {newest[0]}, self.following()
        _, last = max(here)
        return {newest[0], last}, [*self.annals.surely(after=last), *self.following()]

    def following(self) -> Sequence[Certificate]:
        """The certificates after the newest state; all, without one."""
        newest = self.newest
        return self.annals.certificates if newest is None else self.annals.since(newest[0])

    def reached(self, held: Shelf) -> tuple[Digest, int] | None:
        """(head, round) that the newest state is brought to with the contributions that are here; None without a state."""
        reached = self.newest
        if reached is None:
            return None
        for certificate in self.annals.after(reached[0]):
            if any(name not in held for name in certificate.value.blobs):
                break
            reached = certificate.head, certificate.value.round
        return reached

    # ---- what comes ----

    def save(self, state: AnchorState) -> None:
        """Keeps a state that is on the chain. Raises OSError."""
        write_checkpoint(self.checkpoints, self._manifest.run_id, state, keep=MAX_STATES, unexplained=self._unexplained)
        self._states = {**self._states, state.head: (state.round, state.digest)}  # the loop may be reading it

    def let_go(self, heads: Collection[Digest]) -> None:
        """Of all states but those at these heads. Raises OSError."""
        if not heads:
            return
        numbers = sorted({self._states[head][0] for head in heads})
        wanted = [self.checkpoints / f"anchor-{number:08d}.safetensors" for number in numbers]
        keep_only(*wanted, *later_of(self._unexplained, wanted[-1]))
        self._states = {head: self._states[head] for head in heads}

    def close(self) -> None:
        self.log.close()


class Archive:
    """All stages of one run."""

    def __init__(self, folder: Path, manifest: Manifest, listener: Listener) -> None:
        """Reads and verifies what is there, and lets go of what nobody needs, unless certificates were lost which might say otherwise.
        Blocking. Raises OSError; ConfigError where another version wrote a log."""
        keep_manifest(folder, manifest)
        self.manifest = manifest
        self.contributions = Shelf(folder / "contributions")
        with ExitStack() as opened:
            self.stages = tuple(
                opened.enter_context(closing(StageArchive(folder, manifest, stage, listener)))
                for stage in range(manifest.stages.count)
            )
            opened.pop_all()
        self._folder = folder
        if not any(stage.has_lost for stage in self.stages):
            _, unwanted = self.spare()
            self.let_go([()] * len(self.stages), unwanted)

    def to_keep(self) -> tuple[Sequence[set[Digest]], set[Digest]]:
        """(heads of the states of each stage, names of the contributions) to keep."""
        found = [stage.wanted for stage in self.stages]
        return [heads for heads, _ in found], {
            name for _, certificates in found for each in certificates for name in each.value.blobs
        }

    def spare(self) -> tuple[Sequence[set[Digest]], frozenset[Digest]]:
        """(heads of the states of each stage to keep, names of the contributions that need not be kept) as it is now."""
        heads, names = self.to_keep()
        return heads, self.contributions.held - names

    def let_go(self, heads: Sequence[Collection[Digest]], names: Collection[Digest]) -> None:
        """Of all states but those at these heads, and of these contributions: what comes meanwhile stays. Blocking, while chains may go on.
        Raises OSError."""
        for stage, wanted in zip(self.stages, heads, strict=True):
            stage.let_go(wanted)
        for name in names:
            self.contributions.forget(name)

    def size_bytes(self) -> int:
        """On the disk; blocking."""
        return sum(size for size in map(_size, self._folder.rglob("*")))

    def arriving_bytes(self) -> int:
        """Of these, what has come of states that are not whole yet; blocking."""
        return sum(size for size in map(_size, self._folder.glob(f"*/{ARRIVALS}/**/*")))

    def missing(self, stage: int) -> list[Digest]:
        """The contributions to the stage since its newest state that are not here, oldest first."""
        kept = self.stages[stage]
        certificates = kept.annals.certificates if (newest := kept.newest) is None else kept.annals.after(newest[0])
        return [name for each in certificates for name in each.value.blobs if name not in self.contributions]

    def close(self) -> None:
        for stage in self.stages:
            stage.close()


def usual_bytes(certificates: Sequence[Certificate], count: int) -> tuple[int, int]:
    """(number of the contributions to the last `count` certificates, bytes of a usual one), as the newest of them have it: what an entry
    says of its size is its author's word, so the median speaks for all."""
    newest = certificates[-min(count, MOST_COUNTED) :]
    sizes = [thing.size_bytes for each in newest for thing in each.value.things]
    return (round(count * len(sizes) / len(newest)), int(median(sizes))) if sizes else (0, 0)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0
