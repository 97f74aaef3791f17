"""`export`: the agreed model as a Hugging Face folder that `transformers` loads."""

import typer

from dilocox_peer.cli.flags import ExportFlags
from dilocox_peer.cli.source import load_model


def run_export(flags: ExportFlags) -> None:
    """Writes the folder, whole or not at all. Raises ConfigError, RunUnreachable, StateCorrupt."""
    from dilocox_peer.model.huggingface import check_target, write_folder

    check_target(flags.out, force=flags.force)  # before anything is fetched
    model = load_model(flags.source)
    size_bytes = write_folder(flags.out, model, force=flags.force)
    origin = model.origin
    typer.echo(
        f"wrote {flags.out}: run {origin.run_name!r} after round {origin.round}, {model.num_parameters:,} parameters, "
        f"{size_bytes / 1e6:.1f} MB"
    )
    typer.echo(f'next: dilocox-peer generate "Once" --model {flags.out}')
