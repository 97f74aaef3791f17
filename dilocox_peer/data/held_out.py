"""Tokens that nobody trains on, and what is measured on them."""

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dilocox_peer.data.packing import BEGINS, packed
from dilocox_peer.data.tokenizer import BYTE_TOKENIZER, Counts, Ids, Tokenizer
from dilocox_peer.errors import ConfigError
from dilocox_peer.types import IGNORED


class HeldOut:
    """One segment of tokens, `validation`."""

    def __init__(
        self,
        validation: Ids,
        *,
        name: str,
        tokenizer: Tokenizer,
        counts: Counts | None = None,
        starts: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """validation: two tokens or more. name: of the text, for errors. counts: which of them are measured on, None: all. starts: of documents,
        ascending from 0, where each is measured by itself, as it is trained on packed best fit; None: as one text."""
        self.name = name
        self.tokenizer = tokenizer
        self.validation = validation
        self._counts = counts
        self._documents = starts

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
        """Raises ConfigError if there is no sequence in it to measure on."""
        self._pieces(context)

    def _pieces(self, context: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(first, end) of the pieces that are measured on, up to context + 1 tokens each, each with a target. Raises ConfigError."""
        if self._documents is None:
            if len(self.validation) <= context:
                raise ConfigError(
                    f"{self.name}: {len(self.validation)} {self.unit}s are held out; the run's sequences need {context + 1}: "
                    "give longer texts"
                )
            firsts = np.arange((len(self.validation) - 1) // context) * context
            ends = firsts + context + 1
        else:
            firsts, ends = _pieces_of(self._documents, len(self.validation), context)
            if not len(firsts):
                raise ConfigError(f"{self.name}: no document that is held out has two {self.unit}s: give longer texts")
        if self._counts is not None:
            before = np.concatenate([[0], np.cumsum(self._counts)])
            has_target = before[ends] > before[firsts + 1]
            firsts, ends = firsts[has_target], ends[has_target]
            if not len(firsts):
                raise ConfigError(
                    f"{self.name}: in all {len(self.validation):,} tokens that are held out nothing is an answer to measure on: make the "
                    "shards anew with a larger --validation"
                )
        return firsts, ends

    def validation_batches(self, limit: int, *, batch: int, context: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(inputs, targets) over about `limit` tokens of the validation split: always the same ones, evenly spread, and each sequence with a
        target. Raises ConfigError."""
        firsts, ends = self._pieces(context)
        available = len(firsts)
        count = min(available, max(1, int(limit * available // (ends - firsts - 1).sum())))
        chosen = np.arange(count) * available // count
        if self._documents is not None:
            pieces = [self._signed(np.arange(firsts[each], ends[each])) for each in chosen]
            sequences = packed(pieces, context + 1)
            for first in range(0, len(sequences), batch):
                yield inputs_and_targets(sequences[first : first + batch])
            return
        for first in range(0, count, batch):
            places = firsts[chosen[first : first + batch], None] + np.arange(context + 1)
            yield inputs_and_targets(self._signed(places))

    def _signed(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The tokens at these places; one that is not measured on as -1 - token."""
        tokens = self.validation[places].astype(np.int64)
        return tokens if self._counts is None else np.where(self._counts[places], tokens, ~tokens)

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


def _pieces_of(
    starts: npt.NDArray[np.int64], size: int, context: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(first, end) of the pieces of these documents, as `packed` cuts them; a single token is none."""
    lengths = np.diff(starts, append=size)
    starts, lengths = starts[lengths > 1], lengths[lengths > 1]
    numbers = -(-(lengths - 1) // context)
    within = np.arange(numbers.sum()) - np.repeat(np.cumsum(numbers) - numbers, numbers)
    firsts = np.repeat(starts, numbers) + within * context
    return firsts, np.minimum(firsts + context + 1, np.repeat(starts + lengths, numbers))


def inputs_and_targets(sequences: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """sequences: (B, T + 1); a token that is no target as -1 - token, with BEGINS added where a document begins (packing.py). The
    target of the former is IGNORED; the input that begins a document is -1 - token (model/borders.py)."""
    counts = sequences >= 0
    tokens = np.where(counts, sequences, ~sequences)
    begins, tokens = tokens >= BEGINS, tokens % BEGINS
    inputs = np.where(begins, ~tokens, tokens)[:, :-1]
    targets = np.where(counts, tokens, IGNORED)[:, 1:]
    return torch.from_numpy(np.ascontiguousarray(inputs)), torch.from_numpy(np.ascontiguousarray(targets))
