"""What a stage's certificates say of its rounds, one after the other: loss, tokens, time, bytes, contributors. A fold. Pure.

Loss and time are what the contributors say of themselves (wire/chain.Report): the median of them is taken, so that a minority of liars
moves nothing; of a round with one or two contributors there is no minority. Time never goes back, nor ahead of the reader's clock.
"""

import bisect
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from dilocox_peer.peer.planning.plan import PlanBounds
from dilocox_peer.peer.planning.upkeep import RoundPace
from dilocox_peer.peer.rounds.ledger import Ledger
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.chain import VOUCHING, Certificate, Entry, Plan
from dilocox_peer.wire.directives import Directive

MAX_POINTS = 1024  # of a curve, as the page gets it
EXACT_POINTS = 256  # the newest, each a round; what is before them is thinned
PACE_ROUNDS = 12  # rounds whose pace is the pace of now
COUNTED_OF = 32  # rounds that the share of counted contributions is of
MAX_LOSS = 1e3  # nats a token: a uniform guess among a million tokens has 14


@dataclass(slots=True)
class PastRound:
    """One outer round of a stage. members: of the roster that could contribute. at_s: when it was closed (Unix seconds), 0.0 unknown. micro_batches: counted up to here, this
    round's included. loss: nats a token, None unknown. sent_bytes: of contributions, that a contributor sends if each of the others
    takes them from it once, or in slices two others, and all others the results; contribution_bytes: of one; allreduce_bytes: what a ring all-reduce of float32 gradients after each inner step would have it send."""

    number: int
    at_s: float
    micro_batches: int
    loss: float | None
    contributors: int
    codec: str
    rank: int
    inner_steps: int
    end_step: int
    sent_bytes: float
    allreduce_bytes: float
    members: int = 0
    contribution_bytes: float = 0.0


