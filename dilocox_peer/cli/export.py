"""`export`: the agreed model as a Hugging Face folder that `transformers` loads."""

from typing import TYPE_CHECKING

import typer

from dilocox_peer.cli.flags import ExportFlags, WeightType
from dilocox_peer.cli.home import tokenizers_folder
from dilocox_peer.cli.source import load_model, source_of, tokenizer_of
from dilocox_peer.errors import ConfigError
from dilocox_peer.manifest import PublishedSection

if TYPE_CHECKING:
    from dilocox_peer.model.weights import Precision
    from dilocox_peer.model.whole import WholeModel

PRECISIONS: "dict[WeightType, Precision]" = {
    WeightType.FLOAT32: "float32",
    WeightType.BFLOAT16: "bfloat16",
    WeightType.FLOAT16: "float16",
}


def run_export(flags: ExportFlags) -> None:
    """Writes the folder, whole or not at all. Raises ConfigError, RunUnreachable, StateCorrupt."""
    source = source_of(flags.source)
    from dilocox_peer.data.tokenizer import FILE_NAME
    from dilocox_peer.data.tokenizer_files import kept_files
    from dilocox_peer.model.huggingface import PublishedTokenizer, check_target, write_folder
    from dilocox_peer.model.merging import merge

    check_target(flags.out, force=flags.force)  # before anything is fetched
    model = load_model(source)
    if flags.adapter and not (isinstance(model.section, PublishedSection) and model.section.lora_rank):
        raise ConfigError("--adapter: this run trains all parameters, it has no adapters; leave --adapter out")
    if flags.dtype not in (None, WeightType.FLOAT32):
        if flags.adapter:
            raise ConfigError(f"--dtype {flags.dtype.value}: adapters are written in float32; leave --dtype out")
        if not isinstance(model.section, PublishedSection):
            raise ConfigError(
                f"--dtype {flags.dtype.value}: this run's model starts from a seed, its weights are float32; leave --dtype out"
            )
    beside = _beside(model, flags)
    published = None
    tokenizer = None if FILE_NAME in beside else tokenizer_of(model, flags.source, given=flags.tokenizer)
    if tokenizer is not None and (files := kept_files(tokenizers_folder(flags.source.home), tokenizer)):
        beside = {**files, **beside}
        published = PublishedTokenizer(files=files, data=model.origin.data, bos=tokenizer.bos, eos=tokenizer.eos)
    if not flags.adapter:
        model = merge(model, flags.model)
    precision: Precision | None = None if flags.dtype is None else PRECISIONS[flags.dtype]
    size_bytes = write_folder(
        flags.out, model, force=flags.force, tokenizer=published, beside=beside, precision=precision
    )
    origin = model.origin
    typer.echo(
        f"wrote {flags.out}: run {origin.run_name!r} after round {origin.round}, {model.num_parameters:,} parameters, "
        f"{size_bytes / 1e6:.1f} MB"
    )
    if flags.adapter:
        typer.echo(f"next: peft.PeftModel.from_pretrained(MODEL, {str(flags.out)!r})")
    elif isinstance(model.section, PublishedSection):
        typer.echo(f"next: transformers.AutoModelForCausalLM.from_pretrained({str(flags.out)!r})")
    else:
        typer.echo(f'next: dilocox-peer generate "Once" --model {flags.out}')


def _beside(model: "WholeModel", flags: ExportFlags) -> dict[str, bytes]:
    """The published model's small files that are on this machine, each the one that the run's manifest names, without those of a
    tokenizer that is not the run's. Raises ConfigError when it would be written over."""
    from dilocox_peer.model.source_tokenizer import files_of_another
    from dilocox_peer.model.weights import open_folder, place_of

    section, given = model.section, flags.model
    if not isinstance(section, PublishedSection):
        if given is not None:
            raise ConfigError(f"--model {given}: this run's model starts from a seed; leave --model out")
        return {}
    if (place := place_of(section, given)) is None:
        return {}
    if flags.out.resolve() == place.resolve():
        raise ConfigError(f"--out {flags.out} is the model that the run began with: pass another --out")
    folder = open_folder(place)
    same = set(section.small_files).intersection(folder.files)
    if given is not None and not same:
        raise ConfigError(f"--model {given}: none of its files is of the run's model: take {section.source}")
    others = files_of_another(section, model.origin.data.tokenizer)
    return {
        file.name: folder.read_small(file.name) for file in folder.files if file in same and file.name not in others
    }
