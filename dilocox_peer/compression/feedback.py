"""Error feedback: what a codec loses in one round goes with the next one.

Pure arithmetic on flat float32 vectors; who owns the residual, and when a new one replaces the old, is peer/training/outer.py.
Source: Karimireddy et al. (arXiv 1901.09847); for pseudo-gradients DiLoCoX (2506.21263) and SparseLoCo (2508.15706). Decay touches
codec error only, never the pseudo-gradient itself.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from dilocox_peer.compression.codec import CodecPolicy
from dilocox_peer.types import Layout

DECAY_BY_CODEC: Mapping[str, float] = {
    "none": 1.0, "fp16": 1.0, "int8": 1.0, "int4": 1.0, "int2": 1.0, "sign": 1.0,
    "topk": 0.8, "ecsq": 1.0, "lowrank-int4": 0.8,
}  # fmt: skip
"""Share of the residual that is carried on. 1.0 for codecs that send something of every element in every round; 0.8
where elements or directions wait many rounds for their turn and a stale residual hurts (top-k, low rank)."""


def decay_by_codec(layout: Layout, codec_of: CodecPolicy) -> tuple[float, ...]:
    """The decay of each tensor's residual, in the layout's order: a contribution mixes codecs (names.py)."""
    return tuple(DECAY_BY_CODEC[codec_of(spec).name] for spec in layout.tensors)


def with_feedback(pseudo_gradient_N: Tensor, residual_N: Tensor, decay: float, *, out: Tensor | None = None) -> Tensor:
    """pseudo-gradient + decay * residual, in out or a new vector: what is to be encoded."""
    return torch.add(pseudo_gradient_N, residual_N, alpha=decay, out=out)


def residual_after(sent_N: Tensor, decoded_N: Tensor) -> Tensor:
    """sent - decoded, written into sent: what the codec lost. Exactly 0 for a lossless codec."""
    return torch.sub(sent_N, decoded_N, out=sent_N)