@dataclass
class StageHistory:
    """Give `follow` the chain again and again; read the rest. raw_bytes: of a pseudo-gradient as float32."""

    first_plan: Plan
    second_plan: Plan
    bounds: PlanBounds
    raw_bytes: int
    rounds: list[PastRound] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    sent_bytes: float = 0.0  # of all contributors, over all rounds
    allreduce_bytes: float = 0.0
    directive: Directive | None = None  # of the run's owner, the newest that the chain has
    _roster: frozenset[PeerId] = frozenset()  # of the next round
    _heads: list[Digest] = field(default_factory=list)
    _plans: list[Plan] = field(default_factory=list)  # of round 1, 2, ... as far as they are known

    def follow(self, certificates: Sequence[Certificate], now: float) -> bool:
        """Takes in what is new of a verified chain, from genesis on. Whether anything was. now: wall clock."""
        known = len(self._heads)
        if known and (len(certificates) < known or certificates[known - 1].head != self._heads[-1]):
            self._forget()  # another branch counts now: rare, and all is read again
            known = 0
        for number in range(known, len(certificates)):  # one by one: all of a year's are no list to have in memory
            self._take(certificates[number], now)
        return len(certificates) > known

    def plan_for(self, number: int) -> Plan:
        """Of a round up to the one after next."""
        plans = self._plans or [self.first_plan, self.second_plan]
        return plans[min(max(number, 1), len(plans)) - 1]

    @property
    def steps_done(self) -> int:
        return self.rounds[-1].end_step if self.rounds else 0

    @property
    def expected_rounds(self) -> int | None:
        """How many the run will have, if they stay as long as they are; None: it has no end. The rounds that are certified count, also
        beyond the one after which the owner wants it to end: the word for that comes with a certificate, and applies a round later."""
        total, last = self.total_steps, self.last_round
        if last is not None:
            last = max(last, len(self.rounds))
        if total is None:
            return last
        number = max(1, len(self.rounds))
        while number < len(self._plans) and self._plans[number - 1].end < total:
            number += 1
        plan = self.plan_for(number)
        expected = number + max(0, -(-(total - plan.end) // plan.inner_steps))
        return expected if last is None else min(expected, last)

    @property
    def total_steps(self) -> int | None:
        """Inner steps that the run lasts, as its settings or its owner have it; None: it has no end."""
        return (self.directive.total_steps or self.bounds.total_steps) if self.directive else self.bounds.total_steps

    @property
    def last_round(self) -> int | None:
        """After which the owner has it end; None: not before all steps are done."""
        return (self.directive.stop_after or None) if self.directive else None

    def steps_per_s(self) -> float | None:
        """Pace of the newest rounds; None while there are no two with a time."""
        return self._pace(lambda each: each.end_step)

    def micro_batches_per_s(self) -> float | None:
        """The same of what all contributors have counted."""
        return self._pace(lambda each: each.micro_batches)

    def round_s(self) -> float | None:
        """How long a round takes, the median of the newest; None while there are no two with a time."""
        times = [each.at_s for each in self.rounds[-PACE_ROUNDS - 1 :] if each.at_s]
        return median(after - before for before, after in itertools.pairwise(times)) if len(times) > 1 else None

    def pace(self) -> RoundPace | None:
        """What the newest rounds take of a contributor; None while there are no two with a time."""
        rounds_per_s, micro_batches_per_s = self._pace(lambda each: each.number), self.micro_batches_per_s()
        if not rounds_per_s or not micro_batches_per_s or not self.rounds[-1].contributors:
            return None
        last = self.rounds[-1]
        each_does = micro_batches_per_s / rounds_per_s / last.contributors
        return RoundPace(last.contributors, last.contribution_bytes, each_does, 1 / rounds_per_s, codec=last.codec)

    @property
    def counted(self) -> tuple[int, int]:
        """(contributions that the newest rounds' means are of, members of their rosters)."""
        newest = self.rounds[-COUNTED_OF:]
        return sum(each.contributors for each in newest), sum(each.members for each in newest)

    def _pace(self, counter: Callable[[PastRound], int]) -> float | None:
        timed = [each for each in self.rounds[-PACE_ROUNDS - 1 :] if each.at_s]
        if len(timed) < 2 or timed[-1].at_s <= timed[0].at_s:
            return None
        return (counter(timed[-1]) - counter(timed[0])) / (timed[-1].at_s - timed[0].at_s)

    def _forget(self) -> None:
        for kept in (self.rounds, self._heads, self._plans):
            kept.clear()
        self.ledger = Ledger()
        self._roster, self.directive = frozenset(), None
        self.sent_bytes = self.allreduce_bytes = 0.0

    def _take(self, certificate: Certificate, now: float) -> None:
        if not self._plans:
            self._plans = [self.first_plan, self.second_plan]
        self._heads.append(certificate.head)
        value = certificate.value
        self.directive = value.directive or self.directive
        members, self._roster = self._roster, frozenset(value.roster)
        if value.kind != "round":
            return
        plan = self.plan_for(value.round)
        before = self.rounds[-1] if self.rounds else None
        sizes, count = sum(entry.size_bytes for entry in value.entries), len(value.entries)
        others = max(0, count - 1)
        sent, allreduce = float(sizes * others), 2.0 * others * self.raw_bytes * plan.inner_steps
        if value.results:  # as peer/planning/sent.py has it, with the results' own sizes
            sent = VOUCHING * sizes * others / max(1, count) + others * sum(each.size_bytes for each in value.results)
        self.rounds.append(
            PastRound(
                number=value.round,
                at_s=closed_at(value.entries, not_before=before.at_s if before is not None else 0.0, now=now),
                micro_batches=(before.micro_batches if before is not None else 0)
                + sum(entry.micro_batches for entry in value.entries),
                loss=loss_of(value.entries),
                contributors=count,
                codec=plan.codec,
                rank=plan.rank,
                inner_steps=plan.inner_steps,
                end_step=plan.end,
                sent_bytes=sent / max(1, count),
                contribution_bytes=sizes / max(1, count),
                allreduce_bytes=allreduce / max(1, count),
                members=len(members | {entry.peer for entry in value.entries}),
            )
        )
        self.sent_bytes += sent
        self.allreduce_bytes += allreduce
        self.ledger.count(certificate)
        self._plans.append(value.plan)


def loss_of(entries: Iterable[Entry]) -> float | None:
    """The median of what contributors report, of those that do; None: nobody did."""
    said = [entry.report.loss_micronats / 1e6 for entry in entries if entry.report.loss_micronats]
    believable = [each for each in said if each <= MAX_LOSS]
    return median(believable) if believable else None


def closed_at(entries: Iterable[Entry], *, not_before: float, now: float) -> float:
    """The median of the contributors' clocks, within these bounds; without a report the round before's (0.0: unknown)."""
    said = [entry.report.closed_ms / 1000 for entry in entries if entry.report.closed_ms]
    return max(not_before, min(median(said), now)) if said else not_before


@dataclass(frozen=True, slots=True)
class Point:
    """Of a curve: a round, or the mean of several, named by the last of them."""

    last: PastRound
    loss: float | None
    contributors: float


def thinned(rounds: Sequence[PastRound], most: int = MAX_POINTS, exact: int = EXACT_POINTS) -> list[Point]:
    """At most `most` points: the newest rounds as they are, those before in equal groups."""
    if len(rounds) <= most:
        return [Point(each, each.loss, each.contributors) for each in rounds]
    old, new = rounds[:-exact], rounds[-exact:]
    size = -(-len(old) // (most - exact))
    points = []
    for start in range(0, len(old), size):
        group = old[start : start + size]
        losses = [each.loss for each in group if each.loss is not None]
        points.append(Point(group[-1], fmean(losses) if losses else None, fmean(each.contributors for each in group)))
    return points + [Point(each, each.loss, each.contributors) for each in new]


def evaluations_on(
    rounds: Sequence[PastRound], losses: dict[int, float], most: int = MAX_POINTS
) -> list[tuple[PastRound, float]]:
    """Validation losses by round, with their place on the curve, the newest `most`; of rounds that are not here none."""
    numbers = [each.number for each in rounds]
    found = []
    for number in sorted(losses)[-most:]:
        index = bisect.bisect_left(numbers, number)
        if index < len(numbers) and numbers[index] == number:
            found.append((rounds[index], losses[number]))
    return found
