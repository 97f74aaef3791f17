"""Refusals of peers' messages, told at most so often: who floods us with nonsense does not flood the log too. Pure."""

from dilocox_peer.peer.rounds.membership import MAX_KNOWN
from dilocox_peer.peer.rounds.timing import NEVER
from dilocox_peer.types import PeerId

NOTE_EVERY_S = 1.0  # of one peer's messages


class Refusals:
    """When each peer's were last told."""

    def __init__(self) -> None:
        self._told_at: dict[PeerId, float] = {}

    def is_due(self, peer: PeerId, now: float) -> bool:
        """Whether a refusal of peer's is to be told now; then it is."""
        if now - self._told_at.get(peer, NEVER) < NOTE_EVERY_S:
            return False
        if len(self._told_at) > MAX_KNOWN:
            self._told_at.clear()
        self._told_at[peer] = now
        return True
