"""The inner optimizer: schedule, clipping, weight decay."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilocox_peer.manifest import InnerSection, ModelSection
from dilocox_peer.model.adamw import StochasticRounding
from dilocox_peer.model.architecture import LayerRange
from dilocox_peer.model.inner import (
    NORM_PIECE,
    RAMP_STEPS,
    InnerOptimizer,
    micro_batches_a_step,
    norm_of,
    ramp,
    schedule,
)
from dilocox_peer.model.transformer import LlamaStage, initial_parameters
from dilocox_peer.types import Layout, TensorSpec

SECTION = ModelSection(layers=1, hidden_size=8, heads=2, kv_heads=1, mlp_size=8, context=8)
INNER = InnerSection(learning_rate=0.01, weight_decay=0.1, clip_norm=1.0)


def build():
    model = LlamaStage(SECTION, LayerRange.of(SECTION))
    model.flat_N.copy_(initial_parameters(model.layout, SECTION, 0))
    return model


def gradient(model, seed):
    return torch.randn(model.layout.num_elements, generator=torch.Generator().manual_seed(seed)) * 0.01


def test_the_schedule_warms_up_and_ends_at_exactly_zero():
    assert schedule(0.0, warmup=0.1) == 0.0
    assert schedule(0.05, warmup=0.1) == pytest.approx(0.5)
    assert schedule(0.1, warmup=0.1) == 1.0
    assert schedule(0.55, warmup=0.1) == pytest.approx(0.5)
    assert schedule(1.0, warmup=0.1) == 0.0
    assert schedule(1.0, warmup=0.0) == 0.0
    assert schedule(0.0, warmup=0.0) == 1.0


def test_cosine_and_linear_end_at_the_floor_and_wsd_stays_until_its_last_part():
    for shape in ("linear", "cosine", "wsd"):
        assert schedule(0.1, warmup=0.1, shape=shape, floor=0.1) == 1.0
        assert schedule(1.0, warmup=0.1, shape=shape, floor=0.1) == 0.1
        assert schedule(3.0, warmup=0.1, shape=shape, floor=0.1) == 0.1
    assert schedule(0.55, warmup=0.1, shape="cosine", floor=0.1) == pytest.approx(0.55)
    assert schedule(0.325, warmup=0.1, shape="cosine") == pytest.approx(0.5 + 0.5 * math.cos(math.pi / 4))
    assert schedule(0.799, warmup=0.1, shape="wsd") == 1.0
    assert schedule(0.85, warmup=0.1, shape="wsd", floor=0.2) == pytest.approx(0.2 + 0.8 * 0.5)
    with pytest.raises(ValueError, match="are more than the run"):
        InnerSection(schedule="wsd", warmup=0.5, decay=0.6)


def test_the_batch_grows_from_the_first_size_to_the_last_within_its_part_of_the_run():
    section = InnerSection(accumulate=8, first_accumulate=2, batch_ramp=0.5)
    assert [micro_batches_a_step(each / 10, section) for each in range(-1, 11)] == [2, 2, 3, 4, 5, 6, *[8] * 6]
    assert micro_batches_a_step(0.0, InnerSection(accumulate=8)) == 8
    assert micro_batches_a_step(0.0, InnerSection(accumulate=8, first_accumulate=2, batch_ramp=0.0)) == 8
    with pytest.raises(ValueError, match="first_accumulate 9 is more than accumulate 8"):
        InnerSection(accumulate=8, first_accumulate=9)


SHAPES = st.sampled_from(["linear", "cosine", "wsd"])


@given(position=st.floats(-1, 2), warmup=st.floats(0, 1), shape=SHAPES, floor=st.floats(0, 1), decay=st.floats(0, 1))
def test_the_schedule_is_a_share_that_falls_after_the_warm_up(position, warmup, shape, floor, decay):
    parts = {"warmup": warmup, "shape": shape, "floor": floor, "decay": decay}
    share = schedule(position, **parts)
    assert 0.0 <= share <= 1.0
    if position >= warmup:
        assert schedule(position + 0.01, **parts) <= share + 1e-12


def test_it_is_adamw_with_decay_on_matrices_only():
    model = build()
    split = model.layout.num_matrix_elements
    matrices, vectors = (
        part.clone().requires_grad_() for part in model.flat_N.split([split, len(model.flat_N) - split])
    )
    reference = torch.optim.AdamW(
        [{"params": [matrices], "weight_decay": 0.1}, {"params": [vectors], "weight_decay": 0.0}],
        lr=0.01, betas=(0.9, 0.95), foreach=False,
    )  # fmt: skip
    optimizer = InnerOptimizer(model, INNER)
    for step in range(5):
        model.flat_grad_N.copy_(gradient(model, step))
        matrices.grad, vectors.grad = gradient(model, step).split([split, len(model.flat_N) - split])
        optimizer.step(micro_batches=1, share=1.0)
        reference.step()
    assert torch.allclose(model.flat_N, torch.cat([matrices, vectors]).detach(), atol=1e-6)
    assert not model.flat_grad_N.any()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_moments_in_half_precision_train_as_those_in_float32(optimizer):
    """Thirty steps down the same noisy slope end within a hundredth of the way; the moments are bfloat16."""
    ends = []
    for moments in ("float32", "bfloat16"):
        model = build()
        start = model.flat_N.clone()
        section = InnerSection(learning_rate=0.01, weight_decay=0.1, optimizer=optimizer, moments=moments, beta2=0.999)
        inner = InnerOptimizer(model, section)
        for step in range(30):
            model.flat_grad_N.copy_(gradient(model, step % 7) + 0.01 * model.flat_N)
            inner.step(micro_batches=1, share=1.0)
        ends.append(model.flat_N - start)
    assert 0 < float(torch.linalg.vector_norm(ends[1] - ends[0])) < 0.01 * float(torch.linalg.vector_norm(ends[0]))


def test_moments_follow_another_version_of_the_weights():
    section = INNER.model_copy(update={"moments": "bfloat16"})
    whole, moved = build(), build()
    plain, moving = InnerOptimizer(whole, section), InnerOptimizer(moved, section)
    for step in range(4):
        other = moved.version()
        other.flat_N.copy_(moved.flat_N)
        moved = other
        moving.move_to(moved)
        for model, optimizer in ((whole, plain), (moved, moving)):
            model.flat_grad_N.copy_(gradient(model, step))
            optimizer.step(micro_batches=1, share=1.0)
    assert torch.equal(whole.flat_N, moved.flat_N)


def test_a_second_moment_that_moves_by_less_than_its_last_place_is_right_in_the_mean():
    """With beta2 = 0.999 a step moves it by a thousandth, bfloat16's last place is a 128th to a 256th: to nearest it would stay at
    what the first steps made of it."""
    rounding = StochasticRounding(10_000)
    kept, exact = torch.zeros(10_000, dtype=torch.bfloat16), 0.0
    nearest = kept.clone()
    for step in range(3000):
        exact = exact * 0.999 + 0.001
        rounding.store(kept.float().mul_(0.999).add_(0.001), kept, step)
        nearest.copy_(nearest.float().mul_(0.999).add_(0.001))
    assert float(kept.float().mean()) == pytest.approx(exact, rel=0.005)
    assert float(nearest.float().mean()) < 0.6 * exact


def test_rounding_keeps_what_bfloat16_holds_and_goes_to_either_neighbour():
    rounding = StochasticRounding(4)
    held = torch.tensor([1.0, -2.5, 0.0, torch.inf])
    kept = torch.empty(4, dtype=torch.bfloat16)
    rounding.store(held.clone(), kept, 0)
    assert torch.equal(kept.float(), held)
    values = torch.full((4,), -1.0 - 2**-9)
    found = set()
    for place in range(200):
        rounding.renew()
        rounding.store(values.clone(), kept, place)
        found |= set(kept.tolist())
    assert found == {-1.0, -1.0 - 2**-7}


def test_a_step_takes_the_mean_over_its_micro_batches():
    one, four = build(), build()
    one.flat_grad_N.copy_(gradient(one, 1))
    four.flat_grad_N.copy_(gradient(four, 1) * 4)
    rate = InnerOptimizer(one, INNER).step(micro_batches=1, share=1.0)
    assert InnerOptimizer(four, INNER).step(micro_batches=4, share=1.0) == rate == INNER.learning_rate
    assert torch.equal(one.flat_N, four.flat_N)


def test_a_large_gradient_is_clipped():
    large, small = build(), build()
    optimizers = [InnerOptimizer(model, INNER) for model in (large, small)]
    direction = gradient(large, 1)
    unit = direction / torch.linalg.vector_norm(direction)
    for _ in range(2):  # AdamW's first step alone would hide the size
        large.flat_grad_N.copy_(unit * 50)
        small.flat_grad_N.copy_(unit)
        for optimizer in optimizers:
            optimizer.step(micro_batches=1, share=1.0)
    assert torch.allclose(large.flat_N, small.flat_N, atol=1e-7)


def test_a_stage_of_millions_of_parameters_is_clipped_to_the_same_norm():
    """Summed in float32 as one, the squares of sixteen million elements are 0.1 % short, of ten times as many 3 %."""
    count = 2**24
    model = SimpleNamespace(
        flat_N=torch.zeros(count), scale=None, across=(),
        flat_grad_N=torch.randn(count, generator=torch.Generator().manual_seed(0)),
        layout=Layout((TensorSpec("one", (2**12, 2**12)),)),
        zero_grad=lambda: None,
    )  # fmt: skip
    optimizer = InnerOptimizer(model, INNER)
    optimizer.step(micro_batches=1, share=1.0)
    first = next(each for each in optimizer.moments() if len(each.shape))
    length = math.sqrt(sum(float(part.double().square().sum()) for part in first.split(2**20)))
    assert length / (1 - INNER.beta1) == pytest.approx(INNER.clip_norm, rel=5e-5)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_a_norm_of_pieces_is_not_finite_where_an_element_is_not(wrong: float):
    flat_N = torch.ones(NORM_PIECE + 1)
    assert norm_of(flat_N) == pytest.approx(math.sqrt(NORM_PIECE + 1))
    for place in (0, NORM_PIECE):
        flat_N[:] = 1.0
        flat_N[place] = wrong
        assert not math.isfinite(norm_of(flat_N))


def test_a_gradient_that_is_not_finite_leaves_the_parameters():
    model = build()
    before = model.flat_N.clone()
    model.flat_grad_N[3] = torch.nan
    with pytest.raises(FloatingPointError, match="gradient norm is nan"):
        InnerOptimizer(model, INNER).step(micro_batches=1, share=1.0)
    assert torch.equal(model.flat_N, before)


def test_a_joiner_ramps_its_learning_rate():
    assert [ramp(steps) for steps in (0, 9, RAMP_STEPS - 1, 1000)] == pytest.approx([0.05, 0.5, 1.0, 1.0])


def test_a_share_of_zero_changes_nothing():
    model = build()
    before = model.flat_N.clone()
    model.flat_grad_N.copy_(gradient(model, 1))
    InnerOptimizer(model, INNER).step(micro_batches=1, share=0.0)
    assert torch.equal(model.flat_N, before)
