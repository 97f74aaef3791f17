"""The training loop of one stage of several: does the work it finds on its bench, keeps two versions of the weights.

What to do next, and with which version, is decided by the scheduler behind the bench (pipeline/scheduler.py). Here are the
tensors: a forward and its backward use the same weights, so a step or a shift that comes while forwards are out goes
into the second buffer, and the first is free again when the last of them is back. At most two versions live.

A shift from the outer loop may come while both buffers are in use: it waits (`_pending`) until the scheduler says that
it can be published. What is snapshot at a round's close includes it.

What is not finite is the fault of what neighbours sent, as long as our parameters are finite: it is left out, with what has been added up for
the step since the last one, and the peer goes on. A body that half precision cannot hold must not end it. A forward whose output no neighbour would
take is given up before it goes out; an origin has nobody but itself to blame for many in a row (left_out.py).
"""

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from dilocox_peer.data.batches import BatchSource
from dilocox_peer.manifest import Manifest
from dilocox_peer.model.activations import BodyFormat, Bytes
from dilocox_peer.model.architecture import build_model, layers_of
from dilocox_peer.model.inner import InnerOptimizer
from dilocox_peer.model.passes import Passes
from dilocox_peer.peer.planning.timetable import Timetable
from dilocox_peer.peer.training.anchor_state import AnchorState
from dilocox_peer.peer.training.book import HoldReason, Progress, RoundBook, Snapshot
from dilocox_peer.peer.training.given_back import give_back_by_piece
from dilocox_peer.peer.training.left_out import LeftOutInARow
from dilocox_peer.pipeline.contract import Backward, Body, Forward, Publish, StepNow, Turn, Work
from dilocox_peer.types import PeerId
from dilocox_peer.wire.hops import MicroBatchId

if TYPE_CHECKING:
    from dilocox_peer.model.frozen import FrozenBase


MOST_LOSS = 4.0
"""Times what a uniform guess has: more of a told loss is not counted, which nobody can check, and it shows all the same that training diverges."""


class WorkBench(Protocol):
    """Where work comes from and results go; every call returns at once."""

    def next_work(self) -> Work | None: ...

    def released(self) -> list[MicroBatchId]:
        """Micro-batches, since the last call, whose backward will not come: all that `next_work` counted on, and none that it
        handed out."""

    def packed(self, micro_batch: MicroBatchId, seconds: float) -> None:
        """Seconds of packing and unpacking in the work that is about to be reported as done."""

    def forward_done(self, micro_batch: MicroBatchId, body: bytes | None, seconds: float) -> None:
        """body: None where it is nothing that a neighbour takes."""

    def backward_done(self, micro_batch: MicroBatchId, body: bytes | None, loss: float, seconds: float) -> None:
        """body: None of an origin, and where nothing finite came of it."""

    def stepped(self, seconds: float) -> None: ...

    def shifted(self) -> None:
        """The parameters are to change: hand out a Publish when a version can be made of it."""

    def rounds(self, training: int, certified: int, issue_limit: int | None, accumulate: int) -> None: ...

    def hold(self, is_held: bool) -> None: ...

    def pause(self, is_paused: bool) -> None:
        """The volunteer's wish: for long, so callers are sent elsewhere."""

    def load_share(self) -> float:
        """Micro-batches that come to this peer for each that one origin draws: origins over replicas of this stage."""


