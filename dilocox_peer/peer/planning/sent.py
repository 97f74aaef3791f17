"""What averaging makes a peer send, in contributions: all to all, or in slices (docs/decisions/0022-results-in-slices.md). Pure.

all to all   its contribution to each of the others
in slices    its contribution to two averagers, and its part of the result that all others fetch; both but for what is its own
"""

from collections.abc import Mapping
from typing import Final

from dilocox_peer.wire.chain import VOUCHING

ALL_TO_ALL: Final = 3
"""Members up to which everybody takes everybody's whole contribution: no more bytes, and fewer steps."""

RESULT_TIMES: Final[Mapping[str, float]] = {
    "none": 1.0, "fp16": 1.0, "int8": 1.0, "int4": 1.0, "int2": 2.0, "sign": 2.0, "topk": 3.0,
}  # fmt: skip
"""Bytes of a result over those of a contribution in this codec (slices.RESULT_CODEC): 2.7 of topk at four peers, 3.5 at eight, measured."""


def contributions_sent(peers: float, codec: str, *, is_sliced: bool) -> float:
    """So many contributions' bytes a round, of each of so many peers; as many come."""
    if not is_sliced or peers <= ALL_TO_ALL:
        return max(0.0, peers - 1)
    return (VOUCHING + RESULT_TIMES[codec]) * (peers - 1) / peers
