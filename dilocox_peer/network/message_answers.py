"""Which batches of messages were taken, told with the next batch that goes the other way: an answer of its own, with the packets' heads and
their acknowledgements, takes as much of a line as a small batch. Pure.

A batch is answered at once where its sender asks for it, as it does for the first on a stream and while others wait for an answer, and
where a message of it is not taken. Else the answer rides on what is said to the sender next, or goes alone after ANSWER_S. It counts the
batches of the stream from its beginning, modulo 256, so one that comes late, twice or not at all is made good by the next.

Behind a refusal nothing rides, as it might come before the refusal, until a batch begins anew: whoever sends it has read the refusal.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from dilocox_peer.network.message_frames import NUMBERS, BatchHead, BatchPacking, Told, pack_answer

ANSWER_S: Final = 1.5  # much less than who sends waits (SEND_TIMEOUT_S in peer/rounds/driver.py)
UNASKED: Final = 2  # batches that may wait for an answer before one is asked for


class Asking(NamedTuple):
    """What the head of a batch says beside its size. line: number of the stream it goes on, 0: of none, so its answer never rides."""

    line: int
    wants_answer: bool
    told: Told


NOTHING_TOLD: Final = Told(0, 0)
ANSWERED_AT_ONCE: Final = Asking(0, True, NOTHING_TOLD)


class AnswersOwed:
    """To who sends on a stream. num_owed: batches that were taken and not answered."""

    def __init__(self) -> None:
        self.num_owed = 0
        self._line = 0
        self._num_taken = 0
        self._is_behind_refusal = False
        self._has_ridden = False

    def took(self, head: BatchHead, reasons: Sequence[str]) -> bytes | None:
        """An answer that goes at once, or None: it may wait. reasons: as of message_frames.pack_answer."""
        self._line = head.line
        self._num_taken = (self._num_taken + 1) % NUMBERS
        self.num_owed += 1
        if any(reasons):
            self._is_behind_refusal = True
        elif head.packing is BatchPacking.BEGINS:
            self._is_behind_refusal = False
        if any(reasons) or head.wants_answer or self._is_behind_refusal or not head.line:
            return self._answer(reasons)
        return None

    def due(self) -> bytes | None:
        """The answer that has waited, if one does."""
        return self._answer(()) if self.num_owed else None

    def ride(self) -> Told | None:
        """What a batch the other way takes along, if an answer waits."""
        if not self.num_owed:
            return None
        self.num_owed, self._has_ridden = 0, True
        return Told(self._line, self._num_taken)

    def again(self) -> bytes | None:
        """An answer in place of those that have ridden: what they rode on may be lost."""
        return self._answer(()) if self._has_ridden and not self._is_behind_refusal else None

    def _answer(self, reasons: Sequence[str]) -> bytes:
        self.num_owed, self._has_ridden = 0, False
        return pack_answer(self._num_taken, reasons)


def num_answered(told: int, before: int, num_awaited: int) -> int:
    """How many of the batches that wait for an answer this one is for, the oldest first. told, before: what it counts, and what the last one
    did. 0 for one that a later one has overtaken, or that counts what was never sent."""
    more = (told - before) % NUMBERS
    return more if more <= num_awaited else 0