class StageLoop:
    """A TrainingLoop (book.py). current: the newest weights, which `optimizer` steps."""

    def __init__(
        self,
        manifest: Manifest,
        stage: int,
        bench: WorkBench,
        *,
        peer: PeerId,
        incarnation: int,
        corpus: BatchSource | None,
        device: str,
        clock: Callable[[], float],
        micro_batch_limit: int | None,
        timetable: Timetable,
        checkpointing: bool = False,
        base: "FrozenBase | None" = None,
        precision: str = "float32",
        compiled: bool = False,
    ) -> None:
        """corpus: of stage 0 alone. micro_batch_limit: stage 0 begins at most so many in a round."""
        self._manifest = manifest
        self._bench = bench
        self._peer = peer
        self._incarnation = incarnation
        self._corpus = corpus
        self._micro_batch_limit = micro_batch_limit
        self._body = BodyFormat.of(manifest)
        self.passes = Passes(self._body)
        first = build_model(
            manifest.model,
            layers_of(manifest, stage),
            device=device,
            checkpointing=checkpointing,
            base=base,
            precision=precision,
            compiled=compiled,
        )
        self.current, self._other = first, first.version()
        self.optimizer = InnerOptimizer(first, manifest.inner)
        # To be added to the current weights, or with _replaces to take their place.
        self.pending_N: Tensor | None = None
        self._replaces = False
        # What its micro-batches weigh (model/loss.py); they are fewer than the scheduler counts once weights were replaced.
        self._in_gradient = 0.0
        self._book = RoundBook(manifest, clock, timetable)
        self._left_out = LeftOutInARow(precision)
        self._most_loss = MOST_LOSS * math.log(self._body.vocab_size)
        self._held = False
        self._told = (-1, -1, 0)
        self._publish()

    progress: Progress

    def begin(self, state: AnchorState) -> None:
        state.anchor_into(self.current.flat_N)
        self._book.begin(state.round)
        self._publish()

    # ---- work --------------------------------------------------------------------------------------------------------

    def train_on(self) -> bool:
        """One forward, backward, turn or step."""
        if self._held and self._corpus is not None and self._book.may_train and self._corpus.is_ready:
            self._publish()  # data has come
        if self._held and self._corpus is None:
            return False  # an origin goes on with what is under way; what comes to a later stage waits
        work = self._bench.next_work()
        for micro_batch in self._bench.released():  # not before: the work may rest on what was released meanwhile
            self.passes.release(micro_batch)
        started = time.perf_counter()
        done = self._do(work, started)
        self._publish()
        return done

    def _do(self, work: Work | None, started: float) -> bool:
        match work:
            case None:
                return False
            case Forward():
                body = self._checked(work, self._forward(work))
                self._bench.packed(work.id, self.passes.take_codec_s())
                self._bench.forward_done(work.id, body, time.perf_counter() - started)
            case Backward():
                gradient = self._backward(work, started)
                self._bench.packed(work.id, self.passes.take_codec_s())
                self._bench.backward_done(work.id, gradient, work.loss, time.perf_counter() - started)
            case Turn():
                gradient, loss = self._turn(work, started)
                self._bench.packed(work.id, self.passes.take_codec_s())
                self._bench.backward_done(work.id, gradient, loss, time.perf_counter() - started)
            case StepNow():
                self._step()
                self._bench.stepped(time.perf_counter() - started)
            case Publish():
                self._make_version()
                self._apply_pending()
                self._bench.stepped(time.perf_counter() - started)
        return True

    def _forward(self, work: Forward) -> bytes:
        if work.body is not None:
            return self.passes.forward(work.id, self.current, _bytes(work.body))
        assert self._corpus is not None, "a forward without a body at a stage that reads no data"
        inner, model = self._manifest.inner, self._manifest.model
        inputs_BT, targets_BT = self._corpus.train_batch(
            seed=self._manifest.run.seed, peer=self._peer, incarnation=self._incarnation,
            round_number=work.round, index=work.id.index, batch=inner.micro_batch, context=model.context,
        )  # fmt: skip
        return self.passes.begin(work.id, self.current, inputs_BT, targets_BT)

    def _checked(self, work: Forward, output: bytes) -> bytes | None:
        """The output; None where the next stage would take it for a broken protocol. Raises FloatingPointError if our own parameters are not finite, or
        nothing came of too many in a row that we drew ourselves."""
        reason = self._body.why_not(output, is_step=True)
        if reason is not None:
            self._require_finite(FloatingPointError(reason))
            if work.body is None:
                self._left_out.one(reason)
            return None
        if work.body is None:
            self._left_out.of_use()
        return output

    def _turn(self, work: Turn, started: float) -> tuple[bytes | None, float]:
        """Gradient and loss; None and NaN where nothing finite came of it."""
        try:
            gradient, loss = self.passes.turn(self.current, _bytes(work.body))
        except FloatingPointError as error:
            self._leave_out(error)
            return None, math.nan
        self._in_gradient += (counted := self._body.counted(_bytes(work.body)))
        self._book.done(loss, time.perf_counter() - started, counted)
        return gradient, loss

    def _backward(self, work: Backward, started: float) -> bytes | None:
        """The gradient for the stage before; None where nothing that it would take came of it, and at the first."""
        counted = self.passes.counted(work.id)
        try:
            gradient = self.passes.backward(work.id, _bytes(work.body))
        except FloatingPointError as error:
            self._leave_out(error)
            return None
        self._in_gradient += counted
        told = self._most_loss if work.loss > self._most_loss else work.loss  # NaN stays
        self._book.done(told, time.perf_counter() - started, counted)
        return gradient

    def _leave_out(self, error: FloatingPointError) -> None:
        """The gradient is spoiled. Raises the error if our own parameters are."""
        self._require_finite(error)
        self.current.zero_grad()
        self._in_gradient = 0.0

    def _require_finite(self, error: FloatingPointError) -> None:
        """Raises the error if our own parameters are not."""
        if not float(torch.linalg.vector_norm(self.current.flat_N)) < math.inf:
            raise error

    def _step(self) -> None:
        self._make_version()
        self._apply_pending()  # a step's version has the shift in it
        if not self._in_gradient:
            return  # all of it was computed with weights that have been replaced: the version is these alone
        self._book.load = self._bench.load_share()
        share = self._book.learning_rate_share(self.optimizer.steps_done)
        try:
            self._book.learning_rate = self.optimizer.step(micro_batches=self._in_gradient, share=share)
        except FloatingPointError as error:
            self._leave_out(error)
        self._in_gradient = 0.0

    def _make_version(self) -> None:
        """The current weights may be changed from here on: moved to the other buffer if forwards are out on them."""
        if not self.passes.is_used(self.current):
            return
        assert not self.passes.is_used(self._other), "a third version of the weights"
        self._other.flat_N.copy_(self.current.flat_N)
        self.current, self._other = self._other, self.current
        self.optimizer.move_to(self.current)

    # ---- rounds ------------------------------------------------------------------------------------------------------

    def close(self) -> Snapshot:
        snapshot = self._book.close(self.local_N().to("cpu", copy=True))
        self._publish()
        return snapshot

    def shift(self, shift_N: Tensor, *, certified: int) -> None:
        if self.pending_N is None:
            self.pending_N = shift_N
        else:
            self.pending_N.add_(shift_N)
            give_back_by_piece(shift_N)
        self._book.move(certified)
        self._publish()
        self._bench.shifted()

    def replace(self, local_N: Tensor, *, certified: int) -> None:
        self._drop_pending()
        self.pending_N, self._replaces = local_N, True
        self._book.restart(certified)
        self._publish()
        self._bench.shifted()

    def withdraw(self) -> None:
        self._book.move(self._book.certified)
        self._publish()

    def set_held(self, is_held: bool, reason: HoldReason = "rounds") -> None:
        self._book.hold(is_held, reason)
        if reason == "pause":
            self._bench.pause(is_held)
        self._publish()

    def vectors(self) -> list[Tensor]:
        pending = [] if self.pending_N is None else [self.pending_N]
        versions = [self.current.flat_N, self._other.flat_N, self.current.flat_grad_N]
        return [*versions, *pending, *self.optimizer.moments()]

    def local_N(self) -> Tensor:
        """The local parameters with what waits to be published; not to be changed."""
        if self.pending_N is None:
            return self.current.flat_N
        pending_N = self.pending_N.to(self.current.flat_N.device)
        return pending_N if self._replaces else self.current.flat_N + pending_N

    def _apply_pending(self) -> None:
        """Into the current weights, which no forward is out on."""
        if self.pending_N is None:
            return
        pending_N = self.pending_N.to(self.current.flat_N.device)
        if self._replaces:
            self.current.flat_N.copy_(pending_N)
            self.current.zero_grad()
            self._in_gradient = 0.0
        else:
            self.current.flat_N.add_(pending_N)
        self._drop_pending()

    def _drop_pending(self) -> None:
        if self.pending_N is not None:
            give_back_by_piece(self.pending_N)
        self.pending_N, self._replaces = None, False

    def _publish(self) -> None:
        may_train = self._book.may_train and (self._corpus is None or self._corpus.is_ready)
        rounds = (self._book.round, self._book.certified, self._book.micro_batches_a_step)
        if rounds != self._told:
            training, certified, accumulate = self._told = rounds
            self._bench.rounds(training, certified, self._micro_batch_limit, accumulate)
        if may_train == self._held:
            self._held = not may_train
            self._bench.hold(self._held)
        self.progress = self._book.progress(is_training=may_train)


def _bytes(body: Body) -> Bytes:
    """What the scheduler passes on unseen is what the conveyor took from the link."""
    assert isinstance(body, bytes | bytearray | memoryview), type(body)
    return body
