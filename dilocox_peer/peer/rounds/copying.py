"""How fast the copy of a state comes, and whether others should be asked for another one. Pure.

Whoever is asked may be a stranger that lets a byte come now and then: the copy never stands still for long enough that it is called broken off.
An honest line may be slow, too, and what has come of a state is of no use to another one; so a copy is left only where what is left of it would
take longer than all of it has so far, at the pace of the last half minute. A copy of hours costs no more than that half minute, and one that is
nearly done is never left.
"""

from collections import deque

LOOK_S = 30.0


class CopyPace:
    """Of one copy, which began at `since`."""

    def __init__(self, since: float) -> None:
        self._since = since
        self._looks = deque([(since, 0.0)])  # when, and the share that was here; the first about LOOK_S old

    def came(self, share: float, now: float) -> None:
        """So much of it is here by now."""
        self._looks.append((now, share))
        while len(self._looks) > 1 and self._looks[1][0] <= now - LOOK_S:
            self._looks.popleft()

    def is_slow(self, now: float) -> bool:
        """Whether the rest would take longer than it has taken so far, and that is LOOK_S at least."""
        (then, before), (_, share) = self._looks[0], self._looks[-1]
        if now - then < LOOK_S:
            return False
        return (1 - share) * (now - then) > (share - before) * (now - self._since)
