"""Anchor states on disk, one safetensors file per round.

Written beside, flushed, renamed, the folder flushed: a file with the right name is whole unless the disk lies, and
then its digest says so. The newest one that verifies is loaded; a damaged one is reported, left where it is, and the
next older used. Never pickle. Certificates and blobs since a checkpoint are kept elsewhere.

The tensors lie in the layout's order, anchor first: what follows the header is the state's bytes as they are in memory and as peers
give them to each other. So a file is written, read (memory-mapped) and served without a copy of the whole, or a stop of the interpreter:
safetensors' own `save` builds it in memory, 3.7 s under the GIL for 0.7 GB.
"""

import json
import mmap
import re
import struct
from collections.abc import Collection, Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from dilocox_peer.errors import StateCorrupt
from dilocox_peer.files import PartFile, replace_file, sweep_parts
from dilocox_peer.peer.training.anchor_state import AnchorState, StatePart
from dilocox_peer.store.outline import CHUNK_BYTES, Outline, num_chunks
from dilocox_peer.store.shelf import FileContent
from dilocox_peer.types import DIGEST_BYTES, Digest, Layout, RunId

KEEP = 3
FORMAT = "dilocox-anchor-1"
_NAME = re.compile(r"anchor-(\d{8})(-beside)?\.safetensors")
_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class LoadedState:
    """state: None if no file verified. damaged: one line for each newer file that did not. elsewhere: newer files at other heads."""

    state: AnchorState | None
    damaged: tuple[str, ...]
    elsewhere: tuple[Path, ...] = ()


def write_checkpoint(
    folder: Path,
    run_id: RunId,
    state: AnchorState,
    *,
    keep: int = KEEP,
    durable: bool = True,
    unexplained: Collection[Path] = (),
    spare: Path | None = None,
) -> Path:
    """Path of the durable file of state; of the others all beyond `keep` are removed. durable: False where it need not outlive a power
    cut. unexplained: as of `prune`. spare: a file that stays; this one lies beside it where that is of another state of the same round, as two branches
    have, and a view change and its parent. Creates folder. Raises OSError.

    Files of later rounds go first: they are of a branch that was given up for state's, which may have fewer rounds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    header = _header(run_id, state.layout, state.head, state.round, state.outline)
    path = _path(folder, state.round)
    if path == spare and _is_of_another(path, state.head):
        path = path.with_stem(f"{path.stem}-beside")
    sweep_parts(folder)  # of a process that was killed in mid-write
    replace_file(path, [_LENGTH.pack(len(header)), header, *state.parts()], durable=durable)
    prune(path, keep=keep, spare=spare, unexplained=unexplained)
    return path


def prune(path: Path, *, keep: int = KEEP, spare: Path | None = None, unexplained: Collection[Path] = ()) -> None:
    """Removes the checkpoints beside path beyond keep; path and spare are among those that stay. unexplained: files that no branch which
    was given up accounts for: they stay beside those as long as they are of later rounds than path. Raises OSError."""
    stored = [each for each in stored_checkpoints(path.parent) if each not in later_of(unexplained, path)]
    newest = sorted(stored, key=lambda each: (each not in (path, spare), each.name > path.name))
    for old in newest[keep:]:
        old.unlink(missing_ok=True)


def later_of(unexplained: Collection[Path], path: Path) -> list[Path]:
    """Those of them that are of later rounds than path."""
    return [each for each in unexplained if each.name > path.name]


def path_of(folder: Path, state: AnchorState) -> Path | None:
    """Where the state lies, if a file of its round is there and says that it is of its head."""
    path = _path(folder, state.round)
    try:
        return path if _read_header(path)[0]["__metadata__"].get("head") == state.head.hex() else None
    except (StateCorrupt, OSError):
        return None


class GrowingCheckpoint:
    """A GrowingState (anchor_state.py) in the file that it is kept in."""

    def __init__(self, folder: Path, run_id: RunId, layout: Layout, head: Digest, round_number: int) -> None:
        """Creates folder, and takes room for all of it. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        self._run_id = run_id
        self._layout = layout
        self._head = head
        self._round = round_number
        blank = Outline(layout.state_bytes, (Digest(bytes(DIGEST_BYTES)),) * num_chunks(layout.state_bytes))
        self._offset = _LENGTH.size + len(_header(run_id, layout, head, round_number, blank))
        self._file = PartFile(_path(folder, round_number), self._offset + layout.state_bytes)

    def write(self, part: StatePart, start: int, values_X: Tensor) -> None:
        start += 0 if part == "anchor" else self._layout.num_elements
        self._file.write(self._offset + 4 * start, values_X.numpy().astype("<f4", copy=False).data)

    def chunk(self, index: int, scratch_X: Tensor) -> memoryview:
        start = index * CHUNK_BYTES
        raw = scratch_X.numpy().data.cast("B")[: min(CHUNK_BYTES, self._layout.state_bytes - start)]
        self._file.read(self._offset + start, raw)
        return raw

    def finish(self, outline: Outline) -> AnchorState:
        """It has its name from here on."""
        header = _header(self._run_id, self._layout, self._head, self._round, outline)
        self._file.write(0, _LENGTH.pack(len(header)) + header)
        mapped = self._file.mapped()
        self._file.finish()
        raw, half = memoryview(mapped)[self._offset :], self._layout.state_bytes // 2
        return AnchorState.of(
            self._layout, head=self._head, round_number=self._round, anchor=raw[:half], momentum=raw[half:], outline=outline,
            is_finite=True,
        )  # fmt: skip

    def discard(self) -> None:
        self._file.discard()


