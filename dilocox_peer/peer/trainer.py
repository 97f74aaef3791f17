"""The threads that train: one torch thread, sole owner of parameters and optimizer, and one thread for the outer loop.

The session (asyncio) calls; every call returns at once with a value or a Future. Bytes and frozen dataclasses go to the
caller, never a tensor. Between the two threads a vector is handed over whole: whoever gave it does not touch it again.

Order. Every call takes its place in both threads' queues under one lock, so both carry calls out in the order in which
they were made, whatever the timing:
    close:  the torch thread takes the snapshot between two micro-batches; the outer thread waits for it and encodes.
    merge:  the outer thread decodes and steps; the torch thread trains on meanwhile, then applies the shift before any
            later call. So a close after a merge always has its shift in the snapshot.
The torch thread never waits for the outer thread to train on, except where a call says so (overlap none, hold); the
outer thread waits for the torch thread at most one micro-batch. There is no cycle.

Rounds. Training is in round `certified + 1`, or `certified + 2` while an offer is out. A call that puts training into a
higher round starts its count of micro-batches anew; one that puts it back lets the closed round go on.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from dilocox_peer.manifest import Manifest
from dilocox_peer.peer.outer import AnchorState, OuterLoop, OuterSettings
from dilocox_peer.pipeline.data import Corpus
from dilocox_peer.pipeline.inner import InnerOptimizer, ramp, run_position, schedule
from dilocox_peer.pipeline.model import LayerRange, StageModel
from dilocox_peer.pipeline.stage import Stage
from dilocox_peer.types import Digest, PeerId

MAX_CALLS = 64
"""Calls that may wait in a queue; a session has a handful at most, so more is its fault and is refused."""

LOSS_WINDOW = 32
"""Micro-batches over which the shown training loss is averaged."""

SPEED_WINDOW_S = 10.0

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, slots=True)
class Progress:
    """round: the one being trained. micro_batches: completed in it. tokens: since the start of this process.

    train_loss: mean of the last LOSS_WINDOW micro-batches, nan before the first. is_training: False while held, waiting
    for a certificate, or when the run is complete.
    """

    round: int
    micro_batches: int
    tokens: int
    train_loss: float
    tokens_per_s: float
    learning_rate: float
    is_training: bool


@dataclass(frozen=True, slots=True)
class Closing:
    """The offered contribution of a round. micro_batches: its weight, that of missed rounds included. train_loss: mean
    over this round's micro-batches, nan if there were none. round_micro_batches: how many those were."""

    round: int
    blob: bytes
    micro_batches: int
    round_micro_batches: int
    train_loss: float
    raw_bytes: int


@dataclass(frozen=True, slots=True)
class Merged:
    """A certificate is applied to the anchor. norms, clip_factors: of the contributions, in the certificate's order."""

    round: int
    state_digest: Digest
    norms: tuple[float, ...]
    clip_factors: tuple[float, ...]


