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
from dilocox_peer.files import let_go
from dilocox_peer.model.quantized import QuantizedMatrix, bytes_of
from dilocox_peer.types import Digest, Layout

if TYPE_CHECKING:
    from dilocox_peer.model.published import Design
    from dilocox_peer.model.weights import ModelFolder

Frozen = Tensor | QuantizedMatrix
FrozenType = Literal["float32", "bfloat16"]
ALIGNMENT = 64
WIDENED = 2**21
"""Elements of a matrix that are widened at a time."""
_TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class FrozenTensor:
    """A tensor of the file. start: in bytes. is_inner: the matrix of a linear layer between embedding and head, which may be quantized."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    is_inner: bool = False

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
    def of(
        cls, layout: Layout, halved: frozenset[str], dtype: FrozenType, inner: frozenset[str] = frozenset()
    ) -> "FrozenLayout":
        """layout: of all parameters of the stage. halved: those that are kept in dtype. inner: as FrozenTensor has it."""
        found, start = [], 0
        for spec in sorted(layout.tensors, key=lambda each: _natural(each.name)):
            kept = _TORCH[dtype] if spec.name in halved else torch.float32
            found.append(FrozenTensor(spec.name, spec.shape, kept, start, spec.name in inner))
            start = -(-found[-1].stop // ALIGNMENT) * ALIGNMENT
        return cls(tuple(found))

    @cached_property
    def size_bytes(self) -> int:
        return self.tensors[-1].stop if self.tensors else 0

    @cached_property
    def num_elements(self) -> int:
        return sum(each.num_elements for each in self.tensors)

    def bytes_at(self, bits: int) -> int:
        """Of what is kept in memory with inner matrices in so many bits; 0: as in the file."""
        if not bits:
            return self.size_bytes
        return sum(
            bytes_of(each.num_elements, bits) if each.is_inner else each.num_elements * each.dtype.itemsize
            for each in self.tensors
        )

    def widened_at(self, bits: int) -> int:
        """What is taken while the largest tensor is computed with that is kept in another precision: of some of its rows, of a quantized one of
        all."""
        inner = max((each.num_elements for each in self.tensors if each.is_inner), default=0)
        halved = max((each.num_elements for each in self.tensors if each.dtype != torch.float32), default=0)
        return max(8 * inner if bits else 0, 4 * min(halved, WIDENED))


@dataclass(frozen=True)
class FrozenBase:
    """A stage's frozen weights. raw: nobody writes to it. bits: 8 or 4: inner matrices are computed with in so many."""

    layout: FrozenLayout
    raw: mmap.mmap | bytearray
    bits: int = 0

    def tensors(self, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """name -> tensor, in the machine's own memory not copied."""
        return {each.name: self._tensor(each).to(device) for each in self.layout.tensors}

    def kept(self, device: torch.device | str = "cpu") -> dict[str, Frozen]:
        """The same, with inner matrices in `bits`. Raises ConfigError where the library for that is not installed."""
        if not self.bits:
            return dict(self.tensors(device))
        found: dict[str, Frozen] = {}
        for each in self.layout.tensors:
            tensor = self._tensor(each).to(device)
            if not each.is_inner:
                found[each.name] = tensor
                continue
            found[each.name] = QuantizedMatrix(tensor, self.bits)
            let_go(memoryview(self.raw)[each.start : each.stop])
        return found

    def _tensor(self, each: FrozenTensor) -> Tensor:
        flat = torch.frombuffer(self.raw, dtype=each.dtype, count=each.num_elements, offset=each.start)
        return flat.view(each.shape)

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

    def digest_of(self, part: FrozenLayout) -> Digest:
        """Hash of the file that a stage of ours has, which holds some of the same tensors."""
        found, at, here = hashlib.sha256(), 0, memoryview(self.raw)
        own = {each.name: each for each in self.layout.tensors}
        for each in part.tensors:
            found.update(bytes(each.start - at))
            found.update(here[own[each.name].start : own[each.name].stop])
            at = each.stop
        return Digest(found.digest())


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
                raise folder.lacking(entry.name)
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
