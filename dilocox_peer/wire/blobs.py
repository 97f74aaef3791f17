"""The header of a contribution, and the table of one in slices: what makes the blob describe itself. Its sizes are checked against the layout by
compression/contribution.py, which knows it; the bytes are at most as many as that layout's header takes."""

import math
from typing import Annotated, Final

from msgspec import Meta

from dilocox_peer.wire import versions
from dilocox_peer.wire.chain import MAX_SLICES
from dilocox_peer.wire.declared import Declared, Hash, Number, Parser

CONTRIBUTION_NAME: Final = "dilocox-contribution"
MAX_HEADER_BYTES = 1 << 30  # a layout's header is far smaller, and was measured before it comes here


class ContributionHeader(Declared, frozen=True, tag=CONTRIBUTION_NAME):
    """codecs, sizes: of each tensor, in the order of the layout; a size is in bytes."""

    version: int
    layout: Hash
    codecs: tuple[Annotated[str, Meta(min_length=1, max_length=32)], ...]
    sizes: tuple[Number, ...]


CONTRIBUTION_HEADER = Parser[ContributionHeader](
    ContributionHeader, "a header", MAX_HEADER_BYTES, version=versions.CONTRIBUTION, name=CONTRIBUTION_NAME
)

MOST_SQUARED: Final = 2.0**300
"""More than the squares of 2**40 of the largest float32 come to, and as many of them as there are slices can be added."""
TABLE_NAME: Final = "dilocox-slices"
MAX_TABLE_BYTES = 128 + 48 * MAX_SLICES


class SlicePart(Declared, frozen=True):
    """One slice of a contribution: its blob, and the square of the norm of what it decodes to."""

    blob: Hash
    size_bytes: Number
    squared: Annotated[float, Meta(ge=0, le=MOST_SQUARED)]

    def __post_init__(self) -> None:
        if not math.isfinite(self.squared):
            raise ValueError("a norm that is not finite")


class SliceTable(Declared, frozen=True, tag=TABLE_NAME):
    """A contribution in slices. layout: of the whole, cut as the run cuts it."""

    version: int
    layout: Hash
    parts: Annotated[tuple[SlicePart, ...], Meta(min_length=1, max_length=MAX_SLICES)]


SLICE_TABLE = Parser[SliceTable](
    SliceTable, "a table of slices", MAX_TABLE_BYTES, version=versions.CONTRIBUTION, name=TABLE_NAME
)
