"""A few numbers that a stage's first weights give on fixed inputs: who gets others computes another model than the run's owner did.

Another version of transformers, a broken card or a kernel that is wrong shows before anything is trained. A number of the last stage is the
mean loss of a sequence in nats, which of a run with one stage is the published model's own loss; of the others how the output lies to a fixed
direction. The first stage gets tokens, the others what stands for hidden states; all of it is a function of the model's sizes.

Shape letters: B sequences, T tokens, D hidden size, V vocabulary.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dilocox_peer.model.architecture import StageModel
from dilocox_peer.model.transformer import uniform

SEQUENCES, MAX_TOKENS = 4, 16
TOLERANCE = 1e-4
"""For a loss, relative to it; of the others relative to the output's root mean square. All is computed in float32: two kernels are
some ten times nearer."""


@torch.no_grad()
def canary(model: StageModel, hidden_size: int) -> tuple[float, ...]:
    """SEQUENCES numbers, at the model's parameters as they are."""
    return tuple(value for value, _ in _measured(model, hidden_size))


@torch.no_grad()
def what_differs(model: StageModel, hidden_size: int, expected: Sequence[float]) -> str:
    """What this model gives and what was expected, in words; empty where they are alike."""
    for (found, scale), wanted in zip(_measured(model, hidden_size), expected, strict=True):
        if not abs(found - wanted) <= TOLERANCE * scale:
            what = "loss" if model.layers.is_last_stage else "output"
            return f"a {what} of {found:.6g} instead of {wanted:.6g}"
    return ""


def _measured(model: StageModel, hidden_size: int) -> list[tuple[float, float]]:
    """(number, what its tolerance is relative to) of each sequence."""
    device, num_tokens = model.flat_N.device, min(model.context, MAX_TOKENS)
    tokens_BT = fixed_tokens("inputs", model.vocab_size, num_tokens).to(device)
    shape = (SEQUENCES, num_tokens, hidden_size)
    # of root mean square 1, as far as those of a stage are alike in anything
    x = tokens_BT if model.layers.is_first_stage else _noise("hidden", shape, bound=3**0.5).to(device)
    output = model.forward(x).float()
    if model.layers.is_last_stage:
        targets_BT = fixed_tokens("targets", model.vocab_size, num_tokens).to(device)
        losses_BT = F.cross_entropy(output.flatten(0, 1), targets_BT.flatten(), reduction="none").view_as(targets_BT)
        return [(value, max(1.0, value)) for value in losses_BT.mean(1).tolist()]
    signs_BTD = _noise("direction", shape, bound=1.0).sign().to(device)
    projections_B = (output * signs_BTD).mean((1, 2)) * (num_tokens * hidden_size) ** 0.5
    scales_B = output.square().mean((1, 2)).sqrt()
    return list(zip(projections_B.tolist(), scales_B.tolist(), strict=True))


def fixed_tokens(what: str, vocab_size: int, num_tokens: int) -> Tensor:
    """(SEQUENCES, num_tokens) ids."""
    unit = uniform(["dilocox-canary", what], SEQUENCES * num_tokens, bound=0.5).double() + 0.5
    return (unit * vocab_size).long().clamp(0, vocab_size - 1).view(SEQUENCES, num_tokens)


def _noise(what: str, shape: tuple[int, int, int], *, bound: float) -> Tensor:
    count = shape[0] * shape[1] * shape[2]
    return uniform(["dilocox-canary", what], count, bound=bound).view(shape)
