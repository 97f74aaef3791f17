"""`generate --model` goes on as the model in the folder does, whoever wrote it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from dilocox_peer.cli.main import app
from dilocox_peer.data.tokenizer import JsonTokenizer
from dilocox_peer.errors import ConfigError
from dilocox_peer.model.huggingface import FORMAT_OF_PUBLISHED, MARK, is_of_published
from tests.tiny_models import tiny_json, write_folder
from tests.tokenizers_made import bpe_file

transformers = pytest.importorskip("transformers")

PROMPT = "def double(number):"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of one file, with the mark of an export of a published run."""
    write_folder(tmp_path, tiny_json("qwen3", vocab_size=320))
    tensors = {name: tensor for shard in tmp_path.glob("*.safetensors") for name, tensor in load_file(shard).items()}
    for path in tmp_path.glob("model*"):
        path.unlink()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt", MARK: FORMAT_OF_PUBLISHED})
    (tmp_path / "tokenizer.json").write_bytes(bpe_file())
    return tmp_path


def generate(folder: Path, *more: str) -> str:
    result = CliRunner().invoke(app, ["generate", PROMPT, "--model", str(folder), "--threads", "1", *more])
    if isinstance(result.exception, ConfigError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_an_export_of_a_published_models_run_goes_on_as_the_library_does(folder: Path):
    said = generate(folder, "--temperature", "0", "--tokens", "8")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = JsonTokenizer(bpe_file())
    ids = tokenizer.encode([PROMPT.encode()])[0].tolist()
    begun = len(ids)
    with torch.no_grad():
        for _ in range(8):
            logits_V = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1, : tokenizer.vocab_size]
            ids.append(int(logits_V.argmax()))
    assert said == PROMPT + "".join(tokenizer.text_of(iter(ids[begun:]))) + "\n"


def test_adapters_alone_are_told_from_a_model(folder: Path):
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds adapters alone: name a folder that `export` without --adapter wrote"):
        generate(folder)


def test_what_has_no_weights_or_damaged_ones_is_told_as_an_export_of_a_run(folder: Path):
    assert is_of_published(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert not is_of_published(folder)
    weights.unlink()
    with pytest.raises(ConfigError, match=r"holds no config\.json and model\.safetensors: pass a folder that"):
        generate(folder)
