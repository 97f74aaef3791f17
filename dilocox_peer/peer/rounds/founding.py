"""How a newcomer takes in a long chain: up to what the run's owner has signed, without keeping it in memory. Pure but for its blocks.

A peer at genesis may do nothing there once the owner has signed a later round (adoption.py, is_left_behind), so nothing is lost when its chain
moves before it has a state. Signatures are not looked at on the way: each certificate names the one before it by its hash, so the one
that the owner has signed proves all of them; until it is reached, nothing is believed. The chain then ends one certificate before
it: what the owner's word decides (whether the run is over, say) is decided when a state of it is here.
"""

from collections.abc import Sequence
from typing import Protocol

from dilocox_peer.peer.planning.plan import PlanBounds
from dilocox_peer.peer.rounds.chain import Chain, Place
from dilocox_peer.peer.rounds.past import BlockStore
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.chain import Certificate
from dilocox_peer.wire.checkpoints import Checkpoint

FOUNDED_FROM = 512  # height that the owner has signed; of a shorter chain little has to be kept
DEAD_ENDS = 3  # donors in a row that had nothing more
KEPT = 640  # certificates that stay in memory, as in a peer that was here all the time


class _Bounds(Protocol):
    @property
    def max_peers(self) -> int: ...
    @property
    def plans(self) -> PlanBounds: ...


class Founding:
    """chain: what has come of it. is_done: it ends right before what the owner has signed, and is proven. dead_ends: donors in a row that
    had nothing more."""

    def __init__(self, genesis: Place, store: BlockStore) -> None:
        self._store = store
        self._began_at = store.size_bytes
        self.chain = Chain(genesis, store=store)
        self.is_done = False
        self.dead_ends = 0

    @property
    def head(self) -> Digest:
        return self.chain.head

    def grow(self, certificates: Sequence[Certificate], checkpoint: Checkpoint, bounds: _Bounds) -> str | None:
        """Why these do not lead to the checkpoint, or None. Raises OSError where the disk takes no more."""
        for certificate in certificates:
            if self.chain.height == checkpoint.height - 1:
                self.is_done = certificate.head == checkpoint.head
                return None if self.is_done else "a chain that parts from the one that the run's owner has signed"
            place = self.chain.place
            if reason := place.why_not_certificate(certificate, any_vote, bounds.max_peers, bounds.plans):
                return reason
            self.chain.append(certificate)
        self.dead_ends = 0
        self.chain.seal_all_but(KEPT)
        return None

    def give_up(self) -> None:
        """Nothing of it stays on the disk."""
        blocks = self.chain.blocks
        if blocks and self._store.size_bytes == blocks[-1].at + blocks[-1].size_bytes:
            self._store.cut(self._began_at)


def any_vote(_peer: PeerId, _message: bytes, _signature: bytes) -> bool:
    """For certificates that something else proves."""
    return True
