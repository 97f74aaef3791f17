"""Activations and gradients as bytes of known size."""

import dataclasses
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilocox_peer.config import preset
from dilocox_peer.model.activations import MAX_MAGNITUDE, BodyFormat
from dilocox_peer.model.architecture import layers_of
from dilocox_peer.model.inner import InnerOptimizer
from dilocox_peer.model.int8_blocks import Int8Blocks
from dilocox_peer.model.passes import Passes
from dilocox_peer.model.transformer import LlamaStage, initial_parameters
from dilocox_peer.types import IGNORED
from tests.cut_runs import manifest_of

CPU = torch.device("cpu")
FORMS = ("int8", "bf16", "fp32")


def body_format(form: Any, *, vocab_size: int = 256) -> BodyFormat:
    return BodyFormat(form, batch=2, tokens=3, width=8, vocab_size=vocab_size)


def hidden(scale: float = 1.0, seed: int = 0):
    return torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("form", FORMS)
def test_sizes_follow_from_the_manifest(form: str):
    body = body_format(form)
    assert len(body.pack_hidden(hidden())) == body.hidden_bytes
    step = body.pack_hidden(hidden()) + body.pack_targets(torch.zeros(2, 3, dtype=torch.int64))
    assert len(step) == body.step_bytes
    assert body.why_not(step, is_step=True) is None
    assert "expected" in (body.why_not(step + b"\0", is_step=True) or "")
    assert "expected" in (body.why_not(step, is_step=False) or "")


def test_fp32_is_exact():
    body, x = body_format("fp32"), hidden()
    assert torch.equal(body.unpack_hidden(body.pack_hidden(x), CPU), x)


def test_bf16_rounds_to_the_nearest():
    body, x = body_format("bf16"), hidden()
    assert torch.equal(body.unpack_hidden(body.pack_hidden(x), CPU), x.bfloat16().float())


@given(seed=st.integers(0, 2**31), exponent=st.integers(-30, 30))
def test_int8_is_within_half_a_scale_of_each_block(seed: int, exponent: int):
    body, x = body_format("int8"), hidden(2.0**exponent, seed)
    back = body.unpack_hidden(body.pack_hidden(x), CPU)
    largest = x.abs().amax(-1, keepdim=True)
    assert ((back - x).abs() <= largest / 127 * (1 + 2**-6) / 2 * (1 + 1e-5)).all()


@pytest.mark.parametrize("width", [64, 65, 128, 300, 576, 2048])
def test_large_channels_cost_the_others_nothing(width: int):
    body = BodyFormat("int8", batch=2, tokens=3, width=width, vocab_size=256)
    x = torch.randn(2, 3, width, generator=torch.Generator().manual_seed(1))
    plain = body.unpack_hidden(body.pack_hidden(x), CPU)
    outliers = torch.randperm(width, generator=torch.Generator().manual_seed(2))[: Int8Blocks(6, width).num_outliers]
    x[..., outliers] *= 1000.0
    back = body.unpack_hidden(body.pack_hidden(x), CPU)
    assert torch.allclose(back[..., outliers], x[..., outliers], rtol=2**-8)
    others = torch.ones(width, dtype=torch.bool)
    others[outliers] = False
    assert (back - x)[..., others].abs().max() < 2 * (plain - x.where(others, plain)).abs().max() + 0.02


@pytest.mark.parametrize("width", [96, 384, 576, 768, 2048, 4096])
def test_it_costs_at_most_three_percent_more_than_one_scale_a_token(width: int):
    body = BodyFormat("int8", batch=4, tokens=256, width=width, vocab_size=256)
    assert body.hidden_bytes <= 1.03 * 4 * 256 * (width + 2)


@pytest.mark.parametrize("channels", [[5, 5], [9, 3], [0, 128]])
def test_channels_that_are_none_are_refused(channels):
    body = BodyFormat("int8", batch=2, tokens=3, width=128, vocab_size=256)
    packed = body.pack_hidden(torch.ones(2, 3, 128))
    torn = np.array(channels, "<u2").tobytes() + packed[4:]
    assert body.why_not(torn, is_step=False) == f"channels {channels} of 128"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("values", [torch.zeros(2, 3, 8), torch.full((2, 3, 8), 1e-42), torch.full((2, 3, 8), 1.6e7)])
def test_zeros_denormals_and_large_values_stay_finite(form: str, values):
    body = body_format(form)
    packed = body.pack_hidden(values)
    assert body.why_not(packed, is_step=False) is None
    back = body.unpack_hidden(packed, CPU)
    assert torch.isfinite(back).all()
    assert torch.allclose(back, values, rtol=0.02, atol=1e-38)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(form: str, bad: float):
    body, x = body_format(form), hidden()
    x[1, 2, 3] = bad
    assert body.why_not(body.pack_hidden(x), is_step=False) == "activations that are not finite"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [MAX_MAGNITUDE * 1.02, 1e19, 3e38])
