"""Tokens from a model: one after the other, each drawn from what the model expects after the last `context` of them.

No cache of keys and values: at these sizes the forward pass over at most one context is fast enough, and the window may
slide without the cached positions being wrong. Ids that the model has and its tokenizer has not are never drawn.

Shape letters: T tokens, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dilocox_peer.model.architecture import StageModel


@dataclass(frozen=True, slots=True)
class Sampling:
    """temperature: 0 takes the likeliest. top_k: draws among that many likeliest; 0: all."""

    temperature: float = 0.8
    top_k: int = 40

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature {self.temperature} is not a number from 0 on")
        if self.top_k < 0:
            raise ValueError(f"top_k {self.top_k} is negative")


def choose(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """The next token. logits_V: (V,) on the CPU."""
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    # Below the largest, which is 0, and in 64 bits: so no temperature makes infinity of it, nor 0 / 0.
    logits_V = logits_V.double()
    logits_V = ((logits_V - logits_V.max()) / sampling.temperature).float()
    if 0 < sampling.top_k < len(logits_V):
        least = logits_V.topk(sampling.top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < least, -torch.inf)
    return int(torch.multinomial(logits_V.softmax(-1), 1, generator=generator))


@torch.no_grad()
def continuation(
    model: StageModel,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    num_tokens: int,
    num_ids: int,
    seed: int,
    last: int | None = None,
) -> Iterator[int]:
    """num_tokens tokens that follow prompt, which is not empty, as they are drawn; fewer where `last`, the end of a text, is.

    num_ids: ids below it are drawn. Equal seeds give equal tokens on the same machine.
    """
    assert model.layers.is_whole, model.layers
    generator = torch.Generator().manual_seed(seed)
    device, context = model.flat_N.device, model.context
    window = list(prompt)
    for _ in range(num_tokens):
        window = window[-context:]
        logits_1TV = model.forward(torch.tensor([window], device=device))
        token = choose(logits_1TV[0, -1, :num_ids].float().cpu(), sampling, generator)
        if token == last:
            return
        window.append(token)
        yield token
