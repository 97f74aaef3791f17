"""What became of the contributions that a certificate goes without, as one peer saw it. Pure."""

from collections.abc import Collection, Mapping

from dilocox_peer.events_of_rounds import ContributionsMissed
from dilocox_peer.peer.rounds.holdings import Holdings
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.chain import Certificate, Entry


def missed_by(
    certificate: Certificate,
    here: Collection[PeerId],
    offers: Mapping[PeerId, Entry],
    held_at: Mapping[Digest, float],
    holdings: Holdings,
    *,
    first_at: float,
    now: float,
) -> ContributionsMissed | None:
    """here: members that could contribute. held_at: when each contribution was here. first_at: of the round's first offer."""

    def why(peer: PeerId) -> str:
        entry = offers.get(peer)
        if entry is None:
            return f"had not ended its round {now - first_at:.1f} s after the first"
        if holdings.is_refused(entry.blob):
            return "was refused"
        if (came_at := held_at.get(entry.blob)) is not None:
            return f"came {came_at - first_at:.1f} s after the first, too late for the leader"
        if holdings.is_under_way(entry.blob):
            return f"was on its way {now - first_at:.1f} s after the first"
        return "was not to be had"

    certified = {entry.peer for entry in certificate.value.entries}
    late = tuple((peer, why(peer)) for peer in sorted(here) if peer not in certified)
    return ContributionsMissed(certificate.value.round, late) if late else None
