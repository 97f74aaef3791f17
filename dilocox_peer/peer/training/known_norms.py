"""What the check of a contribution has found out, so that the merge need not decode it for that again."""

import threading

from dilocox_peer.compression.aggregate import contribution_squares
from dilocox_peer.compression.lengths import Squares
from dilocox_peer.types import Digest, Layout

MAX_KNOWN = 256  # of a billion parameters each is up to a megabyte


class KnownNorms:
    """The norms of the newest contributions, unit by unit and squared (lengths.py), by their names. Any thread."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._known: dict[Digest, Squares] = {}
        self._lock = threading.Lock()

    def check(self, name: Digest, blob: memoryview) -> None:
        """Decodes it once. Raises MalformedBlob."""
        found = contribution_squares(blob, self._layout)
        with self._lock:
            self._known[name] = found
            while len(self._known) > MAX_KNOWN:
                del self._known[next(iter(self._known))]

    def get(self, name: Digest) -> Squares | None:
        """Its own, if it was checked here."""
        return self._known.get(name)
