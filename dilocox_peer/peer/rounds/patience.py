"""What somebody without a vote believes of a view change that no quorum signed: it counts once it has stood for a while. Pure.

The majority may only be out of sight, and one member can write such a view change alone, in a second, and go on from it to
the end of the run. One that no voter of the roster before it signed never counts: that is for the run's owner to decide. What
the owner's checkpoint holds counts at once.
"""

from collections import OrderedDict

from dilocox_peer.peer.rounds.chain import Chain, Suffix, is_quorum
from dilocox_peer.types import Digest
from dilocox_peer.wire.checkpoints import Checkpoint

MAX_REMEMBERED = 1024  # view changes


class Patience:
    """When each view change was first seen."""

    def __init__(self, seconds: float) -> None:
        """seconds: that a view change of a minority must have stood."""
        self._seconds = seconds
        self._since: OrderedDict[Digest, float] = OrderedDict()

    def settled(self, chain: Chain, path: Suffix, checkpoint: Checkpoint | None, now: float) -> Suffix | None:
        """The path from chain as far as it is to be believed by now; None: not at all. now: monotonic seconds."""
        place, settled, is_believed = chain.place_at(path.ancestor), 0, True
        vouched = path.heads.index(checkpoint.head) if checkpoint is not None and checkpoint.head in path.heads else -1
        for index, certificate in enumerate(path.certificates):
            signers = {peer for peer, _ in certificate.signatures}
            is_view_change = certificate.value.kind == "epoch" and not place.is_genesis
            if index > vouched and is_view_change and not is_quorum(signers, place.voters):
                has_stood = (
                    now - self._seen(certificate.head, now) >= self._seconds
                )  # timed also behind another that has not
                is_believed = is_believed and has_stood and bool(signers & set(place.voters))
            place = place.then(certificate)
            settled += is_believed
        return path.up_to(path.heads[settled - 1]) if settled else None

    def _seen(self, head: Digest, now: float) -> float:
        since = self._since.setdefault(head, now)
        if len(self._since) > MAX_REMEMBERED:
            self._since.popitem(last=False)
        return since
