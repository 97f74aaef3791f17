"""Which members average which slice of a stage's vector, and what a certificate of results must be. Pure values.

A slice has two averagers, a first and a deputy, drawn from the voters so that all come to the same ones: who vouched for its last result goes on
with it, as they hold its residual, as long as they have no more slices than their share; the others by rendezvous hash. A member whose line
is much slower than the others', as the last certificate's reports have it, gets none. Behind the two stand all other voters, in order. Members without
a vote average nothing: in an open run newcomers cost nothing to make, and two of them would write what they like into the slices drawn to them.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from dilocox_peer.peer.planning.sent import ALL_TO_ALL
from dilocox_peer.types import PeerId, sha256
from dilocox_peer.wire.chain import VOUCHING, Result, SliceOutcome, Value

SLOW = 4  # times slower than the median line: owns nothing, while enough others are there
ENOUGH = 4


@dataclass(frozen=True, slots=True)
class Sharing:
    """How a stage's vector is shared out at a place of its chain. count: slices. results: the newest in the chain. slow: members."""

    count: int
    results: tuple[Result, ...] = ()
    slow: frozenset[PeerId] = frozenset()

    def after(self, value: Value) -> "Sharing":
        """At the place after a certificate of this value."""
        lines = {entry.peer: entry.report.uplink_kbps for entry in value.entries if entry.report.uplink_kbps}
        slow = self.slow
        if lines:
            usual = median_low(lines.values())
            slow = frozenset(peer for peer, kbps in lines.items() if SLOW * kbps < usual)
        results = value.results or self.results
        return self if (results, slow) == (self.results, self.slow) else Sharing(self.count, results, slow)

    def is_used(self, roster: Sequence[PeerId]) -> bool:
        """Whether the members of this roster average in slices."""
        return len(roster) > ALL_TO_ALL

    def base(self, index: int) -> bytes:
        """The name of the residual that goes with the next mean of a slice; b"": there is none yet."""
        return self.results[index].residual if self.results else b""

    def why_not(self, value: Value, roster: Sequence[PeerId], voters: Sequence[PeerId]) -> str | None:
        """Why these are not the results that a round of this roster has, or None. Signatures are not looked at."""
        if not value.entries or not self.is_used(roster):
            return "results of a round that has none" if value.results else None
        if len(value.results) != self.count:
            return f"{len(value.results)} results of {self.count} slices"
        able = set(averagers(roster, voters))
        for index, result in enumerate(value.results):
            by = [peer for peer, _ in result.by]
            if len(set(by)) != VOUCHING or not set(by) <= able:
                return f"a result of slice {index} that no two of those who may average vouch for"
            if result.base not in (b"", self.base(index)):
                return f"a result of slice {index} with a residual that was never certified"
        return None


def averagers(roster: Sequence[PeerId], voters: Sequence[PeerId]) -> Sequence[PeerId]:
    """The members that may average: those with a vote, where there are enough that a third of them decides between two."""
    return voters if len(voters) > VOUCHING else roster


def ranked(sharing: Sharing, roster: Collection[PeerId]) -> tuple[tuple[PeerId, ...], ...]:
    """Of each slice all of roster, those who may average, in the order in which they are to do it: the first, the deputy, those that step in."""
    able = [peer for peer in sorted(roster) if peer not in sharing.slow]
    if len(able) < min(ENOUGH, len(roster)):
        able = sorted(roster)
    share = -(-VOUCHING * sharing.count // len(able))
    load: Counter[PeerId] = Counter()
    pairs: list[list[PeerId]] = [[] for _ in range(sharing.count)]
    for pair, result in zip(pairs, sharing.results, strict=False):
        for peer, _ in result.by:
            if peer in able and load[peer] < share:
                pair.append(peer)
                load[peer] += 1
    orders = []
    for index, pair in enumerate(pairs):
        drawn = sorted(able, key=lambda peer: _draw(index, peer), reverse=True)
        while len(pair) < min(VOUCHING, len(able)):
            free = [peer for peer in drawn if peer not in pair]
            peer = next((each for each in free if load[each] < share), None) or min(free, key=lambda each: load[each])
            pair.append(peer)
            load[peer] += 1
        others = [peer for peer in drawn if peer not in pair]
        behind = sorted(set(roster) - set(able), key=lambda peer: _draw(index, peer), reverse=True)
        orders.append((*pair, *others, *behind))
    return tuple(orders)


def _draw(index: int, peer: PeerId) -> bytes:
    return sha256(b"slice", index.to_bytes(2, "big"), peer.encode())


def supporters(result: Result, said: Mapping[PeerId, tuple[SliceOutcome, bytes]]) -> set[PeerId]:
    """Those that it names, and whoever has told us the same since: they do not know that another was passed over."""
    return {peer for peer, _ in result.by} | {p for p, (outcome, _) in said.items() if outcome == result.outcome}
