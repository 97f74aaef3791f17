"""A stage that computes in bfloat16 where that is safe, on the same float32 vectors: torch's autocast around any stage.

Weights, gradients, moments and all that peers exchange stay in float32, so peers of either precision train one run, and their anchors are
equal to the bit. What a stage gives to the next and to the loss is float32 again.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from dilocox_peer.model.architecture import LayerRange, StageModel
from dilocox_peer.types import Layout


class AutocastStage:
    """A StageModel (architecture.py) around another."""

    def __init__(self, model: StageModel) -> None:
        self._model = model
        self._device = model.flat_N.device.type

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
    def flat_N(self) -> Tensor:
        return self._model.flat_N

    @property
    def flat_grad_N(self) -> Tensor:
        return self._model.flat_grad_N

    def forward(self, x: Tensor, starts_BT: Tensor | None = None) -> Tensor:
        with self._halved():
            output = self._model.forward(x, starts_BT)
        return output.float()

    def hidden(self, x: Tensor, starts_BT: Tensor | None = None) -> Tensor:
        with self._halved():
            output = self._model.hidden(x, starts_BT)
        return output.float()

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        with self._halved():
            output = self._model.logits(hidden_BTD)
        return output.float()

    def zero_grad(self) -> None:
        self._model.zero_grad()

    def load(self, layout: Layout, flat_N: Tensor) -> None:
        self._model.load(layout, flat_N)

    def version(self) -> "AutocastStage":
        return AutocastStage(self._model.version())

    @contextmanager
    def _halved(self) -> Iterator[None]:
        with torch.autocast(self._device, dtype=torch.bfloat16):
            yield
