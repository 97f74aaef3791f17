"""What every message, record and header is made of, and how its bytes are read: the declaration is the schema.

A declared struct is a MessagePack list of its fields in order. Its bytes come from strangers or from a disk, so a `Parser`
looks at the size before anything is decoded, and takes exactly one encoding of each value: what it reads is written again and
compared. So integers in too many bytes, fields left out at the end, numbers of another type that would be converted, and
bytes at the end are all refused, and two peers that hold the same value hold the same bytes.
What a field may say at this moment (ballots, rosters, signatures) is for who reads it to judge, not for this room.
"""

from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta, Struct

from dilocox_peer.errors import ProtocolError
from dilocox_peer.types import DIGEST_BYTES, Digest, PeerId
from dilocox_peer.wire import versions

MAX_COUNT = 2**53  # any counter; exact in every language's double
MAX_PEER_CHARS = 64  # base58 of an Ed25519 PeerID is 52
MAX_STAGE = 2**16
MAX_SIGNATURE_BYTES = 128  # of an Ed25519 key 64, and 8 more with the order of a vote
MAX_REFUSAL_CHARS = 300  # of a refusal: some repeat what was read
MAX_SITE_CHARS = 32
SITE = r"^[A-Za-z0-9._-]*\Z"  # of a place, as a volunteer calls it; empty: he says nothing
PLAIN = r"^[ -~]+\Z"  # not "$", which lets a line end pass

# What fields hold. Each is checked when bytes are read, and only then: values made by this program are trusted.
Number = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
FromOne = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
StageNumber = Annotated[int, Meta(ge=0, le=MAX_STAGE)]
PeerName = Annotated[PeerId, Meta(min_length=1, max_length=MAX_PEER_CHARS, pattern=PLAIN)]
Hash = Annotated[Digest, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
HashOrNone = Annotated[bytes, Meta(max_length=DIGEST_BYTES)]  # empty or a digest: `check_digest` in __post_init__
Signature = Annotated[bytes, Meta(min_length=1, max_length=MAX_SIGNATURE_BYTES)]

Site = Annotated[str, Meta(max_length=MAX_SITE_CHARS, pattern=SITE)]

encode = msgspec.msgpack.Encoder().encode
"""The bytes of a declared value, or of lists, tuples and plain values. Equal values give equal bytes."""

astuple = msgspec.structs.astuple
replaced = msgspec.structs.replace
"""A copy of a declared value with other values in some fields; as dataclasses.replace."""

T = TypeVar("T")


class Declared(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The root of all that is declared. With a tag, that comes first in the list."""


def check_digest(digest: bytes, what: str) -> None:
    """Raises ValueError for what is neither empty nor a digest."""
    if len(digest) not in (0, DIGEST_BYTES):
        raise ValueError(f"a {what} of {len(digest)} bytes")


class Parser(Generic[T]):
    """Reads one kind of bytes."""

    def __init__(
        self,
        declared: Any,
        what: str,
        max_bytes: int,
        *,
        version: int | None = None,
        name: str = "",
        is_canonical: bool = True,
    ) -> None:
        """declared: a declared type, or a union of tagged ones; what: its name, for refusals. version: of one
        whose tag is its version: of another it says who must update; name: what comes before that. is_canonical: whether another
        encoding than our own is refused; of what lies on disk, under a checksum, it need not be."""
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(declared)
        self._what = what
        self._max_bytes = max_bytes
        self._version = version
        self._name = encode(name) if name else b""
        self._is_canonical = is_canonical

    def read(self, raw: bytes | bytearray | memoryview, *, max_bytes: int | None = None) -> T:
        """The value in raw. Raises ValueError, one line that says what and where, for anything else than exactly one.

        max_bytes: fewer than this parser's own."""
        most = self._max_bytes if max_bytes is None else max_bytes
        if len(raw) > most:
            raise ValueError(f"{self._what} of {len(raw)} bytes; at most {most} are read")
        if (
            self._version is not None
            and (reason := versions.why_not_list(self._what, raw, self._version, self._name)) is not None
        ):
            raise ValueError(reason)
        try:
            value = self._decoder.decode(raw)
        except (ValueError, RecursionError) as error:  # msgspec's errors and UnicodeDecodeError are ValueErrors
            raise ValueError(f"{self._what}: {plain_line(str(error))}") from None
        if self._is_canonical and encode(value) != raw:
            raise ValueError(f"{self._what}: another encoding of it than the one that peers use")
        return value

    def hear(self, raw: bytes | bytearray | memoryview, sender: PeerId | None, *, max_bytes: int | None = None) -> T:
        """The same, of what a peer has sent. Raises ProtocolError."""
        try:
            return self.read(raw, max_bytes=max_bytes)
        except ValueError as error:
            raise ProtocolError(sender, str(error)) from None


def plain_line(text: str) -> str:
    """text as one short line for a log: a stranger's words may be in it."""
    return "".join(each if each.isprintable() else "?" for each in text[:MAX_REFUSAL_CHARS])