class Trainer:
    """See the module. Methods may be called from any one thread, except that none may be called from on_failure."""

    def __init__(
        self,
        manifest: Manifest,
        *,
        peer: PeerId,
        incarnation: int,
        corpus: Corpus,
        device: str = "cpu",
        threads: int = 1,
        clock: Callable[[], float] = time.monotonic,
        on_failure: Callable[[str], None] = lambda reason: None,
        micro_batch_limit: int | None = None,
    ) -> None:
        """on_failure: called once, from the thread that failed; both threads are useless afterwards.

        micro_batch_limit: train at most so many in a round, then wait for its end; None trains on without bound.
        Tests that must repeat to the bit set it.
        """
        corpus.require_context(manifest.model.context)
        self._outer_settings = OuterSettings.of(manifest)
        self._outer: OuterLoop | None = None
        self._state: AnchorState | None = None
        self._on_failure = on_failure
        self._failed: str | None = None
        self._lock = threading.Lock()
        self._loop = _TorchLoop(
            manifest, peer=peer, incarnation=incarnation, corpus=corpus, device=device, clock=clock,
            micro_batch_limit=micro_batch_limit,
        )  # fmt: skip
        self._torch = _Worker("dilocox-torch", self._fail, num_threads=threads, idle=self._loop.train_on)
        self._executor = _Worker("dilocox-outer", self._fail, num_threads=1)

    def start(self, state: AnchorState) -> None:
        """Begins to train round state.round + 1 on top of state. Once."""
        assert self._outer is None, "already started"
        outer = self._outer = OuterLoop(self._outer_settings, state)
        self._state = state
        self._loop.begin(outer.state.anchor_N(), state.round)
        self._torch.start()
        self._executor.start()

    def progress(self) -> Progress:
        """The latest figures; cheap, any thread."""
        return self._loop.progress

    def state(self) -> AnchorState:
        """The agreed state after the last merge; immutable, so it can be served while training goes on."""
        assert self._state is not None, "not started"
        return self._state

    @property
    def failure(self) -> str | None:
        """Why a thread gave up, or None."""
        return self._failed

    def close(self) -> "Future[Closing]":
        """Ends the round being trained and encodes its contribution; the next round begins at once, or with overlap
        `none` after the merge. The Future fails with RuntimeError if an offer is out: merge or withdraw it first."""
        outer = self._started()
        with self._lock:
            self._require_room()
            snapshot = self._torch.submit(self._loop.close)
            return self._executor.submit(lambda: _encode(outer, snapshot.result()), after=snapshot)

    def merge(
        self, blobs: Sequence[bytes], weights: Sequence[int], *, own: bool, round_number: int, head: Digest
    ) -> "Future[Merged]":
        """Applies a certificate: its blobs and their micro-batches in its order; own: whether our offer is among them.

        No blobs: a void round, or a certificate that only moves the head. Done when anchor and local parameters are
        (`state` is new a little earlier, `progress` not later). If the round was not closed here yet, it is over now
        and its movement goes with the next. Fails with MalformedBlob or RuntimeError; nothing has changed then.
        """
        outer = self._started()
        blobs, weights = tuple(blobs), tuple(weights)

        def step() -> tuple[Merged, Tensor]:
            outcome = outer.merge(blobs, weights, own=own, round_number=round_number, head=head)
            self._state = outcome.state
            merged = Merged(round_number, outcome.state.digest, outcome.norms, outcome.clip_factors)
            return merged, outcome.shift_N

        return self._outer_then_torch(step, lambda shift_N: self._loop.shift(shift_N, certified=round_number))

    def withdraw(self) -> "Future[None]":
        """The head moved under our offer: its movement is pending again, and its round goes on."""
        outer = self._started()

        def step() -> tuple[None, None]:
            outer.withdraw()
            return None, None

        return self._outer_then_torch(step, lambda _: self._loop.withdraw())

    def install(self, state: AnchorState, *, keep_movement: bool) -> "Future[None]":
        """Adopts another state. keep_movement: our unsettled movement stays on top of it; else local parameters become
        its anchor. Optimizer moments stay. An offer that was out is withdrawn."""
        outer = self._started()

        def step() -> tuple[None, Tensor]:
            local_N = outer.install(state, keep_movement=keep_movement)
            self._state = state
            return None, local_N

        def apply(local_N: Tensor) -> None:
            if keep_movement:
                self._loop.shift(local_N, certified=state.round)
            else:
                self._loop.replace(local_N, certified=state.round)

        return self._outer_then_torch(step, apply)

    def hold(self) -> "Future[None]":
        """No micro-batch begins from when this is done until `resume`; calls are still carried out."""
        return self._on_torch(lambda: self._loop.set_held(True))

    def resume(self) -> "Future[None]":
        """Undoes `hold`. Does not end the wait of overlap `none` for its certificate."""
        return self._on_torch(lambda: self._loop.set_held(False))

    def stop(self, timeout_s: float) -> None:
        """Ends both threads after what they are at (one micro-batch, one encoding); calls still waiting fail.

        Raises TimeoutError if a thread is not done by then; it still ends by itself after what it is at.
        """
        deadline = time.monotonic() + timeout_s
        for worker in (self._torch, self._executor):
            worker.ask_to_stop("the trainer was stopped")
        for worker in (self._torch, self._executor):
            worker.join(max(0.0, deadline - time.monotonic()))

    def _started(self) -> OuterLoop:
        assert self._outer is not None, "not started"
        return self._outer

    def _require_room(self) -> None:
        """Before a call takes its places, so that it gets all of them or none."""
        if self._torch.is_full or self._executor.is_full:
            raise RuntimeError(f"{MAX_CALLS} calls are waiting for the trainer")

    def _on_torch(self, run: Callable[[], None]) -> "Future[None]":
        self._started()
        with self._lock:
            self._require_room()
            return self._torch.submit(run)

    def _outer_then_torch(self, step: Callable[[], tuple[T, U]], apply: Callable[[U], None]) -> "Future[T]":
        """Runs step in the outer thread, then apply with the second half of its result in the torch thread, before any
        call made later. The Future is done with the first half after both. If step fails, apply is left out."""

        def finish() -> T:
            value, handed = stepped.result()
            apply(handed)
            return value

        with self._lock:
            self._require_room()
            stepped = self._executor.submit(step)
            return self._torch.submit(finish, after=stepped, is_fatal=True)

    def _fail(self, reason: str) -> None:
        with self._lock:
            if self._failed is not None:
                return
            self._failed = reason
        for worker in (self._torch, self._executor):
            worker.ask_to_stop(reason)
        self._on_failure(reason)


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """Local parameters at a round's close. new_micro_batches: since the last snapshot."""

    flat_N: Tensor
    round: int
    new_micro_batches: int
    round_micro_batches: int
    train_loss: float


