"""A stage that computes in half precision where that is safe, on the same float32 vectors: torch's autocast around any stage.

Weights, gradients, moments and all that peers exchange stay in float32, so peers of any precision train one run, and their anchors are
equal to the bit. What a stage gives to the next and to the loss is float32 again.

float16 has few exponents: small gradients would be 0 in it. So a backward goes through the stage with everything `scale.factor` times as
large, and what leaves it, to the stage before and at the optimizer, is divided by that again. A step whose gradient is not finite is left
out and halves the factor; many good ones in a row double it (as torch.amp.GradScaler does, which knows optimizers with parameters
of their own and no stages). Source: Micikevicius et al., "Mixed precision training" (arXiv 1710.03740).
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dilocox_peer.model.architecture import GradientScale, LayerRange, StageModel
from dilocox_peer.types import Layout

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class AutocastStage:
    """A StageModel (architecture.py) around another."""

    def __init__(self, model: StageModel, precision: str, scale: GradientScale | None = None) -> None:
        """precision: of DTYPES. scale: that of another stage whose gradients are added to ours, or which shares them."""
        self._model = model
        self._precision = precision
        self._device = model.flat_N.device.type
        self.scale = scale or (GradientScale() if precision == "float16" else None)

    @property
    def layers(self) -> LayerRange:
        return self._model.layers

    @property
    def layout(self) -> Layout:
        return self._model.layout

    @property
    def context(self) -> int:
        return self._model.context

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    @property
    def across(self) -> Collection[str]:
        return self._model.across

    @property
    def flat_N(self) -> Tensor:
        return self._model.flat_N

    @property
    def flat_grad_N(self) -> Tensor:
        return self._model.flat_grad_N

    def forward(self, x: Tensor, starts_BT: Tensor | None = None) -> Tensor:
        with self._halved():
            output = self._model.forward(self._entering(x), starts_BT)
        return self._leaving(output)

    def hidden(self, x: Tensor, starts_BT: Tensor | None = None) -> Tensor:
        with self._halved():
            output = self._model.hidden(self._entering(x), starts_BT)
        return self._leaving(output)

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        with self._halved():
            output = self._model.logits(self._entering(hidden_BTD))
        return self._leaving(output)

    def zero_grad(self) -> None:
        self._model.zero_grad()

    def load(self, layout: Layout, flat_N: Tensor) -> None:
        self._model.load(layout, flat_N)

    def version(self) -> "AutocastStage":
        return AutocastStage(self._model.version(), self._precision, self.scale)

    def _entering(self, x: Tensor) -> Tensor:
        if self.scale is None or not x.is_floating_point():
            return x
        entering: Tensor = _Entering.apply(x, self.scale)  # type: ignore[no-untyped-call]
        return entering

    def _leaving(self, output: Tensor) -> Tensor:
        if self.scale is None:
            return output.float()
        leaving: Tensor = _Leaving.apply(output.float(), self.scale)  # type: ignore[no-untyped-call]
        return leaving

    @contextmanager
    def _halved(self) -> Iterator[None]:
        with torch.autocast(self._device, dtype=DTYPES[self._precision]):
            yield


class _Leaving(torch.autograd.Function):
    """Where a backward comes in: its gradient is made larger."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: GradientScale) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.scale.factor, None


class _Entering(torch.autograd.Function):
    """Where a backward leaves: its gradient has its own size again. One that is too large for float16 is 0: the stages before are spared it, and
    the step here is left out; the scale is told."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: GradientScale) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        not_finite = ~torch.isfinite(gradients[0]).all()
        before = ctx.scale.not_finite
        ctx.scale.not_finite = not_finite if before is None else before | not_finite
        return torch.nan_to_num(gradients[0] / ctx.scale.factor, nan=0.0, posinf=0.0, neginf=0.0), None
