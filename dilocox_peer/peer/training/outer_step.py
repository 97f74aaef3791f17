"""The outer step of a merge, piece by piece: the next anchor and momentum, what local parameters are shifted by, and the new state's outline.

Arithmetic and the order of it, of a crew's threads and of tensors; the formulas and what becomes of the result are outer.py's. What bounds
its speed on several threads, as measured (benchmarks/BENCHMARKS.md, "What a round costs"): nobody waits for all others before the end, so a
tensor is opened by whoever comes to it first and let go of by whoever has read the last of it; a state's chunks are hashed where they are
computed, while they lie in the caches, and only those that a piece holds in part are read back; a value is looked at once.
"""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dilocox_peer.compression.aggregate import TensorMean
from dilocox_peer.compression.contribution import Contribution
from dilocox_peer.compression.reader import TensorReader, pieces
from dilocox_peer.errors import StateCorrupt
from dilocox_peer.peer.training.anchor_state import GrowingState, StatePart, buffer_of
from dilocox_peer.peer.training.crew import Crew, Scratch
from dilocox_peer.store.outline import CHUNK_BYTES, Outline, num_chunks
from dilocox_peer.types import Digest, Layout, sha256


class RoundMean(Protocol):
    """The mean of a round's contributions, tensor by tensor."""

    def open(self, index: int) -> TensorMean:
        """The mean of the tensor of that place in the layout. Raises MalformedBlob."""
        ...

    def let_go(self, index: int) -> None:
        """That tensor was read."""
        ...


@dataclass(frozen=True, slots=True)
class Before:
    """What a step starts from. anchor_N, momentum_N: (N,) float32, to be read; let_go: of the elements start to stop of both, which were."""

    layout: Layout
    anchor_N: Tensor
    momentum_N: Tensor
    let_go: Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Settlement:
    """Our own contribution, where it counts. pseudo_gradient_N: (N,) float32, which may be where the shift goes. settle: given a tensor's index,
    a part of the flat vector, and what the contribution decodes to there."""

    contribution: Contribution
    pseudo_gradient_N: Tensor
    settle: Callable[[int, slice, Tensor], None]


SWEPT_EVERY = 16
LEAST_MOMENTUM = 2.0**-80
"""Far below anything that moves a weight, and in so many rounds no momentum of 0.15 and more fades from there to 2**-126."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Elements start to stop of a tensor."""

    tensor: "_Tensor"
    start: int
    stop: int


class OuterStep:
    """m' = mu * m + g;  u = -lr * (g + mu * m');  a' = a + u;  the shift is u, or u + d of a contribution that is settled.

    In every SWEPT_EVERY-th round what is left in m' below LEAST_MOMENTUM is 0: the momentum of elements that nobody changes any more would fade into
    denormal numbers, for good, with which processors take ten times as long, and some count otherwise."""

    def __init__(
        self, before: Before, mean: RoundMean, *, learning_rate: float, momentum: float, round_number: int = 1
    ) -> None:
        self._before = before
        self._mean = mean
        self._lr, self._mu = learning_rate, momentum
        self._sweeps = round_number % SWEPT_EVERY == 0

    def take(
        self,
        crew: Crew,
        growing: GrowingState,
        shift_N: Tensor,
        *,
        settlement: Settlement | None,
        measured: frozenset[str],
        mean_N: Tensor,
    ) -> Outline:
        """growing takes anchor' and momentum', shift_N the shift, mean_N the mean of the tensors of those names; the outline of what has grown.
        Raises StateCorrupt for values that are not finite, MalformedBlob, OSError, InterruptedError of a crew that is stopped: growing and the
        vectors are then written in part."""
        layout = self._before.layout
        outline = _OutlineInParts(layout.num_elements)

        def step(piece: _Piece, scratch: Scratch) -> None:
            self._step(piece, scratch, growing, shift_N, settlement, outline)
            if piece.tensor.name in measured:
                part = piece.tensor.part(piece.start, piece.stop)
                mean_N[part] = scratch.of(piece.stop - piece.start)[0]
            piece.tensor.is_read(piece.stop - piece.start)

        crew.each(step, self._pieces(None if settlement is None else settlement.contribution))
        crew.each(
            lambda index, scratch: outline.take(index, growing.chunk(index, scratch.vectors[0])), outline.missing()
        )
        return outline.whole()

    def _step(
        self,
        piece: _Piece,
        scratch: Scratch,
        growing: GrowingState,
        shift_N: Tensor,
        settlement: Settlement | None,
        outline: "_OutlineInParts",
    ) -> None:
        lr, mu = self._lr, self._mu
        part = piece.tensor.part(piece.start, piece.stop)
        mean, after, update, decoded = scratch.of(piece.stop - piece.start)
        round_mean, own = piece.tensor.readers()
        round_mean.read(piece.start, piece.stop, mean, after)
        torch.mul(self._before.momentum_N[part], mu, out=after).add_(mean)
        if self._sweeps:  # what is no number stays none, to be found below
            after.masked_fill_(torch.abs(after, out=update) < LEAST_MOMENTUM, 0.0)
        growing.write("momentum", part.start, after)
        outline.look("momentum", part.start, after)
        torch.mul(after, mu, out=update).add_(mean).mul_(-lr)  # "u" of outer.py's text
        torch.add(self._before.anchor_N[part], update, out=after)
        if not _is_finite(after):  # it is not if the momentum is not, so that one needs no look of its own
            is_momentum = not _is_finite(torch.mul(self._before.momentum_N[part], mu, out=decoded).add_(mean))
            raise StateCorrupt(f"{'momentum' if is_momentum else 'anchor'} holds values that are not finite")
        growing.write("anchor", part.start, after)
        outline.look("anchor", part.start, after)
        if settlement is None or own is None:
            shift_N[part] = update
        else:
            own.read(piece.start, piece.stop, decoded)
            settlement.settle(piece.tensor.index, part, decoded)
            torch.add(update, settlement.pseudo_gradient_N[part], out=shift_N[part])

    def _pieces(self, own: Contribution | None) -> Iterator[_Piece]:
        for index, (spec, first, _stop) in enumerate(self._before.layout.spans()):
            tensor = _Tensor(index, spec.name, first, spec.num_elements, self._mean, own, self._before.let_go)
            for start, stop in pieces(spec.num_elements):
                yield _Piece(tensor, start, stop)


