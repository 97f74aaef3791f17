"""Callees that kept what they had of us for too long, or were silent, and until when each is left alone. Pure.

All times are in seconds of the peer's own clock.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass

from dilocox_peer.pipeline.contract import HopTiming
from dilocox_peer.types import PeerId

MAX_REMEMBERED = 512  # callees, linked or not
LONGER = 4  # times as long, each time that it is silent


@dataclass(slots=True)
class _Lapses:
    late: int = 0  # how often it kept something for far too long, less one for each `overdue_cap_s` in which it worked
    late_until: float = -math.inf  # of the last of these
    silent: int = 0  # how often it did not even say that it has it, less one for each `leaving_s` in which it worked
    working_since: float = math.inf  # its first gradient after that
    until: float = -math.inf


class Lateness:
    """By peer, not by link: a new link forgives nothing."""

    def __init__(self, timing: HopTiming) -> None:
        self._timing = timing
        self._records: OrderedDict[PeerId, _Lapses] = OrderedDict()

    def until(self, peer: PeerId) -> float:
        """When it may be asked again; -inf: at any time."""
        record = self._records.get(peer)
        return -math.inf if record is None else record.until

    def kept(self, peer: PeerId, now: float) -> float:
        """It had something for far too long: left alone for a while, twice as long each time. Until when."""
        record = self._record(peer)
        if record.late_until > now:  # of several at once the first counts
            return record.until
        self._forgive(record, now)
        pause_s = self._timing.leaving_s * (1 << min(record.late, 8))
        record.late += 1
        record.late_until = self._leave_alone(record, pause_s, now)
        return record.until

    def was_silent(self, peer: PeerId, now: float) -> float:
        """Asked whether it still has something it said nothing, and that goes elsewhere. Left alone for some seconds, as all are late at once where a
        machine is busy; four times as long each time, as what a step waits for is held up each time. Until when."""
        record = self._record(peer)
        if record.until > now:  # of several at once the first counts
            return record.until
        self._forgive(record, now)
        record.silent += 1
        return self._leave_alone(record, self._timing.refused_s * LONGER ** min(record.silent, 8), now)

    def answered(self, peer: PeerId, now: float) -> None:
        """With a gradient that is taken: lesser words are free, and one gradient for each silence is cheap."""
        if peer in self._records:
            record = self._records[peer]
            # Not before it may be asked again: what it keeps back until it is told to leave it would have the pause count as work.
            record.working_since = min(record.working_since, max(now, record.until))

    def _record(self, peer: PeerId) -> _Lapses:
        record = self._records.setdefault(peer, _Lapses())
        self._records.move_to_end(peer)
        while len(self._records) > MAX_REMEMBERED:
            self._records.popitem(last=False)
        return record

    def _forgive(self, record: _Lapses, now: float) -> None:
        """As much as its work since the last lapse is worth. Being late costs a caller more, and so takes more work: the longest pause for each."""
        worked_s = max(0.0, now - record.working_since)
        record.silent = max(0, record.silent - int(worked_s / self._timing.leaving_s))
        record.late = max(0, record.late - int(worked_s / self._timing.overdue_cap_s))
        record.working_since = math.inf

    def _leave_alone(self, record: _Lapses, pause_s: float, now: float) -> float:
        record.until = max(record.until, now + min(pause_s, self._timing.overdue_cap_s))
        return record.until
