"""`init --from`: the manifest of a run that goes on from published weights, or from an export of an earlier run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import typer

from dilocox_peer.cli.flags import InitFlags
from dilocox_peer.config import PUBLISHED_PRESETS, published
from dilocox_peer.errors import ConfigError
from dilocox_peer.manifest import BYTES, NUM_BYTES, Manifest
from dilocox_peer.paths import with_tilde

if TYPE_CHECKING:
    from dilocox_peer.model.adapters import Lora
    from dilocox_peer.model.architecture import LayerRange
    from dilocox_peer.model.published import Design
    from dilocox_peer.model.weights import ModelFolder

USUAL_CONTEXT = 1024
LORA_LEARNING_RATE = 2e-4  # adapters begin at zero, and take larger steps than trained weights
_MAX_RUN_NAME = 64


def published_manifest(flags: InitFlags, path: Path) -> Manifest:
    """Reads all of the folder once, for its hashes. Raises ConfigError that names what is wrong and the remedy."""
    from dilocox_peer.model.architecture import LayerRange
    from dilocox_peer.model.families import check_cut, library
    from dilocox_peer.model.partition import choose_cut, usual_window
    from dilocox_peer.model.published import (
        costs_of_design,
        design_from,
        design_layout,
    )
    from dilocox_peer.model.weights import open_folder

    if flags.preset is not None and flags.preset not in PUBLISHED_PRESETS:
        raise ConfigError(
            f"--preset {flags.preset} and --from {path}: a published model brings its own sizes; leave one out"
        )
    folder = open_folder(path)
    if flags.preset is not None:
        flags = _with_preset(flags, flags.preset, folder.config_json)
    check_cut(folder.config_json)
    count = flags.stages or 1
    most = _longest(folder.config_json)
    context = flags.context or min(most or USUAL_CONTEXT, USUAL_CONTEXT)
    if most is not None and context > most:
        raise ConfigError(f"--context {context}: the model's sequences have at most {most} tokens")
    design = design_from(folder.config_json, num_stages=count, context=context)
    try:
        cut = choose_cut(costs_of_design(design), count)
    except ValueError as error:
        raise ConfigError(f"--stages {count}: {error}") from None
    num_layers = sum(cut)
    typer.echo(f"reading {path}: {design.config.model_type}, {num_layers} layers, {folder.precision}", err=True)
    ranges = [LayerRange(first, last, first == 0, last == num_layers - 1) for first, last in _spans(cut)]
    lora = _lora(flags, folder, design)
    trained = replace(design, lora=lora)
    begun = [_begun(folder, trained, layers, flags.path.parent) for layers in ranges]
    parameters = sum(each.num_parameters for each in begun)
    if lora is not None:
        typer.echo(
            f"adapters of rank {lora.rank} on {', '.join(lora.targets)}: {parameters / 1e6:.2f} M parameters are trained",
            err=True,
        )
    elif design.family.is_tied and count > 1:
        size = int(design.config.vocab_size) * int(design.config.hidden_size)
        typer.echo(
            f"note: embedding and head are one matrix in this model; over {count} stages they are two that begin equal: "
            f"{parameters / 1e6:.1f} M parameters instead of {(parameters - size) / 1e6:.1f} M, and the export says so",
            err=True,
        )
    if unused := folder.unused(design):
        typer.echo(f"note: {len(unused)} tensors of the folder are not used, {unused[0]} among them", err=True)
    whole = design_layout(design, LayerRange(0, num_layers - 1, is_first_stage=True, is_last_stage=True))
    model = {
        "architecture": "transformers",
        # Strangers read it: under the home folder it is without whose that is.
        "source": with_tilde(path.resolve()),
        "revision": flags.revision,
        "layers": num_layers,
        "hidden_size": int(design.config.hidden_size),
        "context": context,
        "vocab_size": int(design.config.vocab_size),
        "dtype": folder.precision,
        "layout": whole.digest().hex(),
        "genesis": [each.genesis for each in begun],
        "files": [str(file) for file in folder.files],
        **_lora_fields(lora, [each.base for each in begun]),
        "library": library().__version__,
        "canary": [number for each in begun for number in each.canary],
        "config": folder.config_json,
    }
    name = flags.run_name or "".join(each if each.isalnum() or each in "._-" else "-" for each in path.resolve().name)
    inner: dict[str, Any] = {"accumulate": usual_window(count)} if count > 1 else {}
    if lora is not None:
        inner["learning_rate"] = LORA_LEARNING_RATE
    return published(
        model,
        stages={"count": count, "blocks": list(cut)},
        run={"name": name[:_MAX_RUN_NAME] or "published"},
        admission={"mode": flags.admission.value},
        inner=inner,
    )


def _with_preset(flags: InitFlags, name: str, config_json: str) -> InitFlags:
    """The flags with what the preset says where they say nothing. Raises ConfigError for a folder with another model."""
    from dilocox_peer.model.families import config_from

    wanted, config = PUBLISHED_PRESETS[name], config_from(config_json)
    if (config.num_hidden_layers, config.hidden_size) != (wanted.layers, wanted.hidden_size):
        raise ConfigError(
            f"--from {flags.published} holds {config.num_hidden_layers} layers of width {config.hidden_size}, --preset {name} is "
            f"{wanted.hub} with {wanted.layers} of {wanted.hidden_size}: name its folder, or leave --preset out"
        )
    return replace(
        flags,
        stages=flags.stages or wanted.stages,
        context=flags.context or wanted.context,
        lora_rank=flags.lora_rank or wanted.lora_rank,
        run_name=flags.run_name or name,
        preset=None,
    )


def needs_of(manifest: Manifest) -> list[str]:
    """A line for each stage: what a peer of it needs."""
    from dilocox_peer.model.memory import StageSize, size

    lines = []
    for stage in range(manifest.stages.count):
        found = StageSize.of(manifest, stage)
        beside = f" beside {size(found.frozen_bytes)} that stay" if found.frozen_bytes else ""
        lines.append(
            f"stage {stage}: {found.parameters / 1e6:,.1f} M parameters{beside}; a peer needs {size(found.host_bytes(checkpointing=True))} "
            f"of memory, or {size(found.device_bytes(checkpointing=True))} on a card and {size(found.host_bytes(on_cpu=False))} in the "
            "machine"
        )
    return lines


@dataclass(frozen=True, slots=True)
class _Begun:
    """What a manifest says of a stage's first weights. base: of a run of adapters, the hash of the others; else empty."""

    num_parameters: int
    genesis: str
    base: str
    canary: tuple[float, ...]


