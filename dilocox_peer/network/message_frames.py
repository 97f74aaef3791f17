"""How messages travel on the stream that a peer keeps to another: batches one way, an answer to each the other way. Pure.

batch    count u8 | length u32 of the rest | count times: length u32, message
answer   length u16 of the rest | nothing: all are taken; else count times: length u16, why it is not (UTF-8; empty: it is)
"""

import struct
from collections.abc import Sequence
from typing import Final

from dilocox_peer.errors import ProtocolError

MAX_MESSAGE_BYTES: Final = 1024 * 1024  # larger things are fetched
MAX_BATCH: Final = 32  # messages
BATCH_BYTES: Final = 64 * 1024  # of several in one batch, that none waits long for the others on a slow line
MAX_REASON_BYTES: Final = 300

_HEAD = struct.Struct(">BI")
HEAD_BYTES: Final = _HEAD.size
_LENGTH = struct.Struct(">I")
_SHORT = struct.Struct(">H")
ANSWER_HEAD_BYTES: Final = _SHORT.size
MAX_BATCH_BYTES: Final = MAX_MESSAGE_BYTES + MAX_BATCH * _LENGTH.size  # of what follows the head


def num_in_batch(lengths: Sequence[int]) -> int:
    """How many of the first messages, of these lengths in bytes, go into one batch; one at least."""
    total = 0
    for number, length in enumerate(lengths[:MAX_BATCH]):
        total += length
        if number and total > BATCH_BYTES:
            return number
    return min(len(lengths), MAX_BATCH)


def pack_batch(messages: Sequence[bytes]) -> bytes:
    """Raises ValueError for more than a batch may have."""
    total = sum(map(len, messages))
    if not 0 < len(messages) <= MAX_BATCH or total > MAX_MESSAGE_BYTES:
        raise ValueError(
            f"{len(messages)} messages of {total} bytes, at most {MAX_BATCH} of {MAX_MESSAGE_BYTES}: serve it for fetch instead"
        )
    parts = [_HEAD.pack(len(messages), total + len(messages) * _LENGTH.size)]
    for message in messages:
        parts += (_LENGTH.pack(len(message)), message)
    return b"".join(parts)


def read_head(raw: bytes) -> tuple[int, int]:
    """Messages of a batch, and the bytes that follow its head. raw: HEAD_BYTES of them. Raises ProtocolError."""
    count, num_bytes = _HEAD.unpack(raw)
    if not 0 < count <= MAX_BATCH:
        raise ProtocolError(None, f"{count} messages at once, at most {MAX_BATCH}")
    if num_bytes > MAX_BATCH_BYTES:
        raise ProtocolError(None, f"messages of {num_bytes} bytes at once, at most {MAX_BATCH_BYTES}")
    return count, num_bytes


def split_batch(count: int, body: bytes) -> list[bytes]:
    """The messages of a batch. body: what follows its head. Raises ProtocolError."""
    return _split(count, body, _LENGTH, MAX_MESSAGE_BYTES)


def pack_answer(reasons: Sequence[str]) -> bytes:
    """reasons: why each message of a batch is not taken; empty: it is."""
    if not any(reasons):
        return _SHORT.pack(0)
    parts: list[bytes] = []
    for reason in reasons:
        raw = reason.encode("utf-8", "replace")[:MAX_REASON_BYTES]
        parts += (_SHORT.pack(len(raw)), raw)
    rest = b"".join(parts)
    return _SHORT.pack(len(rest)) + rest


def read_answer_head(raw: bytes) -> int:
    """The bytes that follow. Raises ProtocolError."""
    (num_bytes,) = _SHORT.unpack(raw)
    if num_bytes > MAX_BATCH * (_SHORT.size + MAX_REASON_BYTES):
        raise ProtocolError(None, f"answer of {num_bytes} bytes")
    return int(num_bytes)


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
