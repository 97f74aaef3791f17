"""Which of the things that rounds want is fetched now, and which waits until others are here. Pure.

A few at once, so that the first are here soon. A member that sends a byte now and then would hold its place up to the fetch's deadline, and
four of them all places: of one that is the only source of several things one comes at a time, and what takes far longer than things
usually do has no place any more, and comes beside the others. Those that often do not deliver wait for each other only.
"""

from collections import deque
from dataclasses import dataclass
from statistics import median

from dilocox_peer.peer.rounds.contract import FetchBlob
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.chain import MAX_ROSTER

CONCURRENT_FETCHES = 4
MOST_AT_ONCE = MAX_ROSTER  # with what is late; of one source it is one thing
LATE = 4.0  # times as long as things usually take
LATE_S = 3.0  # nothing is late before; without an example it is before UNKNOWN_S
UNKNOWN_S = 10.0
EXAMPLES = 16  # the newest


@dataclass(frozen=True, slots=True)
class _Started:
    action: FetchBlob
    since: float


class FetchSlots:
    """Of one peer. Each method gives back what is to be fetched from now on."""

    def __init__(self, at_once: int = CONCURRENT_FETCHES) -> None:
        self._at_once = at_once
        self._under_way: dict[Digest, _Started] = {}
        self._waiting: dict[Digest, FetchBlob] = {}  # in the order in which they were asked for
        self._took_s: deque[float] = deque(maxlen=EXAMPLES)

    @property
    def is_anything_waiting(self) -> bool:
        """Then `look` is due now and then: what is under way may be late by then."""
        return bool(self._waiting)

    def ask(self, action: FetchBlob, now: float) -> list[FetchBlob]:
        """For the same thing elsewhere, if it was asked for before: the caller ends that fetch."""
        self._under_way.pop(action.blob, None)
        self._waiting.pop(action.blob, None)
        self._waiting[action.blob] = action
        return self.look(now)

    def ended(self, blob: Digest, now: float, *, has_come: bool) -> list[FetchBlob]:
        """has_come: from another peer, and right: it shows how long that takes."""
        if (before := self._under_way.pop(blob, None)) is not None and has_come:
            self._took_s.append(now - before.since)
        return self.look(now)

    def look(self, now: float) -> list[FetchBlob]:
        started = []
        for blob, action in list(self._waiting.items()):
            if self._has_place(action, now):
                del self._waiting[blob]
                self._under_way[blob] = _Started(action, now)
                started.append(action)
        return started

    def _has_place(self, action: FetchBlob, now: float) -> bool:
        if (only := _only_source(action)) is not None and any(
            _only_source(each.action) == only for each in self._under_way.values()
        ):
            return False
        alike = [each for each in self._under_way.values() if each.action.doubted == action.doubted]
        late_s = max(LATE_S, LATE * median(self._took_s)) if self._took_s else UNKNOWN_S
        in_time = sum(now < each.since + late_s for each in alike)
        return len(self._under_way) < MOST_AT_ONCE and in_time < (1 if action.doubted else self._at_once)


def _only_source(action: FetchBlob) -> PeerId | None:
    return action.sources[0] if len(action.sources) == 1 else None
