"""The order in which members lead at a head. Pure."""

from collections.abc import Iterable, Sequence

from dilocox_peer.types import Digest, PeerId, sha256


def rank_of(head: Digest, peer: PeerId) -> bytes:
    """Order in which peers lead at a head; changes with every head, so a slow leader does not stay one."""
    return sha256(head, peer.encode())


def by_rank(peers: Iterable[PeerId], head: Digest) -> list[PeerId]:
    """The peers in the order in which they lead at head."""
    return sorted(peers, key=lambda peer: rank_of(head, peer))


def leader(roster: Sequence[PeerId], head: Digest, ballot: int) -> PeerId:
    return by_rank(roster, head)[ballot % len(roster)]