class _Tensor:
    """A tensor of the layout: opened once, by whoever is first; let go of once all of it was read. Any threads."""

    def __init__(
        self,
        index: int,
        name: str,
        first: int,
        num_elements: int,
        mean: RoundMean,
        own: Contribution | None,
        let_go: Callable[[int, int], None],
    ) -> None:
        self.index = index
        self.name = name
        self._first = first
        self._num_elements = self._left = num_elements
        self._mean = mean
        self._own = own
        self._let_go = let_go
        self._lock = threading.Lock()
        self._readers: tuple[TensorMean, TensorReader | None] | None = None

    def part(self, start: int, stop: int) -> slice:
        """That part of the flat vector."""
        return slice(self._first + start, self._first + stop)

    def readers(self) -> tuple[TensorMean, TensorReader | None]:
        """Those of the mean and of our own contribution. Raises MalformedBlob."""
        with self._lock:
            if self._readers is None:
                own = None if self._own is None else self._own.open(self.index)
                self._readers = self._mean.open(self.index), own
            return self._readers

    def is_read(self, num_elements: int) -> None:
        """So many more."""
        with self._lock:
            self._left -= num_elements
            if self._left:
                return
            self._readers = None
        self._let_go(self._first, self._first + self._num_elements)
        self._mean.let_go(self.index)


class _OutlineInParts:
    """The digests of a state's chunks, as they come. Any threads, each with chunks of its own."""

    def __init__(self, num_elements: int) -> None:
        self._num_elements = num_elements
        self._size_bytes = 8 * num_elements
        self._digests: list[Digest | None] = [None] * num_chunks(self._size_bytes)

    def look(self, part: StatePart, start: int, values_X: Tensor) -> None:
        """Takes the chunks that lie whole in the elements of a part (float32, contiguous) from start on."""
        raw = buffer_of(values_X)
        begin = 4 * (start if part == "anchor" else self._num_elements + start)
        index = -(-begin // CHUNK_BYTES)
        while (first := index * CHUNK_BYTES - begin) < len(raw):
            last = min(first + CHUNK_BYTES, self._size_bytes - begin)
            if last > len(raw):
                return
            self.take(index, raw[first:last])
            index += 1

    def take(self, index: int, raw: memoryview) -> None:
        """The bytes of that chunk."""
        self._digests[index] = sha256(raw)

    def missing(self) -> Sequence[int]:
        """The chunks of which parts lay in several pieces."""
        return [index for index, digest in enumerate(self._digests) if digest is None]

    def whole(self) -> Outline:
        assert not self.missing(), f"chunks {self.missing()} were not looked at"
        return Outline(self._size_bytes, tuple(digest for digest in self._digests if digest is not None))


def _is_finite(values: Tensor) -> bool:
    return not values.numel() or all(math.isfinite(bound) for bound in values.aminmax())
