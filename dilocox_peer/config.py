"""run.toml: the manifest as a commented file that a person edits. Pure text in, manifest out, and back.

The file holds what manifest.py's schema holds, nothing else; comments come from the schema's descriptions.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from dilocox_peer.complaints import first_error
from dilocox_peer.errors import ConfigError
from dilocox_peer.manifest import MAX_MANIFEST_BYTES, Manifest

PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    # Learns readable structure of source code on two laptop cores in minutes; what `demo` trains.
    # Its recipe was measured (benchmarks/BENCHMARKS.md): short rounds of sparse contributions where the link allows it. The
    # larger ones keep AdamW and longer rounds until theirs is.
    "tiny": {
        "inner": {"optimizer": "muon", "learning_rate": 2.7e-2},
        "outer": {"learning_rate": 0.8, "momentum": 0.4},
        "rounds": {"total": 1600, "inner_steps": 8},
        "compression": {"codec": "topk"},
    },
    # 9.6 M parameters; `dilocox-peer plan` says for how long on which machines.
    "small": {
        "model": {"layers": 6, "hidden_size": 384, "heads": 6, "kv_heads": 2, "mlp_size": 1024, "context": 256},
        "inner": {"learning_rate": 1e-3, "micro_batch": 8},
        "rounds": {"total": 200, "inner_steps": 50, "min_inner_steps": 16},
        "compression": {"codec": "int4"},
    },
    # GPT-2's size in today's shape; one consumer GPU a peer.
    "125m": {
        "model": {
            "layers": 12, "hidden_size": 768, "heads": 12, "kv_heads": 4, "mlp_size": 2560, "context": 1024,
            "rope_theta": 500000.0,
        },
        "inner": {"learning_rate": 6e-4, "micro_batch": 8, "accumulate": 4, "warmup": 0.02},
        "rounds": {"total": 1000, "inner_steps": 100, "min_inner_steps": 32, "start_peers": 2},
        "compression": {"codec": "int4"},
        "data": {"source": "files"},
    },
    # The size of DiLoCoX's smaller experiment.
    "1.3b": {
        "model": {
            "layers": 24, "hidden_size": 2048, "heads": 16, "kv_heads": 4, "mlp_size": 5632, "context": 2048,
            "rope_theta": 500000.0,
        },
        "inner": {"learning_rate": 3e-4, "micro_batch": 4, "accumulate": 8, "warmup": 0.02},
        "rounds": {"total": 2000, "inner_steps": 125, "min_inner_steps": 32, "start_peers": 2},
        "compression": {"codec": "int4"},
        "data": {"source": "files"},
    },
}  # fmt: skip

PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "inner": {
        "learning_rate": 5e-5, "weight_decay": 0.01, "warmup": 0.05, "micro_batch": 1, "accumulate": 8,
    },
    "rounds": {"total": 100, "inner_steps": 20, "min_inner_steps": 8},
    "compression": {"codec": "int4"},
    "data": {"source": "files"},
}  # fmt: skip
"""Beside the model of a run that goes on from published weights: small steps, as they have been trained already."""


@dataclass(frozen=True, slots=True)
class PublishedPreset:
    """Of a run that goes on from a well-known model. hub: where it is downloaded from. layers, hidden_size: of its config.json, by
    which a folder is known for it."""

    hub: str
    layers: int
    hidden_size: int
    stages: int = 1
    context: int = 1024
    lora_rank: int | None = None

    @property
    def folder(self) -> str:
        """As a person would name it."""
        return self.hub.rpartition("/")[2]


PUBLISHED_PRESETS: Mapping[str, PublishedPreset] = {
    "smollm2-135m": PublishedPreset("HuggingFaceTB/SmolLM2-135M", layers=30, hidden_size=576),
    "qwen3-0.6b": PublishedPreset("Qwen/Qwen3-0.6B", layers=28, hidden_size=1024, stages=2),
    "llama3-1b": PublishedPreset("meta-llama/Llama-3.2-1B", layers=16, hidden_size=2048, stages=4),
    "llama3-8b-lora": PublishedPreset("meta-llama/Llama-3.1-8B", layers=32, hidden_size=4096, lora_rank=16),
}

_HEADER = """\
# The settings of a run: every peer of it must agree on them, so they are signed, and their hash is the run id.
# After a change:  dilocox-peer sign {name}
# To start:        dilocox-peer bootstrap {name}
"""


def preset(name: str, **overrides: Mapping[str, Any]) -> Manifest:
    """The unsigned manifest of a preset, with sections overridden: preset("tiny", rounds={"total": 8}).

    Raises ConfigError for a preset or a value that does not exist.
    """
    if name not in PRESETS:
        raise ConfigError(f"unknown preset {name!r}: choose one of {', '.join(PRESETS)}")
    sections: dict[str, dict[str, Any]] = {key: dict(values) for key, values in PRESETS[name].items()}
    for key, values in overrides.items():
        sections.setdefault(key, {}).update(values)
    return _validated(sections, f"preset {name}")


def published(model: Mapping[str, Any], *, stages: Mapping[str, Any], **overrides: Mapping[str, Any]) -> Manifest:
    """The unsigned manifest of a run of a published model. Raises ConfigError for a value that does not exist."""
    sections = {key: dict(values) for key, values in PUBLISHED.items()}
    for key, values in overrides.items():
        sections.setdefault(key, {}).update(values)
    return _validated({**sections, "model": dict(model), "stages": dict(stages)}, str(model.get("source")))


def to_toml(manifest: Manifest, *, file_name: str = "run.toml") -> str:
    """The commented file. `parse_toml` of it gives the manifest back."""
    lines = [_HEADER.format(name=file_name), f"format = {manifest.format}  # of this file"]
    for key, section in manifest:
        if not isinstance(section, BaseModel):
            continue
        fields = type(section).model_fields
        assignments = [f"{name} = {_literal(value)}" for name, value in section]
        width = max((len(each) for each in assignments if len(each) < 60), default=0)
        lines += ["", f"[{key}]"]
        for name, value in section:
            assignment = f"{name} = {_literal(value)}"
            comment = fields[name].description
            lines.append(f"{assignment:<{width}}  # {comment}" if comment else assignment)
    return "\n".join(lines) + "\n"


def parse_toml(text: str, *, source: str) -> Manifest:
    """The manifest in a run.toml's text; `source` names it in errors. Raises ConfigError."""
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # of a number with thousands of digits, of brackets in brackets
        raise ConfigError(f"{source} is not valid TOML: {error}") from None
    return _validated(document, source)


