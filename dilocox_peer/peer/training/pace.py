"""When a peer closes its round and when it merges what was certified: the three values of rounds.overlap, as one table.

Pure: `next_step(situation)` says what to do now; the session does it and asks again.
"""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

Overlap = Literal["arrival", "one-step", "none"]


class Duty(Enum):
    """What to do now."""

    TRAIN = auto()  # nothing to decide: local steps go on
    CLOSE = auto()  # snapshot, encode, offer; then train the next round (none: hold until the merge)
    MERGE = auto()  # apply the oldest certificate that waits
    HOLD = auto()  # local steps stop until there is something to merge
    FINISH = auto()  # the last round is applied


@dataclass(frozen=True, slots=True)
class Situation:
    """What the decision depends on.

    due: the round in training has run its course (RoundClock). may_offer: a contribution closed now could be certified
    (not while the last one is out, nor before a joiner is in the roster). offered: ours is out and its certificate is not.
    waiting: certificates whose blobs are here and that are not merged. busy: a close, merge or state fetch is
    running. training_round: the round the local steps belong to, from 1. merged_round: of the newest merged certificate.
    last_round: of the run, None while it is not planned yet. may_end: whether its certificate is believed (rounds/ending.py).
    """

    overlap: Overlap
    ready: bool
    busy: bool
    due: bool
    may_offer: bool
    offered: bool
    waiting: int
    training_round: int
    merged_round: int
    last_round: int | None
    may_end: bool = True


def next_step(now: Situation) -> Duty:
    """The step of a situation.

    arrival: a certificate is merged as soon as it is here; a round that is over while the last one's certificate is
    still out trains on and closes later. one-step: a certificate is merged at the end of the following round, which
    waits for it. none: nothing is trained between the close and the merge.
    """
    if now.busy or not now.ready:
        return Duty.TRAIN
    after_last = now.last_round is not None and now.training_round > now.last_round
    if now.waiting:
        at_its_place = now.overlap != "one-step" or now.due or after_last or now.waiting > 1
        return Duty.MERGE if at_its_place else Duty.TRAIN
    if now.last_round is not None and now.merged_round >= now.last_round:
        return Duty.FINISH if now.may_end else Duty.HOLD
    if after_last:
        return Duty.HOLD
    if not now.due:
        return Duty.TRAIN
    if now.may_offer:
        return Duty.CLOSE
    return Duty.HOLD if now.offered and now.overlap != "arrival" else Duty.TRAIN
