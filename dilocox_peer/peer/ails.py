"""What a peer knows to be wrong with itself, and whom of its stage it has caught: a fold over its own events. Pure."""

from dataclasses import dataclass, field

from dilocox_peer.events import ContributionRefused, EquivocationProved, Event
from dilocox_peer.events_of_data import ShardRefused
from dilocox_peer.events_of_health import DiskRefused, LinkProcessEnded
from dilocox_peer.events_of_rounds import ContributionsMissed
from dilocox_peer.types import PeerId
from dilocox_peer.wire.health import MAX_ACCUSED, Accusation, Ail

REFUSED_S = 60.0  # so long after its last contribution, or file of data, that was refused a peer is named for it
LATE_S = 60.0  # and ourselves for one that came too late
LATE_TIMES = 2  # within that time: one alone is an accident


@dataclass
class Ails:
    """Give `take` every event; times are seconds of a clock that does not go back."""

    me: PeerId
    _disk: set[str] = field(default_factory=set)  # what waits to be written
    _has_links: bool = True
    _data_at: float = float("-inf")  # when a file of its data was refused, the last time
    _late_at: list[float] = field(default_factory=list)
    _proven: dict[PeerId, None] = field(default_factory=dict)
    _refused: dict[PeerId, float] = field(default_factory=dict)

    def take(self, event: Event, now: float) -> None:
        match event:
            case DiskRefused(what, _, is_over):
                self._disk.discard(what) if is_over else self._disk.add(what)
            case LinkProcessEnded(_, is_back):
                self._has_links = is_back
            case ShardRefused():
                self._data_at = now
            case EquivocationProved(peer, _):
                self._proven[peer] = None
                while len(self._proven) > MAX_ACCUSED:
                    del self._proven[next(iter(self._proven))]
            case ContributionRefused(peer, _, _):
                self._refused.pop(peer, None)
                self._refused[peer] = now
                while len(self._refused) > MAX_ACCUSED:
                    del self._refused[next(iter(self._refused))]
            case ContributionsMissed(_, missed):
                if any(peer == self.me for peer, _ in missed):
                    self._late_at = [*self._late_at, now][-LATE_TIMES:]
            case _:
                pass

    def now(self, now: float) -> tuple[Ail, ...]:
        """What is wrong."""
        is_late = len(self._late_at) == LATE_TIMES and now - self._late_at[0] <= LATE_S
        found: list[tuple[bool, Ail]] = [
            (bool(self._disk), "disk"),
            (not self._has_links, "links"),
            (is_late, "line"),
            (now - self._data_at <= REFUSED_S, "data"),
        ]
        return tuple(ail for is_so, ail in found if is_so)

    def accused(self, now: float) -> tuple[Accusation, ...]:
        """The proven before the others."""
        refused = [peer for peer, at in self._refused.items() if now - at <= REFUSED_S and peer not in self._proven]
        named = [
            *(Accusation(peer, "proven") for peer in self._proven),
            *(Accusation(peer, "refused") for peer in refused),
        ]
        return tuple(named[:MAX_ACCUSED])
