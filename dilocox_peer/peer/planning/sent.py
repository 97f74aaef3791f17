"""What averaging makes a peer send, and keep on its disk: all to all, or in slices (docs/decisions/0022-results-in-slices.md). Pure.

sent, in contributions
    all to all   its contribution to each of the others
    in slices    its contribution to two averagers, and its part of the result that all others fetch; both but for what is its own
kept of a round
    all to all   all contributions, for who is behind
    in slices    the result of all slices, for who is behind; and for a few rounds its contribution, of the others' those slices that it
                 averages, all tables, and what encoding lost of the means that it made
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from dilocox_peer.wire.chain import VOUCHING

ALL_TO_ALL: Final = 3
"""Members up to which everybody takes everybody's whole contribution: no more bytes, and fewer steps."""

RESULT_TIMES: Final[Mapping[str, float]] = {
    "none": 1.0, "fp16": 1.0, "int8": 1.0, "int4": 1.0, "int2": 2.0, "sign": 2.0, "topk": 3.0,
}  # fmt: skip
"""Bytes of a result over those of a contribution in this codec (slices.RESULT_CODEC): 2.7 of topk at four peers, 3.5 at eight, measured before a bit cost 0.1 (ecsq.py): some less now."""

PASSING_ROUNDS: Final = 2
"""That slices of contributions stay to be had: whoever doubts a result can look."""

TABLE_BYTES: Final = 800  # of a contribution in 16 slices
LOST_BYTES: Final = 4  # a parameter: what encoding a mean has lost (slices.check_residual)


class AveragedKept(NamedTuple):
    """Bytes on a disk. a_round: for who is behind, of each round that may be replayed. passing: of all else."""

    a_round: float
    passing: float


def contributions_sent(peers: float, codec: str, *, is_sliced: bool) -> float:
    """So many contributions' bytes a round, of each of so many peers; as many come."""
    if not is_sliced or peers <= ALL_TO_ALL:
        return max(0.0, peers - 1)
    return (VOUCHING + RESULT_TIMES[codec]) * (peers - 1) / peers


def contributions_kept(
    peers: float, contribution_bytes: float, parameters: int, codec: str, *, is_sliced: bool
) -> AveragedKept:
    """What each of so many peers of a stage keeps of what they average."""
    if not is_sliced or peers <= ALL_TO_ALL:
        return AveragedKept(peers * contribution_bytes, 0.0)
    averaged = VOUCHING / peers  # of all slices, those that it averages
    rounds = PASSING_ROUNDS + 1  # and the one that is on
    slices = (1 + averaged * (peers - 1)) * contribution_bytes + peers * TABLE_BYTES
    lost = averaged * LOST_BYTES * parameters * (rounds + 1)  # what is certified goes into the next mean
    return AveragedKept(RESULT_TIMES[codec] * contribution_bytes, rounds * slices + lost)
