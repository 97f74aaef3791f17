"""What a watcher of several peers knows: a fold over their events. Pure; the demo's table and report are drawn from it."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from dilocox_peer.cli.timeline import Timed, read
from dilocox_peer.manifest import Manifest
from dilocox_peer.types import PeerId

MAX_KEPT_EVENTS = 2000  # of the report's log; routine progress is not logged
MAX_KEPT_TIMED = 20_000  # micro-batches of a traced demo, the newest
_ROUTINE = frozenset(
    {
        "TrainingProgress", "PipelineProgress", "RoundClosed", "CheckpointWritten", "Evaluated", "RoundCertified",
        "MicroBatchTimed", "RouteChanged",
    }
)  # fmt: skip


@dataclass
class PeerView:
    """One peer as its events show it."""

    label: str
    stage: int = 0
    peer: PeerId = PeerId("")
    round: int = 0
    tokens: int = 0
    tokens_per_s: float = 0.0
    train_loss: float = float("nan")
    bytes_sent: int = 0
    bytes_received: int = 0
    lag_ms_p99: float = 0.0
    busy: float = 0.0
    resent: int = 0
    pipeline_bytes_sent: int = 0
    num_parameters: int = 0  # of its stage
    head: str = ""
    anchor_digest: str = ""
    state: str = "starting"


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
        self.peers: dict[str, PeerView] = {}
        self.rounds: dict[int, RoundView] = {}
        self.initial_val_loss: float | None = None
        self.final_val_loss: float | None = None
        self.bigram_entropy: float | None = None
        self.unigram_entropy: float | None = None
        self.first_training_s: float | None = None
        self.last_round_s: float | None = None
        self.orphaned_contributions = 0
        self.events: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self.timed: deque[Timed] = deque(maxlen=MAX_KEPT_TIMED)

    def take(self, label: str, record: Mapping[str, Any]) -> None:
        """Folds in one event of the process `label`, in its JSONL form (events.Event.record)."""
        kind, now = str(record.get("event")), float(record.get("time", 0.0))
        if kind not in _ROUTINE and len(self.events) < MAX_KEPT_EVENTS:
            self.events.append({"process": label, **record})
        match kind:
            case "PeerStarted":
                self.peers[label] = PeerView(label, stage=record["stage"], peer=record["peer"], state="joining")
            case "TrainingProgress":
                self._progress(self.peers[label], record)
                if record["tokens"] and self.first_training_s is None:
                    self.first_training_s = now
            case "MicroBatchTimed":
                self._timed(label, record)
            case "PipelineProgress":
                view = self.peers[label]
                view.busy, view.resent = record["busy"], record["resent"]
                view.pipeline_bytes_sent = record["bytes_sent"]
            case "RoundCertified":
                self._certified(self.peers[label], record, now)
            case "Evaluated":
                self._evaluated(record)
            case "DataMeasured":
                self.bigram_entropy, self.unigram_entropy = record["bigram_entropy"], record["unigram_entropy"]
            case "BranchSwitched":
                self.orphaned_contributions += record["orphaned_contributions"]
            case "RunComplete" if label in self.peers:
                view = self.peers[label]
                view.state, view.head, view.anchor_digest = "complete", record["head"], record["anchor_digest"]
            case "Left" if label in self.peers and self.peers[label].state != "complete":
                self.peers[label].state = "left"
            case "Failed":
                self.errors.append(f"{label}: {record['where']}: {record['reason']}")

    @property
    def tokens(self) -> int:
        """Trained, counted once: at stage 0, where micro-batches start."""
        return sum(view.tokens for view in self.peers.values() if view.stage == 0)

    @property
    def resent_micro_batches(self) -> int:
        return sum(view.resent for view in self.peers.values())

    @property
    def tokens_per_s(self) -> float:
        """Over the time from the first training step to the last certified round."""
        if self.first_training_s is None or self.last_round_s is None:
            return 0.0
        return self.tokens / max(1e-9, self.last_round_s - self.first_training_s)

    def tokens_of(self, micro_batches: int) -> int:
        return micro_batches * self.manifest.inner.micro_batch * self.manifest.model.context

    def _progress(self, view: PeerView, record: Mapping[str, Any]) -> None:
        view.round, view.tokens, view.tokens_per_s = record["round"], record["tokens"], record["tokens_per_s"]
        view.train_loss, view.lag_ms_p99 = record["train_loss"], record["lag_ms_p99"]
        view.bytes_sent, view.bytes_received = record["bytes_sent"], record["bytes_received"]
        if view.state == "joining":
            view.state = "training"

    def _timed(self, label: str, record: Mapping[str, Any]) -> None:
        timed = read(label, self.peers[label].stage, record)
        if timed is not None:
            self.timed.append(timed)

    def _certified(self, view: PeerView, record: Mapping[str, Any], now: float) -> None:
        number = int(record["round"])
        seen = self.rounds.setdefault(number, RoundView(number, first_seen_s=now))
        seen.stage_contributors[view.stage] = len(record["contributors"])
        if view.stage == 0:
            seen.micro_batches = record["micro_batches"]
        seen.bytes_sent.append(record["bytes_sent"])
        seen.raw_bytes.append(record["raw_bytes"])
        if record["delay_s"] is not None:
            seen.delays_s.append(record["delay_s"])
        view.num_parameters = record["raw_bytes"] // 4
        if view.stage == 0:
            seen.codec, seen.rank, seen.inner_steps = record["codec"], record["rank"], record["inner_steps"]
            self.expected_rounds = max(number, record["expected_rounds"])
        if record["train_loss"] == record["train_loss"]:
            seen.train_losses.append(record["train_loss"])
        view.head, view.anchor_digest = record["head"], record["anchor_digest"]
        self.last_round_s = now

    def _evaluated(self, record: Mapping[str, Any]) -> None:
        number, loss = int(record["round"]), float(record["val_loss"])
        if number == 0:
            self.initial_val_loss = loss
        elif number in self.rounds:
            self.rounds[number].val_loss = loss
        self.final_val_loss = loss
