"""The weights that a run of adapters leaves as they were published: a stage's in one file, memory-mapped, named by its SHA-256.

The file is made of the published model's folder, or fetched from peers as any thing of the store; both ways it is the same
bytes. Matrices of linear layers and plain embeddings are kept in the precision that the manifest says, bfloat16 or float32;
everything else (norms, biases, stacks of experts) in float32. Every tensor begins at a multiple of ALIGNMENT, zeros between.
"""

import hashlib
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from dilocox_peer.errors import ConfigError, StateCorrupt
from dilocox_peer.types import Digest, Layout

if TYPE_CHECKING:
    from dilocox_peer.model.published import Design
    from dilocox_peer.model.weights import ModelFolder

FrozenType = Literal["float32", "bfloat16"]
ALIGNMENT = 64
_TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class FrozenTensor:
    """A tensor of the file. start: in bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int

    @property
    def num_elements(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def stop(self) -> int:
        return self.start + self.num_elements * self.dtype.itemsize


@dataclass(frozen=True)
class FrozenLayout:
    """What lies where in a stage's file: its tensors by name, numbers in names as numbers, as published files are read."""

    tensors: tuple[FrozenTensor, ...]

    @classmethod
    def of(cls, layout: Layout, halved: frozenset[str], dtype: FrozenType) -> "FrozenLayout":
        """layout: of all parameters of the stage. halved: those that are kept in dtype."""
        found, start = [], 0
        for spec in sorted(layout.tensors, key=lambda each: _natural(each.name)):
            kept = _TORCH[dtype] if spec.name in halved else torch.float32
            found.append(FrozenTensor(spec.name, spec.shape, kept, start))
            start = -(-found[-1].stop // ALIGNMENT) * ALIGNMENT
        return cls(tuple(found))

    @cached_property
    def size_bytes(self) -> int:
        return self.tensors[-1].stop if self.tensors else 0

    @cached_property
    def num_elements(self) -> int:
        return sum(each.num_elements for each in self.tensors)

    @cached_property
    def widened_bytes(self) -> int:
        """What the largest tensor takes that is computed with in another precision than it is kept in."""
        return max((4 * each.num_elements for each in self.tensors if each.dtype != torch.float32), default=0)


@dataclass(frozen=True)
class FrozenBase:
    """A stage's frozen weights. raw: nobody writes to it."""

    layout: FrozenLayout
    raw: mmap.mmap | bytearray

    def tensors(self, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """name -> tensor, in the machine's own memory not copied."""
        return {
            each.name: torch.frombuffer(self.raw, dtype=each.dtype, count=each.num_elements, offset=each.start)
            .view(each.shape)
            .to(device)
            for each in self.layout.tensors
        }

    @classmethod
    def zeros(cls, layout: FrozenLayout) -> "FrozenBase":
        """In place of weights, where only shapes count."""
        return cls(layout, bytearray(layout.size_bytes))

    @classmethod
    def open(cls, path: Path, layout: FrozenLayout) -> "FrozenBase":
        """Maps a file whose hash was checked. Raises StateCorrupt for one of another size, OSError."""
        with path.open("rb") as file:
            if (size_bytes := os.fstat(file.fileno()).st_size) != layout.size_bytes:
                raise StateCorrupt(
                    f"{path} has {size_bytes:,} bytes, the stage's frozen weights are {layout.size_bytes:,}"
                )
            return cls(layout, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))

    @classmethod
    def read(cls, folder: "ModelFolder", design: "Design", layout: FrozenLayout) -> "FrozenBase":
        """From a published model's folder, into memory. Raises ConfigError."""
        folder.check_shapes(
            design, {each.name: each.shape for each in layout.tensors}
        )  # before so much memory is taken
        raw, at = bytearray(layout.size_bytes), 0

        def take(piece: memoryview) -> None:
            nonlocal at
            raw[at : at + len(piece)] = piece
            at += len(piece)

        read_base(folder, design, layout, take)
        return cls(layout, raw)

    @cached_property
    def digest(self) -> Digest:
        return Digest(hashlib.sha256(self.raw).digest())


def read_base(
    folder: "ModelFolder", design: "Design", layout: FrozenLayout, take: Callable[[memoryview], object]
) -> Digest:
    """Gives the bytes of a stage's file to take, in order, and their hash; a few tensors are in memory at a time. Raises
    ConfigError that names what is missing, damaged or of another shape, and what take raises."""
    whole, at = hashlib.sha256(), 0
    for entry, tensor in _in_order(folder, design, layout):
        for piece in (memoryview(bytes(entry.start - at)), _bytes_of(tensor)):
            whole.update(piece)
            take(piece)
        at = entry.stop
    return Digest(whole.digest())


def _in_order(folder: "ModelFolder", design: "Design", layout: FrozenLayout) -> Iterator[tuple[FrozenTensor, Tensor]]:
    wanted = {each.name: each.shape for each in layout.tensors}
    early: dict[str, Tensor] = {}
    coming = folder.parameters(design, wanted)
    for entry in layout.tensors:
        while entry.name not in early:
            found = next(coming, None)
            if found is None:
                raise ConfigError(f"{folder.path} lacks {entry.name}: download the model again")
            name, tensor = found
            early[name] = tensor
        tensor = early.pop(entry.name)
        if not torch.isfinite(tensor).all():
            raise ConfigError(f"{folder.path} holds weights that are not finite: download the model again")
        yield entry, tensor.to(entry.dtype)


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.contiguous().flatten().view(torch.uint8)
    return flat.numpy().data.cast("B")


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]
