"""Which state a certificate names: what copies, keepers and newcomers take for the stage's. Pure."""

from collections import Counter
from collections.abc import Collection, Sequence

from dilocox_peer.types import PeerId
from dilocox_peer.wire.chain import Entry


def majority_digest(entries: Sequence[Entry], voters: Collection[PeerId]) -> bytes:
    """The state digest that most of the voters' entries report (the lowest of equally frequent ones), if more than half of all voters report it, or of all
    entries; b"" else: newcomers would have all fetch theirs, and one voter would name the state while the others rest."""
    counts = Counter(entry.state_digest for entry in entries if entry.state_digest and entry.peer in voters)
    most = min(counts, key=lambda digest: (-counts[digest], digest), default=b"")
    of_all = sum(entry.state_digest == most for entry in entries)
    return most if 2 * counts[most] > len(voters) or 2 * of_all > len(entries) else b""
