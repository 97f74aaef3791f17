"""Inputs that a leader has named, and what members say that slices of their mean came to. Pure.

What two say, and not as many another thing, is a result. Whose words count is asked of who keeps them (averages.py): not of one that was found
wrong before, where others speak, and not of what is nowhere to be had. So two that say what nobody can fetch, or what others
contradict, hold a slice up for as long as it takes the next in order to step in.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from statistics import median

from dilocox_peer.contract import Note
from dilocox_peer.events_of_rounds import AveragesDiffer
from dilocox_peer.peer.rounds.chain import Place, Verifier
from dilocox_peer.peer.rounds.contract import Action
from dilocox_peer.peer.rounds.slices import supporters
from dilocox_peer.peer.rounds.timing import FOREVER
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.chain import VOUCHING, Entry, Result, SliceOutcome, Value, average_statement, inputs_of

LATE = 4.0  # times as long as others' results
LATE_S = 6.0  # and no sooner: of two sources the second may be asked after 5 s
SliceWords = dict[PeerId, tuple[SliceOutcome, bytes]]
"""What each member says of a slice, with its signature."""


@dataclass(slots=True)
class Named:
    """said: of each slice. settled: slices whose result is known and to be had, by now; known: since when, of all that ever were. opened: since when others are not. settled_at: when the last one was.
    heeded, until: since when these are what is averaged, and until when, as another leader names others, and who averages goes over to them.
    misers: who said of a slice what was then asked for in vain, or did not come. tried: how often, of each such result. failing: those of them of whom a fetch came to nothing. took: of others' results that are here, seconds since they were known."""

    entries: tuple[Entry, ...]
    since: float
    heeded: float = FOREVER
    until: float = FOREVER
    said: dict[int, SliceWords] = field(default_factory=dict)
    under_way: set[int] = field(default_factory=set)
    settled: set[int] = field(default_factory=set)
    known: dict[int, float] = field(default_factory=dict)
    opened: dict[int, float] = field(default_factory=dict)
    settled_at: float = 0.0
    misers: set[tuple[PeerId, int]] = field(default_factory=set)
    tried: dict[Digest, int] = field(default_factory=dict)
    failing: set[PeerId] = field(default_factory=set)
    took: dict[int, float] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    told: set[tuple[int, frozenset[PeerId]]] = field(default_factory=set)
    is_untold: bool = False  # something of ours
    is_news: bool = False

    def open_s(self, index: int, now: float) -> float:
        """How long a slice has had no result."""
        return 0.0 if index in self.settled else now - self.opened.get(index, self.since)

    def takes_news(self) -> bool:
        """Whether there was news, which is none any more."""
        was_news, self.is_news = self.is_news, False
        return was_news

    def is_outgrown(self, others: Sequence[Entry], then: float) -> bool:
        """Whether these are so many more that they are named instead, if this was named before then."""
        return 3 * len(self.entries) < 2 * len(others) and self.since <= then

    def is_open(self, count: int, then: float) -> bool:
        """Whether some of so many slices had no result then, or one that was not to be had at first."""
        return len(self.settled) < count or self.settled_at > then or bool(self.tried)

    def came(self, index: int, now: float) -> None:
        """A result that others say is here."""
        if index not in self.took and index in self.known:
            self.took[index] = now - self.known[index]

    def is_late(self, index: int, now: float, most_s: float) -> bool:
        """Whether a result that is known and not here takes far longer than most others did, or longer than most_s."""
        if index not in self.known or index in self.took:
            return False
        if len(self.took) > len(self.known) // 2:
            most_s = min(most_s, max(LATE_S, LATE * median(self.took.values())))
        return now >= self.known[index] + most_s

    def settle(self, index: int, now: float, *, is_settled: bool) -> bool:
        """Notes whether a slice has a result by now; whether that is otherwise than before."""
        if is_settled == (index in self.settled):
            return False
        if is_settled:
            self.settled.add(index)
            self.settled_at = now
            self.is_news |= index not in self.known  # once a slice: whoever says it piece by piece holds nobody up
            self.known.setdefault(index, now)
        else:
            self.settled.discard(index)
            self.opened[index] = now
        return True

    # ---- who is to blame ----

    def was_heeded_for(self, seconds: float, now: float) -> bool:
        """Whether it was what is averaged for so long in one go: whoever goes over to other inputs averages these no more, and is not to blame."""
        return min(now, self.until) - self.heeded > seconds

    def idle(self, orders: Sequence[Sequence[PeerId]], holds: Callable[[PeerId, Set[Digest]], bool]) -> set[PeerId]:
        """Those that say they hold all of what was named, first in the order of a slice, and have not averaged it."""
        tables = {each.blob for each in self.entries}
        pairs = ((index, peer) for index, order in enumerate(orders) for peer in order[:VOUCHING])
        late = {peer for index, peer in pairs if peer not in self.said.get(index, {})}
        return {peer for peer in late if holds(peer, tables)}

    def contradicting(self, results: Sequence[Result]) -> list[tuple[PeerId, int]]:
        """Members, with the slice, that said that it comes to something else, from the same residual."""
        return [
            (peer, index)
            for index, result in enumerate(results)
            for peer, (outcome, _) in self.said.get(index, {}).items()
            if outcome != result.outcome and outcome.base == result.base
        ]


