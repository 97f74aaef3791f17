"""Forward and backward of micro-batches through one stage of several, and what is kept between the two.

A forward's activations stay, bound to the weights (StageModel) they were computed with, until its backward or until it
is released. The last stage does forward, loss and backward as one `turn` and keeps nothing. Gradients are added to the
model's flat gradient vector; stepping is the owner's business. One thread.
"""

import time
from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from dilocox_peer.model.activations import BodyFormat, Bytes
from dilocox_peer.model.architecture import StageModel
from dilocox_peer.model.borders import parted
from dilocox_peer.model.loss import counted, train_on


@dataclass(frozen=True, slots=True)
class _Saved:
    model: StageModel
    input_BTD: Tensor | None  # None: tokens, which have no gradient
    output_BTD: Tensor
    counted: float


class Passes:
    """Micro-batches by id; an id is new at its forward and gone after its backward."""

    def __init__(self, body: BodyFormat) -> None:
        self._body = body
        self._saved: dict[Hashable, _Saved] = {}
        self._codec_s = 0.0

    def take_codec_s(self) -> float:
        """Seconds spent packing and unpacking since the last call."""
        seconds, self._codec_s = self._codec_s, 0.0
        return seconds

    def __len__(self) -> int:
        return len(self._saved)

    def is_used(self, model: StageModel) -> bool:
        """Whether a saved forward was computed with these weights, which must not change until its backward."""
        return any(saved.model is model for saved in self._saved.values())

    def counted(self, key: Hashable) -> float:
        """What the backward of an earlier forward will weigh in a step (loss.counted)."""
        return self._saved[key].counted

    def begin(self, key: Hashable, model: StageModel, inputs_BT: Tensor, targets_BT: Tensor) -> bytes:
        """Forward of the first stage from inputs as `parted` takes them; the body for the next stage."""
        tokens_BT, starts_BT = parted(inputs_BT.to(model.flat_N.device))
        output_BTD = model.forward(tokens_BT, starts_BT)
        self._saved[key] = _Saved(model, None, output_BTD, counted(targets_BT))
        return self._packed(output_BTD) + self._body.pack_targets(targets_BT, starts_BT)

    def forward(self, key: Hashable, model: StageModel, body: Bytes) -> bytes:
        """Forward of a stage in the middle; the body for the next stage."""
        input_BTD = self._unpacked(body, model.flat_N.device).requires_grad_()
        output_BTD = model.forward(input_BTD, self._body.unpack_starts(body, model.flat_N.device))
        self._saved[key] = _Saved(model, input_BTD, output_BTD, self._body.counted(body))
        return self._packed(output_BTD) + bytes(self._body.targets_of(body))

    def backward(self, key: Hashable, body: Bytes) -> bytes | None:
        """Backward of an earlier forward, with the gradient the next stage sent; the gradient for the stage before, None
        at the first.

        Raises FloatingPointError if the stage before would take it for a broken protocol, or nothing finite came of it; the gradient vector
        is then spoiled.
        """
        saved = self._saved.pop(key)
        gradient_BTD = self._unpacked(body, saved.model.flat_N.device)
        torch.autograd.backward(saved.output_BTD, gradient_BTD)
        return None if saved.input_BTD is None else self._gradient(saved.model, saved.input_BTD)

    def turn(self, model: StageModel, body: Bytes) -> tuple[bytes, float]:
        """Forward, loss and backward of the last stage: (gradient for the stage before, mean loss in nats a target).

        Raises FloatingPointError if the loss is not finite, and as `backward`; the gradient vector is then spoiled.
        """
        device = model.flat_N.device
        input_BTD = self._unpacked(body, device).requires_grad_()
        starts_BT = self._body.unpack_starts(body, device)
        value = train_on(model, input_BTD, self._body.unpack_targets(body, device), starts_BT=starts_BT)
        return self._gradient(model, input_BTD), value

    def release(self, key: Hashable) -> None:
        """The backward will not come. Nothing happens for a key that is not here."""
        self._saved.pop(key, None)

    def _gradient(self, model: StageModel, input_BTD: Tensor) -> bytes:
        """One row of usual strength among rows of nothing passes every look at activations, and each norm's backward makes of it a gradient a
        hundred times as strong."""
        assert input_BTD.grad is not None, "backward reached no input"
        if model.scale is not None and model.scale.judge():
            raise FloatingPointError("a gradient that is not finite in float16, at a scale at which others were")
        packed = self._packed(input_BTD.grad)
        if (reason := self._body.why_not(packed, is_step=False)) is not None:
            raise FloatingPointError(reason)
        return packed

    def _packed(self, hidden_BTD: Tensor) -> bytes:
        started = time.perf_counter()
        body = self._body.pack_hidden(hidden_BTD)
        self._codec_s += time.perf_counter() - started
        return body

    def _unpacked(self, body: Bytes, device: torch.device) -> Tensor:
        started = time.perf_counter()
        hidden_BTD = self._body.unpack_hidden(body, device)
        self._codec_s += time.perf_counter() - started
        return hidden_BTD
