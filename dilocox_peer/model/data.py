"""Training and validation data: bytes as tokens.

`stdlib` is the source of Python's own standard library, found on every machine; otherwise the user names files and
folders (text, or JSONL with a "text" field). A fixed share of the files, chosen by the hash of their relative path, is
for validation and never trained on, so a file held out by one peer is held out by all. Training batches are a pure
function of (run seed, peer, incarnation, round, index): reproducible, and independent between peers.
"""

import hashlib
import json
import math
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dilocox_peer.errors import ConfigError
from dilocox_peer.types import PeerId, canonical, sha256

Bytes = npt.NDArray[np.uint8]

STDLIB = "stdlib"
_STDLIB_EXCLUDED = frozenset(
    {"test", "tests", "site-packages", "dist-packages", "encodings", "idlelib", "idle_test", "lib2to3", "ensurepip",
     "turtledemo", "pydoc_data", "msilib", "__pycache__"}
)  # fmt: skip
_FEW_FILES = 20
"""Below this, a share of the files chosen by hash is too coarse (it may be empty): blocks of the files are chosen."""

_MMAP_FROM_BYTES = 64 * 1024 * 1024
_MIN_BLOCK_BYTES = 2048
_MAX_BLOCK_BYTES = 65536


@dataclass(frozen=True, slots=True)
class SourceFile:
    """name: the path relative to where the corpus starts, with slashes; the same on every machine."""

    name: str
    data: Bytes


