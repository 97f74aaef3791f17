"""Error feedback: what a codec loses in one round goes with the next one.

Pure arithmetic on flat float32 vectors; who owns the residual, and when a new one replaces the old, is peer/outer.py.
Source: DESIGN section 8, measured in facts/algorithm.md. Decay touches codec error only, never the movement itself.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

DECAY_BY_CODEC: Mapping[str, float] = {
    "none": 1.0, "fp16": 1.0, "int8": 1.0, "int4": 1.0, "int2": 1.0, "sign": 1.0,
    "topk": 0.8,
}  # fmt: skip
"""Share of the residual that is carried on. 1.0 for codecs that send something of every element in every round; 0.8
where elements or directions wait many rounds for their turn and a stale residual hurts (top-k, low rank)."""


def with_feedback(movement_N: Tensor, residual_N: Tensor, decay: float) -> Tensor:
    """movement + decay * residual, in a new vector: what is to be encoded. decay 1 multiplies nothing."""
    carried_N = residual_N if decay == 1.0 else residual_N * decay
    return movement_N + carried_N


def residual_after(sent_N: Tensor, decoded_N: Tensor) -> Tensor:
    """sent - decoded, written into sent: what the codec lost. Exactly 0 for a lossless codec."""
    return torch.sub(sent_N, decoded_N, out=sent_N)
