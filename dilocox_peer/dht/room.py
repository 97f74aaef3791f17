"""For whose records a node of the directory has room. Pure.

A name costs nothing, so whoever is connected once could fill a key with leases of peers that it made up, and nobody new would be found any
more. A connection costs more, and a range of addresses more still: of records that their writers have not brought themselves, each range has
few a key, and where a key is full who is connected and writes for itself takes the place of one of these, else of the newest of the range
that has the most. So who is there stays there, and who comes finds room, unless as many ranges are against it as a key has places.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from dilocox_peer.types import PeerId

MAX_RECORDS = 128  # under one key; the peers of a stage are spread over BUCKETS keys
MAX_BYTES_OF_KEY = 768 * 1024  # of values: less than a reader takes of a dictionary
HANDED_ON = 8  # a key, of one range: writers renew theirs themselves, this is for who has just come near to the key
MAX_BYTES_OF_PLACE = 2 * 1024 * 1024  # of all keys: a stranger must not take all that a node keeps, either
RECORD_COST_BYTES = 512  # beside its value: what the objects around a record take, about


@dataclass(frozen=True, slots=True)
class Giver:
    """Whose connection a record came by. place: its range of addresses; "" where that is not known, or is this computer's: all of these
    are as one."""

    peer: PeerId
    place: str = ""


@dataclass(slots=True)
class _Kept:
    """is_own: its writer brought it. share: what its bytes count for."""

    place: str
    is_own: bool
    share: str
    num_bytes: int
    expires_s: float


class RecordRoom:
    """`make` before a record is kept, `kept` when it was. Times are those of expirations."""

    def __init__(self, ours: str) -> None:
        """ours: the writer whose records always have room."""
        self._ours = ours
        self._keys: defaultdict[object, dict[str, _Kept]] = defaultdict(dict)  # the oldest first
        self._bytes: Counter[str] = Counter()

    def make(self, key: object, writer: str, num_bytes: int, giver: Giver, now: float) -> list[str] | None:
        """The writers whose records have to go so that there is room for this one; None: there is none for it."""
        self._forget_expired(key, now)
        there = self._keys.get(key, {})
        others = {name: kept for name, kept in there.items() if name != writer}
        is_own, before = writer == giver.peer, there.get(writer)
        if before is None and not is_own and _handed_on(others)[giver.place] >= HANDED_ON:
            return None
        if not self._has_share(giver, num_bytes, before, is_own=is_own, now=now):
            return None
        going: list[str] = []
        while (
            len(others) >= MAX_RECORDS or sum(kept.num_bytes for kept in others.values()) + num_bytes > MAX_BYTES_OF_KEY
        ):
            name = self._least(others, giver.place) if is_own else None
            if name is None:
                return None
            del others[name]
            going.append(name)
        return going

    def kept(self, key: object, writer: str, num_bytes: int, expires_s: float, giver: Giver) -> None:
        """The record is here."""
        there = self._keys[key]
        before = there.get(writer)
        is_own = writer == giver.peer
        place, share = giver.place, _share_of(giver, is_own=is_own)
        if before is not None:
            self._less(before)
            if not is_own:  # that others hand it on again makes it no less its writer's, nor another's
                place, share, is_own = before.place, before.share, before.is_own
        there[writer] = _Kept(place, is_own, share, num_bytes, expires_s)
        self._bytes[share] += _cost(num_bytes)

    def dropped(self, key: object, writer: str) -> None:
        """The record is here no longer."""
        there = self._keys[key]
        kept = there.pop(writer, None)
        if kept is not None:
            self._less(kept)
        if not there:
            del self._keys[key]

    def _less(self, kept: _Kept) -> None:
        self._bytes[kept.share] -= _cost(kept.num_bytes)
        if not self._bytes[kept.share]:
            del self._bytes[kept.share]

    def _has_share(self, giver: Giver, num_bytes: int, before: _Kept | None, *, is_own: bool, now: float) -> bool:
        share = _share_of(giver, is_own=is_own) if before is None or is_own else before.share
        known = _cost(before.num_bytes) if before is not None and before.share == share else 0
        more = _cost(num_bytes) - known
        if self._bytes[share] + more > MAX_BYTES_OF_PLACE:
            for key in list(self._keys):
                self._forget_expired(key, now)
        return self._bytes[share] + more <= MAX_BYTES_OF_PLACE

    def _least(self, others: Mapping[str, _Kept], place: str) -> str | None:
        """Whose record goes for that of a writer from that place: the newest of the most crowded one."""
        others = {name: kept for name, kept in others.items() if name != self._ours}
        of_places = _handed_on(others)
        is_own = not of_places
        if is_own:
            of_places = Counter(kept.place for kept in others.values())
        crowded = max(of_places, key=lambda each: (of_places[each], each == place), default="")
        if is_own and of_places[crowded] < 2:
            return None
        return next(
            (name for name, kept in reversed(others.items()) if kept.place == crowded and kept.is_own == is_own), None
        )

    def _forget_expired(self, key: object, now: float) -> None:
        for writer in [writer for writer, kept in self._keys.get(key, {}).items() if kept.expires_s < now]:
            self.dropped(key, writer)


def _handed_on(records: Mapping[str, _Kept]) -> Counter[str]:
    """How many there are of each place that their writers have not brought."""
    return Counter(kept.place for kept in records.values() if not kept.is_own)


def _share_of(giver: Giver, *, is_own: bool) -> str:
    """Peers of whose place nothing is known share what they hand on, and nothing else: all of a run may be behind relays."""
    return giver.place or (giver.peer if is_own else "")


def _cost(num_bytes: int) -> int:
    return RECORD_COST_BYTES + num_bytes
