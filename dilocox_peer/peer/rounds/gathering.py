"""What members hold of a round's contributions in slices, as they say it (Gathered), and when we say what we hold. Pure.

A word may be lost on its way, and so may the offer of a contribution, of which its receiver then knows nothing. Among many members some are
lost in every round, so that nobody waits for each: what all but few hold counts as here after a while, and those few hear of it in the
inputs (averages.py); whoever sees that another names others' contributions and not its own offers it again (arrivals.py).
"""

from collections.abc import Collection, Iterable, Sequence, Set

from dilocox_peer.peer.rounds.contract import Action
from dilocox_peer.peer.rounds.seat import Seat, send_all
from dilocox_peer.peer.rounds.timing import FOREVER
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.chain import MAX_ROSTER
from dilocox_peer.wire.rounds import Gathered

FEW = 8  # one of so many averagers may lack what all others hold: its word, or the offer to it, is lost
SOME = 4  # one of so many may have missed an offer: more are likely to be slow
SEVERAL = 2  # contributions that one averager lacks and most others have: no one author keeps them from it


class Gathering:
    """The words of one (head, view) at one peer."""

    def __init__(self, seat: Seat, now: float) -> None:
        self._seat = seat
        self._words: dict[PeerId, frozenset[Digest]] = {}
        self._ever: dict[PeerId, set[Digest]] = {}  # of what is awaited, when it was looked
        self._spoken: set[PeerId] = set()
        self._most_since: dict[Digest, float] = {}
        self._many_since: dict[Digest, float] = {}
        self._some_lack_since: dict[Digest, float] = {}
        self._told_at, self._num_told = now, 0

    def heard(self, sender: PeerId, message: Gathered) -> bool:
        """Takes a member's word in; whether it is one."""
        if sender not in self._seat.place.roster:
            return False
        self._words[sender] = frozenset(message.tables)
        self._spoken.add(sender)
        return True

    # ---- who holds what ----

    def has_spoken(self, peer: PeerId) -> bool:
        """Whether it holds all that is its to average of any contribution."""
        return bool(self._words.get(peer))

    def holds(self, peer: PeerId, tables: Set[Digest]) -> bool:
        """Whether it says that it holds all that is its to average of all of these."""
        return tables <= self._words.get(peer, frozenset())

    def by(self, table: Digest) -> set[PeerId]:
        """Those that hold all of this contribution that is theirs to average: they know of it."""
        return {peer for peer, tables in self._words.items() if table in tables}

    def holders(self, table: Digest) -> list[PeerId]:
        """The others among them, in the order in which they were heard first."""
        return [peer for peer, tables in self._words.items() if table in tables and peer != self._seat.me]

    def by_all(self, everyone: Iterable[PeerId]) -> frozenset[Digest]:
        """What all of everyone, at least one, hold of."""
        nothing = frozenset[Digest]()
        return frozenset.intersection(*(self._words.get(peer, nothing) for peer in everyone))

    def unaware_of(self, table: Digest) -> set[PeerId]:
        """Those that have said what they hold since this was asked last, and named others' contributions, not this."""
        spoken, self._spoken = self._spoken, set()
        return {peer for peer in spoken if self._words[peer] and table not in self._words[peer]}

    def missed_by(self, table: Digest, roster: Collection[PeerId], now: float) -> set[PeerId]:
        """The others that have not said that they hold it, where all but some of the roster have, for so long that their words would have come."""
        holders = self.by(table).intersection(roster)
        if SOME * (len(roster) - len(holders)) > len(roster):
            return set()
        since = self._some_lack_since.setdefault(table, now)
        return set(self._seat.others) - holders if now >= since + self._seat.timing.retry_s else set()

    def look(
        self,
        tables: Iterable[Digest],
        awaited: Collection[Digest],
        everyone: Collection[PeerId],
        able: Collection[PeerId],
        now: float,
    ) -> None:
        """Notes of which of these contributions most of everyone hold all by now, and of which of the awaited more than half of the able do."""
        for peer, held in self._words.items():
            self._ever.setdefault(peer, set()).update(held.intersection(awaited))
        for table in tables:
            if table in awaited and table not in self._many_since and self._is_by_many(table, able):
                self._many_since[table] = now
            if table not in self._most_since and self._is_by_most(table, everyone):
                self._most_since[table] = now

    def is_by_most(self, table: Digest, everyone: Collection[PeerId], now: float) -> bool:
        """Whether all but few of everyone hold it, for so long that the words of those few would have come."""
        is_time = now >= self._most_since.get(table, FOREVER) + self._seat.timing.retry_s
        return is_time and self._is_by_most(table, everyone)

    def _is_by_most(self, table: Digest, everyone: Collection[PeerId]) -> bool:
        return FEW * (len(everyone) - len(self.by(table).intersection(everyone))) <= len(everyone)

    def _is_by_many(self, table: Digest, able: Collection[PeerId]) -> bool:
        return 2 * len(self.by(table).intersection(able)) > len(able)

    def behind(self, everyone: Collection[PeerId], then: float) -> tuple[set[PeerId], set[PeerId]]:
        """Those of everyone that lack several of which more than half of them have held theirs since then, and those of them that never said that they
        hold them: one that lacks one may be kept from it by its author."""
        many = {table for table, at in self._many_since.items() if at <= then}
        held = {peer: self._words.get(peer, frozenset()) for peer in everyone}
        lacking = {peer for peer in everyone if len(many - held[peer]) >= SEVERAL}
        return lacking, {peer for peer in lacking if len(many - self._ever.get(peer, set())) >= SEVERAL}

    # ---- what we say ----

    def hold(self, gathered: Sequence[Digest]) -> bool:
        """That we hold these, as many of the first as a word has room for: named inputs may have others than are offered by now. Whether that is news."""
        tables = frozenset(gathered[:MAX_ROSTER])
        if tables == self._words.get(self._seat.me, frozenset()):
            return False
        self._words[self._seat.me], self._num_told = tables, 0
        return True

    def say(self, now: float, *, is_all: bool, is_late: bool) -> list[Action]:
        """What we hold, if it is to be said: at once when it is all that is to come, else soon, once or twice a round; later now and then, as
        messages are lost."""
        retry_s = self._seat.timing.retry_s
        seldom_s = 0.0 if is_late else 0.75 * (self._seat.pace.round_s or 0.0)
        soon_s = min(max(retry_s / 4, seldom_s), 8 * retry_s)
        waits_s = soon_s if self._num_told == 0 else self._seat.again_s(self._num_told)
        is_due = now >= self._told_at + self._seat.jittered(waits_s) or (is_all and self._num_told == 0)
        if not self.has_spoken(self._seat.me) or not is_due:
            return []
        self._told_at, self._num_told = now, self._num_told + 1
        return [*send_all(self._seat.others, Gathered(*self._seat.at(), tuple(sorted(self._words[self._seat.me]))))]
