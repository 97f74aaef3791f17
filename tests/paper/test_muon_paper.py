"""Statements of Muon (K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024) we rely on."""

import pytest
import torch

from dilocox_peer.model.muon import Muon, orthogonalized


def normal(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_singular_values(values, rows=48, columns=96, seed=0):
    u = torch.linalg.qr(normal((rows, rows), seed)).Q
    v = torch.linalg.qr(normal((columns, columns), seed + 1)).Q
    sizes = torch.zeros(rows, columns)
    sizes[range(rows), range(rows)] = values
    return u @ sizes @ v.mT, u @ torch.eye(rows, columns) @ v.mT


def test_newton_schulz_brings_singular_values_near_one():
    """Muon: five steps bring singular values into about [0.7, 1.2], "which does not harm"; also small ones."""
    matrix, _ = with_singular_values(torch.logspace(0, -2, 48))
    sizes = torch.linalg.svdvals(orthogonalized(matrix[None])[0])
    assert float(sizes.min()) > 0.5
    assert float(sizes.max()) < 1.25
    flat, _ = with_singular_values(torch.linspace(0.5, 1, 48))
    sizes = torch.linalg.svdvals(orthogonalized(flat[None])[0])
    assert 0.65 < float(sizes.min()) <= float(sizes.max()) < 1.25


def test_the_update_is_about_the_nearest_orthogonal_matrix():
    """Muon: the iteration changes singular values alone, so it approximates U V^T of the momentum's U S V^T."""
    matrix, nearest = with_singular_values(torch.linspace(0.1, 1, 48))
    update = orthogonalized(matrix[None])[0]
    cosine = (update * nearest).sum() / update.norm() / nearest.norm()
    assert float(cosine) > 0.98


@pytest.mark.parametrize("shape", [(24, 24), (24, 64)])
def test_turning_the_gradient_turns_the_update(shape):
    """Muon is steepest descent under the spectral norm, which rotations leave as it is."""
    gradient, turn = normal((1, *shape), 0), torch.linalg.qr(normal((shape[0], shape[0]), 1)).Q
    assert torch.allclose(orthogonalized(turn @ gradient), turn @ orthogonalized(gradient), atol=1e-4)


def test_nesterov_looks_ahead_of_the_momentum():
    """Muon: the update is of gradient + momentum * buffer (both scaled by 1 - momentum here: it does not matter)."""
    gradients = [normal((8, 8), seed) for seed in range(3)]
    weight, gradient = torch.zeros(8, 8), torch.zeros(8, 8)
    muon = Muon([(weight, gradient)], momentum=0.95, weight_decay=0.0)
    buffer, expected = torch.zeros(8, 8), torch.zeros(8, 8)
    for each in gradients:
        gradient.copy_(each)
        muon.step(0.1)
        buffer = 0.95 * buffer + each
        expected -= 0.1 * orthogonalized((each + 0.95 * buffer)[None])[0]
    assert torch.allclose(weight, expected, atol=1e-5)


def test_weight_decay_is_decoupled():
    """Moonlight (arXiv 2502.16982): weights shrink by lr * decay besides the update, the gradient is not touched."""
    weights = [torch.ones(8, 8), torch.ones(8, 8)]
    for weight, decay in zip(weights, (0.0, 0.1), strict=True):
        Muon([(weight, normal((8, 8), 0))], momentum=0.95, weight_decay=decay).step(0.1)
    assert torch.allclose(weights[0] - weights[1], torch.full((8, 8), 0.01), atol=1e-6)
