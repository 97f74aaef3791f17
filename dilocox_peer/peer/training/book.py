"""What the torch thread does, as the trainer sees it: values, the protocol of a training loop, and its bookkeeping.

Two loops implement it: whole_loop.py trains a model that is one stage, stage_loop.py one stage of several.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from torch import Tensor

from dilocox_peer.manifest import Manifest
from dilocox_peer.model.inner import ramp, scheduled
from dilocox_peer.peer.planning.timetable import Timetable
from dilocox_peer.peer.training.anchor_state import AnchorState

LOSS_WINDOW = 32
"""Micro-batches over which the shown training loss is averaged."""

SPEED_WINDOW_S, SPEED_SAMPLES = 10.0, 4096

HoldReason = Literal["rounds", "pause"]
"""A side that wants training held: the conductor, or the volunteer. Each takes back its own alone."""


@dataclass(frozen=True, slots=True)
class Progress:
    """round: the one being trained. micro_batches: completed in it. share: how many are expected of it in the round. tokens:
    since the start of this process.

    train_loss: mean over the targets of the last LOSS_WINDOW micro-batches, nan before the first and while none is finite. is_training:
    False while held, waiting for a certificate, or when the run is complete. busy: share of the time spent computing, as
    tokens_per_s over about the last SPEED_WINDOW_S before measured_s, the end of the newest micro-batch: see `at`.
    measured_over_s: how long that was.
    """

    round: int
    micro_batches: int
    tokens: int
    train_loss: float
    tokens_per_s: float
    learning_rate: float
    is_training: bool
    busy: float = 0.0
    share: int = 0
    micro_batch_tokens: int = 0
    measured_s: float = 0.0
    measured_over_s: float = 0.0

    def at(self, now: float) -> "Progress":
        """As it is by now: the speed is what it would be if the next micro-batch were done at this moment, at most what
        was measured. So work that goes on is not called slower between two micro-batches, and a standstill shows."""
        if not self.tokens_per_s:
            return self
        idle_s = now - self.measured_s
        kept_s = min(self.measured_over_s, max(0.0, SPEED_WINDOW_S - idle_s))
        speed = (self.tokens_per_s * kept_s + self.micro_batch_tokens) / (kept_s + idle_s)
        if speed >= self.tokens_per_s:
            return self
        return replace(self, tokens_per_s=speed, busy=self.busy * speed / self.tokens_per_s)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Local parameters at a round's close. new_micro_batches: since the last snapshot."""

    flat_N: Tensor
    round: int
    new_micro_batches: int
    train_loss: float


@dataclass(frozen=True, slots=True)
class LossSum:
    """Mean of the losses that are finite: a callee that tells none, for one micro-batch, must not make the mean of all NaN.

    count: targets, as `counted` (model/loss.py) adds them up. total: of their losses."""

    total: float = 0.0
    count: float = 0.0

    @classmethod
    def of(cls, losses: Iterable[tuple[float, float]]) -> "LossSum":
        """losses: of each micro-batch its mean, and what it weighs."""
        finite = [(loss, counted) for loss, counted in losses if math.isfinite(loss)]
        return cls(sum(loss * counted for loss, counted in finite), sum(counted for _, counted in finite))

    def __add__(self, other: "LossSum") -> "LossSum":
        return LossSum(self.total + other.total, self.count + other.count)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else math.nan


class TrainingLoop(Protocol):
    """All but `begin` and `progress` run in the torch thread. `progress` is replaced whole, so anyone may read it."""

    progress: Progress

    def begin(self, state: AnchorState) -> None:
        """Before the thread starts: the round after the state's will be trained on top of it."""

    def train_on(self) -> bool:
        """One piece of work. False: there is nothing to do now."""

    def close(self) -> Snapshot:
        """Ends the round being trained. Raises RuntimeError if an offer is out."""

    def shift(self, shift_N: Tensor, *, certified: int) -> None:
        """Adds shift_N to the local parameters; the agreed round is now `certified`."""

    def replace(self, local_N: Tensor, *, certified: int) -> None:
        """Local parameters become local_N; what was trained before counts no more."""

    def withdraw(self) -> None:
        """The offer is no longer out: its round goes on."""

    def set_held(self, is_held: bool, reason: HoldReason = "rounds") -> None:
        """Nothing new begins while anybody holds."""

    def vectors(self) -> list[Tensor]:
        """All that is as long as the parameters: for who ends the training."""


