"""To which peer of the next stage a micro-batch goes: near, sticky, weighted, and without asking anybody.

Near first: bodies that cross a slow or long way cost their time on lines that rounds need. A callee of our own site is near, one of
another is not; where a volunteer says nothing, a callee is near to which a body and its answer take not much longer than to the
nearest. Until that is measured a callee has one micro-batch of ours at a time. A caller tells each callee whether it plans on it.

Two rulers. Callers, sorted by id and as long as they are fast, lie end to end on [0, 1]; so do the callees. A caller
uses the callees that its own piece overlaps, in proportion. Every callee tells its callers their places (HopStatus), so
all lay the same rulers without another message: 4 callers of 4 equal callees pair off, one caller of five spreads over
all, and nobody herds. What a peer tells of its speed counts as at most MOST_COUNTED times the median of the others: by its word alone none
draws the others' work to itself. Among its callees a caller takes the one with the fewest of its own micro-batches per weight, so
the flow follows what each callee really does, not what it says.

Expected waits only mend: when the planned callee's exceeds the best other's by half a window of service, the
micro-batch goes there instead. Pure: inputs and time in, choices out.
"""

import math
import statistics
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from dilocox_peer.types import PeerId
from dilocox_peer.wire.hops import HopStatus

MOST_COUNTED = 4.0  # of a speed that a peer tells of itself, times the median of the others
LEARNED_FROM = 32  # newest samples a learned time looks at
LEAST_WEIGHT = 1e-6
PLAN_MOVES = 0.1  # total weight that must have moved before a plan is replaced
TRANSFERS_FROM = 8  # newest transfers of a body that a median looks at
FAR, NEAR_AGAIN = 3.0, 2.0  # times the nearest: beyond the first a callee is far, within the second it is no longer
ALIKE_S, ALIKE_SHARE = 0.01, 0.05  # ways that differ by less are alike, or by less than this of a micro-batch's work
MEASURED_S = 600.0  # after so long a way is measured again