def read_manifest(path: Path) -> Manifest:
    """The manifest in the file, signed or not. Raises ConfigError naming the file, the field and the remedy."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_MANIFEST_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: `dilocox-peer init {path}` writes one") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a directory: name the run file in it, such as {path / 'run.toml'}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if len(raw) > MAX_MANIFEST_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_MANIFEST_BYTES} bytes: it is no run.toml")
    try:
        text = raw.decode("utf-8-sig")  # Windows' editors begin with a mark
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text: it is no run.toml") from None
    return parse_toml(text, source=str(path))


def read_signed_manifest(path: Path) -> Manifest:
    """The manifest in the file. Raises ConfigError also when it was not signed, or changed since."""
    manifest = read_manifest(path)
    if not manifest.owner.signature:
        raise ConfigError(f"{path} is not signed: run `dilocox-peer sign {path}`")
    if not manifest.is_signed:
        raise ConfigError(
            f"{path} was changed after it was signed: run `dilocox-peer sign {path}` with the owner's key"
        )
    return manifest


def defaulted_sections(manifest: Manifest) -> list[str]:
    """The sections in which the file it was read from left something out; the owner's is not theirs to write."""
    return [
        name
        for name, section in manifest
        if isinstance(section, BaseModel)
        and name != "owner"
        and section.model_fields_set < type(section).model_fields.keys()
    ]


def _validated(document: Mapping[str, Any], source: str) -> Manifest:
    try:
        return Manifest.model_validate(document)
    except ValidationError as error:
        raise ConfigError(f"{source}: {first_error(error)}") from None


def _literal(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        if '"' in value and "'" not in value and value.isprintable():
            return f"'{value}'"
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in escaped) + '"'
    if isinstance(value, tuple):
        return "[" + ", ".join(_literal(each) for each in value) + "]"
    return repr(value)
