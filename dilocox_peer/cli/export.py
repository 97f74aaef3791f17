"""`export`: the agreed model as a Hugging Face folder that `transformers` loads."""

import typer

from dilocox_peer.cli.flags import ExportFlags
from dilocox_peer.cli.home import tokenizers_folder
from dilocox_peer.cli.source import load_model, tokenizer_of


def run_export(flags: ExportFlags) -> None:
    """Writes the folder, whole or not at all. Raises ConfigError, RunUnreachable, StateCorrupt."""
    from dilocox_peer.data.tokenizer_files import kept_files
    from dilocox_peer.model.huggingface import PublishedTokenizer, check_target, write_folder

    check_target(flags.out, force=flags.force)  # before anything is fetched
    model = load_model(flags.source)
    tokenizer = tokenizer_of(model, flags.source, given=flags.tokenizer)
    published = None
    if files := kept_files(tokenizers_folder(flags.source.home), tokenizer):
        published = PublishedTokenizer(files=files, data=model.origin.data, bos=tokenizer.bos, eos=tokenizer.eos)
    size_bytes = write_folder(flags.out, model, force=flags.force, tokenizer=published)
    origin = model.origin
    typer.echo(
        f"wrote {flags.out}: run {origin.run_name!r} after round {origin.round}, {model.num_parameters:,} parameters, "
        f"{size_bytes / 1e6:.1f} MB"
    )
    typer.echo(f'next: dilocox-peer generate "Once" --model {flags.out}')
