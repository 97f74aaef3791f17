"""`init --from`: the manifest of a run that goes on from published weights, or from an export of an earlier run."""

from pathlib import Path

import typer

from dilocox_peer.cli.flags import InitFlags
from dilocox_peer.config import published
from dilocox_peer.errors import ConfigError
from dilocox_peer.manifest import NUM_BYTES, Manifest

USUAL_CONTEXT = 1024
_MAX_RUN_NAME = 64


def published_manifest(flags: InitFlags, path: Path) -> Manifest:
    """Reads all of the folder once, for its hashes. Raises ConfigError that names what is wrong and the remedy."""
    from dilocox_peer.model.architecture import LayerRange
    from dilocox_peer.model.families import check_cut
    from dilocox_peer.model.partition import choose_cut, usual_window
    from dilocox_peer.model.published import costs_of_design, design_from, design_layout
    from dilocox_peer.model.weights import open_folder
    from dilocox_peer.peer.training.outer import first_state
    from dilocox_peer.types import Digest

    if flags.preset is not None:
        raise ConfigError(
            f"--preset {flags.preset} and --from {path}: a published model brings its own sizes; leave one out"
        )
    folder = open_folder(path)
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
    genesis, parameters, first = [], 0, 0
    for blocks in cut:
        last = first + blocks - 1
        layers = LayerRange(first, last, is_first_stage=first == 0, is_last_stage=last == num_layers - 1)
        layout = design_layout(design, layers)
        anchor_N = folder.stage_parameters(design, layout)
        genesis.append(first_state(layout, anchor_N, head=Digest(bytes(32))).digest.hex())
        parameters += layout.num_elements
        first = last + 1
    if design.family.is_tied and count > 1:
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
        "source": _source_of(path.resolve()),
        "revision": flags.revision,
        "layers": num_layers,
        "hidden_size": int(design.config.hidden_size),
        "context": context,
        "vocab_size": int(design.config.vocab_size),
        "dtype": folder.precision,
        "layout": whole.digest().hex(),
        "genesis": genesis,
        "files": [str(file) for file in folder.files],
        "config": folder.config_json,
    }
    name = flags.run_name or "".join(each if each.isalnum() or each in "._-" else "-" for each in path.resolve().name)
    inner = {"accumulate": usual_window(count)} if count > 1 else {}
    return published(
        model,
        stages={"count": count, "blocks": list(cut)},
        run={"name": name[:_MAX_RUN_NAME] or "published"},
        admission={"mode": flags.admission.value},
        inner=inner,
    )


def _source_of(path: Path) -> str:
    """The folder as the manifest names it, which strangers read: under the home directory without whose that is."""
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


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


def _longest(config_json: str) -> int | None:
    """Tokens that the model's positions reach; None: its config does not say."""
    from dilocox_peer.model.families import config_from

    found = getattr(config_from(config_json), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None
