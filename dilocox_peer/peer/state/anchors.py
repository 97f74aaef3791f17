"""The anchors of all stages after one same round, put together, and found on a disk.

A whole model is only ever put together from one round, and from states whose digests verify. No network here.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dilocox_peer.errors import ConfigError, ManifestMismatch, StateCorrupt
from dilocox_peer.files import replace_file
from dilocox_peer.manifest import MAX_MANIFEST_BYTES, Manifest
from dilocox_peer.model.architecture import layout_of
from dilocox_peer.model.partition import cut_of
from dilocox_peer.model.whole import Origin, WholeModel, tensors_of, union
from dilocox_peer.peer.state.checkpoint import read_checkpoint
from dilocox_peer.peer.training.anchor_state import AnchorState
from dilocox_peer.types import RunId

MANIFEST_FILE = "manifest.json"


@dataclass(frozen=True, slots=True)
class FromDisk:
    """remarks: one line for each file that was damaged or disagreed."""

    model: WholeModel
    remarks: tuple[str, ...]


def assemble(
    manifest: Manifest, states: Sequence[AnchorState], contributors: Sequence[tuple[str, int]] = ()
) -> WholeModel:
    """The whole model of one round from the states of all its stages. Raises StateCorrupt."""
    assert len(states) == manifest.stages.count, (len(states), manifest.stages.count)
    rounds = {state.round for state in states}
    assert len(rounds) == 1, rounds
    heads = tuple(state.head.hex() for state in states)
    origin = Origin(
        manifest.run.name, manifest.run_id, states[0].round, heads, manifest.data, tuple(contributors), cut=cut_of(manifest)
    )  # fmt: skip
    return union(manifest.model, origin, [tensors_of(state.layout, state.anchor) for state in states])


def load_from_disk(folders: Sequence[Path], manifest: Manifest) -> FromDisk:
    """The newest round of which all stages' checkpoints lie in these run folders and verify.

    Raises ConfigError that names the stages that are missing, StateCorrupt when nothing whole is left.
    """
    paths = [_checkpoints(folders, stage) for stage in range(manifest.stages.count)]
    where = ", ".join(str(folder) for folder in folders)
    if missing := [str(stage) for stage, of_stage in enumerate(paths) if not of_stage]:
        what = "stage" if len(missing) == 1 else "stages"
        raise ConfigError(
            f"no checkpoint of {what} {', '.join(missing)} (of {len(paths)}) in {where}: export from the live run with its link"
        )
    common = set.intersection(*(set(of_stage) for of_stage in paths))
    if not common:
        rounds = "; ".join(f"stage {stage}: {sorted(of_stage)}" for stage, of_stage in enumerate(paths))
        raise ConfigError(f"no round of which all stages lie in {where} ({rounds}): export from the live run")
    remarks: list[str] = []
    for number in sorted(common, reverse=True):
        states = [_verified(of_stage[number], manifest, stage, remarks) for stage, of_stage in enumerate(paths)]
        whole = [state for state in states if state is not None]
        if len(whole) == len(states):
            return FromDisk(assemble(manifest, whole), tuple(remarks))
    raise StateCorrupt(f"no whole checkpoint in {where}: {remarks[0]}")


def newest_states(folder: Path, manifest: Manifest, after: int) -> tuple[AnchorState, ...] | None:
    """The states of the newest round after `after` of which all stages have one in a run's folder; None if there is none."""
    paths = [_checkpoints([folder], stage) for stage in range(manifest.stages.count)]
    common = [number for number in set.intersection(*map(set, paths)) if number > after]
    for number in sorted(common, reverse=True):
        states = [_verified(of_stage[number], manifest, stage, []) for stage, of_stage in enumerate(paths)]
        whole = tuple(state for state in states if state is not None)
        if len(whole) == len(states):
            return whole
    return None


def keep_manifest(run_folder: Path, manifest: Manifest) -> None:
    """Writes the manifest into a run's folder, unless it is there; so what the folder holds can be read without the run.

    Raises OSError.
    """
    path = run_folder / MANIFEST_FILE
    if not path.exists():
        run_folder.mkdir(parents=True, exist_ok=True)
        replace_file(path, [manifest.to_bytes()])


def kept_manifest(run_folder: Path) -> Manifest | None:
    """The manifest in a run's folder, None if there is none. Raises StateCorrupt when it is not that run's."""
    path = run_folder / MANIFEST_FILE
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_MANIFEST_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateCorrupt(f"{path} cannot be read: {error.strerror}") from None
    try:
        return Manifest.from_bytes(raw, run_id=RunId(Manifest.model_validate_json(raw).run_id))
    except (ManifestMismatch, ValueError) as error:
        raise StateCorrupt(f"{path} is damaged ({str(error).splitlines()[0]}): pass --manifest run.toml") from None


def _checkpoints(folders: Sequence[Path], stage: int) -> Mapping[int, list[Path]]:
    """round -> files of a stage, by their names."""
    found: dict[int, list[Path]] = {}
    for folder in folders:
        for path in sorted((folder / f"stage{stage}" / "checkpoints").glob("anchor-*.safetensors")):
            number = path.stem.removeprefix("anchor-")
            if number.isdecimal() and int(number) > 0:
                found.setdefault(int(number), []).append(path)
    return found


def _verified(paths: Sequence[Path], manifest: Manifest, stage: int, remarks: list[str]) -> AnchorState | None:
    """The state in these files of one round; where they disagree (a swarm that was parted) that of the most."""
    states: list[AnchorState] = []
    for path in paths:
        try:
            states.append(read_checkpoint(path, manifest.run_id, layout_of(manifest, stage)))
        except (StateCorrupt, OSError) as error:
            remarks.append(f"{path} is not used: {error}")
    if not states:
        return None
    # By what is in them: a view change may certify a round again, and then one state has two heads.
    votes = Counter(state.digest for state in states)
    heads = Counter(state.head for state in states)
    chosen = min(states, key=lambda each: (-votes[each.digest], -heads[each.head], each.head))
    if len(votes) > 1:
        remarks.append(
            f"stage {stage} has {len(votes)} different states of round {states[0].round} on this disk (the swarm was "
            f"parted); {chosen.head.hex()[:12]} is used"
        )
    return chosen
