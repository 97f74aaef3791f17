"""Tokens that nobody trains on, and what is measured on them."""

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dilocox_peer.data.packing import BEGINS
from dilocox_peer.data.tokenizer import BYTE_TOKENIZER, Counts, Ids, Tokenizer
from dilocox_peer.errors import ConfigError
from dilocox_peer.types import IGNORED


class HeldOut:
    """One segment of tokens, `validation`."""

    def __init__(self, validation: Ids, *, name: str, tokenizer: Tokenizer, counts: Counts | None = None) -> None:
        """validation: two tokens or more. name: of the text, for errors. counts: which of them are measured on, None: all."""
        self.name = name
        self.tokenizer = tokenizer
        self.validation = validation
        self._counts = counts

    @property
    def unit(self) -> str:
        """What a token of it is called."""
        return "byte" if self.tokenizer is BYTE_TOKENIZER else "token"

    @property
    def is_ready(self) -> bool:
        """A micro-batch takes no time."""
        return True

    @property
    def validation_tokens(self) -> int:
        return len(self.validation)

    def require_context(self, context: int) -> None:
        """Raises ConfigError if it is too short for one sequence."""
        if len(self.validation) <= context:
            raise ConfigError(
                f"{self.name}: {len(self.validation)} {self.unit}s are held out; the run's sequences need {context + 1}: "
                "give longer texts"
            )

    def validation_batches(self, limit: int, *, batch: int, context: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(inputs, targets) over about `limit` tokens of the validation split: always the same ones, evenly spread."""
        self.require_context(context)
        available = (len(self.validation) - 1) // context
        count = min(available, max(1, limit // context))
        for first in range(0, count, batch):
            rows = np.arange(first, min(first + batch, count)) * available // count * context
            places = rows[:, None] + np.arange(context + 1)
            sequences = self.validation[places].astype(np.int64)
            yield inputs_and_targets(
                sequences if self._counts is None else np.where(self._counts[places], sequences, ~sequences)
            )

    def num_bytes(self, targets_BT: Tensor) -> int:
        """Bytes of text that these tokens stand for."""
        return self.tokenizer.num_bytes(targets_BT[targets_BT != IGNORED].numpy())

    def unigram_entropy(self) -> float:
        """Nats a token of the validation split if tokens were independent: what a model reaches without context."""
        return _entropy(np.bincount(self.validation))

    def bigram_entropy(self) -> float:
        """Nats a token of a token given the one before it, in the validation split itself."""
        wide = self.validation.astype(np.int64)
        _, pairs = np.unique(wide[:-1] * self.tokenizer.vocab_size + wide[1:], return_counts=True)
        return _entropy(pairs) - _entropy(np.bincount(wide[:-1]))


def _entropy(counts: npt.NDArray[np.int64]) -> float:
    """Entropy of the distribution that these counts are of, in nats."""
    present = counts[counts > 0]
    total = int(present.sum())
    return math.log(total) - float((present * np.log(present)).sum()) / total if total else 0.0


def inputs_and_targets(sequences: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """sequences: (B, T + 1); a token that is no target as -1 - token, with BEGINS added where a document begins (packing.py). The
    target of the former is IGNORED; the input that begins a document is -1 - token (model/borders.py)."""
    counts = sequences >= 0
    tokens = np.where(counts, sequences, ~sequences)
    begins, tokens = tokens >= BEGINS, tokens % BEGINS
    inputs = np.where(begins, ~tokens, tokens)[:, :-1]
    targets = np.where(counts, tokens, IGNORED)[:, 1:]
    return torch.from_numpy(np.ascontiguousarray(inputs)), torch.from_numpy(np.ascontiguousarray(targets))
