"""Benchmarks of lm-evaluation-harness on a folder: what it scores is what the model's own logits say."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dilocox_peer.errors import ConfigError
from tests.tiny_models import tiny_json, write_folder
from tests.tokenizers_made import bpe_file
from tests.unit.test_evaluate_folder import evaluate

transformers = pytest.importorskip("transformers")

QUESTIONS: list[dict[str, Any]] = [
    {"question": f"def f{index}(x):", "choices": [" return x", " import os"], "answer": index % 2} for index in range(8)
]
TASK = """
task: returns
dataset_path: json
dataset_kwargs: {{data_files: {{test: {}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_folder(tmp_path / "model", tiny_json("qwen3", vocab_size=320))
    (tmp_path / "model" / "tokenizer.json").write_bytes(bpe_file())
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path / "model"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_benchmark_scores_what_the_models_logits_say(folder: Path, tmp_path: Path, monkeypatch):
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    questions, tasks = tmp_path / "questions.jsonl", tmp_path / "tasks"
    tasks.mkdir()
    questions.write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
    (tasks / "returns.yaml").write_text(TASK.format(questions))
    more = ("--task-files", str(tasks), "--tasks", "returns")
    found = json.loads(evaluate(folder, *more, "--log", "json"))["returns"]
    assert found["acc,none"] == pytest.approx(expected_accuracy(folder))
    assert evaluate(folder, *more).startswith(f"returns acc: {found['acc,none']:.4f}")
    with pytest.raises(ConfigError, match="knows none of that name"):
        evaluate(folder, "--tasks", "returns")


def expected_accuracy(folder: Path) -> float:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def likelihood(question: str, choice: str) -> float:
        before, ids = (tokenizer(text, add_special_tokens=False).input_ids for text in (question, question + choice))
        with torch.no_grad():
            losses_TV = model(input_ids=torch.tensor([ids[:-1]]), use_cache=False).logits[0].log_softmax(-1)
        return sum(float(losses_TV[place - 1, ids[place]]) for place in range(len(before), len(ids)))

    right = [
        int(max(range(2), key=lambda index: likelihood(each["question"], each["choices"][index]))) == each["answer"]
        for each in QUESTIONS
    ]
    share: float = sum(right) / len(right)
    return share


def test_what_cannot_be_scored_is_one_line(folder: Path, monkeypatch):
    with pytest.raises(ConfigError, match="either --data or --tasks"):
        evaluate(folder, "--tasks", "arc_easy", "--data", str(folder / "config.json"))
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ConfigError, match=r"pip install 'lm-eval\[hf\]>=0\.4\.9'"):
        evaluate(folder, "--tasks", "arc_easy")
