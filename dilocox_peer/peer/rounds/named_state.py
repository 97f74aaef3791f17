"""Which state a certificate names: what copies, keepers and newcomers take for the stage's. Pure."""

from collections import Counter
from collections.abc import Collection, Sequence

from dilocox_peer.types import PeerId
from dilocox_peer.wire.chain import Entry


def majority_digest(entries: Sequence[Entry], voters: Collection[PeerId]) -> bytes:
    """The state digest that most of the voters' entries report, if more than half of all voters report it, or of all entries; b"" else: newcomers would
    have all fetch theirs, and one voter would name the state while the others rest. Of several that as many voters report, that of most entries (of two
    voters one may have computed another state, and would keep it while the third earns its vote), then the lowest."""
    of_all = Counter(entry.state_digest for entry in entries if entry.state_digest)
    of_voters = Counter(entry.state_digest for entry in entries if entry.state_digest and entry.peer in voters)
    most = min(of_voters, key=lambda digest: (-of_voters[digest], -of_all[digest], digest), default=b"")
    return most if 2 * of_voters[most] > len(voters) or 2 * of_all[most] > len(entries) else b""
