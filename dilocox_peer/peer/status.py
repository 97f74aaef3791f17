"""What one peer knows of itself, its swarm and the rounds: a fold over its events. Pure.

The dashboard, `status`, the metrics and a replay are drawn from it. Live events and those of a log file go through the
same `take`, with the time at which they happened.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from dilocox_peer.events import (
    BootstrapReady,
    BranchSwitched,
    EquivocationProved,
    Event,
    Failed,
    Left,
    MemberDoubted,
    MessageRefused,
    NeighbourLinked,
    NeighbourLost,
    NeighbourSeen,
    NeighbourUnlinked,
    Paused,
    PeerStarted,
    PipelineProgress,
    Resumed,
    RoundCertified,
    RoundClosed,
    RunComplete,
    RunJoined,
    SeenPeer,
    StageClaimed,
    StageSeen,
    SwarmSeen,
    TrainingProgress,
    ViewChanged,
)
from dilocox_peer.events_of_costs import MonthCounted, NeedsReckoned
from dilocox_peer.events_of_data import Evaluated
from dilocox_peer.events_of_health import NOTES, Trouble, TroublesSeen
from dilocox_peer.events_of_reach import Starting, TurnedAway
from dilocox_peer.events_of_rounds import ContributionClipped, ContributionRefused, ContributionsMissed, OwnerDirected
from dilocox_peer.events_of_states import StageCopied, StateFetchFailed
from dilocox_peer.peer.contributions import Contributions, Round
from dilocox_peer.peer.costs import CostsTold
from dilocox_peer.peer.map_peer import MapPeer
from dilocox_peer.peer.rates import Rates
from dilocox_peer.peer.time_left import time_left_s
from dilocox_peer.types import PeerId

MAX_ROUNDS = 256
MAX_LOG = 500
MAX_PEERS = 512  # of the map; a stage has at most 64, a lease costs a stranger nothing
MAX_LINE = 300
MAX_DOUBTED = 64
STALLED_S = 30.0  # without a micro-batch: something to look at
SILENT_S = 5.0  # without any event: the peer itself hangs
LAG_MS = 250.0

Health = Literal["ok", "wait", "warn", "bad"]
Phase = Literal["starting", "joining", "training", "waiting", "paused", "complete", "left"]


@dataclass(frozen=True, slots=True)
class LogLine:
    at_s: float
    level: str
    text: str


@dataclass
class Status:
    """`take` events in the order in which they happened; read the rest."""

    joined: RunJoined | None = None
    started: PeerStarted | None = None
    progress: TrainingProgress | None = None
    pipeline: PipelineProgress | None = None
    paused: str | None = None
    is_run_paused: bool = False  # by the owner: nobody trains, and when it goes on the owner alone knows
    certified: RoundCertified | None = None  # the last
    num_rounds: int = 0  # merged here; `rounds` keeps the newest
    expected_rounds: int = 0  # of the run, as the last certificate lets expect
    complete: RunComplete | None = None
    left: str | None = None
    failure: str | None = None
    view: int = 0
    orphaned: int = 0
    started_s: float | None = None
    last_event_s: float | None = None
    last_work_s: float | None = None  # the tokens moved
    last_round_s: float | None = None
    claimed_stage: int | None = None
    step: str = ""  # of the start-up, the newest
    rounds: deque[Round] = field(default_factory=lambda: deque(maxlen=MAX_ROUNDS))
    log: deque[LogLine] = field(default_factory=lambda: deque(maxlen=MAX_LOG))
    rates: Rates = field(default_factory=Rates)
    peers: dict[PeerId, MapPeer] = field(default_factory=dict)
    looked_at: set[int] = field(default_factory=set)  # stages whose peers were looked for, and perhaps not found
    addresses: tuple[str, ...] = ()
    doubted: dict[PeerId, tuple[str, bool]] = field(default_factory=dict)  # why not waited for; whether that is proven
    refused: dict[PeerId, tuple[str, int]] = field(default_factory=dict)  # what was last refused of it; how often
    turned_away: dict[str, tuple[str, float]] = field(default_factory=dict)  # by us: why, and until when
    contributions: Contributions = field(default_factory=Contributions)  # those not taken as they were
    directive: OwnerDirected | None = None  # the owner's newest
    troubles: tuple[Trouble, ...] = ()  # what is wrong with the run, the worst first
    troubles_at_s: float = 0.0  # when that was told
    copies: dict[int, int] = field(default_factory=dict)  # other stages of which one is kept here: its round
    costs: CostsTold = field(default_factory=CostsTold)

    # ---- what is read ------------------------------------------------------------------------------------------------

    @property
    def me(self) -> PeerId:
        said = self.joined or self.started
        return PeerId("") if said is None else said.peer

    @property
    def stage(self) -> int | None:
        said = self.joined or self.started
        return self.claimed_stage if said is None else said.stage

    @property
    def num_stages(self) -> int:
        known = self.joined.stages if self.joined is not None else 1
        return max([known, *(peer.stage + 1 for peer in self.peers.values())])

    @property
    def phase(self) -> Phase:
        if self.left is not None:
            return "left"
        if self.complete is not None:
            return "complete"
        if self.joined is None and self.started is None:
            return "starting"
        if self.paused is not None:
            return "paused"
        if self.progress is None or not self.progress.tokens:
            return "joining"
        return "training" if self.progress.is_training else "waiting"

    def link_overhead(self) -> float | None:
        """What TCP carried for activations and gradients beyond them, as a share of them; None before there is a measure."""
        link = self.pipeline
        payload = link.bytes_sent + link.bytes_received if link is not None else 0
        if link is None or not payload or not link.wire_bytes_sent:
            return None
        return max(0.0, (link.wire_bytes_sent + link.wire_bytes_received) / payload - 1)

    def busy(self) -> float:
        """Share of the last seconds spent computing; 0 when nothing moves."""
        return self.progress.busy if self.progress is not None and self.rates.tokens_per_s() > 0 else 0.0

    def health(self, now: float) -> tuple[Health, str]:
        """How this peer does, and why, in a few words."""
        if self.left is not None:
            return "wait", f"left: {self.left}"
        if self.complete is not None:
            return "ok", "the run is complete"
        if self.last_event_s is None or self.phase == "starting":
            return "wait", self.step or "starting"
        if self.paused is not None:
            return "wait", f"paused: {self.paused}"
        if self.progress is not None and now - self.last_event_s > SILENT_S:
            return "bad", f"no word for {now - self.last_event_s:.0f} s"
        worst = self.troubles[0] if self.troubles else None
        if worst is not None and worst.stops:
            return "wait" if worst.kind == "waiting" else "bad", self.trouble_words(worst, now)
        if self.progress is None or not self.progress.tokens:
            return "wait", self._why_not_training()
        idle_s = now - self.last_work_s if self.last_work_s is not None else 0.0
        if idle_s > STALLED_S:
            return "bad", f"stalled: no micro-batch for {idle_s:.0f} s{self._stall_cause()}"
        if self.progress.lag_ms_p99 > LAG_MS:
            return "warn", "the network waits for the CPU"
        if worst is not None and worst.kind not in NOTES:
            return "warn", self.trouble_words(worst, now)
        return "ok", "ok"

    def time_left_s(self, now: float) -> float | None:
        """Until the run's last round; None: not known, or nobody trains."""
        stands = self.is_run_paused or any(each.stops for each in self.troubles)
        return None if stands or self.complete is not None else time_left_s(self.rounds, self.total_rounds, now)

    def trouble_words(self, trouble: Trouble, now: float) -> str:
        """One of `troubles`, and what happens next, as of now."""
        return trouble.words(max(0.0, now - self.troubles_at_s))

    def of_stage(self, stage: int) -> list[MapPeer]:
        """The peers known of a stage, ourselves included: who counts first, then by PeerID."""
        found = [peer for peer in self.peers.values() if peer.stage == stage]
        return sorted(found, key=lambda peer: (not peer.counts, peer.peer != self.me, peer.peer))

    def stage_speed(self, stage: int) -> float:
        """Tokens a second that the stage's peers say they compute together."""
        speed = 0.0
        for peer in self.of_stage(stage):
            if peer.counts and not peer.is_paused:
                speed += self.rates.tokens_per_s() if peer.peer == self.me else peer.tokens_per_s
        return speed

    def stage_speed_is_whole(self, stage: int) -> bool:
        """Whether all who train there have said how fast; else stage_speed is less than it is. A peer's speed is 0 until its
        lease is read with one, also when it is heard as a neighbour."""
        return all(
            peer.tokens_per_s > 0 or peer.is_paused or peer.peer == self.me
            for peer in self.of_stage(stage)
            if peer.counts
        )

    @property
    def seen_stages(self) -> list[int]:
        """Those that were looked at, or of which a peer is known. Of others nobody knows whether they are empty."""
        seen = self.looked_at | {peer.stage for peer in self.peers.values()}
        return [stage for stage in range(self.num_stages) if stage in seen]

    def empty_stages(self) -> list[int]:
        return [stage for stage in self.seen_stages if not self._holders(stage)]

    def is_thin(self, stage: int) -> bool:
        """Whether its loss would stop the run, or it is the brake: one peer where others have more, or less than half the
        speed of the middle one."""
        counts = sorted(self._holders(each) for each in range(self.num_stages))
        holders = self._holders(stage)
        if holders == 0:
            return True
        if holders == 1 and counts[-1] > 1:
            return True
        speeds = sorted(self.stage_speed(each) for each in range(self.num_stages))
        middle = speeds[len(speeds) // 2]
        is_slow = len(speeds) > 1 and 0 < self.stage_speed(stage) < middle / 2
        return is_slow and self.stage_speed_is_whole(stage)

    # ---- what happens ------------------------------------------------------------------------------------------------

    def take(self, event: Event, at_s: float) -> None:
        """Folds in what happened at at_s (wall clock)."""
        if self.started_s is None:
            self.started_s = at_s
        self.last_event_s = at_s
        if event.level != "debug":
            self._note(event, at_s)
        match event:
            case Starting(step):
                self.step = step
            case RunJoined():
                if self.stage not in (None, event.stage):
                    self.rounds.clear()  # of another stage, which counts its own
                self.joined = event
                self.copies.pop(event.stage, None)
                self._restart(at_s)
            case PeerStarted():
                self.started = event
                self.addresses = event.addresses
            case BootstrapReady():
                self.addresses = event.addresses
            case StageClaimed(stage):
                self.claimed_stage = stage
            case TrainingProgress():
                self._take_progress(event, at_s)
            case PipelineProgress():
                self.pipeline = event
            case RoundCertified():
                self._take_round(event, at_s)
            case Evaluated(number, val_loss):
                self._take_evaluation(number, val_loss)
            case ViewChanged(view):
                self.view = view
            case MemberDoubted(peer, reason):
                self._doubt(peer, reason, is_proven=False)
            case EquivocationProved(peer, reason):
                self._doubt(peer, reason, is_proven=True)
            case MessageRefused(peer, reason) | StateFetchFailed(peer, reason):
                self._refuse(peer, reason)
            case TurnedAway(who, reason, seconds):
                self._turn_away(who, reason, at_s + seconds, at_s)
            case ContributionRefused() | ContributionClipped() | ContributionsMissed():
                self.contributions.take(event)
            case BranchSwitched():
                self.orphaned += event.orphaned_contributions
            case OwnerDirected():
                self.directive = event
            case TroublesSeen(troubles):
                self.troubles, self.troubles_at_s = troubles, at_s
            case StageCopied(stage, number):
                self.copies[stage] = number
            case Paused(reason, is_everybody):
                self.paused, self.is_run_paused = reason, is_everybody
            case Resumed():
                self.paused, self.is_run_paused = None, False
                self.last_work_s = at_s
            case SwarmSeen(stages, seen):
                self._take_leases(stages, seen)
            case StageSeen():
                self._take_stage(event)
            case NeighbourSeen(peer):
                self._here(peer, self.stage, True)
            case NeighbourLost(peer):
                self._here(peer, self.stage, False)
            case NeighbourLinked(peer, stage):
                self._here(peer, stage, True)
            case NeighbourUnlinked(peer, stage):
                self._here(peer, stage, False)
            case RunComplete():
                self.complete = event
            case Failed(where, reason):
                self.failure = f"{where}: {reason}"
            case MonthCounted() | NeedsReckoned() | RoundClosed():
                self.costs.take(event)
            case Left(reason):
                self.left = reason
                self.rates.clear()  # it may be away for the rest of a month

    def _restart(self, at_s: float) -> None:
        """The session begins, perhaps again: what was counted since the last beginning counts no more."""
        self.rates.clear()
        self.progress = self.pipeline = None
        self.troubles = ()
        self.left = None
        self.last_work_s = at_s
        for peer in self.peers.values():
            peer.is_here = None

    def _take_progress(self, event: TrainingProgress, at_s: float) -> None:
        before = self.progress
        if before is None or event.tokens != before.tokens:
            self.last_work_s = at_s
        self.progress = event
        self.rates.take(event, self.pipeline, at_s)
        if self.stage is not None and self.me:
            me = self._peer(self.me, self.stage)
            if me is not None:
                me.is_here, me.is_listed, me.round, me.is_paused = True, True, event.round, self.paused is not None

    @property
    def total_rounds(self) -> int:
        """Rounds of the run, as far as can be told now; 0: not known."""
        if self.expected_rounds:
            return self.expected_rounds
        return self.joined.total_rounds if self.joined is not None else 0

    @property
    def share(self) -> int:
        """Micro-batches expected of us in the round in training."""
        if self.progress is not None and self.progress.share:
            return self.progress.share
        return self.joined.share if self.joined is not None else 1

    def _take_round(self, event: RoundCertified, at_s: float) -> None:
        self.certified, self.expected_rounds = event, event.expected_rounds
        self.last_round_s = at_s
        self.num_rounds += 1
        is_measured = bool(event.clip_factors) or not event.contributors
        self.rounds.append(
            Round(
                number=event.round,
                at_s=at_s,
                contributors=len(event.contributors),
                roster=len(event.roster),
                own_included=event.own_included,
                train_loss=event.train_loss,
                codec=event.codec,
                rank=event.rank,
                inner_steps=event.inner_steps,
                delay_s=event.delay_s,
                bytes_sent=event.bytes_sent,
                raw_bytes=event.raw_bytes,
                refused=self.contributions.num_refused(event.round),
                clipped=sum(factor < 1.0 for factor in event.clip_factors) if is_measured else None,
            )
        )
        self.contributions.weigh(event)
        for peer in event.contributors:
            seen = self.peers.get(peer)
            if seen is not None:
                seen.round = max(seen.round, event.round)

    def _take_evaluation(self, number: int, val_loss: float) -> None:
        for index, each in enumerate(self.rounds):
            if each.number == number:
                self.rounds[index] = replace(each, val_loss=val_loss)

    def _take_leases(self, stages: Iterable[int], seen: Iterable[SeenPeer]) -> None:
        looked_at = set(stages)
        self.looked_at |= looked_at
        for peer in self.peers.values():
            if peer.stage in looked_at:
                peer.is_listed = False
        for lease in seen:
            known = self._peer(lease.peer, lease.stage)
            if known is None:
                continue
            known.is_listed = True
            known.tokens_per_s, known.reachability = lease.tokens_per_s, lease.reachability
            known.round = max(known.round, lease.round)
        for gone in [peer.peer for peer in self.peers.values() if not peer.is_listed and peer.is_here is not True]:
            if self.peers[gone].stage in looked_at:
                del self.peers[gone]

    def _take_stage(self, event: StageSeen) -> None:
        self.looked_at.add(event.stage)
        for peer in {*event.roster, *event.here}:
            self._peer(peer, event.stage)
        for known in self.peers.values():
            if known.stage == event.stage:
                known.is_here = known.peer in event.here
                known.is_paused = known.peer in event.paused
                known.is_leader = known.peer == event.leader

    def _doubt(self, peer: PeerId, reason: str, *, is_proven: bool) -> None:
        """The newest reason, but nothing less than a proof."""
        was_proven = self.doubted.pop(peer, ("", False))
        self.doubted[peer] = was_proven if was_proven[1] else (printable(reason), is_proven)
        while len(self.doubted) > MAX_DOUBTED:
            del self.doubted[next(iter(self.doubted))]

    def _refuse(self, peer: PeerId, reason: str) -> None:
        """Apart from the doubted: strangers, of which there may be any number, do not push those out."""
        _, times = self.refused.pop(peer, ("", 0))
        self.refused[peer] = (printable(reason), times + 1)
        while len(self.refused) > MAX_DOUBTED:
            del self.refused[next(iter(self.refused))]

    def _turn_away(self, who: str, reason: str, until_s: float, at_s: float) -> None:
        self.turned_away = {each: why for each, why in self.turned_away.items() if why[1] > at_s and each != who}
        self.turned_away[printable(who)] = (printable(reason), until_s)
        while len(self.turned_away) > MAX_DOUBTED:
            del self.turned_away[next(iter(self.turned_away))]

    def _here(self, peer: PeerId, stage: int | None, is_here: bool) -> None:
        if stage is None:
            return
        known = self._peer(peer, stage)
        if known is not None:
            known.is_here = is_here

    def _peer(self, peer: PeerId, stage: int) -> MapPeer | None:
        """The peer's place on the map; None when that is full. A peer that comes back on another stage has moved there."""
        known = self.peers.get(peer)
        if known is not None and known.stage != stage:
            del self.peers[peer]
            known = None
        if known is None and len(self.peers) < MAX_PEERS:
            known = self.peers[peer] = MapPeer(peer, stage)
        return known

    def _note(self, event: Event, at_s: float) -> None:
        for line in event.line().splitlines():
            if line.strip():
                self.log.append(LogLine(at_s, event.level, printable(line.strip())))

    def _holders(self, stage: int) -> int:
        return sum(peer.counts for peer in self.of_stage(stage))

    def _why_not_training(self) -> str:
        if empty := self.empty_stages():
            return f"waits: nobody holds stage {', '.join(map(str, empty))}"
        if self.started is None:
            return "fetching what it needs"
        return "waits for the others to begin" if not self.view else "about to train"

    def _stall_cause(self) -> str:
        if empty := self.empty_stages():
            return f", nobody holds stage {', '.join(map(str, empty))}"
        if self.pipeline is not None and self.pipeline.linked == 0:
            return ", no link to a neighbour"
        return ""


def stage_words(stage: int, count: int) -> str:
    """A stage's number as flags and records have it, from 0, and which others there are."""
    return f"stage {stage} (of 0..{count - 1})" if count > 1 else "the whole model"


def printable(text: str, most: int = MAX_LINE) -> str:
    """text as a terminal may be given it: no control characters (a reason may come from a stranger), and not endless."""
    clean = text if text.isprintable() else "".join(each if each.isprintable() else "�" for each in text)
    return clean if len(clean) <= most else clean[: most - 1] + "…"


def printable_lines(text: str, most: int = MAX_LINE) -> str:
    """text of one or more lines, each printable; all but the first begin with spaces, so that a stranger's reason with a line break
    in it does not look like another line of the log."""
    first, *more = text.split("\n")
    return "\n".join(
        [printable(first, most), *("    " + printable(line.strip(), most) if line.strip() else "" for line in more)]
    )
