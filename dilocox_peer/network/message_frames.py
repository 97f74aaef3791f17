"""How messages travel on the stream that a peer keeps to another: batches one way, answers the other way. Pure.

batch    packing u8, and 128 if an answer is wanted at once | count u8 | number u8 of this stream | number u8 of the other's stream, and how many
         of its batches are taken u8 (message_answers.py; number 0: nothing is told) | bytes u32 of the messages with their lengths |
         length u32 of the rest | count times: length u32, message; deflated if packing says so (message_packing.py)
answer   batches taken u8 | length u16 of the rest | nothing: all messages of the last batch are taken too; else for each of them: length
         u16, why it is not (UTF-8; empty: it is)
"""

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from dilocox_peer.errors import ProtocolError

MAX_MESSAGE_BYTES: Final = 1024 * 1024  # larger things are fetched
MAX_BATCH: Final = 32  # messages
BATCH_BYTES: Final = 64 * 1024  # of several in one batch, that none waits long for the others on a slow line
MAX_REASON_BYTES: Final = 300

NUMBERS: Final = 256  # of batches, and of streams: counted modulo this

_HEAD = struct.Struct(">BBBBBII")
HEAD_BYTES: Final = _HEAD.size
_LENGTH = struct.Struct(">I")
_SHORT = struct.Struct(">H")
_ANSWER_HEAD = struct.Struct(">BH")
ANSWER_HEAD_BYTES: Final = _ANSWER_HEAD.size
_AT_ONCE: Final = 128
MAX_BATCH_BYTES: Final = MAX_MESSAGE_BYTES + MAX_BATCH * _LENGTH.size  # of messages with their lengths
MAX_DEFLATED_BYTES: Final = 68 * 1024  # the same, of a batch that is deflated: what is larger goes as it is
MOST_LONGER: Final = 1024  # bytes that what does not shrink grows by
_PACKINGS: Final = frozenset(range(3))


def num_in_batch(lengths: Sequence[int]) -> int:
    """How many of the first messages, of these lengths in bytes, go into one batch; one at least."""
    total = 0
    for number, length in enumerate(lengths[:MAX_BATCH]):
        total += length
        if number and total > BATCH_BYTES:
            return number
    return min(len(lengths), MAX_BATCH)


class BatchPacking(IntEnum):
    """Whether a batch is deflated, and with what went before it."""

    NONE = 0
    BEGINS = 1
    GOES_ON = 2


class Told(NamedTuple):
    """How many batches, modulo NUMBERS, of the stream that the other has given this number were taken. Number 0: of none."""

    line: int
    num_taken: int


class BatchHead(NamedTuple):
    """Of a batch. num_bytes: of the messages with their lengths. num_packed: bytes that follow the head. line: the number its sender has given the
    stream, 0: none. wants_answer: at once. told: of a stream the other way."""

    packing: BatchPacking
    num_messages: int
    num_bytes: int
    num_packed: int
    line: int
    wants_answer: bool
    told: Told


def join_batch(messages: Sequence[bytes]) -> bytes:
    """Messages, each after its length. Raises ValueError for more than a batch may have."""
    total = sum(map(len, messages))
    if not 0 < len(messages) <= MAX_BATCH or total > MAX_MESSAGE_BYTES:
        raise ValueError(
            f"{len(messages)} messages of {total} bytes, at most {MAX_BATCH} of {MAX_MESSAGE_BYTES}: serve it for fetch instead"
        )
    parts: list[bytes] = []
    for message in messages:
        parts += (_LENGTH.pack(len(message)), message)
    return b"".join(parts)


def pack_head(head: BatchHead) -> bytes:
    kind = head.packing + _AT_ONCE * head.wants_answer
    return _HEAD.pack(kind, head.num_messages, head.line, *head.told, head.num_bytes, head.num_packed)


def read_head(raw: bytes) -> BatchHead:
    """raw: HEAD_BYTES of them. Raises ProtocolError."""
    kind, count, line, told_line, num_taken, num_bytes, num_packed = _HEAD.unpack(raw)
    wants_answer, packing = divmod(kind, _AT_ONCE)
    if packing not in _PACKINGS:
        raise ProtocolError(None, f"messages packed in way {packing}, which is not known")
    if not 0 < count <= MAX_BATCH:
        raise ProtocolError(None, f"{count} messages at once, at most {MAX_BATCH}")
    if num_bytes > MAX_BATCH_BYTES:
        raise ProtocolError(None, f"messages of {num_bytes} bytes at once, at most {MAX_BATCH_BYTES}")
    if packing != BatchPacking.NONE and num_bytes > MAX_DEFLATED_BYTES:
        raise ProtocolError(None, f"deflated messages of {num_bytes} bytes at once, at most {MAX_DEFLATED_BYTES}")
    if num_packed != num_bytes if packing == BatchPacking.NONE else num_packed > num_bytes + MOST_LONGER:
        raise ProtocolError(None, f"messages of {num_bytes} bytes packed into {num_packed}")
    told = Told(told_line, num_taken)
    return BatchHead(BatchPacking(packing), count, num_bytes, num_packed, line, bool(wants_answer), told)


def split_batch(count: int, body: bytes) -> list[bytes]:
    """The messages of a batch. body: each after its length. Raises ProtocolError."""
    return _split(count, body, _LENGTH, MAX_MESSAGE_BYTES)


def pack_answer(num_taken: int, reasons: Sequence[str]) -> bytes:
    """num_taken: batches since the stream began, modulo NUMBERS. reasons: why each message of the last of them is not taken; empty: it is."""
    if not any(reasons):
        return _ANSWER_HEAD.pack(num_taken, 0)
    parts: list[bytes] = []
    for reason in reasons:
        raw = reason.encode("utf-8", "replace")[:MAX_REASON_BYTES]
        parts += (_SHORT.pack(len(raw)), raw)
    rest = b"".join(parts)
    return _ANSWER_HEAD.pack(num_taken, len(rest)) + rest


def read_answer_head(raw: bytes) -> tuple[int, int]:
    """Batches taken, modulo NUMBERS, and the bytes that follow. Raises ProtocolError."""
    num_taken, num_bytes = _ANSWER_HEAD.unpack(raw)
    if num_bytes > MAX_BATCH * (_SHORT.size + MAX_REASON_BYTES):
        raise ProtocolError(None, f"answer of {num_bytes} bytes")
    return num_taken, num_bytes


def split_answer(count: int, body: bytes) -> list[str]:
    """Why each of so many messages is not taken; empty: it is. Raises ProtocolError."""
    if not body:
        return [""] * count
    return [" ".join(raw.decode("utf-8", "replace").split()) for raw in _split(count, body, _SHORT, MAX_REASON_BYTES)]


def _split(count: int, body: bytes, prefix: struct.Struct, most: int) -> list[bytes]:
    """So many parts, each after its length, that are all of body. most: bytes of one. Raises ProtocolError."""
    parts = []
    at = 0
    for _ in range(count):
        if at + prefix.size > len(body):
            raise ProtocolError(None, f"{len(body)} bytes end before the last of {count} parts")
        (length,) = prefix.unpack_from(body, at)
        if length > most:
            raise ProtocolError(None, f"a part of {length} bytes, at most {most}")
        at += prefix.size
        parts.append(body[at : at + length])
        at += length
    if at != len(body):
        raise ProtocolError(None, f"parts of {at} bytes in {len(body)}")
    return parts
