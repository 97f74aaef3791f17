"""Muon: against torch's own, repeated to the bit, converging, and its properties."""

from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilocox_peer.manifest import InnerSection, ModelSection
from dilocox_peer.model.architecture import LayerRange
from dilocox_peer.model.inner import InnerOptimizer
from dilocox_peer.model.muon import Muon, orthogonalized
from dilocox_peer.model.stage_layout import EMBEDDING, LM_HEAD
from dilocox_peer.model.transformer import LlamaStage, initial_parameters
from dilocox_peer.types import Layout, TensorSpec

SHAPES = [(32, 32), (16, 32), (64, 32), (32, 64), (32, 32)]
SECTION = ModelSection(layers=2, hidden_size=16, heads=2, kv_heads=1, mlp_size=24, context=8)


def normal(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pairs_of(seed=0):
    return [(normal(shape, seed + index), torch.zeros(shape)) for index, shape in enumerate(SHAPES)]


def run(pairs, num_steps, learning_rate=0.02):
    muon = Muon(pairs, momentum=0.95, weight_decay=0.1)
    for step in range(num_steps):
        for index, (_weight, gradient) in enumerate(pairs):
            gradient.copy_(normal(gradient.shape, 100 * step + index))
        muon.step(learning_rate)
    return [weight for weight, _ in pairs]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9")
def test_it_is_torchs_muon_but_for_bfloat16():
    weights = [weight.clone().requires_grad_() for weight, _ in pairs_of()]
    reference = torch.optim.Muon(weights, lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=True)
    for step in range(6):
        for index, weight in enumerate(weights):
            weight.grad = normal(weight.shape, 100 * step + index)
        reference.step()
    for ours, theirs, (start, _) in zip(run(pairs_of(), 6), weights, pairs_of(), strict=True):
        moved = (theirs.detach() - start).norm()
        assert (ours - theirs.detach()).norm() < 0.02 * moved


def test_without_bfloat16_it_is_torchs_muon(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    for shape in SHAPES:
        gradient = normal(shape, 1)
        moved = torch.nn.Parameter(torch.zeros(shape))
        moved.grad = gradient.clone()
        torch.optim.Muon([moved], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
        theirs = -moved.detach() / max(1.0, shape[0] / shape[1]) ** 0.5  # its step is larger for tall matrices
        wide = gradient if shape[0] <= shape[1] else gradient.mT
        ours = orthogonalized(wide[None])[0]
        assert torch.allclose(ours if shape[0] <= shape[1] else ours.mT, theirs, atol=1e-5)


def test_equal_runs_give_equal_bits():
    for first, second in zip(run(pairs_of(), 4), run(pairs_of(), 4), strict=True):
        assert torch.equal(first, second)


def test_a_batch_is_what_its_matrices_are_alone():
    together = run(pairs_of(), 3)
    for index, pair in enumerate(pairs_of()):
        muon = Muon([pair], momentum=0.95, weight_decay=0.1)
        for step in range(3):
            pair[1].copy_(normal(pair[1].shape, 100 * step + index))
            muon.step(0.02)
        assert torch.allclose(pair[0], together[index], atol=1e-5)


def test_it_solves_a_least_squares_problem():
    weight, gradient, target, inputs = torch.zeros(8, 16), torch.zeros(8, 16), normal((8, 16), 1), normal((64, 16), 2)
    muon = Muon([(weight, gradient)], momentum=0.95, weight_decay=0.0)
    before = float((inputs @ target.mT).square().mean())
    for step in range(300):
        gradient.copy_((inputs @ (weight - target).mT).mT @ inputs / 64)
        muon.step(0.1 * (1 - step / 300))
    assert float((inputs @ (weight - target).mT).square().mean()) < 1e-3 * before


@given(seed=st.integers(0, 999), scale=st.sampled_from([1e-20, 1e-4, 1.0, 1e10]))
def test_an_update_does_not_depend_on_the_gradients_size(seed, scale):
    gradient = normal((1, 12, 20), seed)
    if scale > 1e-7:
        assert torch.allclose(orthogonalized(gradient * scale), orthogonalized(gradient), atol=1e-4)
    assert bool(torch.isfinite(orthogonalized(gradient * scale)).all())


def test_no_gradient_moves_nothing_but_decay():
    weight = torch.ones(4, 4)
    Muon([(weight, torch.zeros(4, 4))], momentum=0.95, weight_decay=0.1).step(0.5)
    assert torch.allclose(weight, torch.full((4, 4), 0.95))


def test_tall_matrices_move_further():
    """The update's scale is sqrt(max(1, fan_out / fan_in)), weights being [out, in]."""
    sizes = {}
    for shape in [(64, 16), (16, 64), (16, 16)]:
        weight = torch.zeros(shape)
        Muon([(weight, normal(shape, 0))], momentum=0.95, weight_decay=0.0).step(1.0)
        sizes[shape] = float(torch.linalg.matrix_norm(weight, 2))
    assert 1.3 < sizes[64, 16] < 2.5
    assert 0.65 < sizes[16, 64] < 1.25
    assert 0.65 < sizes[16, 16] < 1.25


def build(optimizer):
    model = LlamaStage(SECTION, LayerRange.of(SECTION))
    model.flat_N.copy_(initial_parameters(model.layout, SECTION, 0))
    return model, InnerOptimizer(model, InnerSection(optimizer=optimizer, learning_rate=0.01))


def test_embedding_head_and_vectors_are_adamws_and_the_rest_muons():
    moved = {}
    for optimizer in ("adamw", "muon"):
        model, inner = build(optimizer)
        before = model.flat_N.clone()
        for step in range(3):
            model.flat_grad_N.copy_(normal(model.layout.num_elements, step) * 0.001)  # below the clipping norm
            inner.step(micro_batches=1, share=0.5)
        assert not model.flat_grad_N.any()
        moved[optimizer] = model.flat_N - before
    for spec, start, stop in model.layout.spans():
        same = torch.equal(moved["adamw"][start:stop], moved["muon"][start:stop])
        assert same == (len(spec.shape) == 1 or spec.name in (EMBEDDING, LM_HEAD)), spec.name
        assert moved["muon"][start:stop].any()


def test_a_share_of_zero_changes_nothing():
    model, inner = build("muon")
    before = model.flat_N.clone()
    model.flat_grad_N.copy_(normal(model.layout.num_elements, 1))
    inner.step(micro_batches=1, share=0.0)
    assert torch.equal(model.flat_N, before)


def test_a_gradient_that_is_not_finite_leaves_the_parameters():
    model, inner = build("muon")
    before = model.flat_N.clone()
    model.flat_grad_N[300] = torch.inf
    with pytest.raises(FloatingPointError):
        inner.step(micro_batches=1, share=1.0)
    assert torch.equal(model.flat_N, before)


def test_matrices_that_lie_across_are_stepped_as_if_they_lay_along() -> None:
    """Those of GPT-2 are (in, out): the factor of a matrix that widens was given to the one that narrows."""
    steps = {}
    for across in (False, True):
        stage = Two(across=across)
        generator = torch.Generator().manual_seed(0)
        gradient = torch.randn(8, 4, generator=generator)
        stage.flat_grad_N.copy_((gradient.mT if across else gradient).reshape(-1))
        optimizer = InnerOptimizer(cast("Any", stage), InnerSection(optimizer="muon", learning_rate=0.1, clip_norm=1e9))
        optimizer.step(micro_batches=1, share=1.0)
        moved = stage.flat_N.view((4, 8) if across else (8, 4))
        steps[across] = moved.mT if across else moved
    assert torch.equal(steps[True], steps[False])
    assert steps[True].abs().max() > 0


class Two:
    """A stage of one matrix, which widens 4 to 8."""

    scale = None

    def __init__(self, *, across: bool) -> None:
        self.layout = Layout((TensorSpec("w", (4, 8) if across else (8, 4)),))
        self.across = {"w"} if across else set()
        self.flat_N, self.flat_grad_N = torch.zeros(32), torch.zeros(32)

    def zero_grad(self) -> None:
        self.flat_grad_N.zero_()
