"""Which contributions are here, which are on their way, and which are not to be had. Names only; no bytes. Pure."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from dilocox_peer.peer.rounds.contract import BlobPart, FetchBlob
from dilocox_peer.peer.rounds.timing import FOREVER, Timing
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.chain import Certificate, Entry, Thing

MAX_SOURCES = 8
EARLY_RETRY_S, EARLY_GROWTH = 0.25, 1.25  # seconds, and how much longer each time
MOST_GROWN = 32  # times: a head may stand for hours


TABLE, SLICE = BlobPart("table"), BlobPart("slice")
MAX_REFUSALS = 4096  # of one blob; as many slices and tables as a round can have


@dataclass(slots=True)
class _Wanted:
    under_way: bool
    elsewhere: bool
    retry_at: float
    failures: int
    early: bool = False
    times_early: int = 0


def _kept(part: BlobPart | None) -> BlobPart | None:
    """A table is a contribution: both are named by offers."""
    return None if part is None or part.kind == "table" else part


def _kind(part: BlobPart | None) -> tuple[str, int]:
    """As what a blob was checked. A slice is looked at anew with each table that names it, where it is averaged."""
    if part is None:
        return "contribution", 0
    return part.kind, part.slice if part.kind in ("result", "residual") else 0


def part_of(thing: Thing) -> BlobPart | None:
    """What a certificate names it as."""
    return None if thing.slice is None else BlobPart("result", thing.slice)


class Holdings:
    """A blob is held, refused for good, wanted (under way, or missing until its next try), or unknown. It is held as what it was checked as: anybody may
    offer a result's name as a contribution, or say that a table is a residual."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._held: dict[Digest, set[tuple[str, int]]] = {}  # as what
        self._refused: dict[Digest, set[BlobPart | None]] = {}  # as what
        self._wanted: dict[Digest, _Wanted] = {}
        self._round_of: dict[Digest, int] = {}
        self._certified: set[Digest] = set()
        self._sizes: dict[Digest, int] = {}
        self._parts: dict[Digest, tuple[Digest, ...]] = {}
        self._passing: set[Digest] = set()
        self._own: set[Digest] = set()

    def held(
        self,
        blob: Digest,
        round_number: int,
        size_bytes: int,
        parts: tuple[Digest, ...] = (),
        part: BlobPart | None = None,
    ) -> None:
        """size_bytes: as it is, not as an offer has it. parts: the slices that a table names. part: as what it was checked."""
        self._held.setdefault(blob, set()).add(_kind(part))
        if parts:
            self._parts[blob] = parts
            self._passing.add(blob)
        self._sizes[blob] = size_bytes
        self._wanted.pop(blob, None)
        self._round_of.setdefault(blob, round_number)

    def held_all(self, things: Iterable[Thing], round_number: int) -> None:
        for thing in things:
            self.held(thing.name, round_number, thing.size_bytes, part=part_of(thing))

    def held_own(self, entry: Entry, round_number: int, parts: tuple[Digest, ...]) -> None:
        """Our contribution, and its slices."""
        self._own.add(entry.blob)
        self.held(entry.blob, round_number, entry.size_bytes, parts, TABLE if parts else None)
        for each in parts:
            self.held(each, round_number, 0, part=SLICE)
        self._passing.update(parts)

    def found(self, blobs: Collection[Digest], chain: Iterable[Certificate], round_number: int) -> None:
        """Files of these names are on our disk from before; that they are whole has to be found out by a fetch, should they be
        wanted. They are forgotten like the others: those of no certificate of the chain with this round."""
        if blobs:
            of_round = {
                thing.name: (each.value.round, thing.size_bytes) for each in chain for thing in each.value.things
            }
            for blob in blobs:
                met, size_bytes = of_round.get(blob, (round_number, 0))
                self._round_of.setdefault(blob, met)
                self._sizes.setdefault(blob, size_bytes)  # as its author says, until it is looked at
            self._certified.update(of_round.keys() & set(blobs))  # who is behind asks for them

    def certified(self, blob: Digest, round_number: int) -> None:
        """It is needed from this round on, also if it was met long ago: anyone may offer an old one again."""
        self._round_of[blob] = max(self._round_of.get(blob, round_number), round_number)
        self._certified.add(blob)

    def pass_by(self, blobs: Iterable[Digest]) -> None:
        """What is needed for a few rounds alone."""
        self._passing.update(blobs)

    def stay(self, blobs: Iterable[Digest], round_number: int) -> None:
        """These are needed in this round still, if they are here."""
        for blob in blobs:
            if blob in self._round_of:
                self._round_of[blob] = max(self._round_of[blob], round_number)

    def parts_of(self, table: Digest) -> tuple[Digest, ...]:
        """The slices that a table names which was held here."""
        return self._parts.get(table, ())

    def refused(self, blob: Digest, part: BlobPart | None = None) -> None:
        """As this part: two could else name a good slice as another one, and have it refused as what it is."""
        as_what = self._refused.setdefault(blob, set())
        if len(as_what) < MAX_REFUSALS:
            as_what.add(_kept(part))
        self._wanted.pop(blob, None)

    def lost(self, blob: Digest) -> None:
        """It was held and is so no longer."""
        self._held.pop(blob, None)

    def missing(self, blob: Digest, now: float) -> bool:
        """No source gave it; it is asked for again after a while, if still wanted. Whether that is a failure."""
        if (wanted := self._wanted.get(blob)) is None:
            return True
        wanted.under_way = False
        retry_s = self._timing.blob_retry_s
        if wanted.early:
            retry_s = min(EARLY_RETRY_S * EARLY_GROWTH ** min(wanted.times_early, MOST_GROWN), retry_s)
            wanted.times_early += 1
        wanted.failures += not wanted.early
        wanted.retry_at = now + retry_s
        return not wanted.early

    def times_early(self, blob: Digest) -> int:
        """How often it was asked for in vain of peers that may have to get it first."""
        return wanted.times_early if (wanted := self._wanted.get(blob)) is not None else 0

    def is_own(self, blob: Digest) -> bool:
        """Whether it is a contribution of ours, in whosever name it was certified."""
        return blob in self._own

    def has(self, blob: Digest, part: BlobPart | None = None) -> bool:
        """Whether it is here, and was checked as this part."""
        return _kind(part) in self._held.get(blob, ())

    def size_of(self, blob: Digest) -> int:
        """Bytes of one that was held here, 0 of another."""
        return self._sizes.get(blob, 0)

    def has_all(self, blobs: Iterable[Digest], part: BlobPart | None = None) -> bool:
        return all(self.has(blob, part) for blob in blobs)

    def has_things(self, things: Iterable[Thing]) -> bool:
        """Each as what a certificate names it as."""
        return all(self.has(thing.name, part_of(thing)) for thing in things)

    def is_refused(self, blob: Digest, part: BlobPart | None = None) -> bool:
        return _kept(part) in self._refused.get(blob, ())

    def is_under_way(self, blob: Digest) -> bool:
        return (wanted := self._wanted.get(blob)) is not None and wanted.under_way

    def failures(self, blob: Digest) -> int:
        return wanted.failures if (wanted := self._wanted.get(blob)) is not None else 0

    def may_want(self, blob: Digest, now: float, part: BlobPart | None = None) -> bool:
        """Whether `want` would start a fetch: not of what is held, refused, under way or failed just now."""
        if self.has(blob, part) or self.is_refused(blob, part):
            return False
        wanted = self._wanted.get(blob)
        return wanted is None or (not wanted.under_way and now >= wanted.retry_at)

    def want(
        self,
        blob: Digest,
        sources: Iterable[PeerId],
        *,
        round_number: int,
        now: float,
        within_s: float | None = None,
        doubted: bool = False,
        elsewhere: bool = False,
        early: bool = False,
        part: BlobPart | None = None,
    ) -> list[FetchBlob]:
        """The fetch to start now, if any: nothing for a blob that is held, refused, under way or failed just now.

        early: of peers that may have to get it first: that they have not got it yet is nobody's failure, and they are asked again soon.
        elsewhere: one that is under way takes too long; these sources instead, once."""
        if self.has(blob, part) or self.is_refused(blob, part):
            return []
        wanted = self._wanted.setdefault(blob, _Wanted(under_way=False, elsewhere=False, retry_at=now, failures=0))
        if now < wanted.retry_at or (wanted.under_way and (wanted.elsewhere or not elsewhere)):
            return []
        wanted.under_way, wanted.elsewhere, wanted.early = True, elsewhere, early
        self._round_of.setdefault(blob, round_number)
        if part is not None and part.kind != "result":
            self._passing.add(blob)
        return [FetchBlob(blob, tuple(dict.fromkeys(sources))[:MAX_SOURCES], within_s, doubted, part)]

    def forget_before(self, certified: int, others: int, passing: int) -> tuple[Digest, ...]:
        """Drops those certified before the one round, those that nobody certified first met before the other, and of these what passes by
        before the third; gives them back, sorted."""

        def first(blob: Digest) -> int:
            if blob in self._certified:
                return certified
            return max(others, passing) if blob in self._passing else others

        old = sorted(blob for blob, met in self._round_of.items() if met < first(blob))
        for blob in old:
            del self._round_of[blob]
            self._sizes.pop(blob, None)
            self._parts.pop(blob, None)
            self._passing.discard(blob)
            self._certified.discard(blob)
            self._held.pop(blob, None)
            self._own.discard(blob)
            self._refused.pop(blob, None)
            self._wanted.pop(blob, None)
        return tuple(old)

    def deadline(self) -> float:
        waits = (wanted.retry_at for wanted in self._wanted.values() if not wanted.under_way)
        return min(waits, default=FOREVER)
