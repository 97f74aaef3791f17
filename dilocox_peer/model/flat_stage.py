"""What both implementations of a stage (architecture.py) have alike: two flat vectors, and where each tensor lies in them."""

import torch
from torch import Tensor

from dilocox_peer.model.architecture import GradientScale, LayerRange
from dilocox_peer.types import Layout


class FlatStage:
    def __init__(
        self, layers: LayerRange, layout: Layout, *, device: str | torch.device, flat_grad_N: Tensor | None
    ) -> None:
        """flat_grad_N: the gradient vector of another version of the same stage, to be shared with it. Both are zeros."""
        self.layers = layers
        self.layout = layout
        self.scale: GradientScale | None = None
        self.across: frozenset[str] = frozenset()
        self.flat_N = torch.zeros(layout.num_elements, device=device)
        self.flat_grad_N = torch.zeros_like(self.flat_N) if flat_grad_N is None else flat_grad_N
        self._spans = {spec.name: (start, stop, spec.shape) for spec, start, stop in layout.spans()}

    @torch.no_grad()
    def load(self, layout: Layout, flat_N: Tensor) -> None:
        for spec, start, stop in layout.spans():
            own_start, own_stop, shape = self._spans[spec.name]
            assert shape == spec.shape, f"{spec.name} is {spec.shape} there and {shape} here"
            self.flat_N[own_start:own_stop].copy_(flat_N[start:stop])

    def zero_grad(self) -> None:
        self.flat_grad_N.zero_()
