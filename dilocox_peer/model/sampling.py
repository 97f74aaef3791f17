"""Text from a model: one byte after the other, each drawn from what the model expects after the last `context` bytes.

No cache of keys and values: at these sizes the forward pass over at most one context is fast enough, and the window may
slide without the cached positions being wrong. Ids above 255, which a vocabulary may have, are never drawn.

Shape letters: T tokens, V vocabulary.
"""

import codecs
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dilocox_peer.model.transformer import StageModel

NUM_BYTES = 256
_FIRST = b"\n"  # what an empty prompt stands for: a model needs something to go on from


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
    """The next byte. logits_V: (V,) on the CPU, V >= 256."""
    logits_V = logits_V[:NUM_BYTES]
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    logits_V = logits_V / sampling.temperature
    if 0 < sampling.top_k < len(logits_V):
        least = logits_V.topk(sampling.top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < least, -torch.inf)
    return int(torch.multinomial(logits_V.softmax(-1), 1, generator=generator))


@torch.no_grad()
def continuation(model: StageModel, prompt: bytes, sampling: Sampling, *, num_bytes: int, seed: int) -> Iterator[int]:
    """num_bytes bytes that follow prompt, as they are drawn; equal seeds give equal bytes on the same machine."""
    assert model.layers.is_whole, model.layers
    generator = torch.Generator().manual_seed(seed)
    device, context = model.flat_N.device, model.section.context
    window = list(prompt or _FIRST)
    for _ in range(num_bytes):
        window = window[-context:]
        logits_1TV = model.forward(torch.tensor([window], device=device))
        byte = choose(logits_1TV[0, -1].float().cpu(), sampling, generator)
        window.append(byte)
        yield byte


def as_text(stream: Iterator[int]) -> Iterator[str]:
    """The bytes as characters, each as soon as it is whole. What is no UTF-8 becomes U+FFFD; a character that the end
    cuts off does so at the end only."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for byte in stream:
        if text := decoder.decode(bytes([byte])):
            yield text
    if text := decoder.decode(b"", final=True):
        yield text
