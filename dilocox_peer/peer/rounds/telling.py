"""What strangers are told of our chain: a part of the line, in even parts to all ranges of addresses that ask. Pure.

A question of 74 bytes brings up to 650 kB and a hundredth of a second of work. A page goes to somebody who has not had more than its part, while all
together have not had more than theirs: of any length, and then there is a pause. So a page longer than all that may go at once goes too, and no
stream of small questions keeps a long answer from going.
"""

from collections import OrderedDict
from collections.abc import Callable

from dilocox_peer.token_bucket import TokenBucket
from dilocox_peer.types import PeerId

NAME_BYTES = 120  # of a certificate, for each name and signature in it
TOLD_BYTES_PER_S = 4e6  # where nothing narrower is said
BURST_S, LEAST_BURST_BYTES = 8.0, 512 * 1024
MAX_TOLD = 64  # ranges that are remembered
WANTS_S = 60.0  # a range that asked in vain so long ago asks no more; a newcomer comes back to each donor in that time


class Telling:
    """bytes_per_s: that strangers may be told as of now, of the line and of the month. place_of: the range of addresses of a peer."""

    def __init__(self) -> None:
        self.bytes_per_s: Callable[[], float] = lambda: TOLD_BYTES_PER_S
        self.place_of: Callable[[PeerId], str] = str
        self._all: TokenBucket | None = None
        self._own: OrderedDict[str, TokenBucket] = OrderedDict()  # the last told last
        self._wanting: OrderedDict[str, float] = OrderedDict()  # asked in vain, at that time; the newest last

    def may_tell(self, asker: PeerId, now: float) -> bool:
        """Whether a page may go now. A part binds only while others want theirs."""
        place, rate = self.place_of(asker), min(self.bytes_per_s(), TOLD_BYTES_PER_S)
        while self._wanting and next(iter(self._wanting.values())) < now - WANTS_S:
            self._wanting.popitem(last=False)
        others = len(self._wanting.keys() - {place})
        self._all, own = _at(self._all, rate, now), self._own.get(place)
        # One part is left: else something is owed whenever one comes that asks seldom.
        has_had_its_part = own is not None and _at(own, rate / (2 + others), now).owed_s(now) > 0.0
        if self._all.owed_s(now) == 0.0 and not (others and has_had_its_part):
            return True
        self._wanting.pop(place, None)
        self._wanting[place] = now
        if len(self._wanting) > MAX_TOLD:
            self._wanting.popitem(last=False)
        return False

    def told(self, asker: PeerId, names: int, now: float) -> None:
        """A page with so many names and signatures goes."""
        assert self._all is not None, "asked first"
        place = self.place_of(asker)
        bucket = self._own.pop(place, None) or _at(None, self._all.rate / 2, now)
        self._own[place] = bucket
        self._wanting.pop(place, None)
        if len(self._own) > MAX_TOLD:
            self._own.popitem(last=False)
        for each in (bucket, self._all):
            each.reserve(NAME_BYTES * names, now)


def _at(bucket: TokenBucket | None, rate: float, now: float) -> TokenBucket:
    burst = max(BURST_S * rate, LEAST_BURST_BYTES)
    if bucket is None:
        return TokenBucket(rate, burst, now)
    if bucket.rate != rate:
        bucket.change(rate, burst, now)
    return bucket
