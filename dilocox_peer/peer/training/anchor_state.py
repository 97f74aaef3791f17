"""What a stage has agreed on: its anchor and outer momentum after a round, as bytes; and the next one while it grows.

A state lies in a file where there is a disk for it (peer/state/checkpoint.py), mapped into memory as it is read: a merge writes the next
one beside it, and neither takes memory that the system could not have back. Without a disk, in tests, it lies in memory.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dilocox_peer.compression.contribution import Blob
from dilocox_peer.compression.sizes import raw_bytes
from dilocox_peer.errors import StateCorrupt
from dilocox_peer.files import let_go
from dilocox_peer.model.whole import tensor_over
from dilocox_peer.store.outline import CHUNK_BYTES, Outline, outline_of
from dilocox_peer.types import Digest, Layout

_COPIED = 4 << 20  # elements at a time
_LOOK_BYTES = 16 << 20  # looked at once for values that are not finite: the mask takes a quarter of that


@dataclass(frozen=True)
class AnchorState:
    """What a stage has agreed on at a head: anchor and outer momentum, as immutable float32 bytes (little-endian).

    round: outer rounds completed. outline: of the anchor's bytes and then the momentum's, as the store gives them to others
    chunk by chunk. digest: its root, which certificates name.
    """

    layout: Layout
    head: Digest
    round: int
    anchor: memoryview
    momentum: memoryview
    outline: Outline

    @classmethod
    def of(
        cls,
        layout: Layout,
        *,
        head: Digest,
        round_number: int,
        anchor: Blob | memoryview,
        momentum: Blob | memoryview,
        outline: Outline | None = None,
        is_finite: bool = False,
    ) -> "AnchorState":
        """The state of these bytes. outline: where they were checked against it already. is_finite: where that is known.
        Raises StateCorrupt for wrong sizes or values that are not finite. Hashes and reads all, without the GIL: call it from a worker
        thread."""
        anchor_view, momentum_view = (memoryview(part).cast("B").toreadonly() for part in (anchor, momentum))
        for name, view in (("anchor", anchor_view), ("momentum", momentum_view)):
            if len(view) != raw_bytes(layout):
                raise StateCorrupt(f"{name} of {len(view)} bytes for a stage of {raw_bytes(layout)}")
            for start in range(0, 0 if is_finite else len(view), _LOOK_BYTES):
                piece = view[start : start + _LOOK_BYTES]
                is_right = np.isfinite(np.frombuffer(piece, dtype="<f4")).all()
                let_go(piece)
                if not is_right:
                    raise StateCorrupt(f"{name} holds values that are not finite")
        outline = outline_of((anchor_view, momentum_view)) if outline is None else outline
        return cls(layout, head, round_number, anchor_view, momentum_view, outline)

    @property
    def digest(self) -> Digest:
        return self.outline.root

    @property
    def size_bytes(self) -> int:
        return len(self.anchor) + len(self.momentum)

    def parts(self) -> tuple[memoryview, memoryview]:
        """Anchor, then momentum. Not copied; stays valid and unchanged while anyone holds it."""
        return self.anchor, self.momentum

    def chunk(self, index: int) -> Blob | memoryview:
        """The bytes of a chunk of its outline."""
        start, stop = self.outline.span(index)
        half = len(self.anchor)
        if start < half < stop:
            return b"".join((self.anchor[start:], self.momentum[: stop - half]))
        return self.anchor[start:stop] if stop <= half else self.momentum[start - half : stop - half]

    def let_go(self, start: int = 0, stop: int | None = None) -> None:
        """The elements start to stop of both parts, which have been read, need not stay in memory: those of a file are there still."""
        for part in self.parts():
            let_go(part[4 * start : None if stop is None else 4 * stop])

    def anchor_N(self) -> Tensor:
        """The anchor as a new float32 vector."""
        return _vector(self.anchor)

    def anchor_into(self, vector_N: Tensor) -> None:
        """Writes the anchor over vector_N, float32, on any device. Of a file no more than a piece is in memory at a time."""
        anchor_N, _ = self.shared()
        for start in range(0, len(anchor_N), _COPIED):
            stop = min(start + _COPIED, len(anchor_N))
            vector_N[start:stop].copy_(anchor_N[start:stop])
            let_go(self.anchor[4 * start : 4 * stop])

    def momentum_N(self) -> Tensor:
        """The outer momentum as a new float32 vector."""
        return _vector(self.momentum)

    def shared(self) -> tuple[Tensor, Tensor]:
        """Anchor and momentum as they lie here, not copied: they must not be written to, and live as long as this does."""
        return tensor_over(np.frombuffer(self.anchor, "<f4")), tensor_over(np.frombuffer(self.momentum, "<f4"))


def _vector(raw: memoryview) -> Tensor:
    return torch.from_numpy(np.frombuffer(raw, dtype="<f4").astype(np.float32))


def buffer_of(vector_N: Tensor) -> memoryview:
    """The vector's own bytes, read-only; it must not be changed any more."""
    array: npt.NDArray[np.float32] = vector_N.numpy().astype("<f4", copy=False)
    return array.data.cast("B").toreadonly()


StatePart = Literal["anchor", "momentum"]


class GrowingState(Protocol):
    """The next anchor state, written in parts."""

    def write(self, part: StatePart, start: int, values_X: Tensor) -> None:
        """The elements of a part (float32, CPU, contiguous) from start on. Any thread. Raises OSError."""
        ...

    def chunk(self, index: int, scratch_X: Tensor) -> memoryview:
        """The bytes of a chunk of its outline, once they are written; they may lie in scratch, of PIECE elements. Any thread. Raises
        OSError."""
        ...

    def finish(self, outline: Outline) -> AnchorState:
        """The state of what was written, every element of it, all finite. Raises OSError."""
        ...

    def discard(self) -> None:
        """It is not to be."""
        ...


class GrowingInMemory:
    """A GrowingState without a disk."""

    def __init__(self, layout: Layout, head: Digest, round_number: int) -> None:
        self._layout = layout
        self._head = head
        self._round = round_number
        self._whole = np.empty(2 * layout.num_elements, "<f4")

    def write(self, part: StatePart, start: int, values_X: Tensor) -> None:
        start += 0 if part == "anchor" else self._layout.num_elements
        np.copyto(self._whole[start : start + len(values_X)], values_X.numpy())

    def chunk(self, index: int, scratch_X: Tensor) -> memoryview:
        return self._whole.data.cast("B")[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]

    def finish(self, outline: Outline) -> AnchorState:
        n = self._layout.num_elements
        return AnchorState.of(
            self._layout, head=self._head, round_number=self._round, anchor=buffer_of(torch.from_numpy(self._whole[:n])),
            momentum=buffer_of(torch.from_numpy(self._whole[n:])), outline=outline, is_finite=True,
        )  # fmt: skip

    def discard(self) -> None:
        """Nothing is left of it."""
