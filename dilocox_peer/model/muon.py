"""Muon: momentum, then the nearest (semi-)orthogonal matrix, for the hidden matrices of a stage.

Every direction of a matrix moves equally far, however small its gradient. Only for 2-D hidden weights: embedding, head and
vectors belong to AdamW (inner.py). Source: K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks"
(2024): quintic Newton-Schulz, Nesterov, rate by shape. Weights are [out, in].

torch.optim.Muon computes the same and is the reference in the tests. Not used here: it exists from torch 2.9 on, goes
matrix by matrix, and computes in bfloat16, which most CPUs emulate (7.8 ms a step of the tiny preset on one core that does
not, 6.0 here). Here matrices of equal shape (tall ones turned over) are one batch, in float32 on a CPU. Cost: about 5 * (4 r**2 c + 2 r**3) operations for r x c, r <= c, each step; beside a
pass over T tokens (6 r c T) that is (10 r / 3 T) * (1 + r / 2c).

Shape letters: X matrices of a batch, R rows, C columns, R <= C.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dilocox_peer.model.adamw import StochasticRounding

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic Newton-Schulz step: steepest at 0, and singular values end within about 0.7 to 1.2, not at 1."""

NUM_STEPS = 5
_TINY_NORM = 1e-7


def orthogonalized(matrices_XRC: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Each matrix U S V^T of the batch as about U V^T, in the input's dtype. Not modified. 0 stays 0."""
    a, b, c = COEFFICIENTS
    norm_X11 = torch.linalg.vector_norm(matrices_XRC, dim=(1, 2), keepdim=True)
    x_XRC = (matrices_XRC / norm_X11.clamp(min=_TINY_NORM)).to(dtype)  # spectral norm at most 1
    for _ in range(NUM_STEPS):
        gram_XRR = x_XRC @ x_XRC.mT
        step_XRR = torch.baddbmm(gram_XRR, gram_XRR, gram_XRR, beta=b, alpha=c)
        x_XRC = torch.baddbmm(x_XRC, step_XRR, x_XRC, beta=a)
    result_XRC: Tensor = x_XRC.to(matrices_XRC.dtype)
    return result_XRC


@dataclass(frozen=True, slots=True)
class _Matrix:
    """weight and gradient: wide views (R <= C) of a parameter. scale: sqrt(max(1, fan_out / fan_in)) of the original."""

    weight_RC: Tensor
    gradient_RC: Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class _Batch:
    matrices: tuple[_Matrix, ...]
    momentum_XRC: Tensor


class Muon:
    """Over (weight, gradient) pairs, each [out, in]: views that stay the same ones; gradients are read at each step."""

    def __init__(
        self,
        pairs: Sequence[tuple[Tensor, Tensor]],
        *,
        momentum: float,
        weight_decay: float,
        is_halved: bool = False,
    ) -> None:
        """is_halved: the momentum is kept in bfloat16, rounded stochastically (adamw.py)."""
        self._momentum = momentum
        self._weight_decay = weight_decay
        dtype = torch.bfloat16 if is_halved else torch.float32
        self._batches = [
            _Batch(matrices, torch.zeros(len(matrices), *shape, dtype=dtype, device=matrices[0].weight_RC.device))
            for shape, matrices in _by_shape(pairs)
        ]
        self._rounding: StochasticRounding | None = None
        self._stored = 0
        if is_halved and self._batches:
            largest = max(batch.momentum_XRC[0].numel() for batch in self._batches)
            self._rounding = StochasticRounding(largest, device=self._batches[0].momentum_XRC.device)

    def moments(self) -> list[Tensor]:
        """As they are kept."""
        return [batch.momentum_XRC for batch in self._batches]

    def move_to(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Other weights and gradients of the same shapes in the same order; momentum goes on."""
        moved = _by_shape(pairs)
        self._batches = [
            _Batch(matrices, batch.momentum_XRC) for batch, (_, matrices) in zip(self._batches, moved, strict=True)
        ]

    @torch.no_grad()
    def step(self, learning_rate: float, divisor: float = 1.0) -> None:
        """One step of all weights, with Nesterov momentum and decoupled weight decay. divisor: of the gradients."""
        for batch in self._batches:
            gradients_XRC = torch.stack([matrix.gradient_RC for matrix in batch.matrices]).div_(divisor)
            ahead_XRC = self._ahead(batch.momentum_XRC, gradients_XRC)
            dtype = torch.bfloat16 if ahead_XRC.is_cuda else torch.float32
            for matrix, update_RC in zip(batch.matrices, orthogonalized(ahead_XRC, dtype), strict=True):
                matrix.weight_RC.mul_(1 - learning_rate * self._weight_decay)
                matrix.weight_RC.add_(update_RC, alpha=-learning_rate * matrix.scale)

    def _ahead(self, momentum_XRC: Tensor, gradients_XRC: Tensor) -> Tensor:
        """Nesterov's: the gradients, written over, after the momentum has taken them in."""
        if self._rounding is None:
            momentum_XRC.lerp_(gradients_XRC, 1 - self._momentum)
            return gradients_XRC.lerp_(momentum_XRC, self._momentum)
        self._rounding.renew()
        for kept_RC, gradient_RC in zip(momentum_XRC, gradients_XRC, strict=True):  # one matrix in float32 at a time
            widened_RC = kept_RC.float().lerp_(gradient_RC, 1 - self._momentum)
            gradient_RC.lerp_(widened_RC, self._momentum)
            self._rounding.store(widened_RC, kept_RC, self._stored)
            self._stored += 1
        return gradients_XRC


def _by_shape(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[tuple[int, ...], tuple[_Matrix, ...]]]:
    by_shape: dict[tuple[int, ...], list[_Matrix]] = {}
    for weight, gradient in pairs:
        assert weight.dim() == 2, f"a weight of shape {tuple(weight.shape)}"
        fan_out, fan_in = weight.shape
        wide = (weight, gradient) if fan_out <= fan_in else (weight.mT, gradient.mT)
        matrix = _Matrix(*wide, scale=max(1.0, fan_out / fan_in) ** 0.5)
        by_shape.setdefault(tuple(matrix.weight_RC.shape), []).append(matrix)
    return [(shape, tuple(matrices)) for shape, matrices in by_shape.items()]
