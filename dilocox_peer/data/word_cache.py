"""A byte-level BPE word by word, with the words that came before looked up: the tokens that `tokenizers` makes, several times as fast.

Such a tokenizer cuts a text into words by a pattern, then each word into tokens, whatever stands around it. So a word's
tokens can be kept, and a text costs a search by Python's `re` and a look-up a word. That is done for ASCII alone, where the
patterns in use mean the same in `re`; the stretches of a text that hold anything else go to the library, cut where a
space stands between two letters of ASCII, at which all these patterns begin a word. Which tokenizers qualify is read
from their tokenizer.json (`WordCache.of`); the others are used plainly.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

MAX_WORDS = 400_000
"""Kept at most, some 60 MB. Then it begins anew: nine tenths of a text are its commonest words."""

MAX_WORD = 128  # characters; longer ones are seldom twice the same

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_GPT2_DIGITS_APART = r"\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
_KNOWN_SPLITS = {
    # cl100k's, as Llama 3 and Qwen 2 write it
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
_CUT = re.compile(r"(?<=[A-Za-z]) (?=[A-Za-z])")
_FOREIGN = re.compile(r"[^\x00-\x7f]")
_SLICE = 65536  # characters; some 10 ms
_REACH = 512  # characters within which a cut is looked for beside what is not ASCII


class WordCache(dict[str, bytes]):
    """word -> its ids as they lie in memory. One thread."""

    def __init__(self, pattern: str, encode: Callable[[str], list[int]], dtype: "np.dtype[Any]") -> None:
        super().__init__()
        self._words = re.compile(pattern, re.ASCII).findall
        self._encode = encode
        self._dtype = dtype

    @classmethod
    def of(cls, content: bytes, encode: Callable[[str], list[int]], dtype: "np.dtype[Any]") -> "WordCache | None":
        """For the tokenizer of this tokenizer.json, whose `encode` gives the ids of a text; None where it does not qualify."""
        pattern = _pattern_of(json.loads(content))
        return None if pattern is None else cls(pattern, encode, dtype)

    def ids(self, text: str) -> bytes:
        """Of a whole document, as they lie in memory."""
        if len(self) > MAX_WORDS:
            self.clear()
        return b"".join(map(self._of, _slices(text)))

    def _of(self, text: str) -> bytes:
        if text.isascii():
            return b"".join(map(self.__getitem__, self._words(text)))
        return b"".join(
            b"".join(map(self.__getitem__, self._words(part))) if part.isascii() else self._plain(part)
            for part in _parts(text)
        )

    def __missing__(self, word: str) -> bytes:
        ids = self._plain(word)
        if len(word) <= MAX_WORD:
            self[word] = ids
        return ids

    def _plain(self, text: str) -> bytes:
        return np.array(self._encode(text), self._dtype).tobytes()


def _slices(text: str) -> Iterator[str]:
    """A long text in slices that begin where a word does: one call into `re` holds the interpreter for as long as it takes."""
    start = 0
    while len(text) - start > _SLICE and (cut := _CUT.search(text, start + _SLICE // 2)) is not None:
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]


def _parts(text: str) -> Iterator[str]:
    """The text in turns of ASCII and of what holds other characters, each beginning where a word begins."""
    start = 0
    while (foreign := _FOREIGN.search(text, start)) is not None:
        at = foreign.start()
        first = start
        for cut in _CUT.finditer(text, max(start, at - _REACH), at):
            first = cut.start()
        if first > start:
            yield text[start:first]
        # to the next cut after which _REACH characters are ASCII
        stop, look = len(text), foreign.end()
        while (cut_after := _CUT.search(text, look)) is not None:
            look = cut_after.end()
            if _FOREIGN.search(text, look, look + _REACH) is None:
                stop = cut_after.start()
                break
        yield text[first:stop]
        start = stop
    if start < len(text):
        yield text[start:]


def _pattern_of(file: dict[str, Any]) -> str | None:
    """The pattern that cuts a text of ASCII into words, for `re`; None where words are not all there is to it."""
    model = file.get("model") or {}
    plain = (
        model.get("type", "BPE") == "BPE"
        and not model.get("dropout")
        and not model.get("continuing_subword_prefix")
        and not model.get("end_of_word_suffix")
        and file.get("normalizer") is None
        and all(each.get("special") for each in file.get("added_tokens") or ())
    )
    before = file.get("pre_tokenizer") or {}
    steps = before.get("pretokenizers") if before.get("type") == "Sequence" else [before]
    if not plain or not steps or any(each.get("add_prefix_space") for each in steps):
        return None
    match steps:
        case [{"type": "ByteLevel", "use_regex": True}]:
            pattern = _GPT2
        case [{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel", "use_regex": True}]:
            pattern = _GPT2_DIGITS_APART
        case [
            {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "use_regex": False},
        ] if regex in _KNOWN_SPLITS:
            pattern = regex
        case _:
            return None
    return (
        pattern.replace(r"[^\s\p{L}\p{N}]", r"[^\sA-Za-z0-9]")
        .replace(r"[^\r\n\p{L}\p{N}]", r"[^\r\nA-Za-z0-9]")
        .replace(r"[^\s\p{N}]", r"[^\s0-9]")
        .replace(r"\p{L}", "[A-Za-z]")
        .replace(r"\p{N}", "[0-9]")
    )