class Transfers:
    """How long bodies of one neighbour take to come in, from their first byte to the last."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=TRANSFERS_FROM)
        self._until = float("-inf")

    def observe(self, seconds: float, now: float) -> None:
        self._until = now + MEASURED_S
        self._seconds.append(seconds)

    def median_s(self, now: float) -> float | None:
        """None: not measured, or long ago."""
        if self._seconds and now >= self._until:
            self._seconds.clear()
        return statistics.median(self._seconds) if self._seconds else None


class AnswerTimes:
    """Answer times of one callee: median + k * MAD, between a floor and a cap; `start` until there are samples.

    Never under four times the median: the first answers come through empty queues and say little about full ones, and
    where all take the same time the MAD is 0. What is sent again by mistake takes its time from all the others.
    """

    def __init__(self, *, start_s: float, floor_s: float, cap_s: float, mad_factor: float) -> None:
        self._samples: deque[float] = deque(maxlen=LEARNED_FROM)
        self._floor_s, self._cap_s, self._mad_factor = floor_s, cap_s, mad_factor
        self._patience_s: float | None = start_s
        self.median_s = 0.0

    def observe(self, seconds: float) -> None:
        self._samples.append(seconds)
        self._patience_s = None

    @property
    def patience_s(self) -> float:
        """How long an answer may take. Computed when asked for: samples come far more often."""
        if self._patience_s is None:
            self.median_s = statistics.median(self._samples)
            mad = statistics.median([abs(sample - self.median_s) for sample in self._samples])
            wanted = self.median_s + max(self._mad_factor * mad, 3 * self.median_s)
            self._patience_s = min(max(wanted, self._floor_s), self._cap_s)
        return self._patience_s


@dataclass(slots=True)
class Callee:
    """What we know of a linked peer of the next stage."""

    peer: PeerId
    answers: AnswerTimes
    grants: AnswerTimes
    rtt_s: float = 0.0
    transfers: Transfers = field(default_factory=Transfers)  # of its answers
    is_far: bool = False
    least_s: float = 0.0  # believed of what it tells of its service
    status: HopStatus | None = None
    outstanding: int = 0  # our calls that it has, from Reserve to Grad
    known_outstanding: int = 0  # the same, when its last HopStatus came
    behind: int | None = None
    avoid_until: float = 0.0  # it refused: leave it alone until then
    late_until: float = -math.inf  # it was late or silent: the same, while another is linked that was not
    heard_at: float = -math.inf  # its newest message
    calls: set[int] = field(default_factory=set)

    def is_open(self, now: float) -> bool:
        """Whether it may be asked."""
        return max(self.avoid_until, self.late_until) <= now

    @property
    def service_s(self) -> float:
        """As far as it is believed; 0: not known."""
        told = 0.0 if self.status is None else self.status.service_s
        return max(told, self.least_s) if told else 0.0

    def way_s(self, now: float) -> float | None:
        """What a body to it or from it takes, the slower of the two, and a round trip; None: not known."""
        told = self.status.body_s if self.status is not None else 0.0
        answer_s = self.transfers.median_s(now)
        return None if answer_s is None else max(answer_s, told) + self.rtt_s

    def load(self) -> int:
        """Micro-batches it has granted or lets wait, as far as we know."""
        told = 0 if self.status is None else self.status.load
        return max(told + self.outstanding - self.known_outstanding, self.outstanding, 0)


def speeds(service_s: Sequence[float]) -> list[float]:
    """Micro-batches a second of each, as far as it is believed; who has not measured counts as the mean of the others."""
    told = sorted(1.0 / seconds for seconds in service_s if seconds > 0)
    most = MOST_COUNTED * statistics.median(told[:-1]) if len(told) > 1 else math.inf
    usual = statistics.fmean(min(each, most) for each in told) if told else 1.0
    return [min(1.0 / seconds, most) if seconds > 0 else usual for seconds in service_s]


def places(service_s: Mapping[PeerId, float]) -> dict[PeerId, tuple[float, float]]:
    """The piece of [0, 1] that each peer covers, in the order of their ids, as long as it is fast."""
    peers = sorted(service_s)
    rates = speeds([service_s[peer] for peer in peers])
    total, low, found = sum(rates), 0.0, {}
    for peer, rate in zip(peers, rates, strict=True):
        high = min(low + rate / total, 1.0)
        found[peer] = (low, high)
        low = high
    return found


@dataclass(frozen=True, slots=True)
class RoutePlan:
    """weights: parts of our own micro-batches by callee, summing to 1. width: how many peers behind us work for us,
    our shares of them and of those behind them added up."""

    weights: Mapping[PeerId, float]
    width: float

    def is_near(self, other: "RoutePlan") -> bool:
        """Whether replacing one by the other would hardly change a route."""
        if self.weights.keys() != other.weights.keys():
            return False
        moved = sum(abs(weight - other.weights[peer]) for peer, weight in self.weights.items())
        return moved < PLAN_MOVES and abs(self.width - other.width) < PLAN_MOVES * max(self.width, 1.0)


def believe(callees: Mapping[PeerId, Callee]) -> None:
    """Says of each callee how fast it may claim to be: a wait at one that lies would else seem to be none."""
    told = {peer: callee.status.service_s if callee.status is not None else 0.0 for peer, callee in callees.items()}
    for (peer, callee), speed in zip(callees.items(), speeds(list(told.values())), strict=True):
        callee.least_s = 1.0 / speed if told[peer] else 0.0


def find_far(callees: Mapping[PeerId, Callee], site: str, now: float) -> None:
    """Says of each callee whether it is far. site: ours, "" where the volunteer says none."""
    ways = {peer: callee.way_s(now) for peer, callee in callees.items()}
    nearest_s = min((way_s for way_s in ways.values() if way_s is not None), default=None)
    for peer, callee in callees.items():
        its_site, way_s = callee.status.site if callee.status is not None else "", ways[peer]
        if site and its_site:
            callee.is_far = site != its_site
        elif nearest_s is None or way_s is None:
            callee.is_far = False  # to be found out
        else:
            alike_s = max(ALIKE_S, ALIKE_SHARE * callee.service_s)
            callee.is_far = way_s > (NEAR_AGAIN if callee.is_far else FAR) * nearest_s + alike_s


def planned_on(callees: Mapping[PeerId, Callee]) -> dict[PeerId, Callee]:
    """The near ones; where all are far, all."""
    return {peer: callee for peer, callee in callees.items() if not callee.is_far} or dict(callees)


def make_plan(callees: Mapping[PeerId, Callee]) -> RoutePlan:
    """Lays our place among the callers over the callees, the near ones if there are any."""
    if not callees:
        return RoutePlan({}, 0.0)
    callees = planned_on(callees)
    ruler = places({peer: callee.service_s for peer, callee in callees.items()})
    overlaps: dict[PeerId, float] = {}
    width = 0.0
    for peer, (low, high) in ruler.items():
        status = callees[peer].status
        from_, to = status.place if status is not None else (0.0, 1.0)
        overlap = max(0.0, min(high, to) - max(low, from_))
        if overlap > LEAST_WEIGHT:
            overlaps[peer] = overlap
            width += overlap / (high - low) * (1.0 + (status.width if status is not None else 0.0))
    if not overlaps:  # the callees' statuses are of different moments
        overlaps = {peer: high - low for peer, (low, high) in ruler.items()}
    total = sum(overlaps.values())
    return RoutePlan({peer: overlap / total for peer, overlap in overlaps.items()}, width)


def choose(
    callees: Mapping[PeerId, Callee], plan: RoutePlan, *, now: float, window: int, exclude: Collection[PeerId] = ()
) -> tuple[PeerId | None, str]:
    """The callee for the next micro-batch, and why it: "plan", or "wait" when the plan's is too busy, or "only". None: there is
    "nobody", or each has one of ours to be "measured" by."""
    allowed = {
        peer: callee for peer, callee in callees.items() if peer not in exclude and callee.avoid_until <= now
    }  # fmt: skip
    usable = {peer: callee for peer, callee in allowed.items() if callee.late_until <= now}
    if not usable and all(callee.late_until > now for callee in callees.values()):
        usable = allowed  # there is nobody left to be slower than
    if not usable:
        return None, "nobody"
    if len(callees) > 1:
        usable = {peer: each for peer, each in usable.items() if not each.outstanding or each.way_s(now) is not None}
        if not usable:
            return None, "measured"
    planned = [peer for peer in plan.weights if peer in usable]
    if not planned:
        return min(usable, key=lambda peer: (expected_wait_s(usable[peer]), peer)), "only"
    weights = plan.weights
    best = min(planned, key=lambda peer: ((usable[peer].outstanding + 1) / weights[peer], peer))
    if len(usable) > 1 and (service_s := usable[best].service_s) > 0:
        wait_s = expected_wait_s(usable[best])
        if wait_s > service_s * window / 2:
            waits_s = {peer: expected_wait_s(each) + _way_there_s(each, now) for peer, each in usable.items()}
            other = min(waits_s, key=lambda peer: (waits_s[peer], peer))
            if wait_s - waits_s[other] > service_s * window / 2:
                return other, "wait"
    return best, "plan"


def _way_there_s(callee: Callee, now: float) -> float:
    """What being far adds: those on their way go over its line one after another, there and back."""
    return 2 * (callee.outstanding + 1) * (callee.way_s(now) or 0.0) if callee.is_far else 0.0


def expected_wait_s(callee: Callee) -> float:
    """Time until a micro-batch sent now would be begun; by count alone while the speed is unknown."""
    return (callee.load() + 1) * (callee.service_s or 1e-3)