def _begun(folder: "ModelFolder", design: "Design", layers: "LayerRange", room: Path) -> _Begun:
    """room: a folder where what a stage of adapters keeps beside them can lie meanwhile. Raises ConfigError."""
    import torch

    from dilocox_peer.model.adapters import first_adapters
    from dilocox_peer.model.canary import canary
    from dilocox_peer.model.frozen import FrozenBase, read_base
    from dilocox_peer.model.published import PublishedStage, design_layout, frozen_design_layout
    from dilocox_peer.peer.training.outer import first_state
    from dilocox_peer.types import Digest

    base, frozen = "", None
    try:
        with TemporaryDirectory(dir=room, prefix=".init.") as scratch:
            if design.lora is not None:
                file, kept = Path(scratch) / "base", frozen_design_layout(design, layers)
                with file.open("wb") as out:
                    base = read_base(folder, design, kept, out.write).hex()
                frozen = FrozenBase.open(file, kept).tensors()
            else:
                layout = design_layout(design, layers)
                folder.check_shapes(design, {spec.name: spec.shape for spec in layout.tensors})
            stage = PublishedStage(design, layers, frozen=frozen)
            if design.lora is None:
                folder.stage_parameters(design, stage.layout, into=stage.flat_N)
            else:
                with torch.no_grad():
                    stage.flat_N.copy_(first_adapters(stage.layout))
            numbers = canary(stage, int(design.config.hidden_size))
    except OSError as error:
        raise ConfigError(f"{room} cannot be used: {(error.strerror or str(error)).lower()}") from None
    state = first_state(stage.layout, stage.flat_N.detach(), head=Digest(bytes(32)))
    return _Begun(stage.layout.num_elements, state.digest.hex(), base, numbers)


