"""One micro-batch through a whole model: forward, loss, backward; and the loss of fixed parameters for evaluation.

Gradients accumulate in the model's flat gradient vector; the optimizer (inner.py) takes them from there. Micro-batches
through one stage of several are passes.py.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from dilocox_peer.manifest import Manifest
from dilocox_peer.model.transformer import LayerRange, StageModel, initial_parameters


class Stage:
    """A stage that holds the whole model: takes tokens, gives a loss."""

    def __init__(self, model: StageModel) -> None:
        assert model.layers.is_whole, "a stage of several goes through passes.py"
        self.model = model

    def train_micro_batch(self, inputs_BT: Tensor, targets_BT: Tensor) -> float:
        """Mean loss in nats a token; its gradient is added to the model's. Raises FloatingPointError if not finite."""
        loss = self._loss(inputs_BT, targets_BT)
        torch.autograd.backward(loss)
        value = float(loss.detach())
        if not abs(value) < float("inf"):
            raise FloatingPointError(f"the training loss is {value}")
        return value

    @torch.no_grad()
    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[float, int]:
        """(mean loss in nats a token, number of tokens) over the batches, at the current parameters."""
        total, tokens = 0.0, 0
        for inputs_BT, targets_BT in batches:
            total += float(self._loss(inputs_BT, targets_BT)) * targets_BT.numel()
            tokens += targets_BT.numel()
        assert tokens > 0, "nothing to evaluate on"
        return total / tokens, tokens

    def _loss(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        device = self.model.flat_N.device
        logits_BTV = self.model.forward(inputs_BT.to(device))
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.to(device).flatten())


def build_stage(manifest: Manifest, *, device: str = "cpu") -> Stage:
    """The whole model of a run, however it is cut, with its initial parameters."""
    layers = LayerRange.of(manifest.model)
    model = StageModel(manifest.model, layers, device=device)
    model.flat_N.copy_(initial_parameters(model.layout, manifest.model, manifest.run.seed))
    return Stage(model)
