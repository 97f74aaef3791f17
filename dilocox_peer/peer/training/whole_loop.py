"""The training loop of a run with one stage: this peer holds the whole model and needs nobody for an inner step.

What float16 cannot hold, in a forward or a gradient, is left out with what has been added up for the step since the last one (left_out.py). In other
precisions a loss that is not finite is the end of it: the model has diverged.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dilocox_peer.data.batches import BatchSource
from dilocox_peer.manifest import Manifest
from dilocox_peer.model.architecture import StageModel, build_model
from dilocox_peer.model.inner import InnerOptimizer
from dilocox_peer.model.loss import counted
from dilocox_peer.model.team import Team
from dilocox_peer.peer.planning.timetable import Timetable
from dilocox_peer.peer.training.anchor_state import AnchorState
from dilocox_peer.peer.training.book import HoldReason, Progress, RoundBook, Snapshot
from dilocox_peer.peer.training.given_back import give_back_by_piece
from dilocox_peer.peer.training.left_out import LeftOutInARow
from dilocox_peer.types import PeerId

if TYPE_CHECKING:
    from dilocox_peer.model.frozen import FrozenBase


class WholeLoop:
    """A TrainingLoop (book.py)."""

    def __init__(
        self,
        manifest: Manifest,
        *,
        peer: PeerId,
        incarnation: int,
        corpus: BatchSource,
        devices: Sequence[str],
        clock: Callable[[], float],
        micro_batch_limit: int | None,
        timetable: Timetable,
        checkpointing: bool = False,
        base: "FrozenBase | None" = None,
        precision: str = "float32",
        compiled: bool = False,
    ) -> None:
        """devices: each computes micro-batches of its own. micro_batch_limit: at most so many in a round, then wait for its end."""
        self._manifest = manifest
        self._peer = peer
        self._incarnation = incarnation
        self._corpus = corpus
        self._micro_batch_limit = micro_batch_limit
        models: list[StageModel] = []
        for device in devices:
            scale = models[0].scale if models else None
            models.append(
                build_model(
                    manifest.model, device=device, checkpointing=checkpointing, base=base, precision=precision, scale=scale,
                    compiled=compiled,
                )
            )  # fmt: skip
        self._team = Team(models)
        self._optimizer = InnerOptimizer(self._team.model, manifest.inner)
        self._book = RoundBook(manifest, clock, timetable)
        # Micro-batches, and what they weigh (model/loss.py).
        self._since_step, self._in_gradient = 0, 0.0
        self._left_out = LeftOutInARow(precision)
        self._index = 0  # of the data draw: never used twice by one incarnation
        self._publish()

    progress: Progress

    def begin(self, state: AnchorState) -> None:
        state.anchor_into(self._team.model.flat_N)
        self._team.changed()
        self._book.begin(state.round)
        self._publish()

    def train_on(self) -> bool:
        """A micro-batch a device, and the inner step if they complete one."""
        if not self._may_train or not self._corpus.is_ready:
            return False
        started = time.perf_counter()
        batches = [self._next_batch()]
        while len(batches) < self._at_once and self._corpus.is_ready:
            batches.append(self._next_batch())
        try:
            losses = self._team.train(batches)
        except FloatingPointError as error:
            self._leave_out(error)
            losses, batches = [], []
        self._since_step += len(losses)
        for loss, (_, targets_BT) in zip(losses, batches, strict=True):
            self._in_gradient += (weight := counted(targets_BT))
            self._book.done(loss, (time.perf_counter() - started) / len(losses), weight)
        if self._since_step >= self._book.micro_batches_a_step:
            self._step()
        self._publish()
        return True

    def _step(self) -> None:
        if self._in_gradient:
            self._team.gather()
            done = self._optimizer.steps_done
            share = self._book.learning_rate_share(done)
            try:
                self._book.learning_rate = self._optimizer.step(micro_batches=self._in_gradient, share=share)
            except FloatingPointError as error:
                self._leave_out(error)
            if self._optimizer.steps_done > done:
                self._left_out.of_use()
            self._team.changed()
        self._since_step, self._in_gradient = 0, 0.0

    def _leave_out(self, error: FloatingPointError) -> None:
        """The gradient is spoiled. Raises the error if that is not float16's doing, or came too often in a row."""
        model = self._team.model
        if model.scale is None or not float(torch.linalg.vector_norm(model.flat_N)) < math.inf:
            raise error
        self._left_out.one(str(error))
        self._team.zero_grad()
        self._since_step, self._in_gradient = 0, 0.0

    @property
    def _at_once(self) -> int:
        """Micro-batches that may be computed together: what is left of the step, and of the round where that has a bound."""
        most = min(len(self._team), self._book.micro_batches_a_step - self._since_step)
        limit = self._micro_batch_limit
        return most if limit is None else min(most, limit - self._book.in_round)

    def _next_batch(self) -> tuple[Tensor, Tensor]:
        index, self._index = self._index, self._index + 1
        inner, model = self._manifest.inner, self._manifest.model
        return self._corpus.train_batch(
            seed=self._manifest.run.seed, peer=self._peer, incarnation=self._incarnation,
            round_number=self._book.round, index=index, batch=inner.micro_batch, context=model.context,
        )  # fmt: skip

    def close(self) -> Snapshot:
        snapshot = self._book.close(self._team.model.flat_N.to("cpu", copy=True))
        self._publish()
        return snapshot

    def shift(self, shift_N: Tensor, *, certified: int) -> None:
        self._team.model.flat_N.add_(shift_N.to(self._team.model.flat_N.device))
        give_back_by_piece(shift_N)
        self._team.changed()
        self._book.move(certified)
        self._publish()

    def replace(self, local_N: Tensor, *, certified: int) -> None:
        self._team.model.flat_N.copy_(local_N)
        give_back_by_piece(local_N)
        self._team.changed()
        self._team.zero_grad()
        self._since_step, self._in_gradient = 0, 0.0
        self._book.restart(certified)
        self._publish()

    def withdraw(self) -> None:
        self._book.move(self._book.certified)
        self._publish()

    def set_held(self, is_held: bool, reason: HoldReason = "rounds") -> None:
        self._book.hold(is_held, reason)
        self._publish()

    def vectors(self) -> list[Tensor]:
        return [self._team.model.flat_N, self._team.model.flat_grad_N, *self._optimizer.moments()]

    @property
    def _may_train(self) -> bool:
        limit = self._micro_batch_limit
        return self._book.may_train and (limit is None or self._book.in_round < limit)

    def _publish(self) -> None:
        self.progress = self._book.progress(is_training=self._may_train)
