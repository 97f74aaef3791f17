"""Training and validation data held here: documents as tokens, split once, and draws of sequences from them.

`stdlib` is the source of Python's own standard library, found on every machine; otherwise the user names files and folders
(sources.py). A fixed share of the documents, chosen by hash, is for validation and never trained on, so a document held
out by one peer is held out by all. Training batches are a pure function of (run seed, peer, incarnation, round, index):
reproducible, and independent between peers.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from dilocox_peer.data.held_out import HeldOut, inputs_and_targets
from dilocox_peer.data.sources import CUT_BYTES, Document, Reading, documents_of, library_documents
from dilocox_peer.data.split import split
from dilocox_peer.data.tokenizer import BYTE_TOKENIZER, Ids, Tokenizer, bounded
from dilocox_peer.errors import ConfigError
from dilocox_peer.types import PeerId, canonical, sha256

STDLIB = "stdlib"
_BATCH_BYTES = 1 << 20  # tokenized at a time
PIECES_AT_ONCE = 4096  # documents that are joined in one step
MAX_LIVE_BYTES = 2 << 30
"""Of text that is tokenized at each start and held in memory; more is made into shards ahead of time."""


class Corpus(HeldOut):
    """Tokens split once into training and validation segments. train: those of training."""

    def __init__(
        self, documents: Iterable[Document], *, name: str, validation: float, tokenizer: Tokenizer = BYTE_TOKENIZER
    ) -> None:
        """validation: share held out. Raises ConfigError if either side is empty, or there is more text than fits."""
        pieces = _tokenized(documents, tokenizer, name)
        train, held_out, self.split = split(pieces, validation)
        super().__init__(
            _concatenated(held_out) if held_out else np.empty(0, tokenizer.dtype), name=name, tokenizer=tokenizer
        )
        self.train = _joined(train)
        self._starts_of: tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None
        if len(self.validation) < 2 or not self.train:
            count = sum(len(piece) for _, piece in pieces)
            raise ConfigError(
                f"{name}: {count} {self.unit}s are too few to train on some and hold {validation:.0%} out; give more text"
            )

    @property
    def train_tokens(self) -> int:
        return sum(len(segment) for segment in self.train)

    def require_context(self, context: int) -> None:
        """Raises ConfigError if no training or validation segment is long enough for one sequence."""
        super().require_context(context)
        longest = max(len(segment) for segment in self.train)
        if longest <= context:
            raise ConfigError(
                f"{self.name}: the longest training text has {longest} {self.unit}s; the run's sequences need {context + 1}: "
                "give longer texts"
            )

    def train_batch(
        self, *, seed: int, peer: PeerId, incarnation: int, round_number: int, index: int, batch: int, context: int
    ) -> tuple[Tensor, Tensor]:
        """(inputs, targets), (batch, context) int64 each, targets one token ahead. A pure function of its arguments. Raises ConfigError where a
        mapped file has become shorter."""
        key = canonical(["dilocox-data", seed, peer, incarnation, round_number, index])
        generator = np.random.Philox(key=np.frombuffer(sha256(key)[:16], dtype="<u8"))
        draws = generator.random_raw(batch)
        starts, ends = self._starts(context)
        sequences = np.empty((batch, context + 1), dtype=np.int64)
        for row, draw in enumerate(draws):
            position = int(draw % np.uint64(ends[-1]))  # 64 random bits: the bias is below 2**-30
            segment = int(np.searchsorted(ends, position, side="right"))
            start = position - int(ends[segment] - starts[segment])
            _require_whole(self.train[segment])
            sequences[row] = self.train[segment][start : start + context + 1]
        return inputs_and_targets(sequences)

    def _starts(self, context: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """How many sequences begin in each training segment, and their running sum; kept for the last context."""
        if self._starts_of is None or self._starts_of[0] != context:
            self.require_context(context)
            starts = np.maximum(np.array([len(segment) - context for segment in self.train]), 0)
            self._starts_of = (context, starts, np.cumsum(starts))
        return self._starts_of[1], self._starts_of[2]


def has_text(source: str, paths: Sequence[str | Path]) -> bool:
    """Whether load_corpus has what it wants: the user's paths, or none where none are needed."""
    return bool(paths) != (source == STDLIB)


def load_corpus(
    source: str,
    paths: Sequence[str | Path],
    *,
    validation: float,
    tokenizer: Tokenizer = BYTE_TOKENIZER,
    reading: Reading = Reading(),
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
        if tokenizer is not BYTE_TOKENIZER:
            reading = replace(reading, cut_bytes=CUT_BYTES)
        documents = documents_of([Path(path) for path in paths], reading)
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
    """(key, tokens) of each document."""
    pieces: list[tuple[str, Ids]] = []
    size = held = 0
    waiting: list[Document] = []
    is_bytes = tokenizer is BYTE_TOKENIZER

    def tokenize() -> None:
        found = tokenizer.encode([document.data.tobytes() for document in waiting])
        pieces.extend((each.key, bounded(tokenizer, ids)) for each, ids in zip(waiting, found, strict=True))
        waiting.clear()

    for document in documents:
        size += 0 if is_bytes and isinstance(document.data, np.memmap) else len(document.data)
        if size > MAX_LIVE_BYTES:
            raise ConfigError(
                f"{name}: more than {MAX_LIVE_BYTES >> 30} GB of text to read into memory at each start: make shards of it "
                "with `dilocox-peer tokenize`"
            )
        if is_bytes:
            pieces.append((document.key, document.data))
            continue
        held += len(document.data)
        waiting.append(document)
        if held >= _BATCH_BYTES:
            tokenize()
            held = 0
    tokenize()
    return pieces


def _ended(document: Document) -> Document:
    """With bytes for tokens nothing else would part a document from the next, so its last line is ended. Large files, which
    are mapped, stand alone."""
    if isinstance(document.data, np.memmap) or document.data[-1] == ord("\n"):
        return document
    return Document(document.key, np.append(document.data, np.uint8(ord("\n"))))


def _require_whole(segment: Ids) -> None:
    """Raises ConfigError for a mapped file that is shorter than it was: touching what is gone would end the process by a signal. It still may
    within the microsecond until the sequence is read."""
    if not isinstance(segment, np.memmap):
        return
    mapped: Any = segment
    while isinstance(mapped, np.ndarray):
        mapped = mapped.base
    if mapped.size() < len(mapped):
        raise ConfigError(
            f"{segment.filename} has become shorter since it was read: give --data a file that nothing writes to, and"
            " join again"
        )


def _joined(pieces: Sequence[Ids]) -> list[Ids]:
    """Mapped files as they are, all others as one segment: short texts would otherwise be lost to the context."""
    mapped = [piece for piece in pieces if isinstance(piece, np.memmap)]
    plain = [piece for piece in pieces if not isinstance(piece, np.memmap)]
    return ([_concatenated(plain)] if plain else []) + mapped


def _concatenated(pieces: Sequence[Ids]) -> Ids:
    """In steps: over a million pieces at once the interpreter is held for a second, and no other thread has a turn."""
    whole = np.empty(sum(len(piece) for piece in pieces), pieces[0].dtype)
    at = 0
    for first in range(0, len(pieces), PIECES_AT_ONCE):
        step = pieces[first : first + PIECES_AT_ONCE]
        size = sum(len(piece) for piece in step)
        np.concatenate(step, out=whole[at : at + size])
        at += size
    return whole
