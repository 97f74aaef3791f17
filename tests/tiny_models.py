"""Folders of tiny published models, made on the spot: random weights of a family's real classes, saved as it publishes them."""

import json
from pathlib import Path
from typing import Any

import torch

from dilocox_peer.model.families import config_from, library, model_class, seeded, tiny_config

FAMILIES = (
    "llama", "qwen3", "mistral", "olmo2", "olmo3", "smollm3", "gemma2", "gemma3_text", "phi3", "granite", "gpt2", "gpt_neox",
    "mixtral", "qwen3_moe", "olmoe", "gpt_oss", "cohere2", "opt", "bloom", "falcon",
)  # fmt: skip


def tiny_json(family: str, **changes: Any) -> str:
    """config.json of a tiny model of the family."""
    default = library().models.auto.configuration_auto.CONFIG_MAPPING[family]()
    config = tiny_config(default.to_json_string(use_diff=False))
    values = {**config.to_dict(), "tie_word_embeddings": False, **changes}
    values.pop("was_tied")
    values["architectures"] = [model_class(config).__name__]
    return json.dumps(values)


def tiny_model(config_json: str, *, seed: int = 0) -> Any:
    """The library's own model, whole, with random weights, in evaluation mode."""
    config = config_from(config_json)
    with seeded(seed):
        model = model_class(config)(config).float().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def write_folder(folder: Path, config_json: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """Writes the folder in shards of 60 kB; gives the model in it."""
    model = tiny_model(config_json, seed=seed).to(dtype)
    model.save_pretrained(folder, max_shard_size="60KB")
    (folder / "config.json").write_text(config_json)
    return model.float()
