"""`init` and `sign`: writing run.toml whole or not at all."""

import errno
import os
import re
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import typer
from pydantic import ValidationError

from dilocox_peer.cli.expected import on_one_core
from dilocox_peer.cli.flags import AdmissionMode, InitFlags, SignFlags
from dilocox_peer.cli.home import owner_key_path, tokenizers_folder
from dilocox_peer.complaints import first_error
from dilocox_peer.config import PUBLISHED_PRESETS, defaulted_sections, read_manifest, to_toml
from dilocox_peer.config import preset as preset_manifest
from dilocox_peer.errors import ConfigError, not_written
from dilocox_peer.files import behind_links, replace_file, replace_together
from dilocox_peer.manifest import (
    BYTES,
    MAX_MANIFEST_BYTES,
    RUN_NAME,
    SHARDS,
    DataSection,
    Manifest,
    PublishedSection,
)
from dilocox_peer.model.partition import cut_into, idle_warning
from dilocox_peer.peer.identity import Identity

WRITABLE = "name a file in a folder that is there and that you may write"


@dataclass(frozen=True, slots=True)
class _Beside:
    """A tokenizer.json that goes with a run's file. given: where it comes from; told: what is said once it is there."""

    path: Path
    content: bytes
    given: Path
    told: str


def write_run_file(flags: InitFlags) -> None:
    """Writes the signed run.toml of a preset. Raises ConfigError; an existing file stays unless --force."""
    path = flags.path
    if path.is_dir():
        raise ConfigError(f"{path} is a directory: name a file in it, such as {path / 'run.toml'}")
    if flags.run_name is not None and not re.search(RUN_NAME, flags.run_name):
        raise ConfigError(f"--run-name {flags.run_name!r}: use letters, digits, . _ and -, at most 64")
    if path.exists() and not flags.force:
        raise ConfigError(f"{path} exists: pass --force to overwrite it, or another name")
    if flags.admission is AdmissionMode.LIST:
        raise ConfigError(f"--admission list: its members are written into {path}, under [admission]; then sign it")
    if flags.published is not None:
        from dilocox_peer.cli.published import needs_of, published_manifest, tokenizer_in

        manifest = published_manifest(flags, flags.published)
        for line in needs_of(manifest):
            typer.echo(line)
    else:
        manifest = _of_preset(flags)
    if flags.slices:  # every preset has a codec and a way to adapt that slices can have
        manifest = manifest.model_copy(update={"rounds": manifest.rounds.model_copy(update={"averaging": "slices"})})
    tokenizer = flags.tokenizer
    if tokenizer is None and flags.published is not None and flags.data is None:
        tokenizer = tokenizer_in(flags.published, manifest.model.vocab_size)
    if flags.packing is not None and flags.data is None:
        raise ConfigError(f"--packing {flags.packing.value}: it is of shards; pass --data with a folder of them")
    if flags.data_url and flags.data is None:
        raise ConfigError(
            f"--data-url {flags.data_url[:200]}: pass --data with the folder of the same shards, which names them"
        )
    beside: _Beside | None = None
    if flags.data is not None:
        manifest, beside = _with_shards(manifest, flags.data, path, flags)
    elif tokenizer is not None:
        manifest, beside = _with_tokenizer(manifest, tokenizer, path, flags)
    _sign_and_write(manifest, path, owner_key_path(flags.owner_key, flags.home), beside, flags.home)
    typer.echo(
        f"a peer of it takes {on_one_core(manifest).words()}; for your machines: dilocox-peer plan {path} --peers N --up MBIT"
    )
    typer.echo(f"next: dilocox-peer bootstrap {path}")


