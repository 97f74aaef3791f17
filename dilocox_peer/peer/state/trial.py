"""Before a peer of a published model trains: does this machine compute the model that the run's owner had? (model/canary.py)

Asked of the run's first weights, where they are at hand: at a start from them, with the published folder, and of adapters always. A
machine that has passed is not asked again until something of it changes.
"""

import gc
from pathlib import Path
from typing import TYPE_CHECKING

from dilocox_peer.errors import ConfigError
from dilocox_peer.files import replace_file
from dilocox_peer.manifest import Manifest, PublishedSection
from dilocox_peer.model.architecture import LayerRange, build_model, layers_of
from dilocox_peer.model.canary import SEQUENCES, what_differs
from dilocox_peer.peer.state.keeper import Keeper
from dilocox_peer.peer.training.outer import initial_state

if TYPE_CHECKING:
    from torch import Tensor

    from dilocox_peer.model.frozen import FrozenBase
    from dilocox_peer.model.weights import ModelFolder

PASSED = "canary"


def try_out(
    manifest: Manifest,
    stage: int,
    keeper: Keeper,
    model: "ModelFolder | None",
    base: "FrozenBase | None",
    device: str,
) -> None:
    """Blocking, for a forward of a few tokens. Raises ConfigError when the stage's first weights give other numbers here."""
    section = manifest.model
    if not isinstance(section, PublishedSection) or not section.canary:
        return
    if section.starts_from_files and model is None and keeper.state.round:
        return
    from dilocox_peer.model.families import library

    machine, path = _machine(device), keeper.checkpoints.parent / PASSED
    if _read(path) == machine:
        return
    first = keeper.state if not keeper.state.round else initial_state(manifest, stage, folder=model)
    difference = _difference(section, stage, layers_of(manifest, stage), first.shared()[0], base, device)
    gc.collect()  # the model refers to itself: start-up would freeze its 8 bytes a parameter with what stays
    if difference:
        versions = f"transformers {library().__version__} here, {section.library or 'another'} at the run's owner"
        raise ConfigError(
            f"this machine computes another model than the run's: stage {stage} gives {difference} ({versions}; --device {device}): "
            "install that version, or use --device cpu if the device is at fault"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, [machine.encode()])


def _difference(
    section: PublishedSection,
    stage: int,
    layers: LayerRange,
    weights_N: "Tensor",
    base: "FrozenBase | None",
    device: str,
) -> str:
    """In words, what its canary says; empty: nothing."""
    built = build_model(section, layers, device=device, base=base)
    built.flat_N.copy_(weights_N)
    return what_differs(built, section.hidden_size, section.canary[stage * SEQUENCES : (stage + 1) * SEQUENCES])


def _machine(device: str) -> str:
    import torch

    from dilocox_peer.model.families import library

    return f"torch {torch.__version__}, transformers {library().__version__}, {device}"


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
