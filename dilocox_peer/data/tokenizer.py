"""How text becomes tokens: bytes as they are, or a published tokenizer.json, which a run's manifest names by its hash.

A document's tokens never hold a special token that its text spells: where a document begins and ends is ours to say (`bounded`),
with the tokens that the manifest names. The library `tokenizers` is loaded when a run wants it, not before.
"""

import codecs
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dilocox_peer.data.chat import Spans
from dilocox_peer.data.normalizers import MAX_GROWTH, growth_of
from dilocox_peer.data.word_cache import WordCache
from dilocox_peer.errors import ConfigError
from dilocox_peer.extras import pip_install
from dilocox_peer.manifest import BYTES, NUM_BYTES, DataSection

Ids = npt.NDArray[np.unsignedinteger[Any]]

Counts = npt.NDArray[np.bool_]
"""Of each token of a document, whether it is trained on."""

FILE_NAME = "tokenizer.json"
MAX_VOCABULARY = 2**24  # numbers of tokens; published ones have at most some 300,000
_LOOKAHEAD = 8  # tokens that the rest of a character may be away


class Tokenizer(Protocol):
    """ids are little-endian unsigned integers of the narrowest type that holds the vocabulary."""

    @property
    def name(self) -> str:
        """What a manifest's data.tokenizer says."""

    @property
    def vocab_size(self) -> int:
        """Ids are below it."""

    @property
    def dtype(self) -> "np.dtype[np.unsignedinteger[Any]]":
        """Of ids."""

    @property
    def bos(self) -> int | None:
        """The token before each document."""

    @property
    def eos(self) -> int | None:
        """The token behind each document."""

    def encode(self, documents: Sequence[bytes]) -> list[Ids]:
        """The tokens of each document (UTF-8; what is none becomes U+FFFD), without bos and eos."""

    def text_of(self, ids: Iterator[int]) -> Iterator[str]:
        """Their text as they come, each character as soon as it is whole; special tokens are left out."""

    def num_bytes(self, ids: Ids) -> int:
        """Bytes of text that these tokens stand for; special ones for none."""


def id_type(vocab_size: int) -> "np.dtype[np.unsignedinteger[Any]]":
    """The narrowest of u8, u16 and u32, little-endian."""
    return np.dtype("<u1" if vocab_size <= 2**8 else "<u2" if vocab_size <= 2**16 else "<u4")


def bounded(tokenizer: Tokenizer, ids: Ids) -> Ids:
    """A document's tokens with bos and eos around them, as far as the tokenizer has them."""
    if tokenizer.bos is None and tokenizer.eos is None:
        return ids
    whole = np.empty(len(ids) + (tokenizer.bos is not None) + (tokenizer.eos is not None), ids.dtype)
    first = 0
    if tokenizer.bos is not None:
        whole[0], first = tokenizer.bos, 1
    whole[first : first + len(ids)] = ids
    if tokenizer.eos is not None:
        whole[-1] = tokenizer.eos
    return whole


class ByteTokenizer:
    """A Tokenizer: each byte is its own token. Nothing stands between documents."""

    name = BYTES
    vocab_size = NUM_BYTES
    dtype = id_type(NUM_BYTES)
    bos = eos = None

    def encode(self, documents: Sequence[bytes]) -> list[Ids]:
        return [np.frombuffer(document, np.uint8) for document in documents]

    def text_of(self, ids: Iterator[int]) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for byte in ids:
            if text := decoder.decode(bytes([byte])):
                yield text
        if text := decoder.decode(b"", final=True):
            yield text

    def num_bytes(self, ids: Ids) -> int:
        return ids.size


