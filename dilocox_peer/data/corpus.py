"""Training and validation data held here: documents as tokens, split once, and draws of sequences from them.

`stdlib` is the source of Python's own standard library, found on every machine; otherwise the user names files and folders
(sources.py). A fixed share of the documents, chosen by hash, is for validation and never trained on, so a document held
out by one peer is held out by all. Training batches are a pure function of (run seed, peer, incarnation, round, index):
reproducible, and independent between peers.
"""

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dilocox_peer.data.sources import Document, documents_of, library_documents
from dilocox_peer.data.tokenizer import BYTE_TOKENIZER, Ids, Tokenizer, bounded
from dilocox_peer.errors import ConfigError
from dilocox_peer.types import PeerId, canonical, sha256

STDLIB = "stdlib"
_FEW_DOCUMENTS = 20
"""Below this, a share of the documents chosen by hash is too coarse (it may be empty): blocks of them are chosen."""

_MIN_BLOCK = 2048  # tokens
_MAX_BLOCK = 65536
_BATCH_BYTES = 1 << 20  # tokenized at a time
_MAX_PART_BYTES = 4 << 20
MAX_LIVE_BYTES = 2 << 30
"""Of text that is tokenized at each start and held in memory; more is made into shards ahead of time."""


class Corpus:
    """Tokens split once into training and validation segments."""

    def __init__(
        self, documents: Iterable[Document], *, name: str, validation: float, tokenizer: Tokenizer = BYTE_TOKENIZER
    ) -> None:
        """validation: share held out. Raises ConfigError if either side is empty, or there is more text than fits."""
        self.name = name
        self.tokenizer = tokenizer
        pieces = _tokenized(documents, tokenizer, name)
        train, held_out, self.split = _split(pieces, validation)
        self._train = _joined(train)
        self._validation = np.concatenate(held_out) if held_out else np.empty(0, tokenizer.dtype)
        self._starts_of: tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None
        if len(self._validation) < 2 or not self._train:
            count = sum(len(piece) for _, piece in pieces)
            raise ConfigError(
                f"{name}: {count} {self.unit}s are too few to train on some and hold {validation:.0%} out; give more text"
            )

    @property
    def unit(self) -> str:
        """What a token of it is called."""
        return "byte" if self.tokenizer is BYTE_TOKENIZER else "token"

    @property
    def train_tokens(self) -> int:
        return sum(len(segment) for segment in self._train)

    @property
    def validation_tokens(self) -> int:
        return len(self._validation)

    def require_context(self, context: int) -> None:
        """Raises ConfigError if no training or validation segment is long enough for one sequence."""
        longest = max(len(segment) for segment in self._train)
        if longest <= context or len(self._validation) <= context:
            raise ConfigError(
                f"{self.name}: longest training text {longest} {self.unit}s, held out {len(self._validation)}; the run's "
                f"sequences need {context + 1}: give longer texts"
            )

    def train_batch(
        self, *, seed: int, peer: PeerId, incarnation: int, round_number: int, index: int, batch: int, context: int
    ) -> tuple[Tensor, Tensor]:
        """(inputs, targets), (batch, context) int64 each, targets one token ahead. A pure function of its arguments."""
        key = canonical(["dilocox-data", seed, peer, incarnation, round_number, index])
        generator = np.random.Philox(key=np.frombuffer(sha256(key)[:16], dtype="<u8"))
        draws = generator.random_raw(batch)
        starts, ends = self._starts(context)
        sequences = np.empty((batch, context + 1), dtype=np.int64)
        for row, draw in enumerate(draws):
            position = int(draw % np.uint64(ends[-1]))  # 64 random bits: the bias is below 2**-30
            segment = int(np.searchsorted(ends, position, side="right"))
            start = position - int(ends[segment] - starts[segment])
            sequences[row] = self._train[segment][start : start + context + 1]
        return _inputs_and_targets(sequences)

    def _starts(self, context: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """How many sequences begin in each training segment, and their running sum; kept for the last context."""
        if self._starts_of is None or self._starts_of[0] != context:
            self.require_context(context)
            starts = np.maximum(np.array([len(segment) - context for segment in self._train]), 0)
            self._starts_of = (context, starts, np.cumsum(starts))
        return self._starts_of[1], self._starts_of[2]

    def validation_batches(self, limit: int, *, batch: int, context: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(inputs, targets) over about `limit` tokens of the validation split: always the same ones, evenly spread."""
        self.require_context(context)
        available = (len(self._validation) - 1) // context
        count = min(available, max(1, limit // context))
        for first in range(0, count, batch):
            rows = np.arange(first, min(first + batch, count)) * available // count * context
            yield _inputs_and_targets(self._validation[rows[:, None] + np.arange(context + 1)].astype(np.int64))

    def num_bytes(self, targets_BT: Tensor) -> int:
        """Bytes of text that these tokens stand for."""
        return self.tokenizer.num_bytes(targets_BT.numpy())

    def unigram_entropy(self) -> float:
        """Nats a token of the validation split if tokens were independent: what a model reaches without context."""
        return _entropy(np.bincount(self._validation))

    def bigram_entropy(self) -> float:
        """Nats a token of a token given the one before it, in the validation split itself."""
        wide = self._validation.astype(np.int64)
        _, pairs = np.unique(wide[:-1] * self.tokenizer.vocab_size + wide[1:], return_counts=True)
        return _entropy(pairs) - _entropy(np.bincount(wide[:-1]))


def has_text(source: str, paths: Sequence[str | Path]) -> bool:
    """Whether load_corpus has what it wants: the user's paths, or none where none are needed."""
    return bool(paths) != (source == STDLIB)


def load_corpus(
    source: str, paths: Sequence[str | Path], *, validation: float, tokenizer: Tokenizer = BYTE_TOKENIZER
) -> Corpus:
    """The corpus a manifest's data.source names: `stdlib`, or `files` with the user's paths.

    Raises ConfigError that names the path and the remedy.
    """
    if source == STDLIB and paths:
        given = ", ".join(map(str, paths))
        raise ConfigError(f"--data {given}: this run trains on the source of Python's library alone; leave --data out")
    if source != STDLIB and not paths:
        raise ConfigError(f"this run's data are {source!r}: name files or folders of yours with --data")
    try:
        if source == STDLIB:
            return Corpus(library_documents(), name=STDLIB, validation=validation, tokenizer=tokenizer)
        name = ", ".join(map(str, paths))
        documents = documents_of([Path(path) for path in paths])
        first = next(documents, None)
        if first is None:
            raise ConfigError(f"{name}: no text in it; name files with text in them")
        rest: Iterator[Document] = itertools.chain([first], documents)
        if tokenizer is BYTE_TOKENIZER:
            rest = map(_ended, rest)
        return Corpus(rest, name=name, validation=validation, tokenizer=tokenizer)
    except OSError as error:
        where = error.filename or ", ".join(map(str, paths)) or source
        raise ConfigError(f"{where}: {error.strerror or error}; check that you may read it") from None


def _tokenized(documents: Iterable[Document], tokenizer: Tokenizer, name: str) -> list[tuple[str, Ids]]:
    """(key, tokens) of each document that has any."""
    if tokenizer is BYTE_TOKENIZER:
        return [(document.key, document.data) for document in documents]
    pieces: list[tuple[str, Ids]] = []
    size = 0
    waiting: list[Document] = []

    def tokenize() -> None:
        parts = [parts_of(document.data.tobytes()) for document in waiting]
        found = iter(tokenizer.encode([part for each in parts for part in each]))
        for document, each in zip(waiting, parts, strict=True):
            ids = np.concatenate([next(found) for _ in each])
            pieces.append((document.key, bounded(tokenizer, ids)))
        waiting.clear()

    held = 0
    for document in documents:
        size += len(document.data)
        held += len(document.data)
        if size > MAX_LIVE_BYTES:
            raise ConfigError(
                f"{name}: more than {MAX_LIVE_BYTES >> 30} GB of text to cut into tokens at each start: make shards of it "
                "with `dilocox-peer tokenize`"
            )
        waiting.append(document)
        if held >= _BATCH_BYTES:
            tokenize()
            held = 0
    tokenize()
    return pieces


def parts_of(text: bytes) -> list[bytes]:
    """A long document in parts that begin where a line begins with a letter or digit: tokenizers that cut text at words make
    the same tokens of the parts as of the whole, in bounded memory."""
    parts, start = [], 0
    while len(text) - start > _MAX_PART_BYTES:
        stop = _line_start(text, start + _MAX_PART_BYTES // 2, start + _MAX_PART_BYTES)
        parts.append(text[start:stop])
        start = stop
    return [*parts, text[start:]]


def _line_start(text: bytes, first: int, last: int) -> int:
    """The last place in [first, last) where a line begins with a letter or digit after one that does not end in a space; else
    `last`, moved back to where a character begins."""
    at = last
    while (at := text.rfind(b"\n", first, at)) > first:
        if text[at + 1 : at + 2].isalnum() and not text[at - 1 : at].isspace():
            return at + 1
    while last > first and text[last] & 0xC0 == 0x80:
        last -= 1
    return last


def _ended(document: Document) -> Document:
    """With bytes for tokens nothing else would part a document from the next, so its last line is ended. Large files, which
    are mapped, stand alone."""
    if isinstance(document.data, np.memmap) or document.data[-1] == ord("\n"):
        return document
    return Document(document.key, np.append(document.data, np.uint8(ord("\n"))))


def _split(pieces: Sequence[tuple[str, Ids]], share: float) -> tuple[list[Ids], list[Ids], str]:
    """(training pieces, validation pieces, how) of the documents."""
    total = sum(len(piece) for _, piece in pieces)
    if len(pieces) >= _FEW_DOCUMENTS:
        is_held_out = [hash_fraction(key) < share for key, _ in pieces]
        size = sum(len(piece) for (_, piece), held in zip(pieces, is_held_out, strict=True) if held)
        if 0.25 * share <= size / total <= 0.75:
            train = [piece for (_, piece), held in zip(pieces, is_held_out, strict=True) if not held]
            kept = [piece for (_, piece), held in zip(pieces, is_held_out, strict=True) if held]
            return train, kept, f"{len(kept)} of {len(pieces)} documents"
    block = min(max(total // 256, _MIN_BLOCK), _MAX_BLOCK)
    train, validation = _split_blocks(pieces, share, block)
    return train, validation, f"blocks of {block} tokens, as there are few documents"


def _split_blocks(pieces: Sequence[tuple[str, Ids]], share: float, block: int) -> tuple[list[Ids], list[Ids]]:
    """Training stretches and validation blocks; the block with the lowest hash is always held out."""
    blocks = [
        (hash_fraction(f"{key}:{start // block}"), index, start)
        for index, (key, piece) in enumerate(pieces)
        for start in range(0, len(piece), block)
    ]
    if not blocks:
        return [], []
    lowest = min(blocks)
    train: list[Ids] = []
    validation: list[Ids] = []
    stretch: tuple[int, int, int] | None = None  # (piece, start, stop) of the training text so far
    for fraction, index, start in blocks:
        stop = min(start + block, len(pieces[index][1]))
        is_held_out = fraction < share or (fraction, index, start) == lowest
        if is_held_out:
            validation.append(pieces[index][1][start:stop])
        if stretch and (is_held_out or stretch[0] != index):
            train.append(pieces[stretch[0]][1][stretch[1] : stretch[2]])
            stretch = None
        if not is_held_out:
            stretch = (index, stretch[1] if stretch else start, stop)
    if stretch:
        train.append(pieces[stretch[0]][1][stretch[1] : stretch[2]])
    return train, validation


def _joined(pieces: Sequence[Ids]) -> list[Ids]:
    """Mapped files as they are, all others as one segment: short texts would otherwise be lost to the context."""
    mapped = [piece for piece in pieces if isinstance(piece, np.memmap)]
    plain = [piece for piece in pieces if not isinstance(piece, np.memmap)]
    return ([np.concatenate(plain)] if plain else []) + mapped


def hash_fraction(key: str) -> float:
    """In [0, 1), evenly: what is below a share is held out."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64


def _entropy(counts: npt.NDArray[np.int64]) -> float:
    """Entropy of the distribution that these counts are of, in nats."""
    present = counts[counts > 0]
    total = int(present.sum())
    return math.log(total) - float((present * np.log(present)).sum()) / total if total else 0.0


def _inputs_and_targets(sequences: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    tokens = torch.from_numpy(sequences)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
