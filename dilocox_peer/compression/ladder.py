"""The codecs by richness, and what a run that starts with one may change to. Names only: needs no torch."""

LADDER = ("none", "fp16", "int8", "int4", "int2", "sign", "topk")
"""Richest first."""

LOW_RANK = "lowrank-int4"


def codecs_beside(codec: str) -> tuple[str, ...]:
    """What a run that starts with codec may use. Low rank only if it does: whether it pays depends on the matrices."""
    return (LOW_RANK, *LADDER) if codec == LOW_RANK else LADDER
