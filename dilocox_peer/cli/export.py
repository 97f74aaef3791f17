"""`export`: the agreed model as a Hugging Face folder that `transformers` loads."""

from pathlib import Path

import typer

from dilocox_peer.cli.source import SourceRequest, load_model


def run_export(out: Path, source: SourceRequest, *, force: bool) -> None:
    """Writes the folder, whole or not at all. Raises ConfigError, RunUnreachable, StateCorrupt."""
    from dilocox_peer.model.huggingface import check_target, write_folder

    check_target(out, force=force)  # before anything is fetched
    model = load_model(source)
    size_bytes = write_folder(out, model, force=force)
    origin = model.origin
    typer.echo(
        f"wrote {out}: run {origin.run_name!r} after round {origin.round}, {model.num_parameters:,} parameters, "
        f"{size_bytes / 1e6:.1f} MB"
    )
    typer.echo(f'next: dilocox-peer generate "Once" --model {out}')
