"""The order in which members lead at a head. Pure.

It follows from where the head is, not from its hash: whoever leads composes the value that is hashed, and would choose who leads next.
"""

from collections.abc import Iterable

from dilocox_peer.types import PeerId, sha256


def turn_of(stage: int, height: int, view: int) -> bytes:
    """What ranks are drawn by at a head; another at every head, so a slow leader does not stay one."""
    return sha256(f"turn {stage} {height} {view}".encode())


def rank_of(turn: bytes, peer: PeerId) -> bytes:
    return sha256(turn, peer.encode())


def by_rank(peers: Iterable[PeerId], turn: bytes) -> list[PeerId]:
    """The peers in the order in which they lead at that turn."""
    return sorted(peers, key=lambda peer: rank_of(turn, peer))