class JsonTokenizer:
    """A Tokenizer: a tokenizer.json, read by the library `tokenizers`. One thread, as a run's peers share the machine."""

    def __init__(self, content: bytes, *, bos: str = "", eos: str = "", source: str = FILE_NAME) -> None:
        """content: of the file. bos, eos: tokens of it; empty: none. Raises ConfigError, with `source` for its name."""
        self.name = hashlib.sha256(content).hexdigest()
        self._source = source
        try:
            import tokenizers
        except ImportError:
            raise ConfigError(
                f"this run's text is cut by a tokenizer.json: `{pip_install('data', 'tokenizers')}` brings what reads it"
            ) from None
        with _told(f"{source} is no tokenizer.json"):
            inner = self._inner = tokenizers.Tokenizer.from_buffer(content)
        if inner.normalizer is not None and (growth := growth_of(inner.normalizer)) > MAX_GROWTH:
            raise ConfigError(
                f"{source} makes {growth:,.0f} characters of one before it cuts a text, {MAX_GROWTH:.0f} is the limit: name one of a published model"
            )
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True  # a text that spells "<|im_end|>" spells it, and ends nothing
        vocabulary: dict[str, int] = inner.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ConfigError(f"{source} has no tokens in it: name one of a published model")
        self.vocab_size = max(vocabulary.values()) + 1
        if self.vocab_size > MAX_VOCABULARY:
            raise ConfigError(
                f"{source} has a token of number {self.vocab_size - 1:,}, {MAX_VOCABULARY:,} is the limit: name one of a published model"
            )
        self.dtype = id_type(self.vocab_size)
        self.bos = self._special(bos, vocabulary, "data.bos", source)
        self.eos = self._special(eos, vocabulary, "data.eos", source)
        self._sizes: npt.NDArray[np.int32] | None = None
        self._words = WordCache.of(content, lambda text: inner.encode(text, add_special_tokens=False).ids, self.dtype)

    @property
    def special_tokens(self) -> frozenset[str]:
        """What no text of a person's is to spell where special tokens are read."""
        return frozenset(token.content for token in self._inner.get_added_tokens_decoder().values() if token.special)

    @property
    def is_fast(self) -> bool:
        """Whether words are looked up (word_cache.py)."""
        return self._words is not None

    @staticmethod
    def _special(token: str, vocabulary: Mapping[str, int], what: str, source: str) -> int | None:
        if token and token not in vocabulary:
            raise ConfigError(f"{what} is {token[:80]!r}, which is no token of {source}: name one that is, or none")
        return vocabulary[token] if token else None

    def encode(self, documents: Sequence[bytes]) -> list[Ids]:
        """Raises ConfigError for a text that this tokenizer has no tokens for."""
        texts = [document.decode(errors="replace") for document in documents]
        with _told(f"{self._source} cannot cut this text"):  # it may have no token for what it does not know
            if self._words is not None:
                return [np.frombuffer(self._words.ids(text), self.dtype) for text in texts]
            encodings = self._inner.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, self.dtype) for encoding in encodings]

    def encode_marked(self, documents: Sequence[tuple[bytes, Spans]]) -> list[tuple[Ids, Counts]]:
        """The tokens of each text, the special ones that it spells among them, and which of them lie in its spans. Raises as encode."""
        self._inner.encode_special_tokens = False
        try:
            with _told(f"{self._source} cannot cut this text"):
                found = self._inner.encode_batch([text.decode() for text, _ in documents], add_special_tokens=False)
        finally:
            self._inner.encode_special_tokens = True
        marked = []
        for (_, spans), encoding in zip(documents, found, strict=True):
            firsts = np.array([first for first, _ in encoding.offsets], np.int64)
            bounds = np.array(spans, np.int64).reshape(-1, 2)
            within = np.searchsorted(bounds[:, 0], firsts, "right") - 1
            counts = (within >= 0) & (firsts < bounds[np.maximum(within, 0), 1])
            marked.append((np.array(encoding.ids, self.dtype), counts))
        return marked

    def text_of(self, ids: Iterator[int]) -> Iterator[str]:
        window: list[int] = []  # since the last whole character, after one token of what came before it
        said = 0
        for each in ids:
            window.append(each)
            text = self._inner.decode(window)
            if text.endswith("\ufffd") and len(window) - said < _LOOKAHEAD:
                continue
            before = self._inner.decode(window[:said])
            if len(text) > len(before):
                yield text[len(before) :]
            window = window[said:]
            said = len(window)
        rest = self._inner.decode(window)[len(self._inner.decode(window[:said])) :]
        if rest:
            yield rest

    def num_bytes(self, ids: Ids) -> int:
        if self._sizes is None:
            self._sizes = self._token_sizes()
        return int(self._sizes[ids].sum())

    def _token_sizes(self) -> npt.NDArray[np.int32]:
        """Bytes of text that each id stands for."""
        sizes = np.zeros(self.vocab_size, np.int32)
        is_byte_level = "ByteLevel" in json.dumps(json.loads(self._inner.to_str())["decoder"])
        added = {number: token.special for number, token in self._inner.get_added_tokens_decoder().items()}
        for token, number in self._inner.get_vocab(with_added_tokens=True).items():
            if number in added:
                sizes[number] = 0 if added[number] else len(token.encode(errors="replace"))
            elif is_byte_level:
                sizes[number] = len(token)  # each of its characters stands for a byte
            elif len(token) == 6 and token.startswith("<0x"):
                sizes[number] = 1
            else:
                sizes[number] = len(token.replace("\u2581", " ").encode(errors="replace"))
        return sizes


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Raises ConfigError for what the library raises: Exception itself or a kind of it, and where it breaks down at what a file says, what is none."""
    try:
        yield
    except MemoryError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ConfigError(f"{what} ({' '.join(str(error).split())[:200]}): name one of a published model") from None


BYTE_TOKENIZER = ByteTokenizer()


def tokenizer_of_run(
    section: DataSection, vocab_size: int, content: bytes | None, *, source: str = FILE_NAME
) -> Tokenizer:
    """The tokenizer of a run whose model knows vocab_size tokens. content: of its tokenizer.json, None for a run of bytes.

    Raises ConfigError when it is another one, or too large for the model.
    """
    if section.tokenizer == BYTES:
        return BYTE_TOKENIZER
    assert content is not None, "a run with a tokenizer.json"
    found = hashlib.sha256(content).hexdigest()
    if found != section.tokenizer:
        raise ConfigError(
            f"{source} is not the run's tokenizer: its sha256 is {found[:16]}, the run wants {section.tokenizer[:16]}"
        )
    tokenizer = JsonTokenizer(content, bos=section.bos, eos=section.eos, source=source)
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"{source} has {tokenizer.vocab_size:,} tokens, the run's model knows {vocab_size:,}: "
            "its owner has to raise model.vocab_size"
        )
    return tokenizer
