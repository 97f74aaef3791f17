"""Where documents begin in packed sequences, and what follows from it: what a token sees, and the positions, which restart.

Shape letters: B sequences, T tokens.
"""

import torch
from torch import Tensor


def parted(inputs_BT: Tensor) -> tuple[Tensor, Tensor | None]:
    """(tokens, where documents begin) of the inputs of a micro-batch: int64, -1 - token where a document begins that sees nothing
    before it. None: nowhere but at the beginning of a sequence."""
    starts_BT = inputs_BT < 0
    if not bool(starts_BT[:, 1:].any()):
        return torch.where(starts_BT, ~inputs_BT, inputs_BT), None
    return torch.where(starts_BT, ~inputs_BT, inputs_BT), starts_BT


def positions_of(starts_BT: Tensor) -> Tensor:
    """(B, T) int64: of each token in its document, from 0."""
    places_T = torch.arange(starts_BT.shape[1], device=starts_BT.device)
    begun_BT = torch.where(starts_BT, places_T, 0).cummax(1).values
    return places_T - begun_BT


def seen_by(starts_BT: Tensor) -> Tensor:
    """(B, 1, T, T) bool: whether a query (third) sees a key (fourth): in its own document, not behind it."""
    document_BT = starts_BT.cumsum(1)
    same_BTT = document_BT[:, :, None] == document_BT[:, None, :]
    return (same_BTT & torch.ones_like(same_BTT[0]).tril())[:, None]


def as_addend(seen_B1TT: Tensor) -> Tensor:
    """What is added to scores in place of a bool mask: 0 where it sees, -inf where not; in the precision that autocast would give it.

    Attention makes this of a bool mask itself, anew in every layer, and keeps each for the backward: 4 bytes for every two tokens
    of a sequence and layer. Made once it is kept once.
    """
    kind = seen_B1TT.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
    return torch.zeros(seen_B1TT.shape, dtype=dtype, device=seen_B1TT.device).masked_fill_(~seen_B1TT, -torch.inf)
