"""The versions of everything that travels between peers or lies on disk, and what is done on meeting another one.

One rule: a peer reads the versions named here and no others. Anything else is refused in one line that says which of the two
programs is the older one; nothing of it is looked at. A version changes when bytes of before can no longer be read, and only
then. docs/protocol.md has the table of what a refusal means to whom.
"""

from typing import Final

ROUNDS: Final = 3  # messages about rounds; 2 had offers that nobody had signed, 1 votes without an order
LOG: Final = 2  # records of rounds.log; 1 had no checkpoint, and votes without an order
PAGED: Final = 3  # the first record of a rounds.log whose older certificates lie in rounds.past beside it
CHAIN: Final = 1  # a page of a chain, and the chain of a copy on disk
RECORDS: Final = 1  # leases, and the owner's words, in the directory
GRANT: Final = 1  # invitations, and lists of revocations
HELLO: Final = 1  # the first frame over a link
FRAMES: Final = 1  # the prefix of everything larger than a message
CONTRIBUTION: Final = 1
DIRECTIVE: Final = 1  # what the run's owner wants, in the directory, in a message and in a certificate
HEALTH: Final = 1  # how a peer says that it is


def why_not_version(what: str, theirs: int, ours: int) -> str | None:
    """Why something of version `theirs` is not read where `ours` is spoken, and who must update; None if it is read."""
    if theirs == ours:
        return None
    older = "this peer" if theirs > ours else "who wrote it"
    return f"{what} of version {theirs}, this peer speaks {ours}: {older} must update"


def why_not_list(what: str, raw: bytes | bytearray | memoryview, ours: int, name: bytes = b"") -> str | None:
    """The same of a list that begins with its version, or with its encoded name and then its version; None too of
    what is no such list."""
    theirs = version_of_list(raw, name)
    return None if theirs is None else why_not_version(what, theirs, ours)


def version_of_list(raw: bytes | bytearray | memoryview, name: bytes = b"") -> int | None:
    """What such a list says of its version; None of what is none."""
    if not raw or (raw[0] & 0xF0 != 0x90 and raw[0] != 0xDC):
        return None
    first = 3 if raw[0] == 0xDC else 1  # of more than 15 items: their number in two bytes
    at = first + len(name)
    if len(raw) <= at or bytes(raw[first:at]) != name or raw[at] > 0x7F:
        return None
    return raw[at]


def with_version(version: int, encoded: bytes) -> bytes:
    """The short list that encoded is, with the version before its first item."""
    assert 0x90 <= encoded[0] < 0x9F, f"no list of at most 14: {encoded[:1].hex()}"
    return bytes((encoded[0] + 1, version)) + encoded[1:]


def without_version(raw: bytes, version: int, what: str) -> bytes:
    """The list without its version. Raises ValueError if it does not begin with this one."""
    if len(raw) < 2 or not 0x91 <= raw[0] <= 0x9F or raw[1] > 0x7F:
        raise ValueError(f"{what}: no short list that begins with its version")
    if (reason := why_not_version(what, raw[1], version)) is not None:
        raise ValueError(reason)
    return b"".join((bytes((raw[0] - 1,)), memoryview(raw)[2:]))  # one copy of a long one
