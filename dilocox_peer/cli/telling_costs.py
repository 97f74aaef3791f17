"""What taking part comes to, told once, when a peer has seen as many rounds as make a pace. Pure."""

import math
from collections.abc import Callable

from dilocox_peer.events import Event, Listener, RoundCertified, RunJoined
from dilocox_peer.events_of_costs import UpkeepReckoned
from dilocox_peer.peer.planning.upkeep import Upkeep

ROUNDS_SEEN = 6  # five from one to the next


class CostsTeller:
    """Of one session: `take` every event."""

    def __init__(self, look: Callable[[], tuple[Upkeep | None, float | None]], listener: Listener) -> None:
        """look: what it comes to at the pace of now, and the seconds that the run still takes, as far as they are known."""
        self._look, self._listener = look, listener
        self._seen = 0
        self._is_told = False

    def take(self, event: Event) -> None:
        if isinstance(event, RunJoined):
            self._seen = 0
        if not isinstance(event, RoundCertified) or self._is_told:
            return
        if math.isnan(event.train_loss):
            return  # taken over from before it came: the times of those tell nothing
        self._seen += 1
        found, left_s = self._look() if self._seen >= ROUNDS_SEEN else (None, None)
        if found is None:
            return
        self._is_told = True
        sent, received = round(found.sent_bytes_a_day), round(found.received_bytes_a_day)
        self._listener(UpkeepReckoned(sent, received, found.disk_bytes, None if left_s is None else round(left_s, 1)))