def result_of(said: SliceWords, order: Sequence[PeerId]) -> Result | None:
    """What two say, and not as many another thing. said: of one slice, whose members that may average are in this order."""
    counts = Counter(outcome for outcome, _ in said.values())
    most = sorted(counts.values(), reverse=True)
    if not most or most[0] < VOUCHING or (len(most) > 1 and most[0] == most[1]):
        return None
    outcome = max(counts, key=lambda each: counts[each])
    first = sorted((peer for peer in said if said[peer][0] == outcome), key=order.index)[:VOUCHING]
    return Result(*outcome, tuple((peer, said[peer][1]) for peer in first))


def are_as_many(said: SliceWords, result: Result, by: Iterable[PeerId]) -> bool:
    """Whether as many as these, by, say the same other thing."""
    supporting = set(by)
    others = Counter(
        outcome for peer, (outcome, _) in said.items() if outcome != result.outcome and peer not in supporting
    )
    return max(others.values(), default=0) >= len(supporting)


def are_passed_over(
    value: Value,
    said: Sequence[SliceWords],
    orders: Sequence[Sequence[PeerId]],
    may: Callable[[PeerId], bool],
    most: int,
) -> bool:
    """Whether more than most others that are here, and may average, come before all but one of those that support a result, and have not said
    what it is."""
    for result, words, order in zip(value.results, said, orders, strict=True):
        by = supporters(result, words)
        before = order[: sorted(map(order.index, by))[VOUCHING - 1]]
        if sum(peer not in by and peer not in words and may(peer) for peer in before) > most:
            return True
    return False


def told_apart(batch: Named, index: int, place: Place) -> list[Action]:
    """News of members that came to different results from the same, once."""
    outcomes = {outcome for outcome, _ in batch.said[index].values()}
    key = index, frozenset(batch.said[index])
    if max(Counter(outcome.base for outcome in outcomes).values()) < 2 or key in batch.told:
        return []
    batch.told.add(key)
    shown = tuple(
        (peer, average_statement(place.stage, place.head, inputs_of(batch.entries), index, outcome).hex(), signature.hex())
        for peer, (outcome, signature) in sorted(batch.said[index].items())
    )  # fmt: skip
    return [Note(AveragesDiffer(place.round + 1, index, shown))]


def why_not_signed(value: Value, place: Place, verify: Verifier, known: Sequence[SliceWords] = ()) -> str | None:
    """Why the results of a value are not those that its members signed at this place, or None. known: words that were verified, by slice."""
    if not value.results:
        return None
    inputs = inputs_of(value.entries)
    for index, result in enumerate(value.results):
        heard = known[index] if known else {}
        statement = average_statement(place.stage, place.head, inputs, index, result.outcome)
        for peer, signature in result.by:
            if heard.get(peer) != (result.outcome, signature) and not verify(peer, statement, signature):
                return f"a result of slice {index} that {peer} has not signed"
    return None
