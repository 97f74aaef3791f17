"""`evaluate FOLDER` says what the library's own forward says."""

import json
import math
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dilocox_peer.cli.evaluate_folder import evaluate_folder
from dilocox_peer.cli.flags import EvaluateFlags
from dilocox_peer.cli.main import app
from dilocox_peer.data.tokenizer import JsonTokenizer
from dilocox_peer.errors import ConfigError
from tests.tiny_models import tiny_json, write_folder
from tests.tokenizers_made import bpe_file

transformers = pytest.importorskip("transformers")

TEXT = "def double(number):\n    return number + number\n" * 12


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_folder(tmp_path / "model", tiny_json("qwen3", vocab_size=320))
    (tmp_path / "model" / "tokenizer.json").write_bytes(bpe_file())
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "model"


def evaluate(folder: Path, *more: str) -> str:
    result = CliRunner().invoke(app, ["evaluate", str(folder), *more, "--threads", "1"])
    if isinstance(result.exception, ConfigError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_it_is_the_librarys_loss_and_bits_of_the_texts_bytes(folder: Path):
    text = ("--data", str(folder.parent / "text.txt"))
    found = json.loads(evaluate(folder, *text, "--context", "32", "--log", "json"))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = JsonTokenizer(bpe_file())
    ids = torch.from_numpy(tokenizer.encode([TEXT.encode()])[0].astype("int64"))
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(ids) - 1, 32):
            part = ids[start : start + 33]
            logits_TV = model(input_ids=part[None, :-1], use_cache=False).logits[0]
            total += float(torch.nn.functional.cross_entropy(logits_TV, part[1:], reduction="sum"))
    assert found["tokens"] == len(ids) - 1
    assert found["loss"] == pytest.approx(total / (len(ids) - 1), abs=1e-4)
    assert found["bytes"] == len(TEXT.encode()) - tokenizer.num_bytes(ids[:1].numpy())
    assert found["bits_per_byte"] == pytest.approx(total / found["bytes"] / math.log(2), abs=1e-4)
    assert "nats a token" in evaluate(folder, *text)
    assert json.loads(evaluate(folder, *text, "--context", "16", "--tokens", "20", "--log", "json"))["tokens"] == 32


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"data": ()}, "name the text to evaluate on with --data"),
        ({"context": 9999}, "at most 64 tokens"),
        ({"tokenizer": Path("nothing.json")}, "nothing.json"),
        ({"data": (Path("nothing.txt"),)}, "nothing.txt"),
    ],
)
def test_what_it_cannot_evaluate_is_one_line(folder: Path, changes, complaint):
    flags = EvaluateFlags(**{"link": str(folder), "data": (folder.parent / "text.txt",), **changes})
    with pytest.raises(ConfigError, match=complaint) as raised:
        evaluate_folder(folder, flags)
    assert "\n" not in str(raised.value)
