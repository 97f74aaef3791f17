"""The inner optimizer: AdamW on a stage's flat vector, or Muon on its hidden matrices and AdamW on the rest.

Clipping and the run's learning-rate schedule are the same for both.

The schedule is a pure function of the position in the run, so peers of any speed agree on it without talking. Weight
decay applies to matrices (embedding and head included) and not to the 1-D norm weights: decaying those pulls the scale
of a whole layer to 0 for no regularisation. peer/training/trainer.py decides when to step.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from dilocox_peer.manifest import InnerSection
from dilocox_peer.model.adamw import FusedAdamW, HalvedAdamW
from dilocox_peer.model.architecture import StageModel
from dilocox_peer.model.muon import Muon

NORM_PIECE = 2**18

RAMP_STEPS = 20
"""Steps over which a peer without optimizer moments raises its learning rate: AdamW's first steps are as large as its
later ones, in directions that one gradient chose."""


def schedule(
    position: float,
    *,
    warmup: float,
    shape: Literal["linear", "cosine", "wsd"] = "linear",
    floor: float = 0.0,
    decay: float = 0.2,
) -> float:
    """Share of the peak learning rate at a position in [0, 1] of the run: linear up to 1 at `warmup`, then down to exactly `floor`
    at 1: linearly, as half a cosine, or (wsd) not before 1 - `decay` and then as 1 - sqrt (arXiv 2405.18392)."""
    position = min(max(position, 0.0), 1.0)
    if position < warmup:
        return position / warmup
    begins = max(warmup, 1.0 - decay) if shape == "wsd" else warmup
    if begins >= 1.0 or position <= begins:
        return 1.0
    gone = (position - begins) / (1.0 - begins)
    match shape:
        case "linear":
            left = (1.0 - position) / (1.0 - begins)
        case "cosine":
            left = (1.0 + math.cos(math.pi * gone)) / 2 if gone < 1.0 else 0.0
        case "wsd":
            left = 1.0 - math.sqrt(gone)
    return floor + (1.0 - floor) * left


def scheduled(position: float, section: InnerSection) -> float:
    """`schedule` as a run's manifest has it."""
    return schedule(position, warmup=section.warmup, shape=section.schedule, floor=section.floor, decay=section.decay)


def micro_batches_a_step(position: float, section: InnerSection) -> int:
    """K at a position in [0, 1] of the run: from `first_accumulate` linearly to `accumulate` within `batch_ramp`. Small batches make
    more of the first tokens, large ones of the later (arXiv 2005.14165, section 2.3)."""
    first, last = section.first_accumulate or section.accumulate, section.accumulate
    if position >= section.batch_ramp:
        return last
    return first + int((last - first) * max(position, 0.0) / section.batch_ramp)


def norm_of(flat_N: Tensor) -> float:
    """The Euclidean norm of a stage's vector, float32, to some 1e-6; NaN or infinite where an element is. No two peers need the same bits of it.

    A sum in float32 of hundreds of millions of squares stands still on a CPU: torch's norm of 134 million elements was 1.4 % too small, of 268 million 3.7 %.
    """
    whole = len(flat_N) // NORM_PIECE * NORM_PIECE
    norms = torch.linalg.vector_norm(flat_N[:whole].view(-1, NORM_PIECE), dim=1)
    rest = torch.linalg.vector_norm(flat_N[whole:], dim=0, keepdim=True)
    return math.hypot(*torch.cat([norms, rest]).tolist())


def ramp(steps_done: int) -> float:
    """Share of its learning rate that a peer takes which joined under way and has done so many steps since."""
    return min(1.0, (steps_done + 1) / RAMP_STEPS)


class InnerOptimizer:
    """Over the ranges of the stage's flat vector: matrices with weight decay, vectors without."""

    def __init__(self, model: StageModel, section: InnerSection) -> None:
        self._model = model
        self._section = section
        self.steps_done = 0
        self._ranges = self._adamw_ranges(model)
        is_halved = section.moments == "bfloat16"
        self._muon = (
            Muon(self._hidden(model), momentum=section.momentum, weight_decay=section.weight_decay, is_halved=is_halved)
            if section.optimizer == "muon"
            else None
        )
        ranges = [(model.flat_N[part], model.flat_grad_N[part], decay) for part, decay in self._ranges]
        self._adamw = (HalvedAdamW if is_halved else FusedAdamW)(ranges, betas=(section.beta1, section.beta2))

    def move_to(self, model: StageModel) -> None:
        """From now on steps change this version of the stage; moments go on. It shares the gradient vector."""
        assert model.flat_grad_N is self._model.flat_grad_N, "versions of a stage share their gradients"
        self._model = model
        self._adamw.move_to([model.flat_N[part] for part, _decay in self._ranges])
        if self._muon is not None:
            self._muon.move_to(self._hidden(model))

    def moments(self) -> list[Tensor]:
        """As they are kept, to be read."""
        return [*self._adamw.moments(), *(self._muon.moments() if self._muon is not None else ())]

    def _adamw_ranges(self, model: StageModel) -> list[tuple[slice, float]]:
        """Parts of the flat vector that are AdamW's, with their weight decay."""
        decay = self._section.weight_decay
        matrices = slice(0, model.layout.num_matrix_elements)
        decayed = [matrices]
        if self._section.optimizer == "muon":
            spans = model.layout.spans()
            decayed = [slice(start, stop) for spec, start, stop in spans if spec.role in ("embedding", "head")]
        ranges = [(part, decay) for part in decayed] + [(slice(matrices.stop, model.layout.num_elements), 0.0)]
        return [(part, decay) for part, decay in ranges if part.stop > part.start]

    @staticmethod
    def _hidden(model: StageModel) -> list[tuple[Tensor, Tensor]]:
        """(weight, gradient) of the hidden matrices, and of the stacks of them that a layer's experts are."""
        pairs: list[tuple[Tensor, Tensor]] = []
        for spec, start, stop in model.layout.spans():
            if spec.role != "hidden" or spec.is_vector:
                continue
            stack = (-1, *spec.shape[-2:])
            weights, gradients = (flat_N[start:stop].view(stack) for flat_N in (model.flat_N, model.flat_grad_N))
            if spec.name in model.across:  # how far a step goes depends on which side is which
                weights, gradients = weights.mT, gradients.mT
            pairs += zip(weights, gradients, strict=True)
        return pairs

    def step(self, *, micro_batches: float, share: float) -> float:
        """One step with the mean gradient over all targets that count; the gradient is then zero. Gives its learning rate.

        micro_batches: what the gradient was added up of, each as the part of its targets that count (loss.py); more than 0. share: of the peak learning
        rate (schedule, ramp). Raises FloatingPointError for a gradient that is not finite; the parameters are then untouched. In float16 that is no error: the step is left out, and the next gradients are smaller.
        """
        grad_N, scale = self._model.flat_grad_N, self._model.scale
        times = micro_batches * (1.0 if scale is None else scale.factor)
        norm = norm_of(grad_N) / times
        if not norm < float("inf"):
            if scale is not None and scale.factor > 1:
                scale.overflowed()
                self._model.zero_grad()
                return self._section.learning_rate * share
            raise FloatingPointError(f"gradient norm is {norm} at inner step {self.steps_done}")
        divisor = times * max(
            1.0, norm / self._section.clip_norm
        )  # one pass less over the gradient for each that is not made
        if scale is not None:
            scale.stepped()
        self.steps_done += 1
        learning_rate = self._section.learning_rate * share
        self._adamw.step(learning_rate, divisor)
        if self._muon is not None:
            self._muon.step(learning_rate, divisor)
        self._model.zero_grad()
        return learning_rate
