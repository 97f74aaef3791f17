"""What taking part comes to: told when a peer has seen as many rounds as make a pace, and again where that has become otherwise. Pure.

The first rounds of a run are not like the others: a plan soon leaves the codec that a run began with, and then a peer may send twice as much."""

import math
from collections.abc import Callable

from dilocox_peer.events import Event, Listener, RoundCertified, RunJoined
from dilocox_peer.events_of_costs import UpkeepReckoned
from dilocox_peer.peer.planning.upkeep import Upkeep

ROUNDS_SEEN = 6  # five from one to the next
AGAIN_AFTER = 12  # rounds, at least: as many as a pace is made of
OTHERWISE = 1.5  # times as much as was told, or as little


class CostsTeller:
    """Of one session: `take` every event."""

    def __init__(self, look: Callable[[], tuple[Upkeep | None, float | None]], listener: Listener) -> None:
        """look: what it comes to at the pace of now, and the seconds that the run still takes, as far as they are known."""
        self._look, self._listener = look, listener
        self._seen = 0
        self._told: Upkeep | None = None
        self._told_at = 0  # rounds seen

    def take(self, event: Event) -> None:
        if isinstance(event, RunJoined):
            self._seen = self._told_at = 0
        if not isinstance(event, RoundCertified):
            return
        if math.isnan(event.train_loss):
            return  # taken over from before it came: the times of those tell nothing
        self._seen += 1
        if self._seen < (ROUNDS_SEEN if self._told is None else self._told_at + AGAIN_AFTER):
            return
        found, left_s = self._look()
        if found is None or (self._told is not None and not _is_otherwise(found, self._told)):
            return
        self._told, self._told_at = found, self._seen
        sent, received = round(found.sent_bytes_a_day), round(found.received_bytes_a_day)
        self._listener(UpkeepReckoned(sent, received, found.disk_bytes, None if left_s is None else round(left_s, 1)))


def _is_otherwise(now: Upkeep, told: Upkeep) -> bool:
    pairs = ((now.sent_bytes_a_day, told.sent_bytes_a_day), (now.received_bytes_a_day, told.received_bytes_a_day))
    return any(max(pair) > OTHERWISE * max(min(pair), 1.0) for pair in pairs)