class _TorchLoop:
    """What the torch thread does; all but `begin` runs in it. `progress` is replaced whole, so anyone may read it."""

    def __init__(
        self,
        manifest: Manifest,
        *,
        peer: PeerId,
        incarnation: int,
        corpus: Corpus,
        device: str,
        clock: Callable[[], float],
        micro_batch_limit: int | None,
    ) -> None:
        self._manifest = manifest
        self._peer = peer
        self._incarnation = incarnation
        self._corpus = corpus
        self._clock = clock
        self._micro_batch_limit = micro_batch_limit
        self._stage = Stage(StageModel(manifest.model, LayerRange.of(manifest.model), device=device))
        self._optimizer = InnerOptimizer(self._stage.model, manifest.inner)

        self._certified = 0
        self._has_offer = False
        self._awaits_certificate = False  # overlap none, from the close to the merge
        self._is_held = False
        self._in_round, self._in_round_loss = 0, 0.0
        self._closed_in_round, self._closed_loss = 0, 0.0
        self._since_snapshot = 0
        self._since_step = 0
        self._index = 0  # of the data draw: never used twice by one incarnation
        self._learning_rate = 0.0
        self._losses: deque[float] = deque(maxlen=LOSS_WINDOW)
        self._times: deque[float] = deque([clock()], maxlen=4096)
        self.progress = Progress(1, 0, 0, math.nan, 0.0, 0.0, False)

    @property
    def _round(self) -> int:
        return self._certified + (2 if self._has_offer else 1)

    def begin(self, anchor_N: Tensor, certified: int) -> None:
        """Before the thread starts."""
        self._stage.model.flat_N.copy_(anchor_N)
        self._certified = certified
        self._publish()

    def train_on(self) -> bool:
        """One micro-batch, and the inner step if it completes one. False if there is nothing to train on now."""
        if not self._may_train():
            return False
        inner, model = self._manifest.inner, self._manifest.model
        inputs_BT, targets_BT = self._corpus.train_batch(
            seed=self._manifest.run.seed, peer=self._peer, incarnation=self._incarnation,
            round_number=self._round, index=self._index, batch=inner.micro_batch, context=model.context,
        )  # fmt: skip
        loss = self._stage.train_micro_batch(inputs_BT, targets_BT)
        self._index += 1
        self._in_round += 1
        self._in_round_loss += loss
        self._since_snapshot += 1
        self._since_step += 1
        self._losses.append(loss)
        self._times.append(self._clock())
        if self._since_step == inner.accumulate:
            report = self._optimizer.step(micro_batches=self._since_step, share=self._share())
            self._learning_rate = report.learning_rate
            self._since_step = 0
        self._publish()
        return True

    def close(self) -> _Snapshot:
        if self._has_offer:
            raise RuntimeError(f"the offer of round {self._round - 1} is out: merge a certificate or withdraw it first")
        loss = self._in_round_loss / self._in_round if self._in_round else math.nan
        flat_N = self._stage.model.flat_N.to("cpu", copy=True)
        snapshot = _Snapshot(flat_N, self._round, self._since_snapshot, self._in_round, loss)
        self._has_offer = True
        self._awaits_certificate = self._manifest.outer.overlap == "none"
        self._closed_in_round, self._closed_loss = self._in_round, self._in_round_loss
        self._in_round, self._in_round_loss = 0, 0.0
        self._since_snapshot = 0
        self._publish()
        return snapshot

    def shift(self, shift_N: Tensor, *, certified: int) -> None:
        """Adds shift_N to the local parameters; the agreed round is now `certified`."""
        self._stage.model.flat_N.add_(shift_N.to(self._stage.model.flat_N.device))
        self._move(certified)

    def replace(self, local_N: Tensor, *, certified: int) -> None:
        """Local parameters become local_N; what was trained before counts no more."""
        self._stage.model.flat_N.copy_(local_N)
        self._stage.model.zero_grad()
        self._since_snapshot = self._since_step = 0
        self._has_offer = False
        self._in_round, self._in_round_loss = 0, 0.0
        self._move(certified)

    def withdraw(self) -> None:
        self._move(self._certified)

    def set_held(self, is_held: bool) -> None:
        self._is_held = is_held
        self._publish()

    def _move(self, certified: int) -> None:
        """No offer is out, `certified` is the agreed round: what that makes of the round in training."""
        before, had_offer = self._round, self._has_offer
        self._certified = certified
        self._has_offer = self._awaits_certificate = False
        if had_offer and self._round == before - 1:  # the closed round was not certified: it goes on
            self._in_round += self._closed_in_round
            self._in_round_loss += self._closed_loss
        elif self._round != before:
            self._in_round, self._in_round_loss = 0, 0.0
        self._publish()

    def _may_train(self) -> bool:
        if self._is_held or self._awaits_certificate or self._round > self._manifest.rounds.total:
            return False
        return self._micro_batch_limit is None or self._in_round < self._micro_batch_limit

    def _share(self) -> float:
        rounds, inner = self._manifest.rounds, self._manifest.inner
        fraction = self._in_round / (rounds.inner_steps * inner.accumulate)
        position = run_position(round_number=self._round, fraction=fraction, total_rounds=rounds.total)
        share = schedule(position, warmup=inner.warmup)
        # Who comes in after the first round has no moments yet, whether it started there or had a state installed.
        return share * ramp(self._optimizer.steps_done) if self._certified else share

    def _publish(self) -> None:
        inner, model = self._manifest.inner, self._manifest.model
        while len(self._times) > 2 and self._times[-1] - self._times[0] > SPEED_WINDOW_S:
            self._times.popleft()
        tokens_each = inner.micro_batch * model.context
        seconds = self._times[-1] - self._times[0]
        self.progress = Progress(
            round=self._round,
            micro_batches=self._in_round,
            tokens=self._index * tokens_each,
            train_loss=sum(self._losses) / len(self._losses) if self._losses else math.nan,
            tokens_per_s=(len(self._times) - 1) * tokens_each / seconds if seconds > 0 else 0.0,
            learning_rate=self._learning_rate,
            is_training=self._may_train(),
        )


