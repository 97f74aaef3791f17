"""How many directions hold nearly all of an averaged pseudo-gradient's energy: what adaptive.py decides by. Pure.

Shape letters: M rows, N columns, S width of the sketch.
"""

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from dilocox_peer.compression.sizes import matrix_shape
from dilocox_peer.peer.planning.adaptive import GROWTH
from dilocox_peer.types import Layout

ENERGY = 0.99
_OVERSAMPLING = 8  # columns of the sketch beyond what a growth would need


def effective_rank(singular_values: Sequence[float], total_energy: float, *, energy: float = ENERGY) -> int:
    """How many of the largest values hold `energy` of the total; one more than there are if all of them do not."""
    held = 0.0
    for count, value in enumerate(sorted(singular_values, reverse=True)):
        if held >= energy * total_energy:
            return count
        held += value * value
    return len(singular_values) + (held < energy * total_energy)


def spectrum(x_MN: Tensor, width: int) -> list[float]:
    """The largest `width` singular values of x, falling, by a seeded sketch and one power iteration: each a lower bound of
    the true one. Cost: 6 * width * M * N operations, a decomposition of width x width."""
    rows, columns = x_MN.shape
    width = min(width, rows, columns)
    if width == 0:
        return []
    generator = torch.Generator().manual_seed(width)
    sketch_MS = torch.mm(x_MN, torch.randn(columns, width, generator=generator))
    basis_MS: Tensor = torch.linalg.qr(sketch_MS).Q
    basis_MS = torch.linalg.qr(torch.mm(x_MN, torch.mm(basis_MS.t(), x_MN).t())).Q
    inside_SN = torch.mm(basis_MS.t(), x_MN)
    energies_S = torch.linalg.eigvalsh(torch.mm(inside_SN, inside_SN.t()).double()).clamp_(min=0.0)
    return [math.sqrt(value) for value in reversed(energies_S.tolist())]


def needed_rank(layout: Layout, mean_N: Tensor, names: Collection[str], *, rank: int) -> int:
    """Rank that holds ENERGY of the averaged pseudo-gradient mean_N: of the matrices named, weighted by size; 0 without any.

    rank: in use; the search goes as far as one growth of it and a little beyond.
    """
    chosen = frozenset(names)
    weighted, elements = 0.0, 0
    for spec, start, stop in layout.spans():
        if spec.name not in chosen:
            continue
        mean_MN = mean_N[start:stop].view(matrix_shape(spec.shape))
        values = spectrum(mean_MN, math.ceil(GROWTH * rank) + _OVERSAMPLING)
        weighted += effective_rank(values, float(mean_MN.double().square().sum())) * spec.num_elements
        elements += spec.num_elements
    return math.ceil(weighted / elements) if elements else 0
