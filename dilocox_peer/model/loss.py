"""The loss of a micro-batch and its gradient, without ever holding the logits of all its tokens where the vocabulary is large.

Logits of 4 x 2048 tokens over 128,256 ids are 4.2 GB in float32, and cross entropy holds about three of them. Here the head
runs over some tokens at a time, forward and backward at once, so that one part's logits live at a time; what it gives
back to the layers below is collected. A part more costs nothing: each is computed once. Source: the idea is that of
"cut cross-entropy" (arXiv 2411.09009) and Liger's fused loss, without their kernels.

A gradient is that of the sum over the targets that count, divided by B * T however many those are; a step divides by what `counted` adds up to. So
every target weighs the same in a step, whichever micro-batch it is in.

Shape letters: B sequences, T tokens, D hidden size, V vocabulary, R rows = B * T, C rows of a part.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dilocox_peer.model.architecture import StageModel
from dilocox_peer.model.memory import LOGITS_BYTES
from dilocox_peer.types import IGNORED


def rows_at_a_time(vocab_size: int, logits_bytes: int = LOGITS_BYTES) -> int:
    """Tokens whose logits fit in so many bytes."""
    return max(1, logits_bytes // (4 * vocab_size))


def counted(targets_BT: Tensor) -> float:
    """What a micro-batch weighs in a step: the part of its targets that count, 1 where all do."""
    return int((targets_BT != IGNORED).sum()) / targets_BT.numel()


def train_on(
    model: StageModel,
    x: Tensor,
    targets_BT: Tensor,
    *,
    starts_BT: Tensor | None = None,
    logits_bytes: int = LOGITS_BYTES,
) -> float:
    """Forward, loss and backward of the last stage: the mean loss in nats over the targets that count, 0 where none does.

    The gradient, `counted` times that of the mean, is added to the model's, and to x's where x asks for one. x: and starts_BT: what `model.hidden`
    takes; targets on the model's device. Raises FloatingPointError if the loss is not finite; the gradient vector is then spoiled.
    """
    hidden_BTD = model.hidden(x, starts_BT)
    targets_R = targets_BT.flatten()
    at_a_time = rows_at_a_time(model.vocab_size, logits_bytes)
    if len(targets_R) <= at_a_time:
        loss = _summed(model.logits(hidden_BTD).flatten(0, 1), targets_R) / len(targets_R)
        torch.autograd.backward(loss)
    else:
        loss, gradient_BTD = _in_parts(model, hidden_BTD.detach(), targets_R, at_a_time)
        torch.autograd.backward(hidden_BTD, gradient_BTD)
    value = float(loss.detach() * (len(targets_R) / (targets_R != IGNORED).sum().clamp(min=1)))
    if not abs(value) < float("inf"):
        raise FloatingPointError(f"the training loss is {value}")
    return value


@torch.no_grad()
def loss_of(
    model: StageModel,
    x: Tensor,
    targets_BT: Tensor,
    *,
    starts_BT: Tensor | None = None,
    logits_bytes: int = LOGITS_BYTES,
) -> tuple[float, int]:
    """(sum of the losses in nats, number of targets that count) at the current parameters. x, starts_BT: as in `train_on`."""
    hidden_RD, targets_R = model.hidden(x, starts_BT).flatten(0, 1), targets_BT.flatten()
    total = 0.0
    for part in _parts(len(hidden_RD), rows_at_a_time(model.vocab_size, logits_bytes)):
        total += float(_summed(model.logits(hidden_RD[None, part])[0], targets_R[part]))
    return total, int((targets_R != IGNORED).sum())


def _in_parts(model: StageModel, hidden_BTD: Tensor, targets_R: Tensor, at_a_time: int) -> tuple[Tensor, Tensor]:
    """(sum of the losses over R, its gradient by hidden); the head's own gradient is added to the model's."""
    leaf_RD = hidden_BTD.flatten(0, 1).requires_grad_()
    total = torch.zeros((), device=leaf_RD.device)
    for part in _parts(len(leaf_RD), at_a_time):
        loss = _summed(model.logits(leaf_RD[None, part])[0], targets_R[part]) / len(leaf_RD)
        torch.autograd.backward(loss)
        total += loss.detach()
    assert leaf_RD.grad is not None, "the loss reached no hidden state"
    return total, leaf_RD.grad.view_as(hidden_BTD)


def _summed(logits_RV: Tensor, targets_R: Tensor) -> Tensor:
    return F.cross_entropy(logits_RV.float(), targets_R, reduction="sum", ignore_index=IGNORED)


def _parts(rows: int, at_a_time: int) -> list[slice]:
    return [slice(start, min(start + at_a_time, rows)) for start in range(0, rows, at_a_time)]
