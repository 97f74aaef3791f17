"""What a watcher of several peers knows: the status of each, and what is of the swarm as a whole. Pure; the demo's table and report
are drawn from it."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from dilocox_peer.cli.eventlog import read_event
from dilocox_peer.cli.timeline import Timed, read
from dilocox_peer.events import Event, Failed, PipelineProgress, RoundCertified, StageSeen, SwarmSeen, TrainingProgress
from dilocox_peer.events_of_data import DataMeasured, Evaluated
from dilocox_peer.events_of_states import StageCopied
from dilocox_peer.manifest import Manifest
from dilocox_peer.peer.status import Status
from dilocox_peer.pipeline.contract import MicroBatchTimed

MAX_KEPT_EVENTS = 2000  # of the report's log
MAX_KEPT_TIMED = 20_000  # micro-batches of a traced demo, the newest
_NO_PROGRESS = TrainingProgress(0, 0, 0, 0.0, float("nan"), 0, 0, 0.0)
_NO_PIPELINE = PipelineProgress(0, 0.0, 0, 0, 0, 0, 0, 0, 0)


@dataclass
class RoundView:
    """One outer round, put together from all peers that certified it. micro_batches: of stage 0, where they start;
    raw_bytes: of a peer's pseudo-gradient as float32, for each peer. delays_s: from each peer's close to
    its merge. codec, rank, inner_steps: of stage 0."""

    number: int
    stage_contributors: dict[int, int] = field(default_factory=dict)
    first_seen_s: float = 0.0
    micro_batches: int = 0
    train_losses: list[float] = field(default_factory=list)
    val_loss: float | None = None
    bytes_sent: list[int] = field(default_factory=list)
    raw_bytes: list[int] = field(default_factory=list)
    delays_s: list[float] = field(default_factory=list)
    codec: str = ""
    rank: int = 0
    inner_steps: int = 0

    @property
    def train_loss(self) -> float:
        return fmean(self.train_losses) if self.train_losses else float("nan")


class SwarmView:
    """Fold events in with `take`; read `peers` and `rounds`."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.expected_rounds = manifest.rounds.total
        self.statuses: dict[str, Status] = {}  # of every process, also of those that are no peers
        self.rounds: dict[int, RoundView] = {}
        self.initial_val_loss: float | None = None
        self.final_val_loss: float | None = None
        self.bigram_entropy: float | None = None
        self.unigram_entropy: float | None = None
        self.first_training_s: float | None = None
        self.last_round_s: float | None = None
        self.events: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self.timed: deque[Timed] = deque(maxlen=MAX_KEPT_TIMED)

    def take(self, label: str, record: Mapping[str, Any]) -> None:
        """Folds in one event of the process `label`, in its JSONL form (events.Event.record)."""
        known = read_event(record)
        if (known is None or _is_logged(known[0])) and len(self.events) < MAX_KEPT_EVENTS:
            self.events.append({"process": label, **record})
        if known is None:
            return
        event, now = known
        status = self.statuses.setdefault(label, Status())
        status.take(event, now)
        match event:
            case TrainingProgress() if event.tokens and self.first_training_s is None:
                self.first_training_s = now
            case MicroBatchTimed():
                if (timed := read(label, status.stage or 0, event)) is not None:
                    self.timed.append(timed)
            case RoundCertified():
                self._certified(status.stage or 0, event, now)
            case Evaluated(number, loss):
                self._evaluated(number, loss)
            case DataMeasured():
                self.bigram_entropy, self.unigram_entropy = event.bigram_entropy, event.unigram_entropy
            case Failed(where, reason):
                self.errors.append(f"{label}: {where}: {reason}")

    @property
    def peers(self) -> dict[str, Status]:
        """Those that have started, by label."""
        return {label: status for label, status in sorted(self.statuses.items()) if status.started is not None}

    @property
    def tokens(self) -> int:
        """Trained, counted once: at stage 0, where micro-batches start."""
        return sum(progress_of(status).tokens for status in self.peers.values() if status.stage == 0)

    @property
    def resent_micro_batches(self) -> int:
        return sum(pipeline_of(status).resent for status in self.peers.values())

    @property
    def orphaned_contributions(self) -> int:
        return sum(status.orphaned for status in self.statuses.values())

    @property
    def tokens_per_s(self) -> float:
        """Over the time from the first training step to the last certified round."""
        if self.first_training_s is None or self.last_round_s is None:
            return 0.0
        return self.tokens / max(1e-9, self.last_round_s - self.first_training_s)

    def tokens_of(self, micro_batches: int) -> int:
        return micro_batches * self.manifest.inner.micro_batch * self.manifest.model.context

    def _certified(self, stage: int, event: RoundCertified, now: float) -> None:
        seen = self.rounds.setdefault(event.round, RoundView(event.round, first_seen_s=now))
        seen.stage_contributors[stage] = len(event.contributors)
        seen.bytes_sent.append(event.bytes_sent)
        seen.raw_bytes.append(event.raw_bytes)
        if event.delay_s is not None:
            seen.delays_s.append(event.delay_s)
        if stage == 0:
            seen.micro_batches = event.micro_batches
            seen.codec, seen.rank, seen.inner_steps = event.codec, event.rank, event.inner_steps
            self.expected_rounds = max(event.round, event.expected_rounds)
        if event.train_loss == event.train_loss:
            seen.train_losses.append(event.train_loss)
        self.last_round_s = now

    def _evaluated(self, number: int, loss: float) -> None:
        if number == 0:
            self.initial_val_loss = loss
        elif number in self.rounds:
            self.rounds[number].val_loss = loss
        self.final_val_loss = loss


def progress_of(status: Status) -> TrainingProgress:
    """What the peer said of its training last; zeros before."""
    return status.progress or _NO_PROGRESS


def pipeline_of(status: Status) -> PipelineProgress:
    """The same of its links; zeros also with a single stage."""
    return status.pipeline or _NO_PIPELINE


def _is_logged(event: Event) -> bool:
    """Whether the report's log has it. Rounds have their own place there; of the routine it has who was where."""
    if isinstance(event, RoundCertified | Evaluated):
        return False
    return event.level != "debug" or isinstance(event, SwarmSeen | StageSeen | StageCopied)