@dataclass(frozen=True, slots=True)
class _Job:
    run: Callable[[], Any]
    future: "Future[Any]"
    after: "Future[Any] | None"
    is_fatal: bool


class _Worker:
    """One thread that runs jobs in order, each when the Future it comes after is done (a job after one that failed fails
    with it, unrun); and `idle` while none is ready.

    idle: does one piece of work; False: nothing to do until a job has changed something. A job's failure goes to its
    Future; that of idle, or of a fatal job, ends the thread and is reported.
    """

    def __init__(
        self,
        name: str,
        on_failure: Callable[[str], None],
        *,
        num_threads: int,
        idle: Callable[[], bool] = lambda: False,
    ) -> None:
        self._on_failure = on_failure
        self._num_threads = num_threads
        self._idle = idle
        self._wake = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._stop_reason: str | None = None
        self._thread = threading.Thread(target=self._run, name=name)

    @property
    def is_full(self) -> bool:
        return len(self._jobs) >= MAX_CALLS

    def start(self) -> None:
        self._thread.start()

    def submit(
        self, run: Callable[[], T], *, after: "Future[Any] | None" = None, is_fatal: bool = False
    ) -> "Future[T]":
        """The Future of run's result. Once asked to stop it fails at once with RuntimeError."""
        future: Future[T] = _uncancellable()
        with self._wake:
            if self._stop_reason is not None:
                future.set_exception(RuntimeError(self._stop_reason))
                return future
            self._jobs.append(_Job(run, future, after, is_fatal))
            self._wake.notify()
        if after is not None:
            after.add_done_callback(lambda _: self._notify())
        return future

    def ask_to_stop(self, reason: str) -> None:
        with self._wake:
            self._stop_reason = self._stop_reason or reason
            self._wake.notify()

    def join(self, timeout_s: float) -> None:
        if self._thread.ident is None or self._thread is threading.current_thread():
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"thread {self._thread.name} is still at work after {timeout_s:.1f} s")

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)  # holds for this thread only
        may_idle = True
        try:
            while self._stop_reason is None:
                job = self._next_job(may_wait=not may_idle)
                if job is not None:
                    self._carry_out(job)
                    may_idle = True
                elif self._stop_reason is None:
                    may_idle = self._idle()
        except Exception as error:  # the boundary of the thread: whatever it was, say it and stop
            self._on_failure(f"{self._thread.name}: {type(error).__name__}: {error}")
        finally:
            self.ask_to_stop("the trainer was stopped")
            self._refuse_waiting()

    def _next_job(self, *, may_wait: bool) -> _Job | None:
        with self._wake:
            while self._stop_reason is None:
                if self._jobs and (self._jobs[0].after is None or self._jobs[0].after.done()):
                    return self._jobs.popleft()
                if not may_wait:
                    return None
                self._wake.wait()  # every change of what is asked above notifies
        return None

    def _carry_out(self, job: _Job) -> None:
        failed = job.after.exception() if job.after is not None else None
        if failed is not None:
            job.future.set_exception(failed)
            return
        try:
            result = job.run()
        except Exception as error:
            job.future.set_exception(error)
            if job.is_fatal:
                raise
        else:
            job.future.set_result(result)

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    def _refuse_waiting(self) -> None:
        with self._wake:
            waiting = list(self._jobs)
            self._jobs.clear()
        for job in waiting:
            job.future.set_exception(RuntimeError(self._stop_reason))


def _encode(outer: OuterLoop, snapshot: _Snapshot) -> Closing:
    offer = outer.offer(snapshot.flat_N, snapshot.new_micro_batches)
    return Closing(
        round=snapshot.round,
        blob=offer.blob,
        micro_batches=offer.micro_batches,
        round_micro_batches=snapshot.round_micro_batches,
        train_loss=snapshot.train_loss,
        raw_bytes=offer.raw_bytes,
    )


def _uncancellable() -> "Future[Any]":
    """A Future that is under way: whoever stops waiting for a call does not undo half of it."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future