def load_newest(folder: Path, run_id: RunId, layout: Layout, *, among: Container[Digest] | None = None) -> LoadedState:
    """The newest state in folder that verifies for this run, and what was wrong with newer files. among: the heads that it
    may be at, None: any."""
    damaged: list[str] = []
    elsewhere: list[Path] = []
    for path in stored_checkpoints(folder):
        try:
            if among is not None and _head_of(path) not in among:
                elsewhere.append(path)
                continue
            return LoadedState(read_checkpoint(path, run_id, layout), tuple(damaged), tuple(elsewhere))
        except (StateCorrupt, OSError) as error:
            damaged.append(f"{path}: {error}")
    return LoadedState(None, tuple(damaged), tuple(elsewhere))


def read_head(folder: Path, run_id: RunId, layout: Layout, head: Digest) -> AnchorState | None:
    """The state at head, if a checkpoint of it is in folder and verifies."""
    for path in stored_checkpoints(folder):
        try:
            if _head_of(path) == head:
                return read_checkpoint(path, run_id, layout)
        except (StateCorrupt, OSError):
            continue
    return None


def read_checkpoint(path: Path, run_id: RunId, layout: Layout) -> AnchorState:
    """The state in path, memory-mapped, its digest computed anew. Raises StateCorrupt with the reason, OSError."""
    header, start = _read_header(path)
    metadata = header.pop("__metadata__")
    _check_metadata(metadata, run_id, layout)
    if header != _tensors(layout):
        raise StateCorrupt("not a whole checkpoint (its tensors are not the layout's)")
    half = 4 * layout.num_elements
    with path.open("rb") as file:
        raw = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))[start:]
    if len(raw) != 2 * half:
        raise StateCorrupt(f"not a whole checkpoint ({len(raw)} bytes of tensors, expected {2 * half})")
    try:
        head, number = Digest(bytes.fromhex(metadata["head"])), int(metadata["round"])
    except (KeyError, ValueError) as error:
        raise StateCorrupt(f"not a whole checkpoint ({error})") from None
    state = AnchorState.of(layout, head=head, round_number=number, anchor=raw[:half], momentum=raw[half:])
    if state.digest.hex() != metadata.get("digest"):
        raise StateCorrupt(f"state {state.digest.hex()[:12]} in a file of {metadata.get('digest', '')[:12]}")
    return state


def stored_content(folder: Path, digest: Digest) -> FileContent | None:
    """The state of that digest to be served from its file, each chunk checked when it is first read; None if there is none."""
    for path in stored_checkpoints(folder):
        try:
            header, start = _read_header(path)
            metadata = header["__metadata__"]
            if metadata.get("digest") == digest.hex():
                outline = Outline.unpacked(int(metadata["size"]), bytes.fromhex(metadata["chunks"]))
                return FileContent(path, outline, start) if outline.root == digest else None
        except (StateCorrupt, OSError, ValueError, KeyError):
            continue
    return None


