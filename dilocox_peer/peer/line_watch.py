"""Whether our line is still the one that our connections were made on, and which of them to try out. Pure.

A connection of TCP that leads nowhere says so after half a minute or not at all: one whose line has another address now, whose router has
forgotten it, or that slept with the computer. So: where this computer has other addresses than before, or has slept, all connections
are made anew; where a peer that tells something every few seconds is not heard, it is asked something, and so are our relays where nobody is.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dilocox_peer.peer.rounds.timing import Timing
from dilocox_peer.types import PeerId

SLEPT_S = 25.0  # between two looks; others give a connection up after some 40 s
SILENT_S = 5.0  # among few; where many beat more seldom, as long as silence counts as absence
PAUSES_S = (10.0, 20.0, 60.0)  # between two tries of the same peer; of one that does not answer, ever more


@dataclass(slots=True)
class _TryOut:
    due_at: float
    failures: int = 0


@dataclass
class LineWatch:
    """See the module."""

    _own: frozenset[str] = frozenset()
    _looked_at: tuple[float, float] | None = None
    _has_slept: bool = False
    _tried: dict[PeerId, _TryOut] = field(default_factory=dict)

    def is_another(self, own: Iterable[str], now: float, wall: float) -> bool:
        """Whether the line is another than at the last look. own: addresses that this computer sends from, none while it has no line. now,
        wall: monotonic and wall-clock seconds; the first stands still while a computer sleeps, the second is set by people."""
        found, before = frozenset(own), self._own
        looked, self._looked_at = self._looked_at, (now, wall)
        self._has_slept |= looked is not None and max(now - looked[0], wall - looked[1]) > SLEPT_S
        if not found:
            return False  # nothing can be dialled; what comes back may be the same line
        self._own = found
        slept, self._has_slept = self._has_slept, False  # a radio is back some seconds after the computer
        return slept or bool(_in_use(before) - found)  # another one beside it breaks nothing

    def silent(self, connected: Iterable[PeerId], heard: Mapping[PeerId, float], now: float) -> list[PeerId]:
        """The peers to try out now: those that were heard before, and are no more. heard: when, the last time. Each is to be
        followed by `tried`."""
        found = []
        known = {peer: heard[peer] for peer in connected if peer in heard}
        self._tried = {peer: tried for peer, tried in self._tried.items() if peer in known}
        silent_s = max(SILENT_S, Timing().absent_s(len(known) + 1))
        for peer, last in known.items():
            tried = self._tried.get(peer)
            if now - last <= silent_s:
                self._tried.pop(peer, None)
            elif tried is None or now >= tried.due_at:
                found.append(peer)
                failures = 0 if tried is None else tried.failures
                self._tried[peer] = _TryOut(now + PAUSES_S[min(failures, len(PAUSES_S) - 1)], failures)
        return found

    @staticmethod
    def is_silent(connected: Iterable[PeerId], heard: Mapping[PeerId, float], now: float) -> bool:
        """Whether nobody is heard who was: then it may be our line. Where one is, the relay that it is heard through is there too."""
        known = [heard[peer] for peer in connected if peer in heard]
        return bool(known) and now - max(known) > SILENT_S

    def tried(self, peer: PeerId, *, is_there: bool) -> None:
        """What came of it."""
        if (tried := self._tried.get(peer)) is not None:
            tried.failures = 0 if is_there else tried.failures + 1


def _in_use(own: frozenset[str]) -> frozenset[str]:
    """Those that connections are made from: of a computer with IPv4 these alone. Its addresses of IPv6 are others every day, as privacy asks for."""
    return frozenset(each for each in own if ":" not in each) or own
