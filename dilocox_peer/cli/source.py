"""Where `export` and `generate` take a model from: a live run, run folders on this disk, or an exported folder."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from dilocox_peer.cli.home import PeerHome, default_home
from dilocox_peer.config import read_signed_manifest
from dilocox_peer.errors import ConfigError, StateCorrupt
from dilocox_peer.invitation import parse_invitation
from dilocox_peer.manifest import Manifest

if TYPE_CHECKING:
    from dilocox_peer.model.whole import WholeModel


@dataclass(frozen=True, slots=True)
class SourceRequest:
    """The flags, as given: at most one of link, model and run_folders; none means the runs in `home`."""

    link: str | None = None
    model: Path | None = None
    run_folders: tuple[Path, ...] = ()
    home: Path | None = None
    name: str | None = None
    manifest: Path | None = None
    timeout_s: float = 120.0


def load_model(request: SourceRequest) -> "WholeModel":
    """The model, whole and verified. Remarks go to standard error. Raises ConfigError, RunUnreachable, StateCorrupt."""
    given = [
        name
        for name, value in (("LINK", request.link), ("--model", request.model), ("--run-folder", request.run_folders))
        if value
    ]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)}: give one of them")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if request.link:
        return _from_run(request, request.link, console)
    if request.model is not None:
        from dilocox_peer.model.huggingface import read_folder

        return read_folder(request.model)
    folders = request.run_folders or _run_folders(request)
    return _from_disk(folders, request.manifest, console)


def _from_run(request: SourceRequest, link: str, console: Console) -> "WholeModel":
    invitation = parse_invitation(link)
    from dilocox_peer.cli.visit import READER, fetch_whole_model

    reader = PeerHome.at(request.home, READER, None)

    with console.status(f"asking run {invitation.run_id[:12]}"):
        return asyncio.run(
            fetch_whole_model(
                invitation,
                timeout_s=request.timeout_s,
                say=lambda line: console.print(line, style="dim", markup=False),
                reader=reader,
            )
        )


def _from_disk(folders: Sequence[Path], manifest_path: Path | None, console: Console) -> "WholeModel":
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"--run-folder {folder} is no folder: pass one like HOME/peers/NAME/runs/RUN")
    from dilocox_peer.peer.state.anchors import load_from_disk

    loaded = load_from_disk(folders, _manifest_for(folders, manifest_path))
    for remark in loaded.remarks:
        console.print(remark, style="yellow", markup=False)
    return loaded.model


def _manifest_for(folders: Sequence[Path], manifest_path: Path | None) -> Manifest:
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


def _run_folders(request: SourceRequest) -> tuple[Path, ...]:
    """Folders of the one run that the peers in home (or the one of that name) hold states of."""
    home = request.home or default_home()
    pattern = f"peers/{request.name or '*'}/runs/*"
    folders = sorted(path for path in home.glob(pattern) if any(path.glob("stage*/checkpoints/anchor-*.safetensors")))
    if request.manifest is not None:
        wanted = read_signed_manifest(request.manifest).run_id[:16]
        folders = [folder for folder in folders if folder.name == wanted]
    if not folders:
        raise ConfigError(f"no checkpoint of a run in {home / pattern}: pass the run's link, --run-folder or --home")
    runs = {folder.name for folder in folders}
    if len(runs) > 1:
        raise ConfigError(f"{home} holds {len(runs)} runs ({', '.join(sorted(runs))}): choose with --run-folder")
    return tuple(folders)
