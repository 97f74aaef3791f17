"""What a peer knows to be wrong with itself, and whom of its stage it has caught: a fold over its own events. Pure."""

from dataclasses import dataclass, field

from dilocox_peer.events import (
    EquivocationProved,
    Event,
    RoundCertified,
    RoundClosed,
    TrainingProgress,
)
from dilocox_peer.events_of_data import ShardRefused
from dilocox_peer.events_of_health import DiskRefused, LinkProcessEnded
from dilocox_peer.events_of_rounds import ContributionRefused, ContributionsMissed
from dilocox_peer.types import PeerId
from dilocox_peer.wire.health import MAX_ACCUSED, Accusation, Ail

REFUSED_S = 60.0  # so long after its last contribution, or file of data, that was refused a peer is named for it
LATE_S = 60.0  # and ourselves for one that came too late
LATE_TIMES = 2  # within that time: one alone is an accident
NARROW_ROUNDS = 2.0  # so long, or longer, a contribution takes our line to one other: it cannot come in time, which need not be seen first
HOPELESS_ROUNDS = 6.0  # so long, and one close is enough to know
PACE_ROUNDS = 4  # the newest, whose pace is the pace of now


@dataclass
class Ails:
    """Give `take` every event; times are seconds of a clock that does not go back."""

    me: PeerId
    _disk: set[str] = field(default_factory=set)  # what waits to be written
    _has_links: bool = True
    _data_at: float = float("-inf")  # when a file of its data was refused, the last time
    _late_at: list[float] = field(default_factory=list)
    _upload_bps: int = 0  # that may leave; 0: any
    _certified_at: list[float] = field(default_factory=list)  # of the newest rounds
    _narrow_at: list[float] = field(default_factory=list)  # the newest closes, if our line was too narrow at each
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
            case TrainingProgress():
                self._upload_bps = event.upload_bps
            case RoundCertified():
                self._certified_at = [*self._certified_at, now][-PACE_ROUNDS - 1 :]
            case RoundClosed():
                rounds = self._rounds_to_send(event.blob_bytes)
                closes = LATE_TIMES if rounds > HOPELESS_ROUNDS else 1
                self._narrow_at = [*self._narrow_at, *[now] * closes][-LATE_TIMES:] if rounds > NARROW_ROUNDS else []
            case ContributionsMissed(_, missed):
                if any(peer == self.me for peer, _ in missed):
                    self._late_at = [*self._late_at, now][-LATE_TIMES:]
            case _:
                pass

    def _rounds_to_send(self, blob_bytes: int) -> float:
        """How many rounds, at the pace of now, our line is busy with a contribution to one other; 0 where that is not known."""
        times = self._certified_at
        if not self._upload_bps or len(times) < 3 or times[-1] <= times[0]:
            return 0.0
        round_s = (times[-1] - times[0]) / (len(times) - 1)
        return 8 * blob_bytes / self._upload_bps / round_s

    def now(self, now: float) -> tuple[Ail, ...]:
        """What is wrong."""
        is_late = len(self._late_at) == LATE_TIMES and now - self._late_at[0] <= LATE_S
        is_late = is_late or (len(self._narrow_at) == LATE_TIMES and now - self._narrow_at[-1] <= LATE_S)
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
