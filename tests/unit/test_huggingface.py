"""An export is a Llama to `transformers`: the same logits, the same tokens; and it is whole, or nothing."""

import fcntl
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from dilocox_peer.errors import ConfigError, DiskTakesNothing, StateCorrupt
from dilocox_peer.manifest import DataSection, ModelSection
from dilocox_peer.model.architecture import LayerRange
from dilocox_peer.model.huggingface import (
    FILES,
    PublishedTokenizer,
    config_of,
    read_folder,
    tokenizer_of,
    write_folder,
)
from dilocox_peer.model.stage_layout import stage_layout
from dilocox_peer.model.transformer import initial_parameters
from dilocox_peer.model.whole import Origin, WholeModel, tensors_of, union

SECTION = ModelSection(
    layers=3, hidden_size=48, heads=6, kv_heads=2, mlp_size=80, context=32, rope_theta=777.0, norm_eps=3e-5
)
ORIGIN = Origin("tiny", "ab" * 32, 7, ("cd" * 32, "ef" * 32))
TEXTS = ["def f(x):\n    return  x\n", " leading", "", "naïve 日本語 😀\t\r\n\x00\x7f", "<s></s><unk>Ġ"]


def whole_model(seed=1):
    """Two stages' tensors, put together; norms not at their initial ones, so that they count."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for first, last in ((0, 0), (1, 2)):
        layout = stage_layout(SECTION, LayerRange.of(SECTION, first_layer=first, last_layer=last))
        flat_N = initial_parameters(layout, SECTION, seed)
        flat_N += 0.1 * torch.rand(len(flat_N), generator=generator)
        parts.append(tensors_of(layout, flat_N.numpy().tobytes()))
    return union(SECTION, ORIGIN, parts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export") / "model"
    write_folder(folder, whole_model())
    return folder


@pytest.fixture(scope="module")
def transformers():
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
            patch.setenv(name, "1")
        yield pytest.importorskip("transformers")


def test_transformers_computes_the_same_logits(folder, transformers):
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    tokens_BT = torch.randint(0, 256, (3, SECTION.context), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        ours_BTV = whole_model().build().forward(tokens_BT)
        theirs_BTV = theirs(tokens_BT).logits
    assert theirs_BTV.dtype == torch.float32
    assert ours_BTV.abs().max() > 1
    assert (ours_BTV - theirs_BTV).abs().max() < 1e-4


def test_transformers_reads_every_number_of_the_section(folder, transformers):
    config = transformers.AutoConfig.from_pretrained(folder)
    for key, value in config_of(SECTION).items():
        if key not in {"torch_dtype", "rope_theta"}:  # names of transformers 4
            assert getattr(config, key) == value, key
    assert config.rope_parameters["rope_theta"] == SECTION.rope_theta


@pytest.mark.parametrize("text", TEXTS)
def test_the_tokenizer_gives_the_bytes_of_the_text(folder, transformers, text):
    for tokenizer in (
        transformers.AutoTokenizer.from_pretrained(folder),
        transformers.PreTrainedTokenizerFast.from_pretrained(folder),
    ):
        assert tokenizer(text)["input_ids"] == list(text.encode())
        assert tokenizer.decode(list(text.encode())) == text


def test_every_byte_is_a_token_and_nothing_else(transformers):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(json.dumps(tokenizer_of()))
    assert tokenizer.get_vocab_size() == 256
    assert sorted(tokenizer.get_vocab().values()) == list(range(256))
    for text in map(chr, [*range(0x250), 0x7FF, 0x800, 0xFFFD, 0x10FFFF]):
        assert tokenizer.encode(text).ids == list(text.encode())


def test_transformers_goes_on_from_a_prompt_without_special_tokens(folder, transformers):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.tensor([list(b"import ")])
    out = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=8)
    assert out.shape == (1, 15)


def test_what_is_written_is_read_back(folder):
    model, again = whole_model(), read_folder(folder)
    assert again.section == SECTION
    assert again.origin == ORIGIN
    assert again.tensors.keys() == model.tensors.keys()
    assert all(np.array_equal(again.tensors[name], model.tensors[name]) for name in model.tensors)
    assert {path.name for path in folder.iterdir()} == FILES


def test_an_export_is_replaced_with_force_only(tmp_path):
    target = tmp_path / "model"
    write_folder(target, whole_model(1))
    before = (target / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="--force"):
        write_folder(target, whole_model(2))
    assert (target / "model.safetensors").read_bytes() == before
    write_folder(target, whole_model(2), force=True)
    assert (target / "model.safetensors").read_bytes() != before
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize(
    ("said", "kind", "words"),
    [
        ("Error while serializing: I/O error: No space left on device (os error 28)", DiskTakesNothing, "No space left on device"),
        ("Error while serializing: I/O error: Permission denied (os error 13)", ConfigError, "Permission denied; pass another --out"),
        ("Error while serializing: something else", ConfigError, "something else"),
    ],
)  # fmt: skip
def test_what_the_library_says_of_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, said, kind, words):
    """Its error is no OSError, and `export` ended with a traceback."""

    def full(*_):
        raise SafetensorError(said)

    monkeypatch.setattr("dilocox_peer.model.huggingface.save_file", full)
    with pytest.raises(kind, match=f"model cannot be written: .*{words}") as raised:
        write_folder(tmp_path / "model", whole_model())
    assert type(raised.value) is kind
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="others exchange no folders at one stroke")
def test_there_is_an_export_at_every_moment_while_it_is_replaced(tmp_path, monkeypatch):
    target = tmp_path / "model"
    write_folder(target, whole_model(1))
    monkeypatch.setattr(Path, "rename", lambda *_: pytest.fail("it is away until the next rename"))
    write_folder(target, whole_model(2), force=True)
    assert np.array_equal(read_folder(target).tensors["lm_head.weight"], whole_model(2).tensors["lm_head.weight"])
    assert os.listdir(tmp_path) == ["model"]


def test_an_export_is_replaced_where_the_system_exchanges_no_folders(tmp_path, monkeypatch):
    target = tmp_path / "model"
    write_folder(target, whole_model(1))
    monkeypatch.setattr("dilocox_peer.model.huggingface.ctypes.CDLL", lambda *_: object())
    write_folder(target, whole_model(2), force=True)
    assert np.array_equal(read_folder(target).tensors["lm_head.weight"], whole_model(2).tensors["lm_head.weight"])
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize("force", [False, True])
def test_the_next_export_removes_what_a_killed_one_left(tmp_path, force):
    target = tmp_path / "model"
    if force:
        write_folder(target, whole_model(1))

    def beside(name, *within):
        for each in within:
            (tmp_path / name / each).mkdir(parents=True)
            (tmp_path / name / each / "model.safetensors").write_bytes(b"x" * 100)
        os.utime(tmp_path / name, (1.0, 1.0))
        return name

    beside(".model.abcdefgh", "new")
    kept = {
        beside(".model.old_old_", "new", "old"),  # the only model, perhaps
        beside(".model.notebook", "years of work"),
        beside(".other.abcdefgh", "new"),
        beside(".model.atwork12", "new"),
    }
    (tmp_path / ".model.justnow1").mkdir()
    held = os.open(tmp_path / ".model.atwork12", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    write_folder(target, whole_model(2), force=force)
    os.close(held)
    assert set(os.listdir(tmp_path)) == kept | {"model", ".model.justnow1"}


def test_an_export_goes_to_a_disk_that_locks_no_folders(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr("dilocox_peer.model.huggingface.fcntl.flock", refuse)
    write_folder(tmp_path / "model", whole_model(1))
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_with_other_things_in_it_is_never_replaced(tmp_path, force):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match=r"thesis\.tex"):
        write_folder(tmp_path, whole_model(), force=force)
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "model").mkdir()
    write_folder(tmp_path / "model", whole_model())
    assert read_folder(tmp_path / "model").origin == ORIGIN


def test_a_failure_in_the_middle_leaves_what_was_there(tmp_path, monkeypatch):
    target = tmp_path / "model"
    write_folder(target, whole_model(1))

    def full(*_arguments, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dilocox_peer.model.huggingface.save_file", full)
    with pytest.raises(DiskTakesNothing, match="No space left on device; free some space"):
        write_folder(target, whole_model(2), force=True)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["model"]
    assert np.array_equal(read_folder(target).tensors["lm_head.weight"], whole_model(1).tensors["lm_head.weight"])


def test_other_folders_are_refused_with_a_reason(tmp_path):
    with pytest.raises(ConfigError, match="holds no"):
        read_folder(tmp_path)
    write_folder(tmp_path / "model", whole_model())
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(StateCorrupt, match="damaged"):
        read_folder(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_bytes(b"[" * 9999)
    with pytest.raises(StateCorrupt, match=r"config\.json cannot be read"):
        read_folder(tmp_path / "model")


def test_parts_that_are_no_whole_model_are_refused():
    model = whole_model()
    some = dict(list(model.tensors.items())[:-1])
    with pytest.raises(StateCorrupt, match="missing"):
        union(SECTION, ORIGIN, [some])
    with pytest.raises(StateCorrupt, match="two stages"):
        union(SECTION, ORIGIN, [model.tensors, some])
    with pytest.raises(StateCorrupt, match="not of this model"):
        union(SECTION, ORIGIN, [model.tensors, {"extra.weight": np.zeros(3, np.float32)}])
    wrong = {**model.tensors, "model.norm.weight": np.zeros(3, np.float32)}
    with pytest.raises(StateCorrupt, match="expected float32"):
        union(SECTION, ORIGIN, [wrong])
    assert isinstance(union(SECTION, ORIGIN, [model.tensors]), WholeModel)


def test_a_published_tokenizer_goes_out_as_it_came(tmp_path):
    data = DataSection(tokenizer="ab" * 32, bos="<s>", eos="</s>")
    model = replace(whole_model(), origin=replace(ORIGIN, data=data))
    files = {"tokenizer.json": b'{"theirs": 1}', "chat_template.jinja": b"{{ theirs }}"}
    write_folder(tmp_path / "out", model, tokenizer=PublishedTokenizer(files=files, data=data, bos=1, eos=2))
    assert {name: (tmp_path / "out" / name).read_bytes() for name in files} == files
    config, of_tokenizer = (
        json.loads((tmp_path / "out" / name).read_text()) for name in ("config.json", "tokenizer_config.json")
    )
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    assert (of_tokenizer["bos_token"], of_tokenizer["eos_token"]) == ("<s>", "</s>")
    assert read_folder(tmp_path / "out").origin.data == data
    write_folder(tmp_path / "out", model, force=True)  # over the template, which is an export's too
