"""Where `export` and `generate` take a model from: a live run, run folders on this disk, or an exported folder."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from dilocox_peer.cli.flags import SourceFlags
from dilocox_peer.cli.home import PeerHome, default_home, tokenizers_folder
from dilocox_peer.config import read_signed_manifest
from dilocox_peer.errors import ConfigError, StateCorrupt
from dilocox_peer.invitation import SCHEME, Invitation, parse_invitation
from dilocox_peer.manifest import Manifest

if TYPE_CHECKING:
    from dilocox_peer.data.tokenizer import Tokenizer
    from dilocox_peer.model.whole import WholeModel


@dataclass(frozen=True, slots=True)
class ModelSource:
    """One of the three: invitation: to a live run; exported: a folder that `export` wrote; folders: of one run, on this disk."""

    flags: SourceFlags
    invitation: Invitation | None = None
    exported: Path | None = None
    folders: tuple[Path, ...] = ()


def source_of(flags: SourceFlags, *, exported: Path | None = None) -> ModelSource:
    """The source that is meant; exported: a folder that was named. Needs no torch, whose import takes seconds. Raises ConfigError."""
    given = [
        name
        for name, value in (("LINK", flags.link), ("--model", exported), ("--run-folder", flags.run_folder))
        if value
    ]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)}: give one of them")
    if flags.link:
        if SCHEME not in flags.link.lower() and os.path.isdir(flags.link):
            raise ConfigError(
                f"{flags.link[:200]!r} is a folder, no {SCHEME} link: a peer's of a run is named with --run-folder, to `generate` an "
                "export with --model"
            )
        return ModelSource(flags, invitation=parse_invitation(flags.link))
    if exported is not None:
        return ModelSource(flags, exported=exported)
    folders = flags.run_folder or run_folders(flags)
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"--run-folder {folder} is no folder: pass one like HOME/peers/NAME/runs/RUN")
    return ModelSource(flags, folders=tuple(folders))


def load_model(source: ModelSource) -> "WholeModel":
    """The model, whole and verified. Remarks go to standard error. Raises ConfigError, RunUnreachable, StateCorrupt."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if source.invitation is not None:
        return _from_run(source.flags, source.invitation, console)
    if source.exported is not None:
        from dilocox_peer.model.huggingface import read_folder

        return read_folder(source.exported)
    return _from_disk(source.folders, source.flags.manifest, console)


def tokenizer_of(
    model: "WholeModel", flags: SourceFlags, *, given: Path | None, exported: Path | None = None
) -> "Tokenizer":
    """The tokenizer of the model's run: given, kept in --home, or in the exported folder. Raises ConfigError."""
    from dilocox_peer.data.tokenizer_files import find_tokenizer
    from dilocox_peer.model.weights import place_of

    kept = tokenizers_folder(flags.home)
    beside = place_of(model.section, exported)
    return find_tokenizer(model.origin.data, model.section.vocab_size, given=given, kept=kept, beside=beside)


def _from_run(flags: SourceFlags, invitation: Invitation, console: Console) -> "WholeModel":
    from dilocox_peer.cli.visit import READER, fetch_whole_model

    reader = PeerHome.at(flags.home, READER)

    def entered() -> None:
        if not console.is_terminal:  # where nothing turns while we wait
            typer.echo(f"waiting for a round of all stages ({flags.timeout:g} s at most)", err=True)

    with console.status(f"asking run {invitation.run_id[:12]}"):
        return asyncio.run(
            fetch_whole_model(
                invitation,
                timeout_s=flags.timeout,
                say=lambda line: console.print(line, style="dim", markup=False),
                reader=reader,
                entered=entered,
            )
        )


def _from_disk(folders: Sequence[Path], manifest_path: Path | None, console: Console) -> "WholeModel":
    from dilocox_peer.model.architecture import prepare
    from dilocox_peer.peer.state.anchors import load_from_disk

    manifest = manifest_for(folders, manifest_path)
    prepare(manifest)
    loaded = load_from_disk(folders, manifest)
    for remark in loaded.remarks:
        console.print(remark, style="yellow", markup=False)
    return loaded.model


def manifest_for(folders: Sequence[Path], manifest_path: Path | None) -> Manifest:
    """Given, or the one that lies in these folders of one run. Raises ConfigError."""
    if manifest_path is not None:
        return read_signed_manifest(manifest_path)
    from dilocox_peer.peer.state.anchors import kept_manifest

    kept: dict[str, Manifest] = {}
    damage: list[str] = []
    for folder in folders:
        try:
            if manifest := kept_manifest(folder):
                kept[manifest.run_id] = manifest
        except StateCorrupt as error:
            damage.append(str(error))
    if len(kept) > 1:
        raise ConfigError(f"the run folders are of {len(kept)} runs: give those of one")
    if not kept:
        why = damage[0] if damage else f"{folders[0]} does not hold the run's settings"
        raise ConfigError(f"{why}: pass --manifest run.toml, or the run's link")
    return next(iter(kept.values()))


def run_folders(flags: SourceFlags) -> tuple[Path, ...]:
    """Folders of the one run that the peers in home (or the one of that name) hold states of."""
    home = flags.home or default_home()
    if flags.name is not None:
        PeerHome.at(home, flags.name)  # or it is no name of a folder
    pattern = f"peers/{flags.name or '*'}/runs/*"
    folders = sorted(path for path in home.glob(pattern) if any(path.glob("stage*/checkpoints/anchor-*.safetensors")))
    if flags.manifest is not None:
        wanted = read_signed_manifest(flags.manifest).run_id[:16]
        folders = [folder for folder in folders if folder.name == wanted]
    if not folders:
        raise ConfigError(f"no checkpoint of a run in {home / pattern}: pass the run's link, --run-folder or --home")
    runs = {folder.name for folder in folders}
    if len(runs) > 1:
        raise ConfigError(f"{home} holds {len(runs)} runs ({', '.join(sorted(runs))}): choose with --run-folder")
    return tuple(folders)
