"""In bfloat16 a stage computes nearly the same, on float32 vectors that are the same to the bit."""

import pytest
import torch

from dilocox_peer.config import preset
from dilocox_peer.errors import ConfigError
from dilocox_peer.manifest import ModelSection
from dilocox_peer.model.architecture import StageModel, build_model
from dilocox_peer.model.inner import InnerOptimizer
from dilocox_peer.model.loss import loss_of, train_on
from dilocox_peer.model.precision import AutocastStage
from dilocox_peer.model.transformer import initial_parameters
from dilocox_peer.peer.device import chosen_device

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
    with pytest.raises(ConfigError, match="--precision bfloat16: cpu does not compute in it: use --precision float32"):
        chosen_device("cpu", "bfloat16")
