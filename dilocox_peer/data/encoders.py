"""Processes that cut documents into tokens, for `tokenizing.py`: batches go in, and come out in their order."""

import multiprocessing
import queue
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection

import numpy as np

from dilocox_peer.data.chat import Spans
from dilocox_peer.data.sources import Document
from dilocox_peer.data.tokenizer import Counts, Ids, JsonTokenizer, Tokenizer
from dilocox_peer.errors import ConfigError

_AHEAD = 2  # batches a process
ENCODE_S = 300.0  # for a batch and those before it, a MB each

_Encoded = tuple[Ids, Counts | None]
"""The tokens of a document, without bos and eos; of a conversation, which of them are trained on."""


class Encoders:
    """Processes that encode, one thread of ours waiting on each. With one, or bytes, it is done here."""

    def __init__(self, tokenizer: Tokenizer, content: bytes | None, processes: int) -> None:
        """content: of the tokenizer's file; None: bytes are tokens."""
        self._tokenizer, self._content = tokenizer, content
        self._count = processes if content is not None and processes > 1 else 0

    def __enter__(self) -> "Encoders":
        context = multiprocessing.get_context("spawn")
        self._idle: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self._children = []
        for _ in range(self._count):
            ours, theirs = context.Pipe()
            child = context.Process(target=_encode_for, args=(theirs, self._content), daemon=True)
            child.start()
            theirs.close()
            self._children.append((child, ours))
            self._idle.put(ours)
        self._threads = ThreadPoolExecutor(max(1, self._count))
        self._here = None if self._count else self._tokenizer
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._kill()  # a thread may wait for one that never answers
        self._threads.shutdown(cancel_futures=True)
        for child, ours in self._children:
            ours.close()  # it reads the end and goes
            child.join(5.0)
            child.kill()

    def _kill(self) -> None:
        for child, _ in self._children:
            child.kill()

    def encoded(self, batches: Iterator[list[Document]]) -> Iterator[tuple[list[Document], list[_Encoded]]]:
        """Each batch with its tokens, in their order; a bounded number ahead."""
        if self._here is not None:
            for batch in batches:
                yield batch, _encode(self._here, [(document.data.tobytes(), document.answers) for document in batch])
            return
        waiting: deque[tuple[list[Document], Future[list[_Encoded]]]] = deque()
        for batch in batches:
            waiting.append((batch, self._threads.submit(self._ask, batch)))
            if len(waiting) >= _AHEAD * self._count:
                yield self._oldest(waiting)
        while waiting:
            yield self._oldest(waiting)

    def _oldest(
        self, waiting: deque[tuple[list[Document], Future[list[_Encoded]]]]
    ) -> tuple[list[Document], list[_Encoded]]:
        batch, tokens = waiting.popleft()
        try:
            return batch, tokens.result(ENCODE_S)
        except TimeoutError:
            raise ConfigError(
                f"a process that cuts text into tokens has not answered for {ENCODE_S:.0f} s; call this again, with fewer --processes"
            ) from None

    def _ask(self, batch: Sequence[Document]) -> list[_Encoded]:
        encoder = self._idle.get()
        parts = []
        for document in batch:
            parts += [document.data.tobytes(), np.array(document.answers or (), "<i4").tobytes()]
        try:
            encoder.send_bytes(_framed(parts))
            answer = _unframed(encoder.recv_bytes())
        except (EOFError, OSError):
            raise ConfigError(
                "a process that cuts text into tokens has died (out of memory?); call this again, with fewer --processes"
            ) from None
        finally:
            self._idle.put(encoder)
        if len(answer) != 2 * len(batch):
            raise ConfigError(answer[0].decode())
        return [
            (np.frombuffer(ids, "<u4"), None if document.answers is None else np.frombuffer(counts, np.bool_))
            for document, ids, counts in zip(batch, answer[::2], answer[1::2], strict=True)
        ]


def _encode(tokenizer: Tokenizer, documents: Sequence[tuple[bytes, Spans | None]]) -> list[_Encoded]:
    """All of them with answers, or none."""
    marked = [(text, answers) for text, answers in documents if answers is not None]
    if not marked:
        return [(ids, None) for ids in tokenizer.encode([text for text, _ in documents])]
    assert isinstance(tokenizer, JsonTokenizer), "conversations have special tokens"
    return list(tokenizer.encode_marked(marked))


def _encode_for(connection: Connection, content: bytes) -> None:
    """In a process of its own, until the other end is closed or dies."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who asks
    tokenizer = JsonTokenizer(content)
    while True:
        try:
            asked = _unframed(connection.recv_bytes())
        except (EOFError, OSError):
            return
        spans = [tuple((int(a), int(b)) for a, b in np.frombuffer(each, "<i4").reshape(-1, 2)) for each in asked[1::2]]
        parts: list[bytes] = []
        try:
            found = _encode(tokenizer, [(text, each or None) for text, each in zip(asked[::2], spans, strict=True)])
        except ConfigError as error:
            connection.send_bytes(_framed([str(error).encode()]))
            continue
        for ids, counts in found:
            parts += [ids.astype("<u4").tobytes(), b"" if counts is None else counts.tobytes()]
        connection.send_bytes(_framed(parts))


def _framed(parts: Sequence[bytes]) -> bytes:
    return struct.pack(f"<I{len(parts)}I", len(parts), *map(len, parts)) + b"".join(parts)


def _unframed(frame: bytes) -> list[bytes]:
    (count,) = struct.unpack_from("<I", frame)
    sizes = struct.unpack_from(f"<{count}I", frame, 4)
    parts, at = [], 4 + 4 * count
    for size in sizes:
        parts.append(frame[at : at + size])
        at += size
    return parts
