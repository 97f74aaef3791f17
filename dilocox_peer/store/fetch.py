"""How one thing is got from several donors: whom to ask for which bytes, whom not to believe, when it is here. Pure.

Donors are asked for the thing's outline, one first: with that of a small thing comes the thing. Those that claim the same one share the work: each is asked for a run of chunks
that is a part of what is missing, by its speed, so that runs get shorter and all end together; who ends first takes over what
a slow one would be late with. The bytes of a donor that breaks off stay, in mid-chunk too: another goes on at the next byte.

Promises
1. `Finished` only when every chunk is what the outline says, and the outline what the name says.
2. No byte that is held or on its way is asked for, but those of a chunk that was wrong.
3. `Accused` is said of a donor alone for a chunk that it sent all of, or for an outline that cannot be of that name; never of an
   honest one. For a chunk with bytes from two donors nobody is accused: it is asked for again, whole, from one.
4. A donor that is accused, or fails again and again, is asked no more. With none left the fetch gives up.
5. What one liar can cost is the work on one false outline, or one chunk. Where several outlines are claimed and the name proves none,
   the one that comes at the better pace is gone by, once each was tried: no liar sets the pace.
6. However many donors there are, all have their turn; those that have given nothing take the place of one that gives one at a time.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from dilocox_peer.store.actions import (
    Accused,
    AskOutline,
    AskRange,
    CheckChunk,
    CheckWhole,
    FetchAction,
    Finished,
    GaveUp,
    Shorten,
)
from dilocox_peer.store.fetch_donor import IMPATIENT_S, FetchDonor, next_asked, part_of, why_nobody
from dilocox_peer.store.outline import CHUNK_BYTES, Outline
from dilocox_peer.types import Digest, PeerId

MAX_BUSY = 4  # donors that send at once
MAX_FAILURES = 2  # in a row, with no right chunk in between; as today's callers try again by themselves
MAX_FAILURES_IN_ALL = 8
RETRY_S = 1.0
SOONER_S = 1.0  # taking over from a slow donor costs what it has under way; it has to save so much
LATE_S = 5.0  # nor hung up on for another that was never tried
LOOK_S = 0.5
STUCK_S = 30.0  # without a whole chunk; then another outline that is claimed is tried, for twice as long each time
OUTPACED = 2.0  # times as many chunks a second came of another outline: it is gone by again, and what is here of this one is lost


@dataclass(slots=True)
class _Chunk:
    """arrived: bytes of it that are here, from its beginning. givers: who sent them. is_taken: a range that is out covers the rest,
    or it is being checked (check: the number of that). from_one: it was wrong with bytes of two donors in it."""

    arrived: int = 0
    givers: tuple[PeerId, ...] = ()
    is_taken: bool = False
    is_held: bool = False
    from_one: bool = False
    check: int = 0


class Fetch:
    """Of one thing. Each method takes what happened and returns what to do, in order; `begin` first, `tick` at `deadline`.

    Nothing comes after Finished or GaveUp.
    """

    def __init__(
        self,
        name: Digest,
        donors: Iterable[PeerId],
        *,
        is_root: bool = False,
        tries: int = MAX_FAILURES,
        resumed: tuple[Outline, frozenset[int]] | None = None,
    ) -> None:
        """is_root: the name is an outline's root, not the digest of the bytes. tries: how often in a row a donor may fail. resumed: an outline, and which of its chunks are
        here and right; it counts for as much as a donor's word."""
        self.name = name
        self._is_root = is_root
        self._tries = tries
        self._donors = {donor: FetchDonor() for donor in donors}
        self._refuted: set[Digest] = set()  # roots of outlines that were false
        self._turns: Counter[Digest] = Counter()  # how often each was gone by
        self.outline: Outline | None = None
        self.givers: dict[PeerId, None] = {}  # of chunks that were right, in the order they came
        self._chunks: list[_Chunk] = []
        self._missing = 0  # chunks that are not held
        self._is_over = False
        self._num_checks = 0
        self._checking: Digest | None = None  # root of the outline whose whole is being checked
        self._now = float("-inf")
        self._progress_s, self._patience_s = 0.0, STUCK_S  # when a chunk came last, or another outline was gone by
        self._adopted_s = self._looked_s = float("-inf")  # since when this outline is gone by, and its pace is measured
        self._missing_then = 0  # when its pace was looked at last
        self._paces: dict[Digest, float] = {}  # of outlines that were tried: chunks a second
        if resumed is not None and self._why_not(resumed[0]) is None:
            self._adopt(resumed[0])
            for index in resumed[1]:
                self._hold(index)

    def busy(self) -> list[PeerId]:
        return [peer for peer, donor in self._donors.items() if donor.is_busy]

    def deadline(self) -> float:
        """When `tick` is due, in the clock's seconds."""
        donors = self._donors.values()
        rests = [each.retry_s for each in donors if each.is_resting(self._now)]
        if any(each.is_busy for each in donors) and any(
            not each.is_busy and each.outline is not None for each in donors
        ):
            rests.append(self._now + LOOK_S)  # at who is slow: one that sends nothing makes nothing happen
        if any(each.is_unasked(self._now) for each in donors):
            impatient = (each.asked_s + IMPATIENT_S for each in donors if each.is_asked)
            rests += [each for each in impatient if each > self._now]  # of those before the next was asked already
        return min(rests, default=inf)

    @property
    def share(self) -> float:
        """Of its chunks, those that are here; 0 while nobody has said how many they are."""
        return 1 - self._missing / len(self._chunks) if self._chunks else 0.0

    # ---- what happens ----

    def begin(self, now: float) -> list[FetchAction]:
        self._progress_s = self._adopted_s = self._looked_s = now
        self._missing_then = self._missing
        return self._go_on(now)

    def join(self, donors: Iterable[PeerId], now: float) -> list[FetchAction]:
        """These have it too, by what was heard since: they share what is left of the work."""
        known = len(self._donors)
        self._donors |= {donor: FetchDonor() for donor in donors if donor not in self._donors}
        return self._go_on(now) if len(self._donors) > known else []

    def tick(self, now: float) -> list[FetchAction]:
        return self._go_on(now)

    def outlined(self, donor: PeerId, outline: Outline, now: float, *, is_here: bool = False) -> list[FetchAction]:
        """The donor's answer to AskOutline. is_here: with it came the thing, which is one chunk; its digest is computed from
        what came, and the bytes have been put where they belong if they are what was asked for."""
        asked = self._donors[donor]
        asked.is_asked = False
        if asked.is_out or self._is_over:
            return []
        if (reason := self._why_not(outline)) is not None:
            return self._accuse(donor, reason) + self._go_on(now)
        asked.outline = outline
        actions: list[FetchAction] = []
        if self.outline is None or (self.outline.root != outline.root and self._is_beaten_by(outline)):
            actions += self._adopt(outline)
        if is_here and self.outline is not None and self.outline.root == outline.root and not self._chunks[0].is_held:
            self._hold(0)
            self.givers[donor] = None
        return actions + self._go_on(now)

    def failed(self, donor: PeerId, reason: str, now: float, *, for_good: bool = False) -> list[FetchAction]:
        """It does not answer, broke off, or (for_good) has not what it was asked for."""
        asked = self._donors[donor]
        self._release(donor)
        asked.is_asked = False
        if asked.is_out or self._is_over:
            return []
        asked.failures += 1
        asked.failures_in_all += 1
        asked.reasons.append(reason)
        asked.retry_s = now + RETRY_S * asked.failures
        asked.is_out = for_good or asked.failures >= self._tries or asked.failures_in_all >= MAX_FAILURES_IN_ALL
        return self._go_on(now)

    def received(self, donor: PeerId, num_bytes: int, now: float) -> list[FetchAction]:
        """The next bytes of its range, which the caller has kept."""
        asked = self._donors[donor]
        if self._is_over or not asked.is_busy:
            return []
        assert 0 < num_bytes <= asked.stop - asked.at, (num_bytes, asked.at, asked.stop)
        asked.heard(num_bytes, now)
        actions: list[FetchAction] = []
        end = asked.at + num_bytes
        while asked.at < end:
            index = self._index_at(asked.at)
            start, stop = self._span(index)
            chunk = self._chunks[index]
            chunk.arrived = min(end, stop) - start
            chunk.givers = tuple(dict.fromkeys((*chunk.givers, donor)))
            asked.at = start + chunk.arrived
            if asked.at == stop:
                self._num_checks += 1
                chunk.check = self._num_checks
                actions.append(CheckChunk(index, chunk.check))
        if asked.at == asked.stop:
            asked.at = asked.stop = 0
            outline, then = self.outline, self._go_on(now)
            actions = actions + then if self.outline is outline else then  # what came is of no chunk of another
        return actions

    def checked(self, check: CheckChunk, digest: Digest, now: float) -> list[FetchAction]:
        """The digest of a chunk whose bytes have all arrived."""
        if self._is_over or self.outline is None or check.index >= len(self._chunks):
            return []
        chunk = self._chunks[check.index]
        if chunk.check != check.number or chunk.is_held:
            return []  # another outline is gone by since
        givers = chunk.givers
        if digest == self.outline.chunks[check.index]:
            self._hold(check.index)
            self.givers.update(dict.fromkeys(givers))
            if len(givers) == 1:
                self._donors[givers[0]].failures, self._donors[givers[0]].has_given = 0, True
            return self._go_on(now)
        self._chunks[check.index] = _Chunk(from_one=len(givers) > 1)
        if len(givers) > 1:
            return self._go_on(now)
        return self._accuse(givers[0], f"chunk {check.index} is not what it said itself") + self._go_on(now)

    def checked_whole(self, check: CheckWhole, is_right: bool, now: float) -> list[FetchAction]:
        """Whether the bytes are what the name says. If not, all who claimed this outline were lying: the chunks agree with it."""
        if self._is_over or self.outline is None or check.outline.root != self._checking:
            return []  # another outline is gone by since
        self._checking = None
        if is_right:
            self._is_over = True
            return [Finished()]
        self._refuted.add(check.outline.root)
        return self._leave("its outline is not of the thing of that name", is_false=True) + self._go_on(now)

    def no_room(self, outline: Outline, reason: str, now: float) -> list[FetchAction]:
        """There is none here for all that this outline says, which the name does not prove: it is left for others. Nobody is accused."""
        if self._is_over or self.outline is None or outline.root != self.outline.root:
            return []
        return self._leave(reason, is_false=False) + self._go_on(now)

    def _leave(self, reason: str, *, is_false: bool) -> list[FetchAction]:
        """Puts out who claims the outline gone by, and goes by another that is claimed."""
        assert self.outline is not None
        left, actions = self.outline.root, list[FetchAction]()
        others: dict[Digest, Outline] = {}
        for peer, donor in self._donors.items():
            if donor.outline is not None and donor.outline.root == left:
                actions += self._accuse(peer, reason) if is_false else self._put_out(peer, reason)
            elif donor.outline is not None and not donor.is_out:
                others.setdefault(donor.outline.root, donor.outline)
        self.outline, self._chunks, self._missing = None, [], 0
        if others:
            self._adopt(max(others.values(), key=lambda each: self._num_behind(each.root)))
        return actions

    # ---- outlines ----

    def _why_not(self, outline: Outline) -> str | None:
        """Why it cannot be this thing's; None: it can."""
        if outline.root in self._refuted:
            return "its outline is not of the thing of that name"
        if self._is_root:
            return None if outline.root == self.name else "its outline is of another thing"
        if len(outline.chunks) == 1 and outline.chunks[0] != self.name:
            return "what it sent is not the thing of that name"
        return None

    def is_proven(self, outline: Outline) -> bool:
        """Whether the name says that it is this thing's."""
        return self._is_root or len(outline.chunks) == 1

    def _num_behind(self, root: Digest) -> int:
        return sum(
            not donor.is_out and donor.outline is not None and donor.outline.root == root
            for donor in self._donors.values()
        )

    def _is_beaten_by(self, other: Outline) -> bool:
        """By one that the name proves, or that more donors claim."""
        assert self.outline is not None
        if self.is_proven(self.outline) or self.is_proven(other):
            return not self.is_proven(self.outline)
        return self._num_behind(other.root) > self._num_behind(self.outline.root)

    def _adopt(self, outline: Outline) -> list[FetchAction]:
        """Goes by this outline from here on. What is held and the same in both stays."""
        actions: list[FetchAction] = []
        for peer in self.busy():
            actions.append(Shorten(peer, self._donors[peer].at))
            self._release(peer)
        self._turns[outline.root] += 1
        before, old = self.outline, self._chunks
        self.outline, self._checking, self._progress_s = outline, None, self._now
        self._chunks = [_Chunk() for _ in outline.chunks]
        self._missing = len(self._chunks)
        if before is not None:
            for index, (was, now_) in enumerate(zip(before.chunks, outline.chunks, strict=False)):
                if was == now_ and before.span(index) == outline.span(index) and old[index].is_held:
                    self._hold(index)
        self._adopted_s = self._looked_s = self._now
        self._missing_then = self._missing
        return actions

    # ---- chunks ----

    def _index_at(self, byte: int) -> int:
        return byte // CHUNK_BYTES

    def _span(self, index: int) -> tuple[int, int]:
        assert self.outline is not None
        return self.outline.span(index)

    def _hold(self, index: int) -> None:
        self._chunks[index], self._progress_s = _Chunk(is_taken=True, is_held=True), self._now
        self._missing -= 1

    def _release(self, peer: PeerId) -> None:
        """What is left of its range is anybody's again; what has arrived of a chunk stays."""
        donor = self._donors[peer]
        if not donor.is_busy:
            return
        for index in range(self._index_at(donor.at), self._index_at(donor.stop - 1) + 1):
            chunk = self._chunks[index]
            chunk.is_taken = False
            if chunk.from_one:
                chunk.arrived, chunk.givers = 0, ()
        donor.at = donor.stop = 0

    # ---- whom to ask for what ----

    def _go_on(self, now: float) -> list[FetchAction]:
        self._now = now
        if self._is_over:
            return []
        if self.outline is not None and not self._missing:
            if not self.is_proven(self.outline):
                if self._checking == self.outline.root:
                    return []
                self._checking = self.outline.root
                return [CheckWhole(self.outline)]
            self._is_over = True
            return [Finished()]
        actions: list[FetchAction] = []
        for peer in next_asked(self._donors, now, is_outlined=self.outline is not None):
            self._donors[peer].is_asked, self._donors[peer].asked_s = True, now
            actions.append(AskOutline(peer))
        if self.outline is not None:
            if (other := self._better_outline(self.outline, now)) is not None:
                actions += self._adopt(other)
            actions += self._hand_out(self.outline, now)
        if any(donor.is_asked or donor.is_busy or donor.is_resting(now) for donor in self._donors.values()):
            return actions
        if any(chunk.check and not chunk.is_held for chunk in self._chunks):
            return actions
        if (other := self._another_outline()) is not None:
            return actions + self._adopt(other) + self._go_on(now)
        self._is_over = True
        return [*actions, GaveUp(why_nobody(self._donors))]

    def _better_outline(self, outline: Outline, now: float) -> Outline | None:
        """To go by instead: one that was never tried, where this one's end is far, or one that came faster. A false one may be let trickle
        for ever."""
        if self.is_proven(outline) or (other := self._another_outline()) is None:
            return None
        if now >= self._progress_s + self._patience_s:
            self._paces[outline.root] = 0.0
            if self._turns[other.root]:  # all have had their turn
                self._patience_s *= 2
            return other
        if now < self._looked_s + STUCK_S:
            return None
        pace = self._paces[outline.root] = (self._missing_then - self._missing) / (now - self._looked_s)
        self._looked_s, self._missing_then = now, self._missing
        if self._missing <= pace * max(STUCK_S, now - self._adopted_s):
            return None  # soon done, beside what it took so far
        fastest = max(self._others(), key=lambda each: self._paces.get(each.root, inf))
        return fastest if self._paces.get(fastest.root, inf) > OUTPACED * pace else None

    def _another_outline(self) -> Outline | None:
        """That a donor claims which is still there, of others than the one gone by: the one that had the fewest turns."""
        return min(self._others(), key=lambda each: self._turns[each.root], default=None)

    def _others(self) -> list[Outline]:
        claimed = (donor.outline for donor in self._donors.values() if not donor.is_out and donor.outline is not None)
        return [each for each in claimed if self.outline is None or each.root != self.outline.root]

    def _hand_out(self, outline: Outline, now: float) -> list[FetchAction]:
        mine = [
            (peer, donor)
            for peer, donor in self._donors.items()
            if not donor.is_out and donor.outline is not None and donor.outline.root == outline.root
        ]
        actions: list[FetchAction] = []
        idle = [(peer, donor) for peer, donor in mine if not donor.is_busy and now >= donor.retry_s]
        is_trying = any(donor.is_busy and not donor.has_given for _, donor in mine)
        # Kinds of those for whom there is no room: whether never tried, whether it has given. The faster of a kind come first.
        in_vain = set[tuple[bool, bool]]()
        for peer, donor in sorted(idle, key=lambda each: each[1].turn(is_trying=is_trying)):
            if len(self.busy()) >= MAX_BUSY:
                kind = donor.rate is None, donor.has_given
                if kind in in_vain or not (room := self._make_room(donor, now)):
                    in_vain.add(kind)
                    continue
                actions += room
            first = next((index for index, chunk in enumerate(self._chunks) if not chunk.is_taken), None)
            if first is None:
                actions += self._take_over(peer, donor, now)
            else:
                count = self._run_length(first, self._fair_share(donor, outline))
                actions.append(self._ask(peer, donor, first, first + count, now))
        return actions

    def _make_room(self, donor: FetchDonor, now: float) -> list[FetchAction]:
        """Hangs up on the slowest, when all that may send at once do and this one is faster or was never tried. For one that has given nothing
        yet that is another such one, if there is one: else a crowd of them would have all places in turn."""
        is_trying = any(each.is_busy and not each.has_given for each in self._donors.values())
        slowest, late_s = self._latest(now, of_untried=is_trying and not donor.has_given)
        if slowest is None or late_s < LATE_S:
            return []
        other = self._donors[slowest]
        if donor.rate is not None and donor.rate < 2 * (other.stop - other.at) / late_s:
            return []
        return [self._hung_up(slowest, now)]

    def _hung_up(self, slow: PeerId, now: float) -> Shorten:
        """What it has under way is another's; it counts for as fast as it was, not for what it began with."""
        donor = self._donors[slow]
        donor.reckon(now)
        at = donor.at
        self._release(slow)
        return Shorten(slow, at)

    def _latest(self, now: float, *, of_untried: bool = False) -> tuple[PeerId | None, float]:
        """The donor that will be done last, and in how many seconds. of_untried: of those that have given nothing yet."""
        slowest, late_s = None, 0.0
        for peer, donor in self._donors.items():
            if donor.is_busy and not (of_untried and donor.has_given) and (left_s := donor.left_s(now)) > late_s:
                slowest, late_s = peer, left_s
        return slowest, late_s

    def _fair_share(self, donor: FetchDonor, outline: Outline) -> int:
        """How many chunks a donor is asked for: all if nobody else has them or may yet say so, else half its part, by the speeds, of those
        that nobody was asked for."""
        free = sum(not chunk.is_taken for chunk in self._chunks)
        hoped = [
            each for each in self._donors.values()
            if not each.is_out and (each.outline is None or each.outline.root == outline.root)
        ]  # fmt: skip
        return free if len(hoped) < 2 else max(1, int(free * part_of(donor, hoped, MAX_BUSY) / 2))

    def _run_length(self, first: int, most: int) -> int:
        """Of chunks from there that nobody was asked for. One of which a part is here begins a run, or is none of it; so that a
        range goes from byte to byte."""
        count = 1
        while count < most and first + count < len(self._chunks):
            chunk = self._chunks[first + count]
            if chunk.is_taken or chunk.arrived:
                break
            count += 1
        return count

    def _ask(self, peer: PeerId, donor: FetchDonor, first: int, last: int, now: float) -> AskRange:
        for chunk in self._chunks[first:last]:
            chunk.is_taken = True
        donor.begin(self._span(first)[0] + self._chunks[first].arrived, self._span(last - 1)[1], now)
        return AskRange(peer, donor.at, donor.stop)

    def _take_over(self, peer: PeerId, donor: FetchDonor, now: float) -> list[FetchAction]:
        """From the donor that would be done last, if that is sooner for all: a part of what it has not begun, by their speeds, or the
        rest of its last chunk."""
        slowest, late_s = self._latest(now)
        if slowest is None:
            return []
        other = self._donors[slowest]
        left = other.stop - other.at
        speed = left / late_s
        rate = donor.rate or speed  # of one that has sent nothing yet
        if late_s - left / (speed + rate) < SOONER_S:
            return []
        current, last = self._index_at(other.at), self._index_at(other.stop - 1)
        give = round((last - current) * rate / (speed + rate))
        if give > 0:
            first = last + 1 - give
            other.stop = self._span(first)[0]
            return [Shorten(slowest, other.stop), self._ask(peer, donor, first, last + 1, now)]
        if self._chunks[current].from_one:  # begun anew
            left = self._span(current)[1] - self._span(current)[0]
        if current < last or late_s < 2 * left / (donor.rate or inf) + SOONER_S:
            return []
        return [self._hung_up(slowest, now), self._ask(peer, donor, current, current + 1, now)]

    # ---- who is not believed ----

    def _accuse(self, peer: PeerId, reason: str) -> list[FetchAction]:
        return [] if self._donors[peer].is_out else [Accused(peer, reason), *self._put_out(peer, reason)]

    def _put_out(self, peer: PeerId, reason: str) -> list[FetchAction]:
        donor = self._donors[peer]
        actions: list[FetchAction] = []
        if donor.is_busy:
            actions.append(Shorten(peer, donor.at))
            self._release(peer)
        for index, chunk in enumerate(self._chunks):
            if peer in chunk.givers and not chunk.is_taken:
                self._chunks[index] = _Chunk(from_one=chunk.from_one)
        donor.is_out = True
        donor.reasons.append(reason)
        return actions
