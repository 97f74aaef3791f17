"""What the check of a contribution has found out, so that the merge need not decode it for that again."""

import threading

from dilocox_peer.compression.allowed import AllowedCodecs
from dilocox_peer.compression.contribution import open_contribution
from dilocox_peer.compression.lengths import Squares, squares_of
from dilocox_peer.manifest import Manifest
from dilocox_peer.peer.planning.plan import plan_bounds
from dilocox_peer.types import Digest, Layout

MAX_KNOWN = 256  # of a billion parameters each is up to a megabyte


def allowed_codecs(manifest: Manifest) -> AllowedCodecs:
    """What contributions to this run may be: what certificates may plan."""
    bounds = plan_bounds(manifest)
    return AllowedCodecs(bounds.codecs, bounds.max_rank)


class KnownNorms:
    """The norms of the newest contributions, unit by unit and squared (lengths.py), by their names. Any thread."""

    def __init__(self, layout: Layout, allowed: AllowedCodecs) -> None:
        self._layout = layout
        self._allowed = allowed
        self._known: dict[Digest, Squares] = {}
        self._lock = threading.Lock()

    def check(self, name: Digest, blob: memoryview) -> None:
        """Decodes it once, if its codecs are those of the run. Raises MalformedBlob."""
        contribution = open_contribution(blob, self._layout)
        self._allowed.check(contribution)
        found = squares_of(contribution, self._layout)
        with self._lock:
            self._known[name] = found
            while len(self._known) > MAX_KNOWN:
                del self._known[next(iter(self._known))]

    def get(self, name: Digest) -> Squares | None:
        """Its own, if it was checked here."""
        return self._known.get(name)