class Corpus:
    """Bytes split once into training and validation segments."""

    def __init__(self, files: Sequence[SourceFile], *, name: str, validation: float) -> None:
        """files: not empty, sorted by name. validation: share held out. Raises ConfigError if either side is empty."""
        assert [file.name for file in files] == sorted(file.name for file in files), "files must be sorted"
        self.name = name
        train, held_out, self.split = _split(files, validation)
        self._train = _joined(train)
        self._validation = np.concatenate(held_out) if held_out else np.empty(0, np.uint8)
        self._starts_of: tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None
        if len(self._validation) < 2 or not self._train:
            size_bytes = sum(len(file.data) for file in files)
            raise ConfigError(
                f"{name}: {size_bytes} bytes are too few to train on some and hold {validation:.0%} out; give more text"
            )

    @property
    def train_bytes(self) -> int:
        return sum(len(segment) for segment in self._train)

    @property
    def validation_bytes(self) -> int:
        return len(self._validation)

    def describe(self) -> str:
        """One line for a person: sizes and how validation was split off."""
        return (
            f"{self.name}: {self.train_bytes / 1e6:.2f} MB to train on, "
            f"{self.validation_bytes / 1e6:.2f} MB held out ({self.split})"
        )

    def require_context(self, context: int) -> None:
        """Raises ConfigError if no training or validation segment is long enough for one sequence."""
        longest = max(len(segment) for segment in self._train)
        if longest <= context or len(self._validation) <= context:
            raise ConfigError(
                f"{self.name}: longest training text {longest} bytes, held out {len(self._validation)}; the run's "
                f"sequences need {context + 1}: give longer texts"
            )

    def train_batch(
        self, *, seed: int, peer: PeerId, incarnation: int, round_number: int, index: int, batch: int, context: int
    ) -> tuple[Tensor, Tensor]:
        """(inputs, targets), (batch, context) int64 each, targets one byte ahead. A pure function of its arguments."""
        key = canonical(["dilocox-data", seed, peer, incarnation, round_number, index])
        generator = np.random.Philox(key=np.frombuffer(sha256(key)[:16], dtype="<u8"))
        draws = generator.random_raw(batch)
        starts, ends = self._starts(context)
        sequences = np.empty((batch, context + 1), dtype=np.int64)
        for row, draw in enumerate(draws):
            position = int(draw % np.uint64(ends[-1]))  # 64 random bits: the bias is below 2**-30
            segment = int(np.searchsorted(ends, position, side="right"))
            start = position - int(ends[segment] - starts[segment])
            sequences[row] = self._train[segment][start : start + context + 1]
        return _inputs_and_targets(sequences)

    def _starts(self, context: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """How many sequences begin in each training segment, and their running sum; kept for the last context."""
        if self._starts_of is None or self._starts_of[0] != context:
            self.require_context(context)
            starts = np.maximum(np.array([len(segment) - context for segment in self._train]), 0)
            self._starts_of = (context, starts, np.cumsum(starts))
        return self._starts_of[1], self._starts_of[2]

    def validation_batches(self, limit_bytes: int, *, batch: int, context: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(inputs, targets) over about limit_bytes of the validation split: always the same ones, evenly spread."""
        self.require_context(context)
        available = (len(self._validation) - 1) // context
        count = min(available, max(1, limit_bytes // context))
        for first in range(0, count, batch):
            rows = np.arange(first, min(first + batch, count)) * available // count * context
            yield _inputs_and_targets(self._validation[rows[:, None] + np.arange(context + 1)].astype(np.int64))

    def unigram_entropy(self) -> float:
        """Nats per byte of the validation split if bytes were independent: what a model reaches without context."""
        return _entropy(np.bincount(self._validation, minlength=256))

    def bigram_entropy(self) -> float:
        """Nats per byte of a byte given the one before it, in the validation split itself."""
        pairs = np.bincount(self._validation[:-1].astype(np.int64) * 256 + self._validation[1:], minlength=65536)
        return _entropy(pairs) - _entropy(pairs.reshape(256, 256).sum(1))


def has_text(source: str, paths: Sequence[str | Path]) -> bool:
    """Whether load_corpus has what it wants: the user's paths, or none where none are needed."""
    return bool(paths) != (source == STDLIB)


def load_corpus(source: str, paths: Sequence[str | Path], *, validation: float) -> Corpus:
    """The corpus a manifest's data.source names: `stdlib`, or `files` with the user's paths.

    Raises ConfigError that names the path and the remedy.
    """
    if source == STDLIB and paths:
        given = ", ".join(map(str, paths))
        raise ConfigError(f"--data {given}: this run trains on the source of Python's library alone; leave --data out")
    if source != STDLIB and not paths:
        raise ConfigError(f"this run's data are {source!r}: name files or folders of yours with --data")
    try:
        if source == STDLIB:
            return Corpus(_stdlib_files(), name=STDLIB, validation=validation)
        files = _files_of([Path(path) for path in paths])
    except OSError as error:
        where = error.filename or ", ".join(map(str, paths)) or source
        raise ConfigError(f"{where}: {error.strerror or error}; check that you may read it") from None
    if not files:
        raise ConfigError(f"{', '.join(map(str, paths))}: no text in it; name files with text in them")
    return Corpus(files, name=", ".join(map(str, paths)), validation=validation)


def _stdlib_files() -> list[SourceFile]:
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        if _STDLIB_EXCLUDED.isdisjoint(parts) and not parts[0].startswith("config-"):
            data = _read(path)
            if len(data):
                files.append(SourceFile("/".join(parts), data))
    if not files:
        raise ConfigError(
            f"{root}: no source of Python's standard library there (a zipped or stripped Python?); "
            "use a full Python, or a run whose data are files"
        )
    return sorted(files, key=lambda file: file.name)


def _files_of(paths: Sequence[Path]) -> list[SourceFile]:
    """The user's files, sorted by name. Equal relative paths in two folders are told apart by the folder's name."""
    files: dict[str, SourceFile] = {}
    for path in paths:
        for file in _user_files(path):
            name = file.name
            while name in files:
                name = f"{path.resolve().name}/{name}"
            files[name] = SourceFile(name, file.data)
    return [files[name] for name in sorted(files)]


def _user_files(path: Path) -> Iterator[SourceFile]:
    """The files at or below path that hold anything. Hidden ones are left out."""
    if not path.exists():
        raise ConfigError(f"{path}: no such file or folder; check --data")
    if path.is_file():
        data = _read_text(path)
        if not len(data):
            raise ConfigError(f"{path}: the file is empty; name one with text in it")
        yield SourceFile(path.name, data)
        return
    for file in sorted(found for found in path.rglob("*") if found.is_file()):
        parts = file.relative_to(path).parts
        if not any(part.startswith(".") for part in parts):
            data = _read_text(file)
            if len(data):
                yield SourceFile("/".join(parts), data)


def _read_text(path: Path) -> Bytes:
    return _read_jsonl(path) if path.suffix == ".jsonl" else _read(path)


def _read(path: Path) -> Bytes:
    """The bytes of path; large files are mapped, not read."""
    if path.stat().st_size >= _MMAP_FROM_BYTES:
        return np.memmap(path, dtype=np.uint8, mode="r")
    return np.frombuffer(path.read_bytes(), dtype=np.uint8)


def _read_jsonl(path: Path) -> Bytes:
    texts = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                texts.append(_text_of(line, where=f"{path}:{number}"))
    return np.frombuffer("\n".join(texts).encode(errors="replace"), dtype=np.uint8)


def _text_of(line: bytes, *, where: str) -> str:
    try:
        record: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON ({error}); every line of a .jsonl file is an object") from None
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise ConfigError(f'{where}: no "text" field with a string; every line of a .jsonl file needs one')
    return text


def _split(files: Sequence[SourceFile], share: float) -> tuple[list[Bytes], list[Bytes], str]:
    """(training pieces, validation pieces, how) of the files."""
    if len(files) >= _FEW_FILES:
        held_out = {file.name for file in files if _hash_fraction(file.name) < share}
        size = sum(len(file.data) for file in files if file.name in held_out)
        if 0.25 * share <= size / sum(len(file.data) for file in files) <= 0.75:
            train = [file.data for file in files if file.name not in held_out]
            kept = [file.data for file in files if file.name in held_out]
            return train, kept, f"{len(held_out)} of {len(files)} files"
    block = min(max(sum(len(file.data) for file in files) // 256, _MIN_BLOCK_BYTES), _MAX_BLOCK_BYTES)
    train, validation = _split_blocks(files, share, block)
    return train, validation, f"blocks of {block} bytes, as there are few files"


def _split_blocks(files: Sequence[SourceFile], share: float, block: int) -> tuple[list[Bytes], list[Bytes]]:
    """Training stretches and validation blocks; the block with the lowest hash is always held out."""
    blocks = [
        (_hash_fraction(f"{file.name}:{start // block}"), index, start)
        for index, file in enumerate(files)
        for start in range(0, len(file.data), block)
    ]
    if not blocks:
        return [], []
    lowest = min(blocks)
    train: list[Bytes] = []
    validation: list[Bytes] = []
    stretch: tuple[int, int, int] | None = None  # (file, start, stop) of the training text so far
    for fraction, index, start in blocks:
        stop = min(start + block, len(files[index].data))
        is_held_out = fraction < share or (fraction, index, start) == lowest
        if is_held_out:
            validation.append(files[index].data[start:stop])
        if stretch and (is_held_out or stretch[0] != index):
            train.append(files[stretch[0]].data[stretch[1] : stretch[2]])
            stretch = None
        if not is_held_out:
            stretch = (index, stretch[1] if stretch else start, stop)
    if stretch:
        train.append(files[stretch[0]].data[stretch[1] : stretch[2]])
    return train, validation


def _joined(pieces: Sequence[Bytes]) -> list[Bytes]:
    """Mapped files as they are, all others as one segment: short texts would otherwise be lost to the context."""
    mapped = [piece for piece in pieces if isinstance(piece, np.memmap)]
    plain = [piece for piece in pieces if not isinstance(piece, np.memmap)]
    return ([np.concatenate(plain)] if plain else []) + mapped


def _hash_fraction(name: str) -> float:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


def _entropy(counts: npt.NDArray[np.int64]) -> float:
    """Entropy of the distribution that these counts are of, in nats."""
    present = counts[counts > 0]
    total = int(present.sum())
    return math.log(total) - float((present * np.log(present)).sum()) / total if total else 0.0


def _inputs_and_targets(sequences: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    tokens = torch.from_numpy(sequences)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