def _spans(cut: Sequence[int]) -> list[tuple[int, int]]:
    """(first, last) layer of each stage."""
    ends = list(accumulate(cut))
    return [(end - blocks, end - 1) for end, blocks in zip(ends, cut, strict=True)]


def _lora(flags: InitFlags, folder: "ModelFolder", design: "Design") -> "Lora | None":
    """The adapters that the flags ask for. Raises ConfigError."""
    from dilocox_peer.model.adapters import Lora, linear_names
    from dilocox_peer.model.families import build_empty

    if flags.lora_rank is None:
        for flag, value in (
            ("--lora-alpha", flags.lora_alpha), ("--lora-targets", flags.lora_targets), ("--base-dtype", flags.base_dtype)
        ):  # fmt: skip
            if value:
                raise ConfigError(f"{flag} is of a run of adapters: pass --lora-rank with it")
        return None
    names = linear_names(build_empty(design.config), design.family.layers)
    if not names:
        raise ConfigError(f"--lora-rank: the layers of {design.config.model_type} have no linear layers to adapt")
    base = "bfloat16" if folder.precision == "bfloat16" else "float32"
    if flags.base_dtype is not None:
        base = flags.base_dtype.value
    alpha = flags.lora_alpha if flags.lora_alpha is not None else 2.0 * flags.lora_rank
    return Lora(
        flags.lora_rank, alpha, flags.lora_targets or tuple(names), "bfloat16" if base == "bfloat16" else "float32"
    )


def _lora_fields(lora: "Lora | None", base: Sequence[str]) -> dict[str, Any]:
    if lora is None:
        return {}
    return {
        "lora_rank": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_targets": list(lora.targets),
        "base_dtype": lora.base,
        "base": list(base),
    }


def tokenizer_in(folder: Path, vocab_size: int) -> Path | None:
    """The folder where it holds a tokenizer.json; None for a model of bytes. Raises ConfigError for neither."""
    if (folder / "tokenizer.json").is_file():
        return folder
    if vocab_size < NUM_BYTES:
        raise ConfigError(
            f"{folder} holds no tokenizer.json, and {vocab_size} tokens are too few for bytes: pass --tokenizer"
        )
    typer.echo(
        f"note: {folder} holds no tokenizer.json: the run's tokens are bytes; --tokenizer names another", err=True
    )
    return None


def check_cut_by(model: Path, shards: Path, tokenizer: str, *, given: Path | None) -> None:
    """Raises ConfigError where a folder's model was trained on other tokens than those of these shards, unless --tokenizer names what cut them.
    tokenizer: as their catalogue has it."""
    from dilocox_peer.data.tokenizer import FILE_NAME
    from dilocox_peer.data.tokenizer_files import read_tokenizer_file
    from dilocox_peer.model.source_tokenizer import is_of
    from dilocox_peer.types import sha256

    if given is not None:
        if not is_of(sha256(read_tokenizer_file(given)), tokenizer):
            raise ConfigError(
                f"--tokenizer {given}: the shards in {shards} were cut by another, or by none: make them anew with "
                f"`dilocox-peer tokenize FILES --out {shards} --tokenizer {given} --force`"
            )
    elif not (model / FILE_NAME).is_file():
        typer.echo(
            f"note: {model} holds no {FILE_NAME}: whether the shards in {shards} are of the model's tokens cannot be told",
            err=True,
        )
    elif not is_of(sha256(read_tokenizer_file(model)), tokenizer):
        by = "by none (their tokens are bytes)" if tokenizer == BYTES else "by another"
        meant = "" if tokenizer == BYTES else f", or pass --tokenizer {shards} where another is meant"
        raise ConfigError(
            f"the shards in {shards} were not cut by the tokenizer of {model}, but {by}: make them anew with `dilocox-peer tokenize FILES "
            f"--out {shards} --tokenizer {model} --force`{meant}"
        )


def _longest(config_json: str) -> int | None:
    """Tokens that the model's positions reach; None: its config does not say."""
    from dilocox_peer.model.families import config_from

    found = getattr(config_from(config_json), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None
