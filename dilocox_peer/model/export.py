"""What goes into the folder of an exported published model: the source's own files, the weights, a card.

Config and tokenizer are the source's, byte for byte; config.json is changed in what has changed: the head of a tied model
that was trained in several stages is a matrix of its own, and weights may have another precision. The weights have the names
and shapes in which their family is published, in shards of at most SHARD_BYTES with an index.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dilocox_peer import __version__
from dilocox_peer.errors import ConfigError
from dilocox_peer.manifest import PublishedSection
from dilocox_peer.model.adapters import write_peft
from dilocox_peer.model.published import Design, design_of, lora_of
from dilocox_peer.model.source_tokenizer import files_of_another
from dilocox_peer.model.weights import CONFIG, INDEX, WEIGHTS, Precision, published_tensors
from dilocox_peer.model.whole import Origin, WholeModel, tensor_over

CARD = "README.md"
SHARD_BYTES = 4_500_000_000
_MAX_LISTED = 200  # contributors in the card

_TORCH: Mapping[Precision, torch.dtype] = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
}  # fmt: skip


def write_published(
    folder: Path,
    model: WholeModel,
    section: PublishedSection,
    *,
    beside: Mapping[str, bytes],
    precision: Precision,
    mark: Mapping[str, str],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Fills the folder, which is empty. beside: the source's small files by name, as far as they are here. mark: for the header of
    every shard, beside where the model comes from."""
    design = design_of(section)
    tensors = {name: tensor_over(tensor) for name, tensor in model.tensors.items()}
    metadata = {**model.origin.metadata, **mark}
    _write_weights(folder, published_tensors(design, tensors), metadata, precision, shard_bytes)
    for name, content in beside.items():
        if name != CONFIG:
            (folder / name).write_bytes(content)
    (folder / CONFIG).write_bytes(_config(section, design, beside.get(CONFIG), precision))
    (folder / CARD).write_text(_card(model, section, design, beside, precision), encoding="utf-8")


def _write_weights(
    folder: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str], precision: Precision, shard_bytes: int
) -> None:
    dtype = _TORCH[precision]
    shards = list(_shards(tensors, shard_bytes, dtype.itemsize))
    weight_map, total = {}, 0
    for number, names in enumerate(shards, 1):
        file = WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        part = {name: tensors[name].to(dtype).contiguous() for name in names}
        if beyond := [name for name in names if not part[name].isfinite().all() and tensors[name].isfinite().all()]:
            raise ConfigError(
                f"--dtype {precision}: {beyond[0]} has values that it cannot hold; take bfloat16 or float32"
            )
        save_file(part, folder / file, metadata)
        weight_map.update(dict.fromkeys(names, file))
        total += sum(tensor.nbytes for tensor in part.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(tensors: Mapping[str, Tensor], shard_bytes: int, itemsize: int) -> Iterator[list[str]]:
    names: list[str] = []
    size_bytes = 0
    for name, tensor in tensors.items():
        if names and size_bytes + tensor.numel() * itemsize > shard_bytes:
            yield names
            names, size_bytes = [], 0
        names.append(name)
        size_bytes += tensor.numel() * itemsize
    yield names


def _config(section: PublishedSection, design: Design, verbatim: bytes | None, precision: Precision) -> bytes:
    values = json.loads(section.config)
    changes: dict[str, Any] = {}
    if design.family.is_tied and not design.is_tied:
        changes["tie_word_embeddings"] = False
    for name in ("dtype", "torch_dtype"):
        if values.get(name) not in (None, precision):
            changes[name] = precision
    if not changes and verbatim is not None:
        return verbatim
    return (json.dumps({**values, **changes}, indent=2, sort_keys=True) + "\n").encode()


def _card(
    model: WholeModel, section: PublishedSection, design: Design, beside: Mapping[str, bytes], precision: Precision
) -> str:
    origin = model.origin
    source = section.source + (f", revision {section.revision}" if section.revision else "")
    lines = [
        "---",
        "library_name: transformers",
        "tags: [dilocox-peer]",
        "---",
        f"# {origin.run_name}",
        "",
        f"A {design.family.class_name} of {model.num_parameters:,} parameters, trained further by volunteers over the internet with "
        f"dilocox-peer {__version__}.",
        "",
        "| | |",
        "|---|---|",
        f"| began with | {source} |",
        f"| run (hash of its signed manifest) | `{origin.run_id}` |",
        f"| after round | {origin.round} |",
        *(f"| chain of stage {stage} ends at | `{head}` |" for stage, head in enumerate(origin.heads)),
        f"| weights | {precision}; trained in float32 |",
        *([f"| trained | {origin.adapters} |"] if origin.adapters else []),
        "",
    ]
    if design.family.is_tied and not design.is_tied:
        lines += [
            f"Embedding and head were one matrix in the source. In {len(section.genesis)} stages they were trained as two, so "
            "`tie_word_embeddings` is false here.",
            "",
        ]
    if others := files_of_another(section, origin.data.tokenizer):
        lines += [
            f"Trained on the tokens of another tokenizer than the source's, whose {', '.join(sorted(others))} do not belong here.",
            "",
        ]
    known = {CONFIG, *beside, *others}
    if missing := [file.name for file in section.small_files if file.name not in known]:
        lines += [f"Not on the machine that exported it: {', '.join(missing)}. Take them from the source.", ""]
    return "\n".join([*lines, *_contributors(origin)])


def _contributors(origin: Origin) -> list[str]:
    lines: list[str] = []
    if origin.contributors:
        lines += [
            "Contributors, by micro-batches that certificates count:",
            "",
            "| peer | micro-batches |",
            "|---|---|",
        ]
        lines += [f"| `{peer}` | {count:,} |" for peer, count in origin.contributors[:_MAX_LISTED]]
        if len(origin.contributors) > _MAX_LISTED:
            lines.append(f"| {len(origin.contributors) - _MAX_LISTED} others | |")
        lines.append("")
    return lines


def write_adapter(folder: Path, model: WholeModel, section: PublishedSection, *, mark: Mapping[str, str]) -> None:
    """Fills the folder, which is empty, with the run's adapters as the library peft loads them. mark: as in write_published."""
    lora = lora_of(section)
    assert lora is not None, "a run of adapters"
    source = section.source.rpartition("/")[2] if section.source.startswith(("/", "~")) else section.source
    tensors = {name: tensor_over(tensor) for name, tensor in model.tensors.items()}
    write_peft(folder, lora, source, tensors, {**model.origin.metadata, **mark})
    origin = model.origin
    lines = [
        "---",
        "library_name: peft",
        "tags: [dilocox-peer, lora]",
        "---",
        f"# {origin.run_name}",
        "",
        f"Adapters of rank {lora.rank} for {source}: {model.num_parameters:,} parameters, trained by volunteers over the internet "
        f"with dilocox-peer {__version__}.",
        "",
        "| | |",
        "|---|---|",
        f"| run (hash of its signed manifest) | `{origin.run_id}` |",
        f"| after round | {origin.round} |",
        *(f"| chain of stage {stage} ends at | `{head}` |" for stage, head in enumerate(origin.heads)),
        "",
        *_contributors(origin),
    ]
    (folder / CARD).write_text("\n".join(lines), encoding="utf-8")
