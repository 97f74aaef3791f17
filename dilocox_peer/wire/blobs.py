"""The header of a contribution: what makes the blob describe itself. Its sizes are checked against the layout by
compression/contribution.py, which knows it; the bytes are at most as many as that layout's header takes."""

from typing import Annotated, Final

from msgspec import Meta

from dilocox_peer.wire import versions
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
