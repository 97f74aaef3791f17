"""How much each contribution of a round weighs for agreeing with the others: the same answer, to the bit, on every peer.

Norms tell nothing of direction: two of eight that send what the others send, turned round and as long as the norm clip lets it be,
end a run's learning (benchmarks/hostile_learning.py). So the signs of a sample of elements are compared, each contribution with
each other one. Signs are whole numbers, and so are sums of their products: no order of adding and no processor changes them. The
sample is drawn by a beacon that is known when all contributions are, the head of their certificate.

Two contributions disagree when their signs do by more than chance (CERTAIN standard deviations) and by more than LEAST_PERCENT of the elements that both
have. Honest peers agree, from a tenth to a sixth of the signs beyond chance where that was measured, less late in a run. What more than half of the
others disagree with is outvoted: while more than half are honest, it is all of those that turn the others round, and none of these. Of what is left, the
quarter of the others that agrees most and the quarter that agrees least with a contribution are left out: accomplices that agree with each other gain
nothing, and who copies somebody turned round makes no outcast of it; a contribution that the rest, taken together, disagrees with is opposed.
Should half of all or more be outvoted, nobody is: then nobody can tell which half is right; nor is anybody opposed where that would come to half.

Near-copies, which agree with each other as no two peers' work does, count as one everywhere here and share the weight of one: else who sends an honest contribution
again and again, with an element changed, raises what is usual, and takes from the others what they have.

What agrees with the rest less than 1/ENOUGH as well as is usual weighs less in proportion, down to nothing: noise, wrong labels and old work oppose nobody
and still lead nowhere. How well is reckoned of all elements that it has, not of those that others have too: what lies where nobody else says anything agrees with nobody. Usual is the lower median of all, so half of them keep all their weight; and it has to be TELLING standard deviations beyond chance, else
contributions that have little in common, as late in a run or on data of their own, would be weighed by luck.
"""

import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from fractions import Fraction

import torch
from torch import Tensor

from dilocox_peer.compression.reader import GRAIN, PIECE, TensorReader, TensorReaders
from dilocox_peer.types import Layout, sha256

SAMPLED = 1 << 20
"""Elements that are looked at; of a smaller stage all."""

MOST_RUNS = 64
"""Of as many equal parts of the stage, and no more than it has pieces, one run of elements each, at a place that the beacon draws. For it the grains that it
lies in are decoded: of 30 million elements two of seven a second time, of a billion one of a hundred. The more runs there are, the less it helps to agree in a
small share of the elements and to have beacons tried until the sample is of those: who leads composes the head."""

CERTAIN = 6
LEAST_PERCENT = 2
ENOUGH = 2
TELLING = 8
ALIKE_PERCENT = 90  # of the signs beyond chance, among all elements that either has: honest ones came to 27 at most
WHOLE = 64  # parts of a weight

_BLOCK = 1 << 16  # elements multiplied at a time: sums of as many signs are exact in float32


