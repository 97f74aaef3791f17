"""What a manifest says of its first weights is what the library itself computes, and another model does not pass for it."""

import gc
from pathlib import Path

import pytest
import torch

from dilocox_peer.cli.flags import InitFlags
from dilocox_peer.cli.published import published_manifest
from dilocox_peer.errors import ConfigError
from dilocox_peer.manifest import Manifest, PublishedSection
from dilocox_peer.model.canary import MAX_TOKENS, SEQUENCES, fixed_tokens
from dilocox_peer.model.published import PublishedStage
from dilocox_peer.model.weights import open_folder
from dilocox_peer.peer.state.base import base_on, put_base
from dilocox_peer.peer.state.keeper import Keeper
from dilocox_peer.peer.state.trial import try_out
from dilocox_peer.types import Digest
from tests.tiny_models import tiny_json, write_folder

transformers = pytest.importorskip("transformers")


def manifest_of(folder: Path, **flags) -> Manifest:
    return published_manifest(InitFlags(published=folder, context=32, path=folder / "run.toml", **flags), folder)


def section_of(manifest: Manifest) -> PublishedSection:
    assert isinstance(manifest.model, PublishedSection)
    return manifest.model


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_folder(tmp_path / "source", tiny_json("llama", vocab_size=256))
    return tmp_path / "source"


@pytest.fixture
def broken(monkeypatch):
    """Sequences do not know their order, and heed too much of it: the attention of random weights is close to none."""

    def break_it():
        monkeypatch.setattr(
            "transformers.models.llama.modeling_llama.apply_rotary_pos_emb", lambda q, k, *_rest, **_named: (9 * q, k)
        )

    return break_it


def keeper_of(tmp_path: Path, manifest: Manifest, stage: int, source: Path) -> Keeper:
    return Keeper(tmp_path / "peer", manifest, stage, lambda _event: None, open_folder(source))


@pytest.mark.parametrize("flags", [{}, {"lora_rank": 4}])
def test_of_one_stage_it_is_the_librarys_own_loss(source: Path, flags):
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    inputs_BT, targets_BT = (fixed_tokens(what, 256, MAX_TOKENS) for what in ("inputs", "targets"))
    with torch.no_grad():
        logits_BTV = model(input_ids=inputs_BT, use_cache=False).logits
    section = section_of(manifest_of(source, **flags))
    assert len(section.canary) == SEQUENCES
    for found, logits_TV, targets_T in zip(section.canary, logits_BTV, targets_BT, strict=True):
        assert found == pytest.approx(float(torch.nn.functional.cross_entropy(logits_TV, targets_T)), abs=1e-3)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_machine_that_computes_another_model_is_told_so(tmp_path: Path, source: Path, broken, stage):
    manifest = manifest_of(source, stages=2)
    keeper, folder = keeper_of(tmp_path, manifest, stage, source), open_folder(source)
    broken()
    with pytest.raises(
        ConfigError, match=f"stage {stage} gives a .* instead of .*transformers {transformers.__version__} here"
    ):
        try_out(manifest, stage, keeper, folder, None, "cpu")
    keeper.close()


def test_who_has_passed_is_not_asked_again_on_the_same_device(tmp_path: Path, source: Path, broken):
    manifest = manifest_of(source)
    keeper, folder = keeper_of(tmp_path, manifest, 0, source), open_folder(source)
    try_out(manifest, 0, keeper, folder, None, "cpu")
    broken()
    try_out(manifest, 0, keeper, folder, None, "cpu")
    with pytest.raises(ConfigError, match="computes another model"):
        try_out(manifest, 0, keeper, folder, None, "cpu:0")
    keeper.close()


def test_the_model_that_was_tried_is_gone_afterwards(tmp_path: Path, source: Path):
    manifest = manifest_of(source)
    keeper, folder = keeper_of(tmp_path, manifest, 0, source), open_folder(source)
    gc.collect()
    before = num_stages()
    gc.disable()  # or it might have come along by chance
    try:
        try_out(manifest, 0, keeper, folder, None, "cpu")
        assert num_stages() == before
    finally:
        gc.enable()
    keeper.close()


def num_stages() -> int:
    return sum(type(each) is PublishedStage for each in gc.get_objects())


def test_adapters_are_tried_with_the_weights_beside_them(tmp_path: Path, source: Path, broken):
    manifest = manifest_of(source, lora_rank=4)
    section, keeper, folder = section_of(manifest), keeper_of(tmp_path, manifest, 0, source), open_folder(source)
    from dilocox_peer.model.architecture import frozen_layout_of

    layout, name = frozen_layout_of(manifest), Digest(bytes.fromhex(section.base[0]))
    assert layout is not None
    put_base(keeper.things, name, layout, folder, section)
    base = base_on(keeper.things, name, layout)
    try_out(manifest, 0, keeper, None, base, "cpu")
    broken()
    with pytest.raises(ConfigError, match="a loss of"):
        try_out(manifest, 0, keeper, None, base, "cpu:0")
    keeper.close()
