"""Documents into sequences, best fit: a document lies in one sequence, unless it is longer than that. Pure.

What lies in a sequence is told apart: where a document begins, a token has BEGINS added, so that the model can hide from it what
stands before (model/borders.py). The first token of a document is no target, as nothing foretells it. A document that is longer
than a sequence is cut into pieces that share a token, so that each of its other tokens is a target once. What stays free in a
sequence is filled with tokens that count for nothing.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

BEGINS = 1 << 40
"""Added to a token with which a document begins."""

_FILLER = ~BEGINS  # token 0, which begins a document and is no target


def packed(documents: Sequence[npt.NDArray[np.int64]], length: int) -> npt.NDArray[np.int64]:
    """(count, length) of these documents' tokens, longest pieces first, each into the sequence that it leaves least free.

    A token that is no target is -1 - token, in what comes and in what goes.
    """
    pieces = [piece for document in documents for piece in _pieces(document, length)]
    order = sorted(range(len(pieces)), key=lambda index: (-len(pieces[index]), index))
    free: list[tuple[int, int]] = []  # (room, sequence), the least first
    contents: list[list[int]] = []
    for index in order:
        size = len(pieces[index])
        at = bisect_left(free, (size, -1))
        if at == len(free):
            room, number = length, len(contents)
            contents.append([])
        else:
            room, number = free.pop(at)
        contents[number].append(index)
        if room > size:
            insort(free, (room - size, number))
    sequences = np.full((len(contents), length), ~0, np.int64)
    for number, within in enumerate(contents):
        filled = 0
        for index in within:
            sequences[number, filled : filled + len(pieces[index])] = pieces[index]
            filled += len(pieces[index])
        if filled < length:
            sequences[number, filled] = _FILLER
    return sequences


def _pieces(document: npt.NDArray[np.int64], length: int) -> list[npt.NDArray[np.int64]]:
    """Each with its first token marked. A single token foretells nothing and is foretold by nothing: it is left out."""
    found = []
    for start in range(0, max(1, len(document) - 1), length - 1):
        piece = document[start : start + length].copy()
        if len(piece) > 1:
            first = int(piece[0])
            piece[0] = ~((first if first >= 0 else ~first) + BEGINS)
            found.append(piece)
    return found
