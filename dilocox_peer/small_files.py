"""The small files beside a published model's weights, as a manifest names them."""

import re
from dataclasses import dataclass

from dilocox_peer.types import Digest


@dataclass(frozen=True, slots=True)
class SmallFile:
    """A file beside a model's weights, as the manifest names it."""

    digest: Digest
    size_bytes: int
    name: str

    def __str__(self) -> str:
        return f"{self.digest.hex()} {self.size_bytes} {self.name}"


def small_file(line: str) -> SmallFile:
    """The file that a line of `files` names. Raises ValueError."""
    if (found := re.fullmatch(r"([0-9a-f]{64}) ([0-9]{1,9}) ([A-Za-z0-9._-]{1,80})", line)) is None:
        raise ValueError(f"files: {line[:80]!r} is not 'sha256 bytes name'")
    return SmallFile(Digest(bytes.fromhex(found[1])), int(found[2]), found[3])
