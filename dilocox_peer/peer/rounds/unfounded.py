"""View changes of a chain that left a quorum of voters behind, as far as the chain itself tells. Pure."""

from collections.abc import Iterator

from dilocox_peer.peer.rounds.chain import Chain, is_quorum
from dilocox_peer.types import PeerId


def unfounded(chain: Chain, vouched: int, me: PeerId | None = None) -> Iterator[tuple[int, set[PeerId]]]:
    """(height at which it begins, voters there who are not on it) of each view change above the height vouched that no quorum of
    its voters has signed or followed, nor `me` signed. What `me` signs later proves nothing to it."""
    certificates = chain.certificates
    for height in chain.view_changes(max(vouched, 1)):
        voters = chain.place_at(height).voters
        signers = {peer for peer, _ in certificates[height].signatures}
        if is_quorum(signers, voters) or me in signers:
            continue
        on_it = chain.votes_since(height)
        others = [peer for peer in voters if peer != me]
        if not is_quorum([peer for peer in others if peer in on_it], voters):
            yield height, {peer for peer in others if peer not in on_it}
