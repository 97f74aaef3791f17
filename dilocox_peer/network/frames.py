"""Frames: how everything larger than a message travels, between stages and between peers of a stage.

    magic u32 | version u8 | kind u8 | reserved u16 | header length u32 | body length u64 | msgpack header | raw body

Sizes are checked against the receiver's caps before memory is taken. The body is never copied into the header's
msgpack (that costs 108 ms per 100 MB; a raw body costs none). A stream of a killed peer ends without an error, so a
frame is complete only when its lengths are.
"""

import struct
from dataclasses import dataclass
from typing import Any

import msgpack

from dilocox_peer.errors import ProtocolError
from dilocox_peer.scan import scan
from dilocox_peer.wire.versions import FRAMES, why_not_version

Buffer = bytes | bytearray | memoryview

MAGIC = 0xD170C0D1
_PREFIX = struct.Struct(">IBBHIQ")
PREFIX_BYTES = _PREFIX.size
MAX_HEADER_BYTES = 64 * 1024
MAX_HEADER_DEPTH, MAX_HEADER_ITEMS = 4, 8192


@dataclass(frozen=True, slots=True)
class Prefix:
    kind: int
    header_bytes: int
    body_bytes: int


def pack_header(kind: int, header: dict[str, Any], body_bytes: int) -> bytes:
    """Prefix and header of a frame; the body follows it on the wire."""
    packed: bytes = msgpack.packb(header, use_bin_type=True)
    assert len(packed) <= MAX_HEADER_BYTES, f"header of {len(packed)} bytes"
    return _PREFIX.pack(MAGIC, FRAMES, kind, 0, len(packed), body_bytes) + packed


def unpack_prefix(raw: bytes, *, max_body_bytes: int) -> Prefix:
    """The prefix of a frame. Raises ProtocolError for another protocol, version, or sizes above the caps."""
    if len(raw) != PREFIX_BYTES:
        raise ProtocolError(None, f"the stream ended after {len(raw)} of {PREFIX_BYTES} prefix bytes")
    magic, version, kind, _reserved, header_bytes, body_bytes = _PREFIX.unpack(raw)
    if magic != MAGIC:
        raise ProtocolError(None, f"not a frame (magic {magic:08x})")
    if (reason := why_not_version("a frame", version, FRAMES)) is not None:
        raise ProtocolError(None, reason)
    if header_bytes > MAX_HEADER_BYTES:
        raise ProtocolError(None, f"header of {header_bytes} bytes, at most {MAX_HEADER_BYTES}")
    if body_bytes > max_body_bytes:
        raise ProtocolError(None, f"body of {body_bytes} bytes, at most {max_body_bytes}")
    return Prefix(kind, header_bytes, body_bytes)


def unpack_header(raw: bytes) -> dict[str, Any]:
    """The header of a frame: a flat dictionary with string keys. Raises ProtocolError."""
    try:
        # Scanned first: lists in lists, each of 4096 it says, would have msgpack take 32 MB for 3 kB.
        scan(raw, max_bytes=MAX_HEADER_BYTES, max_depth=MAX_HEADER_DEPTH, max_items=MAX_HEADER_ITEMS, what="header")
        header = msgpack.unpackb(raw, strict_map_key=True, max_map_len=64, max_array_len=4096, max_ext_len=0)
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(None, f"unreadable header: {error}") from None
    if not isinstance(header, dict) or not all(isinstance(key, str) for key in header):
        raise ProtocolError(None, "the header is no dictionary with string keys")
    return header
