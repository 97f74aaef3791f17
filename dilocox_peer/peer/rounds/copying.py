"""How fast the copy of a state comes, and whether others should be asked for another one. Pure.

Whoever is asked may be a stranger that lets a byte come now and then: the copy never stands still for long enough that it is called broken off.
An honest line may be slow, too, and what has come of a state is of no use to another one; so a copy is left only where what is left of it would
take longer than all of it has so far, at the pace of the last half minute. A copy of hours costs no more than that half minute, and one that is
nearly done is never left.

Where all have left, another copy may be of an older state, and rounds be lost with it. There one is left only where it would not be whole in the time
that it has, at twice the pace of the last two minutes: dialling takes a part of these, and an honest line may stand still for a moment.
"""

from collections import deque
from collections.abc import Mapping

from dilocox_peer.types import Digest

LOOK_S = 30.0
LONG_LOOK_S = 120.0
LENIENT = 2.0  # times the pace of a long look


class CopyPace:
    """Of one copy, which began at `since`."""

    def __init__(self, since: float, *, look_s: float = LOOK_S) -> None:
        """look_s: seconds by which its pace is told."""
        self._since = since
        self._look_s = look_s
        self._looks = deque([(since, 0.0)])  # when, and the share that was here; the first about look_s old

    def came(self, share: float, now: float) -> None:
        """So much of it is here by now."""
        self._looks.append((now, share))
        while len(self._looks) > 1 and self._looks[1][0] <= now - self._look_s:
            self._looks.popleft()

    def is_slow(self, now: float) -> bool:
        """Whether the rest would take longer than it has taken so far, and that is look_s at least."""
        seconds, come, share = self._pace(now)
        return seconds >= self._look_s and (1 - share) * seconds > come * (now - self._since)

    def is_late(self, now: float, ends: float) -> bool:
        """Whether it would not be whole at `ends`, by LENIENT times its pace, once that was looked at for look_s."""
        seconds, come, share = self._pace(now)
        return seconds >= self._look_s and (1 - share) * seconds > LENIENT * come * (ends - now)

    def _pace(self, now: float) -> tuple[float, float, float]:
        """Seconds of the look, the share that came in them, and the share that is here."""
        (then, before), (_, share) = self._looks[0], self._looks[-1]
        return now - then, share - before, share


class Farthest:
    """The state of which most has come, where none came whole: it is gone on with, and nobody who lets a byte of another come has it dropped."""

    def __init__(self, begun: Mapping[Digest, float]) -> None:
        """begun: at an earlier time, with the share of each that is here: which came last says nothing, as a liar's byte may have."""
        self.digest = max(begun, key=lambda each: begun[each], default=None)
        self._share = 0.0 if self.digest is None else begun[self.digest]

    def left(self, digest: Digest, share: float) -> None:
        if share > self._share or digest == self.digest:
            self.digest, self._share = digest, share
