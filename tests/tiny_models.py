"""Folders of tiny published models, made on the spot: random weights of a family's real classes, saved as it publishes them."""

import json
from pathlib import Path
from typing import Any

import torch

from dilocox_peer.manifest import Manifest, PublishedSection, StagesSection
from dilocox_peer.model.architecture import LayerRange
from dilocox_peer.model.families import config_from, library, model_class, seeded, tiny_config
from dilocox_peer.model.published import design_from, design_layout

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


def gpt_neo(positions: int = 64, stages: int = 1, **changes: Any) -> Manifest:
    """A run, without weights, of a family whose 4 layers keep a mask each, of positions by positions. changes: of the config.json that it says it
    has, after its layout was hashed."""
    values = {
        "model_type": "gpt_neo", "num_layers": 4, "num_heads": 2, "hidden_size": 16, "intermediate_size": 16, "vocab_size": 300,
        "max_position_embeddings": positions, "window_size": 16, "attention_types": [[["global", "local"], 2]],
    }  # fmt: skip
    design = design_from(json.dumps(values), num_stages=stages, context=32)
    whole = LayerRange(0, 3, is_first_stage=True, is_last_stage=True)
    section = PublishedSection(
        source="made up", layers=4, hidden_size=16, context=32, vocab_size=300, dtype="float32", genesis=("0" * 64,) * stages, files=(),
        layout=design_layout(design, whole).digest().hex(), config=json.dumps({**values, **changes}),
    )  # fmt: skip
    return Manifest(model=section, stages=StagesSection(count=stages, blocks=(4 // stages,) * stages))
