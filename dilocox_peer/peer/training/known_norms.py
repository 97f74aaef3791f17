"""What the check of a contribution has found out, so that the merge need not decode it for that again."""

from dilocox_peer.compression.aggregate import contribution_norm
from dilocox_peer.types import Digest, Layout

MAX_KNOWN = 4096


class KnownNorms:
    """The norms of the newest contributions, by their names. Any thread."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._known: dict[Digest, float] = {}

    def check(self, name: Digest, blob: memoryview) -> None:
        """Decodes it once. Raises MalformedBlob."""
        self._known[name] = contribution_norm(blob, self._layout)
        while len(self._known) > MAX_KNOWN:
            self._known.pop(next(iter(self._known)), None)

    def get(self, name: Digest) -> float | None:
        """Its norm, if it was checked here."""
        return self._known.get(name)