def test_values_too_large_to_compute_with_are_refused(form: str, size: float):
    """Finite on the wire: 3e38 in int8 is infinite once unpacked, and the norm of a gradient of 1e19 is."""
    body, x = body_format(form), hidden()
    for sign in (1, -1):
        x[1, 2, 3] = sign * size
        assert "at most 1.7e+07" in (body.why_not(body.pack_hidden(x), is_step=False) or "")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stage", [0, 1])
def test_the_largest_values_that_are_let_in_end_no_stage(form: str, stage: int):
    manifest = manifest_of(2)
    manifest = manifest.model_copy(update={"stages": manifest.stages.model_copy(update={"activations": form})})
    body, layers, inner = BodyFormat.of(manifest), layers_of(manifest, stage), manifest.inner
    model = LlamaStage(manifest.model, layers)
    model.flat_N.copy_(initial_parameters(model.layout, manifest.model, 0))
    optimizer, passes = InnerOptimizer(model, inner), Passes(body)
    tokens_BT = torch.zeros(body.batch, body.tokens, dtype=torch.int64)
    packed = body.pack_hidden(torch.full((body.batch, body.tokens, body.width), 0.98 * MAX_MAGNITUDE))
    assert body.why_not(packed, is_step=False) is None
    for index in range(inner.accumulate):
        if stage == 1:
            passes.turn(model, packed + body.pack_targets(tokens_BT))
        else:
            passes.begin(index, model, tokens_BT, tokens_BT)
            passes.backward(index, packed)
    optimizer.step(micro_batches=inner.accumulate, share=1.0)
    assert torch.isfinite(model.flat_N).all()


@pytest.mark.parametrize("vocab_size", [256, 300, 65536, 70000])
def test_targets_come_back(vocab_size: int):
    body = body_format("int8", vocab_size=vocab_size)
    targets = torch.tensor([[0, 1, vocab_size - 1], [5, 255, 7]])
    step = body.pack_hidden(hidden()) + body.pack_targets(targets)
    assert body.why_not(step, is_step=True) is None
    assert torch.equal(body.unpack_targets(step, CPU), targets)
    assert bytes(body.targets_of(step)) == body.pack_targets(targets)


def test_targets_that_do_not_count_come_back_as_such_and_one_has_to_count():
    body = body_format("fp32", vocab_size=300)
    targets = torch.tensor([[IGNORED, 1, 299], [5, IGNORED, IGNORED]])
    step = body.pack_hidden(hidden()) + body.pack_targets(targets)
    assert body.why_not(step, is_step=True) is None
    assert torch.equal(body.unpack_targets(step, CPU), targets)
    none = bytearray(body.pack_hidden(hidden()) + body.pack_targets(torch.full((2, 3), IGNORED)))
    assert body.why_not(none, is_step=True) == "targets of which none counts"
    none[-2] = 0b11000000  # of no target
    assert body.why_not(none, is_step=True) == "targets of which none counts"


def test_borders_are_taken_where_the_run_packs_alone():
    takes = body_format("fp32", vocab_size=300)
    starts = torch.tensor([[True, False, True], [True, False, False]])
    step = takes.pack_hidden(hidden()) + takes.pack_targets(torch.ones((2, 3), dtype=torch.int64), starts)
    assert takes.why_not(step, is_step=True) is None
    packs_none = replace(takes, takes_borders=False)
    assert packs_none.why_not(step, is_step=True) == "borders within a sequence, in a run that packs none"
    whole = takes.pack_hidden(hidden()) + takes.pack_targets(torch.ones((2, 3), dtype=torch.int64))
    assert packs_none.why_not(whole, is_step=True) is None


def test_a_target_outside_the_vocabulary_is_refused():
    body = body_format("fp32", vocab_size=300)
    step = body.pack_hidden(hidden()) + np.array([0, 1, 2, 3, 4, 300], "<u2").tobytes() + b"\xff\0"
    assert "target 300" in (body.why_not(step, is_step=True) or "")


def test_the_manifest_names_the_form():
    manifest = preset("tiny", stages={"count": 2, "activations": "bf16"})
    body = BodyFormat.of(manifest)
    assert body.form == "bf16"
    assert body == dataclasses.replace(
        body, batch=manifest.inner.micro_batch, tokens=manifest.model.context, width=manifest.model.hidden_size
    )