def parts_by_agreement(
    layout: Layout, contributions: Sequence[TensorReaders], weights: Sequence[int], beacon: bytes
) -> tuple[int, ...]:
    """How much of its weight each contribution keeps, in parts of WHOLE: 0 of what pushes against the others or has nothing in common with
    them, WHOLE of those without weight and where fewer than three have any. At least half of the others keep all, but for near-copies. Raises MalformedBlob."""
    parts = [WHOLE] * len(contributions)
    asked = [index for index, weight in enumerate(weights) if weight > 0]
    if len(asked) < 3:
        return tuple(parts)
    agree, shared = _compared(layout, [contributions[index] for index in asked], beacon)
    rows = range(len(asked))
    alike = _alike(agree, shared)
    outvoted = _unless_half({row for row in rows if _is_outvoted(agree[row], shared[row])}, len(asked))
    left = [row for row in rows if row not in outvoted]
    firsts = sorted({alike[row]: row for row in reversed(left)}.values())  # of what is alike the first that is left
    rest = {
        row: _with_the_rest(agree[row], shared[row], [each for each in firsts if alike[each] != alike[row]])
        for row in left
        if len(firsts) > 1
    }
    opposed = outvoted | {row for row, found in rest.items() if _are_opposed(*found)}
    opposed = _unless_half(opposed, len(asked)) or outvoted
    shares = {row: Fraction(found[0], max(shared[row][row], 1)) for row, found in rest.items() if row not in opposed}
    usual = sorted((row for row in firsts if row in shares), key=lambda row: (shares[row], row))
    if usual and _is_telling(*rest[median := usual[(len(usual) - 1) // 2]]):
        for row, share in shares.items():
            parts[asked[row]] = min(max(int(WHOLE * ENOUGH * share / shares[median]), 0), WHOLE)
    for row in left:  # they share what one of them would have
        parts[asked[row]] //= min(sum(alike[each] == alike[row] for each in left), WHOLE)
    for row in opposed:
        parts[asked[row]] = 0
    return tuple(parts)


def _alike(agree: Sequence[Sequence[int]], shared: Sequence[Sequence[int]]) -> list[int]:
    """Of each contribution the first that it is a near-copy of, or that one's first; itself, if it is none."""
    firsts: list[int] = []
    for row in range(len(agree)):
        mine = (
            firsts[other]
            for other in range(row)
            if 100 * agree[row][other] >= ALIKE_PERCENT * max(shared[row][row], shared[other][other], 1)
        )
        firsts.append(min(mine, default=row))
    return firsts


def _unless_half(rows: set[int], count: int) -> set[int]:
    return rows if 2 * len(rows) < count else set()


def _is_outvoted(agree: Sequence[int], shared: Sequence[int]) -> bool:
    """With itself no contribution disagrees."""
    return 2 * sum(map(_are_opposed, agree, shared)) > len(agree) - 1


def _are_opposed(total: int, count: int) -> bool:
    return total < 0 and total * total > CERTAIN * CERTAIN * count and 100 * -total > LEAST_PERCENT * count


def _is_telling(total: int, count: int) -> bool:
    return total > 0 and total * total > TELLING * TELLING * count


def _with_the_rest(agree: Sequence[int], shared: Sequence[int], others: Sequence[int]) -> tuple[int, int]:
    """Of one contribution with those of the others that are left: signs that are alike less those that are not, and elements that both
    have. agree, shared: the same with each."""
    pairs = sorted((agree[other] / max(shared[other], 1), agree[other], shared[other]) for other in others)
    quarter = (len(others) + 1) // 4
    worst = min(max(quarter, 1), len(pairs) - 1)  # of three, one that means ill must not decide about the others
    rest = pairs[worst : max(len(pairs) - quarter, worst + 1)]
    return sum(a for _, a, _ in rest), sum(s for _, _, s in rest)


def _compared(
    layout: Layout, contributions: Sequence[TensorReaders], beacon: bytes
) -> tuple[list[list[int]], list[list[int]]]:
    num = len(contributions)
    agree_MM, shared_MM = torch.zeros(num, num, dtype=torch.int64), torch.zeros(num, num, dtype=torch.int64)
    sample = _sample(layout, beacon)
    widths = [sum(part.stop - part.start for part in parts) for parts in sample.values()]
    decoded_X, signs_MX = torch.empty(PIECE), torch.empty(num, min(PIECE, sum(widths)), dtype=torch.int8)
    opened, readers, filled = -1, list[TensorReader](), 0
    for ((index, start, stop), parts), width in zip(sample.items(), widths, strict=True):
        if filled + width > signs_MX.shape[1]:  # many small tensors are multiplied at once
            _add_products(signs_MX[:, :filled], agree_MM, shared_MM)
            filled = 0
        if index != opened:  # what is sparse is read through for it
            opened, readers = index, [contribution.open(index) for contribution in contributions]
        for row, reader in enumerate(readers):
            reader.read(start, stop, decoded_X[: stop - start])
            at = filled
            for part in parts:
                signs_X = torch.sign(decoded_X[part])
                signs_MX[row, at : at + len(signs_X)] = signs_X
                at += len(signs_X)
        filled += width
    _add_products(signs_MX[:, :filled], agree_MM, shared_MM)
    return agree_MM.tolist(), shared_MM.tolist()


def _add_products(signs_MX: Tensor, agree_MM: Tensor, shared_MM: Tensor) -> None:
    for block_MX in torch.split(signs_MX, _BLOCK, dim=1):
        signs_MB = block_MX.float()
        agree_MM += _products(signs_MB)
        shared_MM += _products(signs_MB.abs_())


def _products(block_MX: Tensor) -> Tensor:
    return (block_MX @ block_MX.T).to(torch.int64)


def _sample(layout: Layout, beacon: bytes) -> dict[tuple[int, int, int], list[slice]]:
    """Of each part (tensor, start, stop) that is decoded, a piece at most, the runs that are looked at, counted from its start."""
    found: dict[tuple[int, int, int], list[slice]] = {}
    spans = layout.spans()
    firsts = [first for _, first, _ in spans]
    for start, stop in _runs(layout.num_elements, beacon):
        index = bisect_right(firsts, start) - 1
        while start < stop:
            spec, first, last = spans[index]
            if start < last:  # a tensor may be empty
                begin = (start - first) // GRAIN * GRAIN
                until = min(stop - first, begin + PIECE, spec.num_elements)
                end = min(-(-until // GRAIN) * GRAIN, spec.num_elements)
                found.setdefault((index, begin, end), []).append(slice(start - first - begin, until - begin))
                start = first + until
            index += start >= last
    return found


def _runs(num_elements: int, beacon: bytes) -> Iterator[tuple[int, int]]:
    """(start, stop) in the flat vector, ascending."""
    if num_elements <= SAMPLED:
        yield 0, num_elements
        return
    num = min(-(-num_elements // PIECE), MOST_RUNS)
    for index in range(num):
        low, high = num_elements * index // num, num_elements * (index + 1) // num
        length = min(SAMPLED // num, high - low)
        drawn = int.from_bytes(sha256(b"agreement", beacon, struct.pack(">I", index))[:8], "big")
        start = low + drawn % (high - low - length + 1)
        yield start, start + length
