"""What somebody without a vote believes of a view change that no quorum signed: it counts once it has stood for a while. Pure.

The majority may only be out of sight, and one member can write such a view change alone, in a second, and go on from it to
the end of the run. One that no voter of the roster before it signed counts only to those who look for these voters all the time
(a keeper, the owner's notary) and have heard none of them for long: to others that is for the run's owner to decide. Where all
voters who have not signed it are surely gone, no majority is out of sight: it counts at once, as what the owner's checkpoint holds.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection

from dilocox_peer.peer.rounds.chain import Chain, Suffix, is_quorum
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.checkpoints import Checkpoint

MAX_REMEMBERED = 1024  # view changes


class Patience:
    """When each view change was first seen."""

    def __init__(
        self,
        seconds: float,
        *,
        are_away: Callable[[Collection[PeerId], float], bool] = lambda _voters, _now: False,
        are_gone: Callable[[Collection[PeerId], float], bool] = lambda _voters, _now: False,
    ) -> None:
        """seconds: that a view change of a minority must have stood. are_away(voters, now): whether none of them has been heard for
        long; are_gone: whether all of them have said so, or refuse connections."""
        self._seconds = seconds
        self._are_away = are_away
        self._are_gone = are_gone
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
                is_theirs = bool(signers & set(place.voters)) or self._are_away(place.voters, now)
                has_stood = has_stood and is_theirs
                is_believed = is_believed and (has_stood or self._are_gone(set(place.voters) - signers, now))
            place = place.then(certificate)
            settled += is_believed
        return path.up_to(path.heads[settled - 1]) if settled else None

    def _seen(self, head: Digest, now: float) -> float:
        since = self._since.setdefault(head, now)
        if len(self._since) > MAX_REMEMBERED:
            self._since.popitem(last=False)
        return since
