"""Anchor states on disk, one safetensors file per round.

Written beside, flushed, renamed, the folder flushed: a file with the right name is whole unless the disk lies, and
then its digest says so. The newest one that verifies is loaded; a damaged one is reported, left where it is, and the
next older used. Never pickle. Certificates and blobs since a checkpoint are kept elsewhere.
"""

import json
import os
import re
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from dilocox_peer.errors import StateCorrupt
from dilocox_peer.peer.training.outer import AnchorState
from dilocox_peer.types import Digest, Layout, RunId

KEEP = 3
FORMAT = "dilocox-anchor-1"
_NAME = re.compile(r"anchor-(\d{8})\.safetensors")
_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Loaded:
    """state: None if no file verified. damaged: one line for each newer file that did not."""

    state: AnchorState | None
    damaged: tuple[str, ...]


def write_checkpoint(folder: Path, run_id: RunId, state: AnchorState, *, keep: int = KEEP) -> Path:
    """Path of the durable file of state; of the others all beyond `keep` are removed. Creates folder. Raises OSError.

    Files of later rounds go first: they are of a branch that was given up for state's, which may have fewer rounds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    anchor, momentum = (np.frombuffer(part, dtype="<f4") for part in state.parts())
    tensors = {}
    for spec, start, stop in state.layout.spans():
        tensors[f"anchor.{spec.name}"] = anchor[start:stop].reshape(spec.shape)
        tensors[f"momentum.{spec.name}"] = momentum[start:stop].reshape(spec.shape)
    metadata = {
        "format": FORMAT,
        "run": run_id,
        "head": state.head.hex(),
        "round": str(state.round),
        "digest": state.digest.hex(),
        "layout": state.layout.digest().hex(),
    }
    path = _path(folder, state.round)
    temporary = path.with_suffix(".partial")
    with temporary.open("wb") as file:
        file.write(save(tensors, metadata))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    _fsync_folder(folder)
    for old in sorted(stored_checkpoints(folder), key=lambda each: each.name > path.name)[keep:]:
        old.unlink(missing_ok=True)
    return path


def load_newest(folder: Path, run_id: RunId, layout: Layout, *, among: Collection[Digest] | None = None) -> Loaded:
    """The newest state in folder that verifies for this run, and what was wrong with newer files. among: the heads that it
    may be at, None: any."""
    damaged: list[str] = []
    allowed = None if among is None else {head.hex() for head in among}
    for path in stored_checkpoints(folder):
        try:
            if allowed is not None and _metadata(path).get("head") not in allowed:
                continue
            return Loaded(read_checkpoint(path, run_id, layout), tuple(damaged))
        except (StateCorrupt, OSError) as error:
            damaged.append(f"{path}: {error}")
    return Loaded(None, tuple(damaged))


def read_head(folder: Path, run_id: RunId, layout: Layout, head: Digest) -> AnchorState | None:
    """The state at head, if a checkpoint of it is in folder and verifies."""
    for path in stored_checkpoints(folder):
        try:
            if _metadata(path).get("head") == head.hex():
                return read_checkpoint(path, run_id, layout)
        except (StateCorrupt, OSError):
            continue
    return None


def read_checkpoint(path: Path, run_id: RunId, layout: Layout) -> AnchorState:
    """The state in path, its digest computed anew. Raises StateCorrupt with the reason, OSError."""
    metadata = _metadata(path)
    try:
        _check_metadata(metadata, run_id, layout)
        with safe_open(path, framework="numpy") as file:
            parts = {
                part: b"".join(
                    _tensor_bytes(file.get_tensor(f"{part}.{spec.name}"), spec.shape) for spec in layout.tensors
                )
                for part in ("anchor", "momentum")
            }
        header = {
            "layout": layout.digest(),
            "head": bytes.fromhex(metadata["head"]),
            "round": int(metadata["round"]),
            "digest": bytes.fromhex(metadata["digest"]),
        }
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise StateCorrupt(f"not a whole checkpoint ({error})") from None
    return AnchorState.parse(layout, header, parts["anchor"] + parts["momentum"])


def _metadata(path: Path) -> dict[str, str]:
    """What the file says of itself. Its header's length is checked before anyone allocates by it."""
    with path.open("rb") as file:
        raw = file.read(_LENGTH.size)
    if len(raw) < _LENGTH.size or _LENGTH.unpack(raw)[0] > _MAX_HEADER_BYTES:
        raise StateCorrupt("not a whole checkpoint (torn or foreign header)")
    try:
        with safe_open(path, framework="numpy") as file:
            return file.metadata() or {}
    except (SafetensorError, ValueError) as error:
        raise StateCorrupt(f"not a whole checkpoint ({error})") from None


def _check_metadata(metadata: dict[str, str], run_id: RunId, layout: Layout) -> None:
    if metadata.get("format") != FORMAT:
        raise StateCorrupt(f"format {json.dumps(metadata.get('format'))}, expected {FORMAT}")
    if metadata.get("run") != run_id:
        raise StateCorrupt(f"of run {metadata.get('run', '')[:12]}, not of {run_id[:12]}")
    if metadata.get("layout") != layout.digest().hex():
        raise StateCorrupt("of another layout (other model or stage)")


def _tensor_bytes(tensor: npt.NDArray[np.float32], shape: tuple[int, ...]) -> bytes:
    if tensor.shape != shape or tensor.dtype != np.float32:
        raise StateCorrupt(f"a tensor is {tensor.dtype} {tensor.shape}, expected float32 {shape}")
    return tensor.astype("<f4", copy=False).tobytes()


def _path(folder: Path, round_number: int) -> Path:
    return folder / f"anchor-{round_number:08d}.safetensors"


def keep_only(path: Path) -> None:
    """Removes the other checkpoints beside it."""
    for other in stored_checkpoints(path.parent):
        if other != path:
            other.unlink(missing_ok=True)


def stored_checkpoints(folder: Path) -> list[Path]:
    """Their files, whole or not, those of later rounds first."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), reverse=True)


def _fsync_folder(folder: Path) -> None:
    """Makes the rename itself durable. Not every platform lets a folder be opened; there it is the best there is."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
