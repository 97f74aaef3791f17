"""Shards ahead of time: documents into tokens by several processes, into files of tokens by one, in the documents' order.

What comes out depends on the documents, the tokenizer and the settings alone, not on how many processes there were or how
often it was interrupted. What is done lies in the folder: the shards, each whole, and a list of them. Begun anew, it reads the
documents again, passes over those that are in a shard, and goes on.
"""

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dilocox_peer.data.catalogue import CATALOGUE_FILE, MAX_DOCUMENT_TOKENS, Catalogue, Shard, catalogue_of, shard_bytes
from dilocox_peer.data.chat import TemplateFiles
from dilocox_peer.data.chat_process import ChatProcess
from dilocox_peer.data.encoders import Encoders
from dilocox_peer.data.shards import write_shard
from dilocox_peer.data.sources import CUT_BYTES, Document, LeftOut, Reading, documents_of, files_of
from dilocox_peer.data.split import hash_fraction
from dilocox_peer.data.tokenizer import BYTE_TOKENIZER, FILE_NAME, Counts, Ids, JsonTokenizer, Tokenizer, bounded
from dilocox_peer.errors import ConfigError, DiskTakesNothing, disk_remedy
from dilocox_peer.files import replace_file, replace_together, sweep_parts

SHARD_TOKENS = 8 << 20
PROGRESS_FILE = "unfinished.json"
_BATCH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be made. tokenizer: the content of a tokenizer.json; None: bytes. bos, eos: tokens of it."""

    paths: tuple[Path, ...]
    out: Path
    tokenizer: bytes | None
    bos: str
    eos: str
    column: str = "text"
    validation: float = 0.05
    shard_tokens: int = SHARD_TOKENS
    processes: int = 1
    chat: TemplateFiles | None = None  # the documents are conversations, in `column`
    mix: tuple[tuple[Path, float], ...] = ()
    """Of some of the paths, how often an epoch goes over their documents: a whole number, or below 1 a share of them, by hash."""

    def settings(self) -> dict[str, Any]:
        """What the shards depend on; compared before an interrupted work is gone on with."""
        files = [
            (str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns)
            for path in files_of(self.paths, _unheard)
        ]
        tokenizer = self.make_tokenizer()
        return {
            "files": [list(each) for each in files],
            "tokenizer": tokenizer.name,
            "borders": [self.bos, self.eos],
            "column": self.column,
            "validation": self.validation,
            "shard_tokens": self.shard_tokens,
            "mix": [[str(path), times] for path, times in self.mix],
            "chat": [] if self.chat is None else [self.chat.source, sorted(map(list, self.chat.tokens.items()))],
        }

    def make_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            return BYTE_TOKENIZER
        return JsonTokenizer(self.tokenizer, bos=self.bos, eos=self.eos)


@dataclass(frozen=True, slots=True)
class Made:
    """So far. text_bytes: of the documents read. resumed: shards that were there already."""

    text_bytes: int
    documents: int
    shards: int
    resumed: int


def make_shards(
    order: Order, *, refused: LeftOut, progress: Callable[[Made], None] = lambda made: None, force: bool = False
) -> Catalogue:
    """Writes shards and catalogue into order.out. force: begin anew where something else was begun, or done: what was done before stays whole until
    the new catalogue is there.

    Raises ConfigError, DiskTakesNothing; what was done until then stays and is gone on with.
    """
    out = order.out.resolve()
    for path in order.paths:
        if path.is_dir() and out.is_relative_to(path.resolve()):  # made anew, shards would be read as text
            raise ConfigError(f"--out {order.out} lies within {path}, which is read: name a folder beside it")
    missing = [folder for folder in (out, *out.parents) if not os.path.lexists(folder)]
    try:
        with _chat_of(order) as chat:
            return _Work(order, chat, refused, progress, force=force).run()
    except OSError as error:
        where = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else order.out
        if os.path.exists(out / PROGRESS_FILE):
            remedy = f"what is done stays in {order.out}: mend it and call this again"
        elif out.is_relative_to(where.absolute()) or where.absolute().is_relative_to(out):
            remedy = "mend it, or pass another --out"
        else:
            remedy = "mend it and call this again"
        kind = DiskTakesNothing if disk_remedy(error) else ConfigError
        raise kind(f"{where}: {(error.strerror or str(error)).lower()}; {remedy}") from None
    finally:
        for folder in missing:  # what came to nothing leaves none
            with suppress(OSError):
                folder.rmdir()


def _chat_of(order: Order) -> AbstractContextManager[ChatProcess | None]:
    if order.chat is None:
        return nullcontext()
    tokenizer = order.make_tokenizer()
    if not isinstance(tokenizer, JsonTokenizer):
        raise ConfigError("--chat needs --tokenizer with the folder of an instruct model")
    return ChatProcess(order.chat, tokenizer.special_tokens)


def _told_before(_line: str) -> None:
    """Of what is read once more."""


class _Work:
    def __init__(
        self,
        order: Order,
        chat: ChatProcess | None,
        refused: LeftOut,
        progress: Callable[[Made], None],
        *,
        force: bool,
    ) -> None:
        self._order = order
        self._refused = refused
        self._progress = progress
        self._force = force
        self._settings = order.settings()
        self._tokenizer = order.make_tokenizer()
        self._chat = chat
        order.out.mkdir(parents=True, exist_ok=True)
        sweep_parts(order.out)
        self._written = self._begun(force=force)
        self._resumed = len(self._written)
        self._text_bytes = self._documents = 0
        self._ends: tuple[str, str] | None = None  # keys of the lowest and of the highest hash, of what came until now
        self._set_apart: tuple[str, str] | None = (
            None  # the first of these held out, the last trained on, whatever the share
        )

    def run(self) -> Catalogue:
        try:
            return self._make()
        except _OtherDocuments:
            if not self._force:
                raise
        return self._make_anew()

    def _make_anew(self) -> Catalogue:
        self._forget()
        self._written = []
        self._resumed = self._text_bytes = self._documents = 0
        return self._make()

    def _make(self) -> Catalogue:
        order = self._order
        last = {(each.shard.held_out, each.shard.times): each for each in self._written}
        sides = {key: _Side(*key) for key in last}
        documents = self._new_documents(sides, last)
        with Encoders(self._tokenizer, order.tokenizer, order.processes) as encoders:
            for batch, tokens in encoders.encoded(_batches(documents)):
                for document, (ids, counts) in zip(batch, tokens, strict=True):
                    key = self._side_of(document)
                    side = sides.setdefault(key, _Side(*key))
                    side.came(document.key)
                    ids = ids.astype(self._tokenizer.dtype, copy=False)
                    if counts is None:
                        side.add(bounded(self._tokenizer, ids), len(document.data), None)
                    else:
                        side.add(*self._bounded_once(ids, counts, len(document.data)))
                    if side.num_tokens >= order.shard_tokens:
                        self._write(side)
                self._progress(Made(self._text_bytes, self._documents, len(self._written), self._resumed))
        for _, side in sorted(sides.items()):
            if side.documents:
                self._write(side)
        return self._finish()

    def _bounded_once(self, ids: Ids, counts: Counts, text_bytes: int) -> tuple[Ids, int, Counts]:
        """A conversation with bos and eos around it, where the template has not written them. They do not count: what ends an answer
        is in it."""
        bos, eos = self._tokenizer.bos, self._tokenizer.eos
        before = [bos] if bos is not None and (not len(ids) or ids[0] != bos) else []
        behind = [eos] if eos is not None and (not len(ids) or ids[-1] != eos) else []
        whole = np.concatenate([np.array(before, ids.dtype), ids, np.array(behind, ids.dtype)])
        return whole, text_bytes, np.pad(counts, (len(before), len(behind)))

    def _new_documents(
        self, sides: Mapping[tuple[bool, int], "_Side"], last: Mapping[tuple[bool, int], "_Written"]
    ) -> Iterator[Document]:
        """Those that are in no shard yet. last: the newest shard of each side. Raises _OtherDocuments where others come than those that the
        shards were made of."""
        to_pass = {key: each.read for key, each in last.items()}
        for document in self._mixed():
            self._text_bytes += len(document.data)
            self._documents += 1
            lowest, highest = self._ends or (document.key, document.key)
            self._ends = min(lowest, document.key, key=hash_fraction), max(highest, document.key, key=hash_fraction)
            key = self._side_of(document)
            if not to_pass.get(key):
                yield document
                continue
            to_pass[key] -= 1
            sides[key].came(document.key)
            if not to_pass[key] and sides[key].keys != last[key].keys:
                raise _OtherDocuments(self._order.out)
        if any(to_pass.values()):
            raise _OtherDocuments(self._order.out)

    def _mixed(self) -> Iterator[Document]:
        """Documents of all paths, those that the mix leaves out left out."""
        refused = self._refused if self._set_apart is None else _told_before
        reading = Reading(self._order.column, CUT_BYTES, refused, self._chat)
        mix = dict(self._order.mix)
        for path in self._order.paths:
            times = mix.get(path, 1.0)
            for document in documents_of([path], reading):
                if times >= 1.0:
                    yield replace(document, times=int(times)) if times > 1.0 else document
                elif hash_fraction(f"mix:{document.key}") < times:
                    yield document

    def _side_of(self, document: Document) -> tuple[bool, int]:
        """(whether it is held out, how often an epoch goes over it)."""
        held_out = hash_fraction(document.key) < self._order.validation
        if self._set_apart is not None and document.key in self._set_apart:
            held_out = document.key == self._set_apart[0]
        return held_out, 1 if held_out else document.times

    def _write(self, side: "_Side") -> None:
        shard = write_shard(
            self._order.out,
            side.documents,
            text_bytes=side.text_bytes,
            held_out=side.held_out,
            times=side.times,
            counts=side.counts if self._order.chat is not None else None,
        )
        self._written.append(_Written(shard, side.read, side.keys))
        state = {
            "settings": self._settings,
            "written": [[each.shard.model_dump(), each.read, each.keys] for each in self._written],
        }
        replace_file(self._order.out / PROGRESS_FILE, [json.dumps(state).encode()])
        side.clear()

    def _begun(self, *, force: bool) -> list["_Written"]:
        """Of an interrupted work of the same settings, as far as it is there still."""
        out = self._order.out
        if (out / CATALOGUE_FILE).exists() and not force:
            raise ConfigError(f"{out} holds a catalogue: pass --force to make it anew, or another --out")
        path = out / PROGRESS_FILE
        if not path.exists():
            return []
        try:
            state = json.loads(path.read_bytes())
            written = [
                _Written(Shard.model_validate(shard), int(read), str(keys)) for shard, read, keys in state["written"]
            ]
            is_same = state["settings"] == self._settings
        except (ValueError, KeyError, TypeError, RecursionError):
            is_same, written = False, []
        if is_same:
            return list(itertools.takewhile(self._is_there, written))
        if not force:
            raise ConfigError(
                f"{out} holds unfinished shards of other files or settings, or of an older version: pass --force to begin anew, or another --out"
            )
        self._forget()
        return []

    def _is_there(self, written: "_Written") -> bool:
        try:
            found = (self._order.out / written.shard.file_name).stat().st_size
        except OSError:
            return False
        return found == shard_bytes(written.shard, self._tokenizer.dtype, answers=self._order.chat is not None)

    def _forget(self) -> None:
        """Takes back what was written, but for what a catalogue there names."""
        self._remove_but(_named_in(self._order.out))
        (self._order.out / PROGRESS_FILE).unlink(missing_ok=True)

    def _remove_but(self, names: Collection[str]) -> None:
        for each in self._order.out.glob("*.shard"):
            if each.name not in names:
                each.unlink()

    def _finish(self) -> Catalogue:
        order = self._order
        shards = list(
            {each.shard.sha256: each.shard for each in self._written}.values()
        )  # equal documents can fill two
        held = sum(each.documents for each in shards if each.held_out)
        if not held or held == sum(each.documents for each in shards):
            if self._set_apart is None and self._ends is not None and self._ends[0] != self._ends[1]:
                self._set_apart = self._ends  # of a few documents none may be below the share, or all
                return self._make_anew()
            self._forget()
            number = "1 document is" if self._documents == 1 else f"{self._documents} documents are"
            raise ConfigError(
                f"{number} too few to train on some and hold one out: give more, or the text as several files or lines of JSONL"
            )
        catalogue = Catalogue(
            tokenizer=self._tokenizer.name,
            bos=order.bos,
            eos=order.eos,
            vocab_size=self._tokenizer.vocab_size,
            answers=order.chat is not None,
            shards=tuple(shards),
        )
        files = {} if order.tokenizer is None else {order.out / FILE_NAME: order.tokenizer}
        replace_together(files | {order.out / CATALOGUE_FILE: catalogue.to_bytes()})
        if self._force:
            self._remove_but({each.file_name for each in shards})
        (order.out / PROGRESS_FILE).unlink(missing_ok=True)
        return catalogue


def _named_in(folder: Path) -> set[str]:
    """The shards' files of the catalogue there: all where it cannot be understood, none where there is none. Raises OSError."""
    path = folder / CATALOGUE_FILE
    if not path.exists():
        return set()
    try:
        return {each.file_name for each in catalogue_of(path.read_bytes(), source=str(path)).shards}
    except ConfigError:
        return {each.name for each in folder.glob("*.shard")}


