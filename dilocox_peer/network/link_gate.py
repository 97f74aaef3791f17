"""Connections that others make to linkd, and which of them are let in: counted, in all and by place, before the first byte of TLS. Pure.

A handshake costs this process milliseconds, and a name nothing. Places are those of invitation.place_of; what comes from this computer, all
of p2pd's tunnels among it, is one of them. What is refused dials again in a moment.
"""

from collections import Counter, OrderedDict

from dilocox_peer.token_bucket import TokenBucket

KNOCKS_PER_S, KNOCKS = 20.0, 100.0  # of all together
PLACE_KNOCKS_PER_S, PLACE_KNOCKS = 4.0, 24.0
OWN_KNOCKS_PER_S, OWN_KNOCKS = 10.0, 64.0  # of this computer
MAX_OF_PLACE = 24  # connections; this computer may have all
MAX_PLACES = 1024  # remembered


class LinkGate:
    """`knocks`, and if that is True, `left` when the connection has ended."""

    def __init__(self, now: float) -> None:
        self._all = TokenBucket(KNOCKS_PER_S, KNOCKS, now)
        self._places: OrderedDict[str, TokenBucket] = OrderedDict()
        self._inside: Counter[str] = Counter()

    @property
    def num_places(self) -> int:
        """That are remembered."""
        return len(self._places)

    def knocks(self, place: str, now: float) -> bool:
        """Whether one more from there is let in; it is inside then."""
        if place and self._inside[place] >= MAX_OF_PLACE:
            return False
        bucket = self._places.get(place)
        if bucket is None:
            rate, burst = (PLACE_KNOCKS_PER_S, PLACE_KNOCKS) if place else (OWN_KNOCKS_PER_S, OWN_KNOCKS)
            bucket = self._places[place] = TokenBucket(rate, burst, now)
            while len(self._places) > MAX_PLACES:
                self._places.popitem(last=False)
        self._places.move_to_end(place)
        if not bucket.try_take(1.0, now) or not self._all.try_take(1.0, now):
            return False
        self._inside[place] += 1
        return True

    def left(self, place: str) -> None:
        self._inside[place] -= 1
        if not self._inside[place]:
            del self._inside[place]