def named_in(path: Path) -> tuple[Digest, Digest] | None:
    """The head and the digest of the state that a file says it has; None if it says none."""
    try:
        metadata = _read_header(path)[0]["__metadata__"]
        return Digest(bytes.fromhex(metadata["head"])), Digest(bytes.fromhex(metadata["digest"]))
    except (StateCorrupt, OSError, ValueError, KeyError):
        return None


def _header(run_id: RunId, layout: Layout, head: Digest, round_number: int, outline: Outline) -> bytes:
    """As safetensors has it: JSON, padded so that the tensors are aligned. Of one length whatever the outline's digests are."""
    metadata = {
        "format": FORMAT,
        "run": run_id,
        "head": head.hex(),
        "round": str(round_number),
        "digest": outline.root.hex(),
        "layout": layout.digest().hex(),
        "size": str(outline.size_bytes),
        "chunks": outline.packed().hex(),
    }
    raw = json.dumps({"__metadata__": metadata, **_tensors(layout)}, separators=(",", ":")).encode()
    return raw + b" " * (-len(raw) % _LENGTH.size)


def _tensors(layout: Layout) -> dict[str, Any]:
    """What the header says of them."""
    found = {}
    for number, part in enumerate(("anchor", "momentum")):
        shift = number * 4 * layout.num_elements
        for spec, start, stop in layout.spans():
            offsets = [shift + 4 * start, shift + 4 * stop]
            found[f"{part}.{spec.name}"] = {"dtype": "F32", "shape": list(spec.shape), "data_offsets": offsets}
    return found


def _head_of(path: Path) -> Digest:
    """b"" for what is none. Raises StateCorrupt, OSError."""
    try:
        return Digest(bytes.fromhex(_read_header(path)[0]["__metadata__"].get("head", "")))
    except ValueError:
        return Digest(b"")


def _is_of_another(path: Path, head: Digest) -> bool:
    """Whether a whole file is there, of a state at another head."""
    try:
        return _head_of(path) != head
    except (StateCorrupt, OSError):
        return False


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header, which has metadata, and where the tensors begin. Its length is checked before anyone allocates by it. Raises
    StateCorrupt, OSError."""
    with path.open("rb") as file:
        raw = file.read(_LENGTH.size)
        if len(raw) < _LENGTH.size or _LENGTH.unpack(raw)[0] > _MAX_HEADER_BYTES:
            raise StateCorrupt("not a whole checkpoint (torn or foreign header)")
        (length,) = _LENGTH.unpack(raw)
        try:
            header = json.loads(file.read(length))
            metadata = header["__metadata__"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise StateCorrupt(f"not a whole checkpoint ({error})") from None
    if not isinstance(header, dict) or not isinstance(metadata, dict) or not all(map(_is_text, metadata.values())):
        raise StateCorrupt("not a whole checkpoint (its header is not one)")
    return header, _LENGTH.size + length


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _check_metadata(metadata: dict[str, str], run_id: RunId, layout: Layout) -> None:
    if metadata.get("format") != FORMAT:
        raise StateCorrupt(f"format {json.dumps(metadata.get('format'))}, expected {FORMAT}")
    if metadata.get("run") != run_id:
        raise StateCorrupt(f"of run {metadata.get('run', '')[:12]}, not of {run_id[:12]}")
    if metadata.get("layout") != layout.digest().hex():
        raise StateCorrupt("of another layout (other model or stage)")


def _path(folder: Path, round_number: int) -> Path:
    return folder / f"anchor-{round_number:08d}.safetensors"


def keep_only(*paths: Path) -> None:
    """Removes the other checkpoints beside them."""
    for other in stored_checkpoints(paths[0].parent):
        if other not in paths:
            other.unlink(missing_ok=True)


def stored_checkpoints(folder: Path) -> list[Path]:
    """Their files, whole or not, those of later rounds first."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), reverse=True)
