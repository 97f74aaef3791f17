"""A run of adapters (LoRA): they are all that is trained, the published weights stay, and what comes out is what peft and
transformers compute."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dilocox_peer.cli.flags import BaseType, InitFlags
from dilocox_peer.cli.init import write_run_file
from dilocox_peer.cli.published import published_manifest
from dilocox_peer.errors import ConfigError, StateCorrupt
from dilocox_peer.manifest import Manifest, PublishedSection
from dilocox_peer.model.adapters import DOWN, UP
from dilocox_peer.model.architecture import StageModel, build_model, frozen_layout_of, layers_of, layout_of
from dilocox_peer.model.frozen import WIDENED, FrozenBase
from dilocox_peer.model.huggingface import write_folder as write_export
from dilocox_peer.model.inner import InnerOptimizer
from dilocox_peer.model.loss import loss_of, train_on
from dilocox_peer.model.memory import StageSize
from dilocox_peer.model.merging import base_of, merge
from dilocox_peer.model.partition import cut_of
from dilocox_peer.model.published import design_of
from dilocox_peer.model.quantized import QuantizedMatrix, bytes_of
from dilocox_peer.model.weights import open_folder
from dilocox_peer.model.whole import WholeModel
from dilocox_peer.peer.state.anchors import assemble
from dilocox_peer.peer.state.base import base_on, put_base
from dilocox_peer.peer.state.beginning import check_bits
from dilocox_peer.peer.training.outer import first_state, initial_state
from dilocox_peer.store.shelf import Shelf
from dilocox_peer.types import Digest
from tests.tiny_models import tiny_json, write_folder

transformers = pytest.importorskip("transformers")

TOKENS_BT = torch.randint(2, 256, (2, 16), generator=torch.Generator().manual_seed(3))


def manifest_of(folder: Path, **flags) -> Manifest:
    return published_manifest(InitFlags(published=folder, **{"context": 16, "lora_rank": 4, **flags}), folder)


def section_of(manifest: Manifest) -> PublishedSection:
    assert isinstance(manifest.model, PublishedSection)
    return manifest.model


def stages_of(manifest: Manifest, folder: Path) -> list[StageModel]:
    opened, found = open_folder(folder), []
    for stage in range(manifest.stages.count):
        layout = frozen_layout_of(manifest, stage)
        assert layout is not None
        base = FrozenBase.read(opened, design_of(section_of(manifest)), layout)
        assert base.digest.hex() == section_of(manifest).base[stage]
        model = build_model(manifest.model, layers_of(manifest, stage), base=base)
        model.flat_N.copy_(initial_state(manifest, stage).anchor_N())
        found.append(model)
    return found


def logits(stages: list[StageModel]) -> torch.Tensor:
    x = TOKENS_BT
    with torch.no_grad():
        for stage in stages:
            x = stage.forward(x)
    return x


def whole_of(manifest: Manifest, stages: list[StageModel]) -> WholeModel:
    states = [first_state(stage.layout, stage.flat_N.detach().clone(), head=Digest(bytes(32))) for stage in stages]
    return assemble(manifest, states)


def disturb(stages: list[StageModel]) -> None:
    for number, stage in enumerate(stages):
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            stage.flat_N.add_(0.1 * torch.randn(len(stage.flat_N), generator=generator))


@pytest.mark.parametrize(
    ("family", "dtype", "count"),
    [
        ("llama", torch.float32, 1),
        ("qwen3", torch.bfloat16, 1),
        ("llama", torch.bfloat16, 2),
        ("gemma2", torch.bfloat16, 1),
    ],
)
def test_a_run_begins_with_the_published_model_and_its_export_is_what_was_trained(tmp_path: Path, family, dtype, count):
    source, out = tmp_path / "source", tmp_path / "out"
    write_folder(source, tiny_json(family, vocab_size=256, tie_word_embeddings=count == 2), dtype=dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    manifest = manifest_of(source, stages=count)
    assert section_of(manifest).base_dtype == str(dtype).removeprefix("torch.")
    stages = stages_of(manifest, source)
    with torch.no_grad():
        expected_BTV = model(input_ids=TOKENS_BT, use_cache=False).logits
    assert (logits(stages) - expected_BTV).abs().max() < 1e-4
    disturb(stages)
    assert (logits(stages) - expected_BTV).abs().max() > 1e-2
    write_export(out, merge(whole_of(manifest, stages), source), precision="float32")
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        out, output_loading_info=True, dtype=torch.float32
    )
    assert not any(report.values()), report
    with torch.no_grad():
        assert (theirs(input_ids=TOKENS_BT, use_cache=False).logits - logits(stages)).abs().max() < 1e-4
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is (count == 2)
    assert "adapters of rank 4, alpha 8, on q_proj" in (out / "README.md").read_text()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("base", [BaseType.FLOAT32, BaseType.BFLOAT16])
def test_adapters_alone_are_trained(tmp_path: Path, optimizer, base):
    write_folder(tmp_path, tiny_json("llama", vocab_size=256), dtype=torch.bfloat16)
    manifest = manifest_of(tmp_path, base_dtype=base)
    (stage,) = stages_of(manifest, tmp_path)
    frozen = base_of(manifest.model, tmp_path)
    assert frozen is not None
    before, first = loss_of(stage, TOKENS_BT, TOKENS_BT)[0], stage.flat_N.detach().clone()
    section = manifest.inner.model_copy(update={"optimizer": optimizer, "learning_rate": 1e-2})
    steps = InnerOptimizer(stage, section)
    for _ in range(8):
        train_on(stage, TOKENS_BT, TOKENS_BT)
        steps.step(micro_batches=1, share=1.0)
    assert loss_of(stage, TOKENS_BT, TOKENS_BT)[0] < 0.9 * before
    assert not torch.equal(first, stage.flat_N)
    assert {spec.name[-len(DOWN) :] for spec in stage.layout.tensors} == {DOWN, UP}
    again = base_of(manifest.model, tmp_path)
    assert again is not None
    assert again.digest == frozen.digest
    largest = 4 * min(max(each.num_elements for each in frozen.layout.tensors), WIDENED)
    assert frozen.layout.widened_at(0) == (largest if base is BaseType.BFLOAT16 else 0)


def test_gradients_are_those_of_the_whole_matrix(tmp_path: Path):
    """With W = W0 + s B A, dL/dA = s B^T dL/dW and dL/dB = s dL/dW A^T."""
    model = write_folder(tmp_path, tiny_json("llama", vocab_size=256))
    manifest = manifest_of(tmp_path)
    (stage,) = stages_of(manifest, tmp_path)
    disturb([stage])
    merged = merge(whole_of(manifest, [stage]), tmp_path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(merged.tensors[name].copy()))
    train_on(stage, TOKENS_BT, TOKENS_BT)
    expected_BTV = model(input_ids=TOKENS_BT, use_cache=False).logits
    torch.autograd.backward(torch.nn.functional.cross_entropy(expected_BTV.flatten(0, 1), TOKENS_BT.flatten()))
    scale, spans = 2.0, {spec.name: (start, stop, spec.shape) for spec, start, stop in stage.layout.spans()}
    for path in ("model.layers.0.self_attn.q_proj", "model.layers.3.mlp.down_proj"):
        (a, b), (da, db) = (
            [vector[start:stop].view(shape) for start, stop, shape in (spans[path + DOWN], spans[path + UP])]
            for vector in (stage.flat_N.detach(), stage.flat_grad_N)
        )
        gradient = model.get_parameter(path + ".weight").grad
        assert torch.allclose(da, scale * b.T @ gradient, atol=1e-6)
        assert torch.allclose(db, scale * gradient @ a.T, atol=1e-6)


def test_in_bfloat16_the_gradient_is_nearly_the_same(tmp_path: Path):
    write_folder(tmp_path, tiny_json("llama", vocab_size=256), dtype=torch.bfloat16)
    manifest = manifest_of(tmp_path)
    base, gradients = base_of(manifest.model, tmp_path), []
    starts_BT = torch.zeros_like(TOKENS_BT, dtype=torch.bool)
    starts_BT[:, [0, 7]] = True
    for precision in ("float32", "bfloat16"):
        stage = build_model(manifest.model, base=base, precision=precision)
        stage.flat_N.copy_(initial_state(manifest).anchor_N())
        disturb([stage])
        train_on(stage, TOKENS_BT, TOKENS_BT, starts_BT=starts_BT)
        gradients.append(stage.flat_grad_N)
    assert torch.cosine_similarity(gradients[0], gradients[1], dim=0) > 0.999


def test_with_checkpoints_the_gradients_are_the_same(tmp_path: Path):
    write_folder(tmp_path, tiny_json("llama", vocab_size=256), dtype=torch.bfloat16)
    manifest = manifest_of(tmp_path)
    base, gradients = base_of(manifest.model, tmp_path), []
    for checkpointing in (False, True):
        stage = build_model(manifest.model, base=base, checkpointing=checkpointing)
        stage.flat_N.copy_(initial_state(manifest).anchor_N())
        disturb([stage])
        train_on(stage, TOKENS_BT, TOKENS_BT)
        gradients.append(stage.flat_grad_N)
    assert torch.equal(*gradients)


@pytest.mark.parametrize(("bits", "alike"), [(8, 0.99), (4, 0.6)])
def test_frozen_matrices_in_few_bits_train_nearly_the_same(tmp_path: Path, bits: int, alike: float):
    write_folder(tmp_path, tiny_json("llama", vocab_size=256), dtype=torch.bfloat16)
    manifest = manifest_of(tmp_path)
    base, found = base_of(manifest.model, tmp_path), []
    assert base is not None
    for each in (base, replace(base, bits=bits)):
        stage = build_model(manifest.model, base=each)
        stage.flat_N.copy_(initial_state(manifest).anchor_N())
        disturb([stage])
        other = stage.version()
        other.flat_N.copy_(stage.flat_N)
        assert torch.equal(stage.forward(TOKENS_BT), other.forward(TOKENS_BT))
        train_on(stage, TOKENS_BT, TOKENS_BT)
        found.append((stage.forward(TOKENS_BT).detach(), stage.flat_grad_N))
    for exact, quantized in zip(*found, strict=True):
        assert alike < float(torch.cosine_similarity(exact.flatten(), quantized.flatten(), dim=0)) < 1
    held = replace(base, bits=bits).kept()
    inner = {each.name for each in base.layout.tensors if each.is_inner}
    assert {name for name, each in held.items() if not isinstance(each, torch.Tensor)} == inner
    assert all(each.startswith("model.layers.") for each in inner)
    assert sum(each.nbytes for each in held.values()) <= base.layout.bytes_at(bits) < base.layout.size_bytes


@pytest.mark.parametrize(("bits", "error"), [(8, 0.015), (4, 0.11)])
def test_a_matrix_in_few_bits_is_nearly_the_same(bits: int, error: float):
    weight = torch.randn(96, 130, generator=torch.Generator().manual_seed(1)) * 0.05
    for dtype in (torch.float32, torch.bfloat16):
        kept = QuantizedMatrix(weight.to(dtype), bits)
        assert 0 < float((kept.to(torch.float32) - weight).norm() / weight.norm()) < error
        assert kept.to(torch.bfloat16).dtype == torch.bfloat16
        assert kept.nbytes <= bytes_of(weight.numel(), bits)


def test_few_bits_are_refused_where_they_cannot_be(tmp_path: Path, monkeypatch):
    write_folder(tmp_path, tiny_json("llama", vocab_size=256))
    manifest = manifest_of(tmp_path)
    check_bits(manifest, 0)
    with pytest.raises(ConfigError, match="--base-bits 5: 8 or 4"):
        check_bits(manifest, 5)
    with pytest.raises(ConfigError, match="--base-bits 4: this run trains all parameters; leave it out"):
        check_bits(manifest_of(tmp_path, lora_rank=None), 4)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"needs bitsandbytes .*: `pip install 'bitsandbytes>=0\.48'`"):
        check_bits(manifest, 4)


def test_another_version_of_a_stage_shares_what_is_frozen(tmp_path: Path):
    write_folder(tmp_path, tiny_json("llama", vocab_size=256))
    (stage,) = stages_of(manifest_of(tmp_path), tmp_path)
    other = stage.version()
    with torch.no_grad():
        other.flat_N.copy_(stage.flat_N)
    assert torch.equal(logits([other]), logits([stage]))
    assert other.flat_grad_N is stage.flat_grad_N


def test_the_same_file_is_made_of_the_folder_by_everybody(tmp_path: Path):
    source = tmp_path / "source"
    write_folder(source, tiny_json("qwen3", vocab_size=256), dtype=torch.bfloat16)
    manifest = manifest_of(source)
    section, layout = section_of(manifest), frozen_layout_of(manifest)
    assert layout is not None
    things, name = Shelf(tmp_path / "store"), Digest(bytes.fromhex(section.base[0]))
    assert base_on(things, name, layout) is None
    put_base(things, name, layout, open_folder(source), section)
    base = base_on(things, name, layout)
    assert base is not None
    expected = base_of(section, source)
    assert expected is not None
    assert all(torch.equal(tensor, expected.tensors()[each]) for each, tensor in base.tensors().items())
    path = things.path(name)
    assert path is not None
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    assert base_on(Shelf(tmp_path / "store"), name, layout) is None  # and forgotten: it is made or fetched anew
    (tmp_path / "short").write_bytes(b"x")
    with pytest.raises(StateCorrupt, match="has 1 bytes"):
        FrozenBase.open(tmp_path / "short", layout)


@pytest.mark.parametrize("count", [1, 2])
def test_other_weights_are_named_and_nothing_of_them_is_kept(tmp_path: Path, count: int):
    source, other = tmp_path / "source", tmp_path / "other"
    config_json = tiny_json("llama", vocab_size=256)
    write_folder(source, config_json)
    write_folder(other, config_json, seed=1)
    manifest = manifest_of(source, stages=count)
    section, layout = section_of(manifest), frozen_layout_of(manifest)
    assert layout is not None
    things = Shelf(tmp_path / "store")
    with pytest.raises(ConfigError, match="not those that the run's adapters belong to"):
        put_base(things, Digest(bytes.fromhex(section.base[0])), layout, open_folder(other), section)
    assert not things.held
    with pytest.raises(ConfigError, match="not those that the run's adapters belong to"):
        base_of(section, other, cut_of(manifest))
    assert base_of(section, source, cut_of(manifest)) is not None
    with pytest.raises(ConfigError, match="not on this machine: somebody/model has to be there"):
        base_of(section.model_copy(update={"source": "somebody/model"}), None)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ({"lora_targets": ("q_proj", "nothing")}, "nothing is no linear layer of the model: adapters go to q_proj"),
        ({"lora_rank": None, "lora_alpha": 3.0}, "--lora-alpha is of a run of adapters"),
    ],
)
def test_what_init_cannot_adapt_is_one_line(tmp_path: Path, flags, complaint):
    source = tmp_path / "source"
    write_folder(source, tiny_json("llama", vocab_size=256))
    with pytest.raises(ConfigError, match=complaint) as raised:
        write_run_file(
            InitFlags(path=tmp_path / "run.toml", published=source, home=tmp_path / "home", **{"lora_rank": 4, **flags})
        )
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run.toml").exists()


def test_memory_is_that_of_the_adapters_and_the_weights_once(tmp_path: Path):
    write_folder(tmp_path, tiny_json("llama", vocab_size=256), dtype=torch.bfloat16)
    manifest = manifest_of(tmp_path)
    found, layout, frozen = StageSize.of(manifest, 0), layout_of(manifest), frozen_layout_of(manifest)
    assert frozen is not None
    assert found.parameters == layout.num_elements
    assert found.frozen_bytes == frozen.size_bytes < 2.2 * frozen.num_elements
    without = published_manifest(InitFlags(published=tmp_path, context=16), tmp_path)
    assert found.host_bytes() < StageSize.of(without, 0).host_bytes()
    assert found.host_bytes(on_cpu=False) < found.host_bytes() - frozen.size_bytes
    assert found.device_bytes() > frozen.size_bytes


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_peft_loads_the_adapters(tmp_path: Path):
    source, out = tmp_path / "source", tmp_path / "out"
    model = write_folder(source, tiny_json("llama", vocab_size=256))
    manifest = manifest_of(source, lora_targets=("q_proj", "down_proj"), lora_alpha=6.0)
    stages = stages_of(manifest, source)
    disturb(stages)
    write_export(out, whole_of(manifest, stages))
    assert sorted(path.name for path in out.iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    write_export(out, whole_of(manifest, stages), force=True)  # it is an export of ours
    peft = pytest.importorskip("peft")
    adapted = peft.PeftModel.from_pretrained(model, out)
    with torch.no_grad():
        assert (adapted(input_ids=TOKENS_BT, use_cache=False).logits - logits(stages)).abs().max() < 1e-4