def _with_tokenizer(
    manifest: Manifest, given: Path, path: Path, flags: InitFlags, borders: tuple[str, str] | None = None
) -> tuple[Manifest, _Beside]:
    """The manifest of a run whose text this tokenizer.json cuts, and the copy of the file that goes beside the run's.
    borders: what stands before and behind each document of shards; None, of files: as the tokenizer's own folder says."""
    from dilocox_peer.data.tokenizer import FILE_NAME, JsonTokenizer
    from dilocox_peer.data.tokenizer_files import bounds_beside, read_tokenizer_file

    if path.name == FILE_NAME or behind_links(path) == behind_links(path.parent / FILE_NAME):
        raise ConfigError(f"{path}: the run's tokenizer lies beside its file under that name; call the file run.toml")
    content = read_tokenizer_file(given)
    bos, eos = borders or bounds_beside(given, content)
    tokenizer = JsonTokenizer(content, bos=bos, eos=eos, source=str(given))
    if isinstance(manifest.model, PublishedSection) and tokenizer.vocab_size > manifest.model.vocab_size:
        raise ConfigError(
            f"{given} has {tokenizer.vocab_size:,} tokens, the model's vocabulary {manifest.model.vocab_size:,}: it is another "
            "model's tokenizer"
        )
    copy = path.parent / FILE_NAME
    if copy.exists() and copy.read_bytes() != content and not flags.force:
        raise ConfigError(f"{copy} exists and is another: pass --force to overwrite it, or put {path.name} elsewhere")
    told = f"{bos or 'nothing'} before and {eos or 'nothing'} behind each document"
    needed = (
        "volunteers do not need it: the shards are tokens already"
        if borders is not None
        else "stage 0 needs this file: join it once with --tokenizer"
    )
    beside = _Beside(copy, content, given, f"wrote {copy}: {tokenizer.vocab_size:,} tokens, {told}; {needed}")
    model = manifest.model
    if tokenizer.vocab_size > model.vocab_size and not isinstance(model, PublishedSection):
        model = model.model_copy(update={"vocab_size": tokenizer.vocab_size})
    section = manifest.data.model_copy(update={"tokenizer": tokenizer.name, "bos": bos, "eos": eos})
    return manifest.model_copy(update={"model": model, "data": section}), beside


def _of_preset(flags: InitFlags) -> Manifest:
    for flag, value in (
        ("--context", flags.context), ("--revision", flags.revision), ("--lora-rank", flags.lora_rank),
        ("--lora-alpha", flags.lora_alpha), ("--lora-targets", flags.lora_targets), ("--base-dtype", flags.base_dtype),
    ):  # fmt: skip
        if value:
            raise ConfigError(f"{flag} belongs to a published model: pass it with --from")
    name = flags.preset or "tiny"
    if known := PUBLISHED_PRESETS.get(name):
        raise ConfigError(
            f"--preset {name} goes on from {known.hub}: download it (`hf download {known.hub} --local-dir {known.folder}`) and pass "
            f"--from {known.folder}"
        )
    manifest = preset_manifest(name, run={"name": flags.run_name or name}, admission={"mode": flags.admission.value})
    try:
        return cut_into(manifest, flags.stages or manifest.stages.count)
    except ValueError as error:
        raise ConfigError(f"--stages {flags.stages}: {error}; raise model.layers in a run.toml of your own") from None


def _with_shards(manifest: Manifest, folder: Path, path: Path, flags: InitFlags) -> tuple[Manifest, _Beside | None]:
    """The manifest of a run on the shards in a folder that `tokenize` wrote, with the tokenizer they were made by, which is to lie beside it."""
    from dilocox_peer.data.catalogue import read_catalogue
    from dilocox_peer.data.shards import sizes_of

    if flags.tokenizer is not None and flags.published is None:
        raise ConfigError(f"--tokenizer {flags.tokenizer}: the shards in {folder} name theirs; leave --tokenizer out")
    catalogue, name = read_catalogue(folder)
    if flags.published is not None:
        from dilocox_peer.cli.published import check_cut_by

        check_cut_by(flags.published, folder, catalogue.tokenizer, given=flags.tokenizer)
        if catalogue.vocab_size > manifest.model.vocab_size:
            raise ConfigError(
                f"the shards in {folder} have {catalogue.vocab_size:,} tokens, the model knows {manifest.model.vocab_size:,}: make them "
                "anew with its own tokenizer"
            )
    beside: _Beside | None = None
    if catalogue.tokenizer != BYTES:
        manifest, beside = _with_tokenizer(manifest, folder, path, flags, (catalogue.bos, catalogue.eos))
        if manifest.data.tokenizer != catalogue.tokenizer:
            raise ConfigError(f"{folder} holds another tokenizer.json than its shards were made by: make them anew")
    sizes = sizes_of(catalogue.train)
    typer.echo(f"trains on {sizes['tokens']:,} tokens of {sizes['documents']:,} documents, in {sizes['shards']} shards")
    packing = flags.packing.value if flags.packing is not None else manifest.data.packing
    if packing != "concatenate" and isinstance(manifest.model, PublishedSection):
        from dilocox_peer.model.families import sees_across

        if sees_across(manifest.model.config):
            typer.echo(
                f"note: the attention of {manifest.model.source} cannot be told where a document begins: those that are packed into "
                "one sequence see each other",
                err=True,
            )
    try:
        data = DataSection.model_validate(
            {
                **manifest.data.model_dump(),
                "source": SHARDS,
                "catalogue": name,
                "url": flags.data_url,
                "packing": packing,
            }
        )
    except ValidationError as error:
        raise ConfigError(
            f"--data-url {flags.data_url[:200]}: {first_error(error)}; give https://HOST/FOLDER"
        ) from None
    return manifest.model_copy(update={"data": data}), beside


