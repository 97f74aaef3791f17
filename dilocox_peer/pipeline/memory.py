"""How much memory a stage takes at a peer, by DESIGN section 5's table. Pure arithmetic, for the claim of a stage."""

from collections.abc import Sequence
from typing import Final

BYTES_PER_PARAMETER: Final = 32
"""Weight, gradient, AdamW's two moments, anchor, outer momentum, residual, snapshot: float32 each."""

SECOND_VERSION_BYTES: Final = 4  # of a stage of several
DECODING_BYTES: Final = 4  # while contributions are averaged
BASE_BYTES: Final = 400_000_000
"""Interpreter, torch, hivemind, linkd, p2pd: one peer of the tiny model with all its processes took 444 MB."""


def stage_bytes(num_parameters: int, *, is_alone: bool) -> int:
    """Of a peer that holds a stage with so many parameters. is_alone: the stage is the whole model."""
    each = BYTES_PER_PARAMETER + DECODING_BYTES + (0 if is_alone else SECOND_VERSION_BYTES)
    return BASE_BYTES + num_parameters * each


def stages_that_fit(num_parameters: Sequence[int], available_bytes: int) -> list[int]:
    """The stages, of those with so many parameters each, that a peer with so much memory can hold."""
    is_alone = len(num_parameters) == 1
    return [
        stage for stage, count in enumerate(num_parameters) if stage_bytes(count, is_alone=is_alone) <= available_bytes
    ]
