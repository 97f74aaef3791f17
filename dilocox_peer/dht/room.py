"""For whose records a node of the directory has room. Pure.

A name costs nothing, so whoever is connected once could fill a key with leases of peers that it made up, and nobody new would be found any
more. A connection costs more, and a range of addresses more still: of records that their writers have not brought themselves, each range has
few a key, and where a key is full who is connected and writes for itself takes the place of one of these, else of the newest of the range
that has the most. So who is there stays there, and who comes finds room, unless as many ranges are against it as a key has places.

So it is with bytes. A range has a share of them, and peers whose range is not known have one share together: a name alone brings none. Where
a share is full, or the node is, a peer that writes for itself takes room from the peer with most bytes, of the share that has most.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dilocox_peer.dht.records import LATEST_S
from dilocox_peer.types import PeerId

MAX_RECORDS = 128  # under one key; the peers of a stage are spread over BUCKETS keys
MAX_BYTES_OF_KEY = 768 * 1024  # of values: less than a reader takes of a dictionary
HANDED_ON = 8  # a key, of one range: writers renew theirs themselves, this is for who has just come near to the key
MAX_BYTES_OF_PLACE = 2 * 1024 * 1024  # of all keys: a stranger must not take all that a node keeps, either
MAX_STORED_BYTES = 16 * 1024 * 1024  # of all places
SWEPT_S = 1.0  # between two looks through all records for those that have expired
RECORD_COST_BYTES = 512  # beside its value: what the objects around a record take, about


@dataclass(frozen=True, slots=True)
class Giver:
    """Whose connection a record came by. place: its range of addresses; "" where that is not known, or is this computer's: all of these
    are as one."""

    peer: PeerId
    place: str = ""


@dataclass(slots=True)
class _Kept:
    """is_own: its writer brought it. share, giver: what its bytes count for."""

    place: str
    is_own: bool
    share: str
    giver: PeerId
    num_bytes: int
    expires_s: float


RecordName = tuple[object, str]
"""A key, and whose record under it."""


@dataclass(slots=True)
class _Brought:
    """What a peer has brought, the oldest first."""

    num_bytes: int = 0
    records: dict[RecordName, None] = field(default_factory=dict)


class RecordRoom:
    """`make` before a record is kept, `kept` when it was. Times are those of expirations."""

    def __init__(self, ours: str) -> None:
        """ours: the writer whose records always have room."""
        self._ours = ours
        self._keys: defaultdict[object, dict[str, _Kept]] = defaultdict(dict)  # the oldest first
        self._shares: defaultdict[str, dict[PeerId, _Brought]] = defaultdict(dict)
        self._bytes: Counter[str] = Counter()  # of each share
        self._swept_at = float("-inf")

    def make(self, key: object, writer: str, num_bytes: int, giver: Giver, now: float) -> list[RecordName] | None:
        """The records that have to go so that there is room for this one; None: there is none for it."""
        self._forget_expired(key, now)
        there = self._keys.get(key, {})
        others = {name: kept for name, kept in there.items() if name != writer}
        is_own, before = writer == giver.peer, there.get(writer)
        if before is None and not is_own and _handed_on(others)[giver.place] >= HANDED_ON:
            return None
        going: list[RecordName] = []
        while (
            len(others) >= MAX_RECORDS or sum(kept.num_bytes for kept in others.values()) + num_bytes > MAX_BYTES_OF_KEY
        ):
            name = self._least(others, giver.place) if is_own else None
            if name is None:
                return None
            del others[name]
            going.append((key, name))
        share = self._share_of(giver) if before is None or is_own else before.share
        more = _cost(num_bytes) - (_cost(before.num_bytes) if before is not None and before.share == share else 0)
        if not 0 <= now - self._swept_at < SWEPT_S and self._lacking(share, more, going):
            self._swept_at = now
            for each in list(self._keys):
                self._forget_expired(each, now)
            going = [each for each in going if each[1] in self._keys.get(each[0], ())]
        while crowded := self._lacking(share, more, going):
            victim = self._heaviest(crowded[0], giver, more, going, renews=before is not None) if is_own else None
            if victim is None:
                return None
            going.append(victim)
        return going

    def kept(self, key: object, writer: str, num_bytes: int, expires_s: float, giver: Giver) -> None:
        """The record is here."""
        there = self._keys[key]
        before = there.get(writer)
        is_own = writer == giver.peer
        kept = _Kept(giver.place, is_own, self._share_of(giver), giver.peer, num_bytes, expires_s)
        # That others hand it on again makes it no less its writer's, nor another's.
        if before is not None and not is_own:
            kept = replace(before, num_bytes=num_bytes, expires_s=expires_s)
        there[writer] = kept
        brought = self._shares[kept.share].setdefault(kept.giver, _Brought())
        is_same = before is not None and (before.share, before.giver) == (kept.share, kept.giver)
        if before is not None and not is_same:
            self._less((key, writer), before)
        brought.records[key, writer] = None
        more = _cost(num_bytes) - (_cost(before.num_bytes) if before is not None and is_same else 0)
        brought.num_bytes += more
        self._bytes[kept.share] += more

    def dropped(self, key: object, writer: str) -> None:
        """The record is here no longer."""
        there = self._keys[key]
        kept = there.pop(writer, None)
        if kept is not None:
            self._less((key, writer), kept)
        if not there:
            del self._keys[key]

    def _less(self, name: RecordName, kept: _Kept) -> None:
        brought = self._shares[kept.share][kept.giver]
        brought.num_bytes -= _cost(kept.num_bytes)
        self._bytes[kept.share] -= _cost(kept.num_bytes)
        del brought.records[name]
        if not brought.records:
            del self._shares[kept.share][kept.giver]
        if not self._shares[kept.share]:
            del self._shares[kept.share], self._bytes[kept.share]

    def _lacking(self, share: str, more: int, going: Sequence[RecordName]) -> list[str]:
        """The share that has to give room, if one has: this one where it is full; where the node is, the one that has most."""
        if more <= 0:
            return []
        left = self._bytes.copy()
        left.subtract(self._weight_of(going))
        if left[share] + more > MAX_BYTES_OF_PLACE:
            return [share]
        if left.total() + more <= MAX_STORED_BYTES:
            return []
        return [max((each for each in left if each != self._ours), key=left.__getitem__, default=share)]

    def _heaviest(
        self, share: str, giver: Giver, more: int, going: Sequence[RecordName], *, renews: bool
    ) -> RecordName | None:
        """The newest record of the peer that has most in a share, the newest of several. Of another share than giver's it goes if that has more
        than giver's would have; of the same if the peer has more than giver would have, or as much as one that `renews` had."""
        gone = Counter[PeerId]()
        for key, writer in going:
            kept = self._keys[key][writer]
            gone[kept.giver] += _cost(kept.num_bytes) if kept.share == share else 0
        left = {peer: brought.num_bytes - gone[peer] for peer, brought in reversed(self._shares[share].items())}
        ours = self._share_of(giver)
        mine = left.pop(giver.peer, 0) if share == ours else 0
        peer = max(left, key=left.__getitem__, default=None)
        if peer is None:
            return None
        if share != ours and sum(left.values()) <= self._bytes[ours] + more:
            return None
        if share == ours and left[peer] < (mine if renews else mine + more + 1):
            return None
        return next((name for name in reversed(self._shares[share][peer].records) if name not in going), None)

    def _weight_of(self, going: Sequence[RecordName]) -> Counter[str]:
        weights = Counter[str]()
        for key, writer in going:
            kept = self._keys[key][writer]
            weights[kept.share] += _cost(kept.num_bytes)
        return weights

    def _share_of(self, giver: Giver) -> str:
        """All peers of whose place nothing is known have one; of a run that may be each of its peers, behind relays."""
        return self._ours if giver.peer == self._ours else giver.place

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
        """Nor does what was kept while our clock was ahead take room: it is dropped where it lies as soon as somebody looks (bounds.py)."""
        there = self._keys.get(key, {})
        for writer in [writer for writer, kept in there.items() if not now <= kept.expires_s <= now + LATEST_S]:
            self.dropped(key, writer)


def _handed_on(records: Mapping[str, _Kept]) -> Counter[str]:
    """How many there are of each place that their writers have not brought."""
    return Counter(kept.place for kept in records.values() if not kept.is_own)


def _cost(num_bytes: int) -> int:
    return RECORD_COST_BYTES + num_bytes
