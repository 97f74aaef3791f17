"""How much memory a stage takes at a peer, and which stages there is room for. Pure arithmetic, for the claim of a stage.

    bytes a parameter                                  where the training computes   in the machine's memory
    weight, gradient, AdamW's two moments              16
    a second version of the weights, of several stages  4
    anchor, outer momentum, residual, snapshot                                       16
    while contributions are averaged                                                  4

Together 36 of a model in one stage, 40 of several. Activations are not in it: they are bounded by slots, a few MB for small
models.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

TRAINED_BYTES: Final = 16
SECOND_VERSION_BYTES: Final = 4
AGREED_BYTES: Final = 16
DECODING_BYTES: Final = 4
BASE_BYTES: Final = 440_000_000
"""What does not grow with the stage: interpreter, torch, hivemind, the text, p2pd. A peer of the tiny model, which is one
stage, took 444 MB with all its processes, 8 of them for parameters."""
LINKD_BYTES: Final = 70_000_000
"""The process that a run of several stages has beside, with py-libp2p imported."""

GB: Final = 1e9


def stage_bytes(num_parameters: int, *, is_alone: bool, on_cpu: bool = True) -> int:
    """In the machine's memory, of a peer that holds a stage with so many parameters. is_alone: it is the whole model."""
    each = AGREED_BYTES + DECODING_BYTES
    if on_cpu:
        each += TRAINED_BYTES + (0 if is_alone else SECOND_VERSION_BYTES)
    return BASE_BYTES + (0 if is_alone else LINKD_BYTES) + num_parameters * each


def device_bytes(num_parameters: int, *, is_alone: bool) -> int:
    """In an accelerator's memory, of a peer that trains there."""
    return BASE_BYTES + num_parameters * (TRAINED_BYTES + (0 if is_alone else SECOND_VERSION_BYTES))


@dataclass(frozen=True, slots=True)
class Room:
    """free_bytes: of the machine, with what this peer has taken already; allowed_bytes: what --max-memory allows."""

    free_bytes: int
    allowed_bytes: int | None = None

    def fitting(self, needs: Sequence[int]) -> list[int]:
        """Of stages that need so many bytes each, those there is room for."""
        most = self.free_bytes if self.allowed_bytes is None else min(self.free_bytes, self.allowed_bytes)
        return [stage for stage, need in enumerate(needs) if need <= most]

    def why_not(self, stage: int, needs: Sequence[int]) -> str:
        """What is wrong with holding that stage and what to do about it; empty when it fits."""
        need = needs[stage]
        fitting = self.fitting(needs)
        if stage in fitting:
            return ""
        other = f", or join with --stage {fitting[0]}, which needs {size(needs[fitting[0]])}" if fitting else ""
        if self.allowed_bytes is not None and need > self.allowed_bytes:
            allowed = f"--max-memory allows {size(self.allowed_bytes)}"
            return f"stage {stage} needs {size(need)} of memory, {allowed}: allow {-(-need // 10**8) / 10:.1f}{other}"
        other = other or ", or use a machine with more memory"
        return (
            f"stage {stage} needs {size(need)} of memory, {size(self.free_bytes)} are free: close other programs{other}"
        )


def size(num_bytes: int) -> str:
    return f"{num_bytes / GB:.1f} GB" if num_bytes >= GB else f"{num_bytes / 1e6:.0f} MB"
