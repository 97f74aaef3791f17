"""One micro-batch through a whole model: forward, loss, backward; and the loss of fixed parameters for evaluation.

Gradients accumulate in the model's flat gradient vector; the optimizer (inner.py) takes them from there. Micro-batches
through one stage of several are passes.py.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from dilocox_peer.manifest import Manifest, ModelSection
from dilocox_peer.model.architecture import StageModel, build_model
from dilocox_peer.model.borders import parted
from dilocox_peer.model.loss import loss_of, train_on
from dilocox_peer.model.transformer import initial_parameters

if TYPE_CHECKING:
    from dilocox_peer.model.frozen import FrozenBase


class Stage:
    """A stage that holds the whole model: takes tokens, gives a loss."""

    def __init__(self, model: StageModel) -> None:
        assert model.layers.is_whole, "a stage of several goes through passes.py"
        self.model = model

    def train_micro_batch(self, inputs_BT: Tensor, targets_BT: Tensor) -> float:
        """Mean loss in nats a target; the gradient is added to the model's, as train_on has it. inputs_BT: as `parted` takes them. Raises
        FloatingPointError if not finite."""
        device = self.model.flat_N.device
        tokens_BT, starts_BT = parted(inputs_BT.to(device))
        return train_on(self.model, tokens_BT, targets_BT.to(device), starts_BT=starts_BT)

    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[float, int]:
        """(mean loss in nats a token, number of tokens) over the batches, at the current parameters. Inputs: as `parted` takes them."""
        device = self.model.flat_N.device
        total, tokens = 0.0, 0
        for inputs_BT, targets_BT in batches:
            tokens_BT, starts_BT = parted(inputs_BT.to(device))
            loss, count = loss_of(self.model, tokens_BT, targets_BT.to(device), starts_BT=starts_BT)
            total, tokens = total + loss, tokens + count
        assert tokens > 0, "nothing to evaluate on"
        return total / tokens, tokens


def build_stage(manifest: Manifest, *, device: str = "cpu", base: "FrozenBase | None" = None) -> Stage:
    """The whole model of a run, however it is cut, with its seeded parameters; of a published model they are zeros as yet. base: of a
    run of adapters, what is beside them."""
    model = build_model(manifest.model, device=device, base=base)
    if isinstance(manifest.model, ModelSection):
        model.flat_N.copy_(initial_parameters(model.layout, manifest.model, manifest.run.seed))
    return Stage(model)
