"""Folders of published models as they come: whole, torn, foreign."""

import json

import pytest
import torch

from dilocox_peer.errors import ConfigError
from dilocox_peer.model.architecture import LayerRange
from dilocox_peer.model.published import design_from, design_layout
from dilocox_peer.model.weights import INDEX, open_folder
from tests.tiny_models import tiny_json, write_folder

pytest.importorskip("transformers")

WHOLE = LayerRange(0, 3, is_first_stage=True, is_last_stage=True)


@pytest.fixture
def folder(tmp_path):
    write_folder(tmp_path, tiny_json("llama"))
    return tmp_path


def read(path):
    opened = open_folder(path)
    design = design_from(opened.config_json, num_stages=1, context=16)
    return opened.stage_parameters(design, design_layout(design, WHOLE))


def test_half_precision_is_widened_exactly(tmp_path):
    model = write_folder(tmp_path, tiny_json("llama"), dtype=torch.bfloat16)
    assert open_folder(tmp_path).precision == "bfloat16"
    flat_N = read(tmp_path)
    assert flat_N.dtype == torch.float32
    assert float(flat_N.abs().sum()) == pytest.approx(sum(float(p.detach().abs().sum()) for p in model.parameters()))


def test_a_torn_shard_is_one_line_that_names_it(folder):
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=rf"{shard.name} is damaged \(.*download it again"):
        read(folder)


def test_a_shard_that_is_not_there_is_named(folder):
    shard = sorted(folder.glob("model-*.safetensors"))[0]
    shard.unlink()
    with pytest.raises(ConfigError, match=f"lacks {shard.name}, which its index names"):
        read(folder)


def test_a_missing_tensor_is_named(folder):
    from safetensors.torch import load_file, save_file

    shard = sorted(folder.glob("model-*.safetensors"))[-1]
    tensors = load_file(shard)
    name = sorted(tensors)[0]
    del tensors[name]
    save_file(tensors, shard, {"format": "pt"})
    with pytest.raises(ConfigError, match=rf"lacks {name}: download the model again"):
        read(folder)


def test_another_shape_is_named(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"] + 1}))
    with pytest.raises(ConfigError, match=r"is \(96, 32\), its config.json asks for \(97, 32\)"):
        read(folder)


def test_no_memory_is_taken_for_sizes_that_only_a_config_claims(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 2**40}))
    with pytest.raises(ConfigError, match=r"its config.json asks for \(1099511627776, 32\)"):
        read(folder)


def test_weights_that_are_not_finite_are_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    write_folder(tmp_path, tiny_json("llama"))
    shard = sorted(tmp_path.glob("model-*.safetensors"))[0]
    tensors = load_file(shard)
    next(iter(tensors.values())).view(-1)[0] = torch.nan
    save_file(tensors, shard, {"format": "pt"})
    with pytest.raises(ConfigError, match="not finite"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "model.bin"])
def test_an_index_reaches_nothing_outside_its_folder(folder, name):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], name)
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="no shard beside it"):
        open_folder(folder)


def test_pickled_weights_are_never_opened(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ConfigError, match="pickled weights only"):
        open_folder(tmp_path)


def test_quantized_weights_are_named(tmp_path):
    from safetensors.torch import save_file

    (tmp_path / "config.json").write_text(tiny_json("llama"))
    save_file({"model.embed_tokens.weight": torch.zeros(4, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model.embed_tokens.weight is I8: quantized"):
        open_folder(tmp_path)


@pytest.mark.parametrize(
    ("content", "complaint"), [("{", "is no JSON"), ("[]", "no JSON object"), (" " * (33 << 20), "more than")]
)
def test_a_config_that_is_none(tmp_path, content, complaint):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=complaint):
        open_folder(tmp_path)


def test_a_name_instead_of_a_folder_says_how_to_download(tmp_path):
    with pytest.raises(ConfigError, match="hf download"):
        open_folder(tmp_path / "HuggingFaceTB" / "SmolLM2-135M")


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_masks_beside_the_weights_are_not_used_whatever_their_type(tmp_path, dtype):
    """Older GPT-NeoX and GPT-2 files hold their masks; the library makes them itself, and loads such a folder."""
    from safetensors.torch import load_file, save_file

    model = write_folder(tmp_path, tiny_json("gpt_neox"))
    shard, mask = sorted(tmp_path.glob("model-*.safetensors"))[0], "gpt_neox.layers.0.attention.bias"
    save_file({**load_file(shard), mask: torch.ones(1, 1, 8, 8).tril().to(dtype)}, shard, {"format": "pt"})
    flat_N = read(tmp_path)
    assert float(flat_N.abs().sum()) == pytest.approx(sum(float(p.detach().abs().sum()) for p in model.parameters()))
    opened = open_folder(tmp_path)
    assert opened.precision == "float32"
    assert mask in opened.unused(design_from(opened.config_json, num_stages=1, context=16))


@pytest.mark.parametrize("other", ["{module}weight", "{module}qweight"])
def test_a_quantized_weight_is_named_as_such_where_it_is_needed(folder, other):
    """Under its own name, or in parts under others, where the parameter would only be missed."""
    from safetensors.torch import load_file, save_file

    shard = sorted(folder.glob("model-*.safetensors"))[-1]
    tensors = load_file(shard)
    name = next(each for each in tensors if each.endswith("proj.weight"))
    told = other.format(module=name.removesuffix("weight"))
    del tensors[name]
    save_file({**tensors, told: torch.zeros(4, dtype=torch.int32)}, shard, {"format": "pt"})
    with pytest.raises(ConfigError, match=rf"{told} is I32: quantized weights are not trained"):
        read(folder)
