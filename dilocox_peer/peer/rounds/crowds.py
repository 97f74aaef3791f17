"""Inputs that come in crowds: what follows from them is looked at once, after the last. Pure.

On a busy machine a peer finds the words of all others waiting together. Each of them asks the round anew whether it is due (who has what, which
slices are ours, what may be proposed), and all but the last ask for nothing.
"""

from dilocox_peer.peer.rounds.contract import (
    BlobHeld,
    BlobMissing,
    BytesCame,
    Input,
    Received,
    RoundProgress,
    SliceAveraged,
)
from dilocox_peer.wire.rounds import Averages, Gathered, Heartbeat, Offer

_USUAL = (BlobHeld, BlobMissing, BytesCame, RoundProgress, SliceAveraged)
_USUAL_MESSAGES = (Averages, Gathered, Heartbeat, Offer)
MAX_IN_A_ROW = 16  # who floods us stops nothing


class Crowds:
    """Of one peer's inputs."""

    def __init__(self) -> None:
        self._num_waiting = 0

    def waits(self, event: Input, *, more: bool) -> bool:
        """Whether what follows from event, which was taken in, can wait for another one. more: whether one is there.

        Only what moves no head waits: what others say after a certificate is said of the head after it, and would be lost.
        """
        is_usual = (
            isinstance(event.message, _USUAL_MESSAGES) if isinstance(event, Received) else isinstance(event, _USUAL)
        )
        waits = more and is_usual and self._num_waiting < MAX_IN_A_ROW
        self._num_waiting = self._num_waiting + 1 if waits else 0
        return waits
