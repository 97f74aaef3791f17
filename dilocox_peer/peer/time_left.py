"""How long a run still takes, as a peer of it can tell from the rounds it has seen certified. Pure; the page reckons alike (web/history.py)."""

import math
from collections.abc import Sequence

from dilocox_peer.peer.contributions import Round

PACE_ROUNDS = 12  # the newest, whose pace is the pace of now


def newest_in_a_row(rounds: Sequence[Round]) -> list[Round]:
    """The newest, whose pace is the pace of now. Of rounds that a peer takes over together, as after it was away, the times tell nothing:
    it is counted from the last gap in their numbers, and of who trains by now from the last round that it did not close."""
    newest = list(rounds)[-PACE_ROUNDS - 1 :]
    trains = bool(newest) and not math.isnan(newest[-1].train_loss)
    for index in range(len(newest) - 1, 0, -1):
        last, before = newest[index], newest[index - 1]
        if last.number != before.number + 1 or (trains and math.isnan(before.train_loss)):
            return newest[index:]
    return newest


def time_left_s(rounds: Sequence[Round], expected_rounds: int, now: float) -> float | None:
    """Seconds until the last round is certified, at the pace of inner steps of the newest rounds; None while it is not known. rounds: in
    order, with the times at which they were certified; now: on that clock."""
    newest = newest_in_a_row(rounds)
    if len(newest) < 2 or newest[-1].at_s <= newest[0].at_s or expected_rounds < newest[-1].number:
        return None
    last, steps = newest[-1], sum(each.inner_steps for each in newest[1:])
    if not steps:
        return None
    seconds = (expected_rounds - last.number) * last.inner_steps * (last.at_s - newest[0].at_s) / steps
    return max(0.0, seconds - max(0.0, now - last.at_s))