@dataclass(frozen=True, slots=True)
class _Written:
    """read: documents of its side that are in it or in an earlier shard, or had no tokens. keys: the hash of their keys, hex."""

    shard: Shard
    read: int
    keys: str


class _OtherDocuments(ConfigError):
    """The shards that are there were made of other documents than those that are read now."""

    def __init__(self, out: Path) -> None:
        super().__init__(
            f"{out} holds unfinished shards of other documents (a file could be read now or could not): pass --force to"
            " begin anew, or another --out"
        )


class _Side:
    """Documents of the shard that comes next, to train on (so many times an epoch) or held out. read: how many came until now;
    keys: the hash of their keys, in that order."""

    def __init__(self, held_out: bool, times: int) -> None:
        self.held_out, self.times = held_out, times
        self.read, self.keys = 0, ""
        self.clear()

    def clear(self) -> None:
        self.documents: list[Ids] = []
        self.counts: list[Counts] = []
        self.num_tokens = self.text_bytes = 0

    def came(self, key: str) -> None:
        self.read += 1
        self.keys = hashlib.sha256((self.keys + key).encode()).hexdigest()

    def add(self, ids: Ids, text_bytes: int, counts: Counts | None) -> None:
        for start in range(0, len(ids), MAX_DOCUMENT_TOKENS):  # a normalizer can make much of little text
            self.documents.append(ids[start : start + MAX_DOCUMENT_TOKENS])
            if counts is not None:
                self.counts.append(counts[start : start + MAX_DOCUMENT_TOKENS])
        self.num_tokens += len(ids)
        self.text_bytes += text_bytes


def _unheard(_line: str) -> None:
    """What is left out is told where the documents are read."""


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.data)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
