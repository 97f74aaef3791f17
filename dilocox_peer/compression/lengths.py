"""How long each part of a contribution is, and what is left of parts that are far longer than is usual there: equal bits on every peer.

A tensor is divided into units of elements; of each the sum of squares is taken, of whole numbers: values in 2**-BITS of the largest power of two in
the unit, so that no order of adding and no processor changes a sum. Signs and the length of the whole (agreement.py, aggregate.py) let one contribution
put all of its length into a few elements; unit by unit it cannot.

Shape letters: X elements of a part of a tensor, U units of a tensor, or of all tensors one after another, M contributions.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dilocox_peer.compression.reader import PIECE, TensorReader, pieces
from dilocox_peer.types import Layout

LEAST_UNIT = 1024
MOST_UNITS = 256
"""Of a tensor, as long as a unit is no longer than a piece: of a contribution to a billion parameters some hundred thousand are kept."""

LEAST_COMPARED = 3  # contributions that have anything in a unit, or as a whole: of fewer nobody is unlike the others
CLIP_STEPS = 64
"""Clip factors are rounded down to 1/64ths: a difference in a norm's last bits cannot show in the result."""

LEAST_FACTOR = 2.0**-64
"""What is so much too long counts nothing: shares stay far from denormal numbers, which not every processor keeps."""

_BITS = 20
_EXACT = 8192  # squares of so many bits whose sum a float64 holds exactly

Squares = np.ndarray[Any, np.dtype[np.float64]]
"""(U): of a contribution the sums of squares of all units."""
Lengths = np.ndarray[Any, np.dtype[np.float64]]
"""(U): of units, in elements or as a bound on what is in them."""
Shares = np.ndarray[Any, np.dtype[np.float32]]
"""(U): of a contribution in the mean of each unit."""


class Opened(Protocol):
    """A contribution, or what it decodes to."""

    def open(self, index: int) -> TensorReader: ...
    def let_go(self, index: int) -> None: ...


def unit_of(num_elements: int) -> int:
    """Elements of a unit of a tensor of so many: a power of two, and pieces are whole ones of it."""
    unit = LEAST_UNIT
    while unit < PIECE and num_elements > MOST_UNITS * unit:
        unit *= 2
    return unit


def units_of(layout: Layout) -> Iterator[slice]:
    """Of each tensor the place of its units among all."""
    first = 0
    for spec in layout.tensors:
        num = -(-spec.num_elements // unit_of(spec.num_elements))
        yield slice(first, first + num)
        first += num


def unit_sizes(layout: Layout) -> Lengths:
    """(U): how many elements each has."""
    sizes = [np.zeros(0)]
    for spec in layout.tensors:
        unit = unit_of(spec.num_elements)
        ends = np.append(np.arange(0, spec.num_elements, unit), spec.num_elements)
        sizes.append(np.diff(ends).astype(np.float64))
    return np.concatenate(sizes)


def squares_of(contribution: Opened, layout: Layout) -> Squares:
    """Of what it decodes to. Raises MalformedBlob: also a full check of it."""
    found, decoded_X, scratch_X = [np.zeros(0)], torch.empty(PIECE), torch.empty(PIECE, dtype=torch.float64)
    for index, spec in enumerate(layout.tensors):
        reader, unit = contribution.open(index), unit_of(spec.num_elements)
        for start, stop in pieces(spec.num_elements):
            values_X = decoded_X[: stop - start]
            reader.read(start, stop, values_X)
            whole = len(values_X) // unit * unit
            if whole:
                found.append(_squares(values_X[:whole].view(-1, unit), scratch_X))
            if whole < len(values_X):
                found.append(_squares(values_X[whole:].view(1, -1), scratch_X))
        contribution.let_go(index)
    return np.concatenate(found)


def _squares(values_UX: Tensor, scratch_X: Tensor) -> Squares:
    largest_U = torch.maximum(values_UX.amax(1), -values_UX.amin(1))  # aminmax(dim=1) takes twenty times as long
    _, exponents_U = np.frexp(largest_U.numpy().astype(np.float64))
    whole_UX = scratch_X[: values_UX.numel()].view(values_UX.shape).copy_(values_UX)
    whole_UX.mul_(torch.from_numpy(np.ldexp(1.0, _BITS - exponents_U))[:, None]).round_()
    whole_UX.mul_(whole_UX)
    sums_U = torch.zeros(len(values_UX), dtype=torch.int64)
    for part_UX in torch.split(whole_UX, _EXACT, dim=1):
        sums_U += part_UX.sum(1).long()
    found: Squares = np.ldexp(sums_U.numpy().astype(np.float64), 2 * (exponents_U - _BITS))
    return found


def length_of(squares_U: Squares) -> float:
    """The length of the whole."""
    return math.sqrt(math.fsum(squares_U))


def unit_factors(
    squares_MU: Sequence[Squares],
    counts: Sequence[int],
    factors: Sequence[float],
    scales: Sequence[float],
    *,
    norm_clip: float,
    reach_U: Lengths | float = math.inf,
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """(M, U): the contributions' own factors, or what is left of a unit that is more than norm_clip times its scale times as long as the lower median of
    those that have anything there and weigh anything, or longer than reach_U, whichever is less. Of fewer than LEAST_COMPARED nobody is unlike the others, and
    reach_U alone is the limit."""
    own_MU = np.broadcast_to(np.array(factors)[:, None], (len(factors), len(squares_MU[0])))
    norms_MU = np.sqrt(np.stack(squares_MU)) * (np.array(counts)[:, None] > 0)
    num_U = (norms_MU > 0.0).sum(0)
    ordered_MU = np.sort(np.where(norms_MU > 0.0, norms_MU, np.inf), axis=0)
    median_U = np.take_along_axis(ordered_MU, np.maximum(num_U - 1, 0)[None] // 2, axis=0)[0]
    usual_U = np.where(num_U >= LEAST_COMPARED, median_U, np.inf)
    limits_MU = np.minimum(norm_clip * usual_U * np.array(scales)[:, None], reach_U)
    is_long_MU = norms_MU > limits_MU
    mantissas_MU, exponents_MU = np.frexp(np.divide(limits_MU, norms_MU, out=np.ones_like(norms_MU), where=is_long_MU))
    left_MU = np.ldexp(np.floor(mantissas_MU * CLIP_STEPS) / CLIP_STEPS, exponents_MU)
    left_MU = np.where(left_MU < LEAST_FACTOR, 0.0, left_MU)
    return np.where(is_long_MU, np.minimum(left_MU, own_MU), own_MU)


def scale(values_X: Tensor, shares_U: Shares, unit: int) -> Tensor:
    """values_X, from a unit's beginning on, in place, each unit times its share. One multiplication, rounded to float32, an element."""
    if len(shares_U) and (shares_U == shares_U[0]).all():
        return values_X.mul_(float(shares_U[0]))
    whole = len(values_X) // unit
    values_X[: whole * unit].view(-1, unit).mul_(torch.from_numpy(shares_U[:whole])[:, None])
    if whole * unit < len(values_X):
        values_X[whole * unit :].mul_(float(shares_U[whole]))
    return values_X