def sign_run_file(flags: SignFlags) -> None:
    """Signs path again, in place. The settings stay, those left out are filled in; comments of the reader's own go."""
    manifest = read_manifest(flags.path)
    _sign_and_write(manifest, flags.path, owner_key_path(flags.owner_key, flags.home))
    if sections := defaulted_sections(manifest):
        typer.echo(f"note: filled in with defaults what {flags.path} left out of {', '.join(sections)}", err=True)


def _sign_and_write(
    manifest: Manifest, path: Path, key_path: Path, beside: _Beside | None = None, home: Path | None = None
) -> None:
    try:
        key_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        reason = f"{key_path.parent} cannot be made: {error.strerror}"
        raise ConfigError(f"{reason}; pass another --home or --owner-key") from None
    with Identity.open(key_path, flag="--owner-key") as owner:
        signed = manifest.signed_by(owner.key)
    content = to_toml(signed, file_name=path.name).encode()
    if max(len(content), len(signed.to_bytes())) > MAX_MANIFEST_BYTES:
        raise ConfigError(
            f"the run's settings take {max(len(content), len(signed.to_bytes())):,} bytes, peers read {MAX_MANIFEST_BYTES:,}: use fewer "
            "stages or a model with a shorter config.json"
        )
    if beside is None:
        write_whole(path, content)
    else:
        _write_both(path, content, beside, home)
        typer.echo(beside.told)
    if warning := idle_warning(signed):
        typer.echo(f"note: {warning}", err=True)
    typer.echo(f"wrote {path}: run {signed.run.name!r}, id {signed.run_id[:16]}, signed with {key_path}")


def _write_both(path: Path, content: bytes, beside: _Beside, home: Path | None) -> None:
    """Both or neither: an older run's file would be left with another tokenizer beside it. Raises ConfigError, DiskTakesNothing."""
    from dilocox_peer.data.tokenizer_files import keep_tokenizer

    keep_tokenizer(tokenizers_folder(home), beside.given)
    # The name of a device or a pipe is to stay.
    if _standard(path) is not None or (path.exists() and not path.is_file()):
        write_whole(beside.path, beside.content)
        write_whole(path, content)
        return
    try:
        replace_together({behind_links(beside.path): beside.content, behind_links(path): content})
    except OSError as error:
        raise not_written(f"{path} cannot be written", error, WRITABLE) from None


def write_whole(path: Path, content: bytes) -> None:
    """The file is the old one or the new one, never a part, and a link to it stays one; a device or a pipe takes it as it comes, and so does
    standard output under a name such as /dev/stdout. Raises ConfigError, DiskTakesNothing."""
    try:
        if (number := _standard(path)) is not None:
            sys.stdout.flush()
            with open(number, "wb", closefd=False) as stream:
                stream.write(content)
        elif path.is_char_device() or path.is_fifo():
            path.write_bytes(content)
        else:
            replace_file(behind_links(path), [content])
    except OSError as error:
        raise not_written(f"{path} cannot be written", error, WRITABLE) from None


def check_writable(path: Path, flag: str) -> None:
    """Makes its folder and finds out whether `write_whole` could write it, without touching what is there. Raises ConfigError that
    names the flag."""
    if path.is_dir():
        raise ConfigError(f"{flag} {path} is a directory: name a file in it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if _standard(path) is not None:
            return
        if not path.exists() or path.is_file():
            tempfile.TemporaryFile(dir=behind_links(path).parent).close()  # it is written beside and takes its place
        elif not (path.is_char_device() or path.is_fifo()) or not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(
            f"{flag} {path} cannot be written ({reason}): name a file in a folder that you may write"
        ) from None


def _standard(path: Path) -> int | None:
    """The descriptor of standard output or error that path is another name of."""
    for number in (1, 2):
        with suppress(OSError):
            if os.path.samestat(path.stat(), os.fstat(number)):
                return number
    return None
