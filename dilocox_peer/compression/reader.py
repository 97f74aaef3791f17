"""Reading an encoded tensor piece by piece, by several threads at once: so that what is computed with it stays in the caches, and
nobody needs room for the whole of it."""

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from torch import Tensor

PIECE = 1 << 19
"""Elements read at a time, a multiple of every codec's blocks: 2 MiB of float32, and operations long enough that two threads seldom
wait for each other's hold of the interpreter (a merge on two threads is 1.1 times as fast with half of it, 1.5 times with this)."""

GRAIN = 1 << 17
"""Elements, from multiples of which on a tensor can be read: a multiple of every codec's blocks too, and PIECE is one of it."""

Payload = bytes | bytearray | memoryview
"""What a tensor is encoded to."""


def empty_payload(size_bytes: int) -> memoryview:
    """To be written into, every byte of it. `bytearray` fills it with zeros first, and 128 MiB of them hold every other thread for 0.16 s."""
    return np.empty(size_bytes, np.uint8).data


class TensorReader(Protocol):
    """One tensor's payload, of a size that can be. Keeps no state: any thread may read any part, several at once."""

    def read(self, start: int, stop: int, out_X: Tensor) -> None:
        """Writes the decoded elements start to stop of the flattened tensor into out_X (float32, CPU, contiguous, of that length).

        start: a multiple of GRAIN; stop: too, or the tensor's end. Equal bits however the tensor is divided. Raises MalformedBlob; out_X is then unspecified.
        """
        ...


class TensorReaders(Protocol):
    """A vector in tensors, each to be read: a contribution, or what it decodes to."""

    def open(self, index: int) -> TensorReader:
        """The tensor of that place in the layout. Raises MalformedBlob, also in reading."""
        ...


def pieces(num_elements: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of the pieces of a tensor."""
    for start in range(0, num_elements, PIECE):
        yield start, min(start + PIECE, num_elements)


def read_all(reader: TensorReader, out: Tensor) -> None:
    """Writes the whole decoded tensor into out (float32, CPU, contiguous)."""
    flat_N = out.view(-1)
    for start, stop in pieces(flat_N.numel()):
        reader.read(start, stop, flat_N[start:stop])
