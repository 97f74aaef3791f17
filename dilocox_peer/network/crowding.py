"""Room for one more where all places are taken: from whom it comes. Pure.

Names cost nothing, ranges of addresses do: who holds most, by many names, gives up to who holds less.
"""

from collections import Counter
from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


def to_give_up(held: Mapping[T, str], holder: str) -> T | None:
    """Of what is held, the oldest first, each with its holder, what makes room for one more of this holder: the oldest of whoever holds most; None: none
    does, as nobody holds more than this one would have then."""
    counts = Counter(held.values())
    most = max(counts, key=counts.__getitem__, default=holder)
    if counts[most] <= counts[holder] + 1:
        return None
    return next(each for each, by in held.items() if by == most)