class RoundBook:
    """Which round is trained and what was done in it; owned by a training loop.

    share: micro-batches this peer is expected to do in the round; load: of it, against an equal part. Training is in round
    `certified + 1`, or `certified + 2` while an offer is out. A move to a higher round starts its count anew; a move
    back lets the closed round go on.
    """

    def __init__(self, manifest: Manifest, clock: Callable[[], float], timetable: Timetable) -> None:
        self._manifest = manifest
        self._timetable = timetable
        self._clock = clock
        self._waits_for_certificates = manifest.outer.overlap == "none"
        self.load = 1.0
        self.certified = 0
        self._came_late = False
        self.held_by: set[HoldReason] = set()
        self._has_offer = False
        self._awaits_certificate = False  # overlap none, from the close to the merge
        self.in_round, self._in_round_loss = 0, LossSum()
        self._closed_in_round, self._closed_loss = 0, LossSum()
        self._since_snapshot = 0
        # As LossSum takes them, finite or not: one that diverges is to be seen.
        self._losses: deque[tuple[float, float]] = deque(maxlen=LOSS_WINDOW)
        self._done: deque[tuple[float, float]] = deque([(clock(), 0.0)])  # (when, compute seconds) of the newest
        self._busy_s = 0.0  # sum of all but the first's
        self.completed = 0
        self.learning_rate = 0.0

    @property
    def round(self) -> int:
        return self.certified + (2 if self._has_offer else 1)

    @property
    def share(self) -> int:
        return max(1, round(self.load * self._timetable.share(self.round)))

    @property
    def micro_batches_a_step(self) -> int:
        return self._timetable.micro_batches_a_step(self.round)

    @property
    def may_train(self) -> bool:
        """Whether new micro-batches may begin."""
        timetable, number = self._timetable, self.round
        return not (
            self.held_by or self._awaits_certificate or timetable.is_after_last(number) or timetable.is_held(number)
        )

    def hold(self, is_held: bool, reason: HoldReason) -> None:
        (self.held_by.add if is_held else self.held_by.discard)(reason)

    def done(self, loss: float, compute_s: float, counted: float = 1.0) -> None:
        """A micro-batch is complete. loss: in nats a target. counted: the part of its targets that count."""
        self.completed += 1
        self.in_round += 1
        self._in_round_loss += LossSum.of([(loss, counted)])
        self._since_snapshot += 1
        self._losses.append((loss, counted))
        self._done.append((self._clock(), compute_s))
        self._busy_s += compute_s

    def learning_rate_share(self, steps_done: int) -> float:
        """Share of the peak learning rate, for the next inner step."""
        fraction = self.in_round / self.share
        position = self._timetable.position(self.round, fraction)
        share = scheduled(position, self._manifest.inner) * self._timetable.rate(self.round, fraction)
        return share * ramp(steps_done) if self._came_late else share

    def begin(self, certified: int) -> None:
        """From a state of that round on, without moments: after the first round their first steps are too long for what the others have come to."""
        self.certified = certified
        self._came_late = certified > 0

    def restart(self, certified: int) -> None:
        """A state of that round was installed: what was trained since the last certificate counts no more."""
        self._since_snapshot = 0
        self._has_offer = False
        self.in_round, self._in_round_loss = 0, LossSum()
        self._came_late = True
        self.move(certified)

    def close(self, flat_N: Tensor) -> Snapshot:
        """The round is over here; flat_N: a copy of the local parameters. Raises RuntimeError if an offer is out."""
        if self._has_offer:
            raise RuntimeError(f"the offer of round {self.round - 1} is out: merge a certificate or withdraw it first")
        snapshot = Snapshot(flat_N, self.round, self._since_snapshot, self._in_round_loss.mean)
        self._has_offer = True
        self._awaits_certificate = self._waits_for_certificates
        self._closed_in_round, self._closed_loss = self.in_round, self._in_round_loss
        self.in_round, self._in_round_loss = 0, LossSum()
        self._since_snapshot = 0
        return snapshot

    def move(self, certified: int) -> None:
        """No offer is out, `certified` is the agreed round: what that makes of the round in training."""
        before, had_offer = self.round, self._has_offer
        self.certified = certified
        self._has_offer = self._awaits_certificate = False
        if had_offer and self.round == before - 1:  # the closed round was not certified: it goes on
            self.in_round += self._closed_in_round
            self._in_round_loss += self._closed_loss
        elif self.round != before:
            self.in_round, self._in_round_loss = 0, LossSum()

    def progress(self, *, is_training: bool) -> Progress:
        """With the speed as of the newest micro-batch: the torch thread, which calls this, may be idle for long."""
        while len(self._done) > 2 and (
            self._done[-1][0] - self._done[0][0] > SPEED_WINDOW_S or len(self._done) > SPEED_SAMPLES
        ):
            self._done.popleft()
            self._busy_s -= self._done[0][1]
        tokens_each = self._manifest.inner.micro_batch * self._manifest.model.context
        seconds = self._done[-1][0] - self._done[0][0]
        return Progress(
            round=self.round,
            micro_batches=self.in_round,
            tokens=self.completed * tokens_each,
            train_loss=LossSum.of(self._losses).mean,
            tokens_per_s=(len(self._done) - 1) * tokens_each / seconds if seconds > 0 else 0.0,
            learning_rate=self.learning_rate,
            is_training=is_training,
            busy=min(1.0, self._busy_s / seconds) if seconds > 0 else 0.0,
            share=self.share,
            micro_batch_tokens=tokens_each,
            measured_s=self._done[-1][0],
            measured_over_s=seconds,
        )
