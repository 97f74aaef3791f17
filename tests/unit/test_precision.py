"""In bfloat16 a stage computes nearly the same, on float32 vectors that are the same to the bit."""

import pytest
import torch

from dilocox_peer.config import preset
from dilocox_peer.errors import ConfigError, LackedForNow
from dilocox_peer.manifest import ModelSection
from dilocox_peer.model.architecture import GOOD_STEPS, GradientScale, LayerRange, StageModel, build_model
from dilocox_peer.model.inner import InnerOptimizer
from dilocox_peer.model.loss import loss_of, train_on
from dilocox_peer.model.precision import AutocastStage
from dilocox_peer.model.transformer import initial_parameters
from dilocox_peer.peer import device as device_module
from dilocox_peer.peer.device import chosen_device, has_card, why_not_compiled

MANIFEST = preset("tiny")
TOKENS_BT = torch.randint(0, 256, (4, 64), generator=torch.Generator().manual_seed(1))


def stage(precision: str, **options) -> StageModel:
    assert isinstance(MANIFEST.model, ModelSection)
    model = build_model(MANIFEST.model, precision=precision, **options)
    model.flat_N.copy_(initial_parameters(model.layout, MANIFEST.model, 0))
    return model


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_gradient_is_nearly_that_of_float32(checkpointing):
    exact, half = stage("float32"), stage("bfloat16", checkpointing=checkpointing)
    assert isinstance(half, AutocastStage)
    starts_BT = torch.zeros_like(TOKENS_BT, dtype=torch.bool)
    starts_BT[:, [0, 20]] = True
    losses = [train_on(model, TOKENS_BT, TOKENS_BT, starts_BT=starts_BT) for model in (exact, half)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    assert losses[1] != losses[0]  # it is not float32 under another name
    assert half.flat_grad_N.dtype == torch.float32
    assert torch.cosine_similarity(exact.flat_grad_N, half.flat_grad_N, dim=0) > 0.999


def test_it_learns_and_its_versions_too():
    model = stage("bfloat16")
    steps = InnerOptimizer(model, MANIFEST.inner.model_copy(update={"optimizer": "adamw", "learning_rate": 3e-3}))
    other = model.version()
    assert other.flat_grad_N is model.flat_grad_N
    with torch.no_grad():
        other.flat_N.copy_(model.flat_N)
    steps.move_to(other)
    before = loss_of(model, TOKENS_BT, TOKENS_BT)[0]
    for _ in range(10):
        train_on(other, TOKENS_BT, TOKENS_BT)
        steps.step(micro_batches=1, share=1.0)
    assert loss_of(other, TOKENS_BT, TOKENS_BT)[0] < 0.9 * before
    assert loss_of(model, TOKENS_BT, TOKENS_BT)[0] == before


def test_a_large_vocabulary_in_parts_gives_the_same_gradient():
    whole, parts = stage("bfloat16"), stage("bfloat16")
    train_on(whole, TOKENS_BT, TOKENS_BT)
    train_on(parts, TOKENS_BT, TOKENS_BT, logits_bytes=50 * 4 * 256)
    assert torch.cosine_similarity(whole.flat_grad_N, parts.flat_grad_N, dim=0) > 0.9999


def test_a_device_that_cannot_is_one_line(monkeypatch):
    assert chosen_device("cpu", "bfloat16") == "cpu"

    def refuse(*_arguments, **named):
        raise RuntimeError("no such dtype here")

    monkeypatch.setattr(torch, "ones", refuse)
    for precision in ("bfloat16", "float16"):
        with pytest.raises(
            ConfigError, match=f"--precision {precision}: cpu does not compute in it: use --precision float32"
        ):
            chosen_device("cpu", precision)


def test_compiling_is_tried_out_and_what_is_wrong_is_one_line(monkeypatch):
    def refuse(_function):
        raise RuntimeError("no C++ compiler\nwas found")

    monkeypatch.setattr(torch, "compile", refuse)
    assert why_not_compiled("cpu") == "no C++ compiler was found"
    with pytest.raises(ConfigError, match="--device xpu cannot be used here"):
        why_not_compiled("xpu")


@pytest.mark.parametrize(
    ("built_for", "maker", "error", "kind"),
    [
        ("12.8", "0x10de", "Found no NVIDIA driver on your system", LackedForNow),
        ("12.8", "0x8086", "Found no NVIDIA driver on your system", ConfigError),
        (None, "0x10de", "Torch not compiled with CUDA enabled", ConfigError),
        (None, "0x8086", "CUDA-capable device(s) is/are busy or unavailable", LackedForNow),
    ],
)
def test_a_card_whose_driver_is_not_loaded_yet_may_come_and_none_at_all_does_not(
    monkeypatch, tmp_path, built_for, maker, error, kind
):
    slot = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    slot.mkdir(parents=True)
    (slot / "vendor").write_text(f"{maker}\n")
    (slot / "class").write_text("0x030000\n")

    def refuse(*_arguments, **named):
        raise RuntimeError(error)

    monkeypatch.setattr(device_module, "has_card", lambda: has_card(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch, "zeros", refuse)
    with pytest.raises(kind, match="--device cuda cannot be used here"):
        chosen_device("cuda")


def test_in_float16_small_gradients_are_not_lost():
    """Of a loss a hundred thousandth of the usual size: without the scale they would be zeros."""
    exact, half = stage("float32"), stage("float16")
    assert half.scale is not None
    for model in (exact, half):
        torch.autograd.backward(model.forward(TOKENS_BT).square().mean() * 1e-5)
    in_size = half.flat_grad_N / half.scale.factor
    assert torch.cosine_similarity(exact.flat_grad_N, in_size, dim=0) > 0.999
    assert float(torch.linalg.vector_norm(in_size)) == pytest.approx(
        float(torch.linalg.vector_norm(exact.flat_grad_N)), rel=1e-2
    )


def test_a_step_that_overflows_in_float16_is_left_out_and_the_next_ones_are_not():
    model = stage("float16")
    assert model.scale is not None
    steps = InnerOptimizer(model, MANIFEST.inner.model_copy(update={"optimizer": "adamw", "learning_rate": 3e-3}))
    before, first = model.flat_N.clone(), loss_of(model, TOKENS_BT, TOKENS_BT)[0]
    model.scale.factor = 2.0**40
    train_on(model, TOKENS_BT, TOKENS_BT)
    steps.step(micro_batches=1, share=1.0)
    assert (steps.steps_done, model.scale.factor) == (0, 2.0**39)
    assert torch.equal(model.flat_N, before)
    assert not model.flat_grad_N.any()
    model.scale.factor = 2.0**16
    for _ in range(10):
        train_on(model, TOKENS_BT, TOKENS_BT)
        steps.step(micro_batches=1, share=1.0)
    assert steps.steps_done == 10
    assert loss_of(model, TOKENS_BT, TOKENS_BT)[0] < 0.9 * first


def test_a_stage_before_one_in_float16_gets_gradients_of_the_right_size():
    """Also where the stage itself overflows: then it gets none."""
    assert isinstance(MANIFEST.model, ModelSection)
    last = LayerRange.of(MANIFEST.model, first_layer=1)
    models = [build_model(MANIFEST.model, last, precision=precision) for precision in ("float32", "float16")]
    sent_BTD = torch.randn(4, 64, MANIFEST.model.hidden_size, generator=torch.Generator().manual_seed(2))
    found = []
    for model in models:
        model.flat_N.copy_(initial_parameters(model.layout, MANIFEST.model, 0))
        sent = sent_BTD.clone().requires_grad_()
        train_on(model, sent, TOKENS_BT)
        assert sent.grad is not None
        found.append(sent.grad)
    assert torch.cosine_similarity(found[0].flatten(), found[1].flatten(), dim=0) > 0.999
    assert float(found[1].norm()) == pytest.approx(float(found[0].norm()), rel=1e-2)
    scale = models[1].scale
    assert scale is not None
    scale.factor = 2.0**60
    sent = sent_BTD.clone().requires_grad_()
    train_on(models[1], sent, TOKENS_BT)
    assert sent.grad is not None
    assert torch.isfinite(sent.grad).all()


def test_the_scale_grows_after_many_good_steps_and_versions_share_it():
    scale = GradientScale(factor=4.0)
    for _ in range(GOOD_STEPS):
        scale.stepped()
    assert (scale.factor, scale.good_steps) == (8.0, 0)
    for _ in range(10):
        scale.overflowed()
    assert scale.factor == 1.0
    model = stage("float16")
    assert model.version().scale is model.scale
