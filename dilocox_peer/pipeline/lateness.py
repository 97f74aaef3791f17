"""Callees that kept what they had of us for too long, or were silent, and until when each is left alone. Pure."""

import math
from collections import OrderedDict
from dataclasses import dataclass

from dilocox_peer.pipeline.contract import HopTiming
from dilocox_peer.types import PeerId

MAX_REMEMBERED = 512  # callees, linked or not
SILENCES = 4  # times as long is it left alone, each time that it gives no answer to a question and nothing to what others answered meanwhile


@dataclass(slots=True)
class _Lapses:
    late: int = 0  # how often it kept something for far too long
    silent: int = 0  # how often it did not even say that it has it, since its last gradient
    until: float = -math.inf


class Lateness:
    """By peer, not by link: a new link forgives nothing."""

    def __init__(self, timing: HopTiming) -> None:
        self._timing = timing
        self._records: OrderedDict[PeerId, _Lapses] = OrderedDict()

    def until(self, peer: PeerId) -> float:
        """When it may be asked again, by the peer's clock."""
        record = self._records.get(peer)
        return -math.inf if record is None else record.until

    def kept(self, peer: PeerId, now: float) -> float:
        """It had something for far too long: left alone for a while, twice as long each time. Until when."""
        record = self._record(peer)
        pause_s = self._timing.leaving_s * (1 << min(record.late, 8))
        record.late += 1
        return self._leave_alone(record, pause_s, now)

    def was_silent(self, peer: PeerId, now: float) -> float:
        """Asked whether it still has something it said nothing, and that goes elsewhere. Left alone for some seconds, as all are late at once where a
        machine is busy; until it has done something four times as long each time, as what a step waits for is held up each time. Until when."""
        record = self._record(peer)
        if record.until > now:  # of several at once the first counts
            return record.until
        record.silent += 1
        return self._leave_alone(record, self._timing.refused_s * SILENCES ** min(record.silent, 8), now)

    def answered(self, peer: PeerId) -> None:
        """With a gradient that is taken: by lesser words one could be silent for ever."""
        if peer in self._records:
            self._records[peer].silent = 0

    def _record(self, peer: PeerId) -> _Lapses:
        record = self._records.setdefault(peer, _Lapses())
        self._records.move_to_end(peer)
        while len(self._records) > MAX_REMEMBERED:
            self._records.popitem(last=False)
        return record

    def _leave_alone(self, record: _Lapses, pause_s: float, now: float) -> float:
        record.until = max(record.until, now + min(pause_s, self._timing.overdue_cap_s))
        return record.until
