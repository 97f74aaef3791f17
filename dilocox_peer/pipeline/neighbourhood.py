"""What a peer knows of the pipeline around it, and tells its neighbours (HopStatus): speeds, places, routes, rounds.

It holds the books on who is linked, and what follows from them: the plan (which callee gets what part of our
micro-batches), the window, the number of slots, and how far the stages before and behind have certified. It decides about
no micro-batch; upstream.py, downstream.py and scheduler.py read it. Pure: inputs and the desk's time in, Statuses out.
"""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from dilocox_peer.pipeline.contract import Rounds, RouteChanged
from dilocox_peer.pipeline.flight import RECENT, Tray
from dilocox_peer.pipeline.routes import (
    AnswerTimes,
    Callee,
    RoutePlan,
    Transfers,
    believe,
    find_far,
    make_plan,
    places,
    planned_on,
)
from dilocox_peer.pipeline.slots import Slots, num_slots, origin_window
from dilocox_peer.pipeline.told_losses import ToldLosses
from dilocox_peer.pipeline.versions import Mode
from dilocox_peer.types import PeerId
from dilocox_peer.wire.declared import replaced
from dilocox_peer.wire.hops import MAX_SECONDS, MAX_WINDOW, HopStatus, MicroBatchId, Step

SERVICE_FROM = 32  # newest work times that the median looks at
NEWS_S = 0.1  # between two HopStatuses of what has changed
MOST_PATH_S, MOST_WIDTH = 600.0, 4096.0  # that a callee is believed to have behind it


@dataclass(slots=True)
class Caller:
    """What we know of a linked peer of the stage before."""

    peer: PeerId
    status: HopStatus | None = None
    window: int = 0
    transfers: Transfers = field(default_factory=Transfers)  # of its Steps

    @property
    def plans_on_us(self) -> bool:
        return self.status is None or self.status.high > self.status.low


@dataclass(frozen=True, slots=True)
class Role:
    """Where a scheduler stands, for its whole life."""

    stage: int
    num_stages: int
    mode: Mode
    accumulate: int
    max_slots: int
    site: str = ""

    @property
    def is_origin(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1


class Neighbourhood:
    """window: how many micro-batches we may have under way: an origin's window, or half of our slots."""

    def __init__(self, desk: Tray, role: Role, slots: Slots) -> None:
        """slots: gets its capacity here."""
        self._desk, self._slots = desk, slots
        self._role, self._is_origin = role, role.is_origin
        self.callers: dict[PeerId, Caller] = {}
        self.callees: dict[PeerId, Callee] = {}
        self.replicas = 1  # of our own stage
        self.plan = RoutePlan({}, 0.0)
        self.rounds = Rounds(0, 0, None)
        self.behind = 0  # the lowest certified round from our stage to the last, as known
        self.status_at = desk.now  # when the next HopStatus is due
        self._stage0_certified = 0
        self._news_at = float("-inf")  # when what changes may be told again at once
        self._told: tuple[int, int, int, int] | None = None
        self._losses = ToldLosses()
        self._forward_s: deque[float] = deque(maxlen=SERVICE_FROM)
        self._backward_s: deque[float] = deque(maxlen=SERVICE_FROM)
        self._service_s = 0.0
        self._is_service_stale = False
        # Caller and origin of the newest micro-batches.
        self._recent: deque[tuple[PeerId, PeerId]] = deque(maxlen=RECENT)
        self._recent_counts: Counter[tuple[PeerId, PeerId]] = Counter()
        self._origin_rounds: dict[tuple[PeerId, PeerId], int] = {}
        slots.capacity = self._capacity()
        self.window = self._compute_window()

    # ---- neighbours ----

    def add_caller(self, peer: PeerId) -> None:
        self.callers[peer] = Caller(peer)

    def add_callee(self, peer: PeerId) -> None:
        self.callees[peer] = Callee(peer, self._answer_times(), self._answer_times(), heard_at=self._desk.now)
        self._update_behind()
        self.replan("linked", is_wanted=True)

    def _answer_times(self) -> AnswerTimes:
        timing = self._desk.timing
        return AnswerTimes(
            start_s=timing.overdue_start_s, floor_s=timing.overdue_floor_s, cap_s=timing.overdue_cap_s,
            mad_factor=timing.mad_factor,
        )  # fmt: skip

    def remove_callee(self, peer: PeerId) -> Callee | None:
        callee = self.callees.pop(peer, None)
        if callee is not None:
            self._update_behind()
            self.replan("unlinked", is_wanted=True)
        return callee

    def round_trip(self, peer: PeerId, seconds: float) -> None:
        callee = self.callees.get(peer)
        if callee is not None:
            callee.rtt_s = seconds
            self.window = self._compute_window()

    def transferred(self, peer: PeerId, seconds: float) -> None:
        """A body of a neighbour has come in, which took so long."""
        neighbour = self.callers.get(peer) or self.callees.get(peer)
        if neighbour is not None:
            neighbour.transfers.observe(seconds, self._desk.now)

    def heard(self, peer: PeerId, status: HopStatus) -> None:
        """A neighbour says how it is."""
        stage = self._role.stage
        caller = self.callers.get(peer)
        if caller is not None and status.stage == stage - 1:
            self._heard_caller(caller, status)
            return
        callee = self.callees.get(peer)
        if callee is None or status.stage != stage + 1:
            return
        is_first = callee.status is None
        # No more than a pipeline can be: we tell others what it comes to, and they refuse what is beyond all bounds.
        callee.status = replaced(status, path_s=min(status.path_s, MOST_PATH_S), width=min(status.width, MOST_WIDTH))
        callee.known_outstanding = callee.outstanding
        callee.behind = status.behind
        self._update_behind()
        self.replan("speed", is_wanted=is_first)

    def _heard_caller(self, caller: Caller, status: HopStatus) -> None:
        caller.status = status
        self.judge_stage0()
        own = (caller.peer, caller.peer)
        if status.stage == 0 and own in self._recent_counts:
            self._origin_rounds[own] = max(self._origin_rounds[own], status.training_round)

    def judge_stage0(self) -> None:
        """What more than half of those that are linked say at least: one that lies cannot end our rounds, nor any of them once it is gone."""
        claims = sorted(each.status.stage0_certified for each in self.callers.values() if each.status is not None)
        if claims:
            self._stage0_certified = claims[(len(claims) - 1) // 2]
        else:  # nobody is linked: what was known stays, as far as it ends one round
            self._stage0_certified = min(self._stage0_certified, self.rounds.training)

    # ---- rounds ----

    @property
    def stage0_certified(self) -> int:
        """Rounds that stage 0 has certified, as known."""
        return self.rounds.certified if self._is_origin else self._stage0_certified

    @property
    def is_drifting(self) -> bool:
        """Whether the stages behind are two rounds late, so that an origin waits for them."""
        return self.rounds.certified - self.behind >= 2

    def set_rounds(self, rounds: Rounds) -> None:
        is_new = rounds.certified != self.rounds.certified
        self.rounds = rounds
        self._update_behind()
        if is_new:
            self.replan("round", is_wanted=True)

    def told_loss(self, peer: PeerId, loss: float) -> float:
        """What a callee tells with a gradient; NaN if that of most of its is another than the other callees'."""
        return self._losses.heard(peer, loss, among=self.callees)

    def heard_behind(self, callee: Callee, behind: int) -> None:
        """A gradient says it too."""
        if callee.behind != behind:
            callee.behind = behind
            self._update_behind()

    def _update_behind(self) -> None:
        known = sorted(callee.behind for callee in self.callees.values() if callee.behind is not None)
        # They have one chain, so the lowest is only the slowest to tell; and one that lies cannot hold the origins for ever.
        self.behind = min([self.rounds.certified, *known[len(known) // 2 :][:1]])

    def may_send(self, caller: PeerId, id_: MicroBatchId) -> bool:
        """Whether that micro-batch may come from there: the callers of stage 1 are the origins. Else one could have another's not computed here, by
        claiming its id first."""
        return self._role.stage != 1 or id_.origin == caller

    def note_origin(self, caller: PeerId, message: Step) -> None:
        """A micro-batch of its origin has come. At stage 1 that is the caller, whatever the message says. Further behind
        nobody can tell, so what a caller says counts for the work that came from it alone: one that lies about the rounds
        of others' origins ends nobody's."""
        source = (caller, caller if self._role.stage == 1 else message.id.origin)
        counts = self._recent_counts
        if len(self._recent) == RECENT:
            oldest = self._recent[0]
            counts[oldest] -= 1
            if not counts[oldest]:
                del counts[oldest], self._origin_rounds[oldest]
        self._recent.append(source)
        counts[source] += 1
        self._origin_rounds[source] = max(self._origin_rounds.get(source, 0), message.round)

    def recent_origins(self) -> dict[tuple[PeerId, PeerId], tuple[int, int]]:
        """By caller and origin: the latest round, and how many of our last 64 micro-batches were theirs."""
        return {source: (self._origin_rounds[source], count) for source, count in sorted(self._recent_counts.items())}

    def num_origins(self, listed: int) -> int:
        """Origins that we work for, of the last 64 micro-batches, as far as it is plausible; listed: those with a lease.

        A caller of a later stage may invent them. So no more are counted than are listed; or one more than there are
        callers, as peers spread over the stages evenly (assignment.py) and leases are read minutes late.
        """
        origins = len({origin for _, origin in self._recent_counts})
        return origins if self._role.stage == 1 else min(origins, max(listed, len(self.callers) + 1))

    # ---- speeds ----

    @property
    def service_s(self) -> float:
        """Median seconds of own compute a micro-batch, 0 before the first."""
        if self._is_service_stale:
            self._is_service_stale = False
            parts = [median(times) for times in (self._forward_s, self._backward_s) if times]
            if self._role.is_last or len(parts) == 2:
                self._service_s = sum(parts)
        return self._service_s

    def forward_took(self, seconds: float) -> None:
        self._forward_s.append(seconds)
        self._is_service_stale = True

    def backward_took(self, seconds: float) -> None:
        self._backward_s.append(seconds)
        self._is_service_stale = True

    @property
    def path_s(self) -> float:
        """Round trips from here to the last stage, the longest way that the plan takes."""
        ways = [
            callee.rtt_s + (callee.status.path_s if callee.status is not None else 0.0)
            for callee in self._planned_callees()
        ]
        return max(ways, default=0.0)

    @property
    def slowest_s(self) -> float:
        """The largest service time from here to the last stage."""
        behind = [callee.status.slowest_s for callee in self._planned_callees() if callee.status is not None]
        return max([self.service_s, *behind])

    def _planned_callees(self) -> list[Callee]:
        return [self.callees[peer] for peer in self.plan.weights if peer in self.callees]

    # ---- plan, window, slots ----

    def replan(self, reason: str, *, is_wanted: bool) -> None:
        """A new plan when it differs; is_wanted: also when it hardly does."""
        believe(self.callees)
        find_far(self.callees, self._role.site, self._desk.now)
        plan = make_plan(self.callees)
        if is_wanted or not plan.is_near(self.plan):
            is_same = plan.is_near(self.plan)
            self.plan = plan
            if not is_same:
                percent = tuple((peer, round(100 * part)) for peer, part in sorted(plan.weights.items()))
                self._desk.note(RouteChanged(percent, reason))
        self.window = self._compute_window()

    def _compute_window(self) -> int:
        role = self._role
        if not self._is_origin:
            return min(max(1, self._slots.capacity // 2), MAX_WINDOW)
        if role.mode == "flush":
            return min(role.accumulate, MAX_WINDOW)
        stations = max(float(role.num_stages), 1.0 + self.plan.width)
        return origin_window(stations=stations, way_s=self.path_s, slowest_s=self.slowest_s, accumulate=role.accumulate)

    def resize(self) -> None:
        """As many slots as callers and replicas ask for now; whoever waits for one is granted it by upstream.py."""
        self._slots.capacity = self._capacity()
        if not self._is_origin:
            self.window = self._compute_window()

    def _capacity(self) -> int:
        role = self._role
        if self._is_origin:
            return 1
        announced = max((caller.window for caller in self.callers.values()), default=0)
        if role.stage == 1:  # its callers are origins, of which none has more under way than a step takes
            announced = min(announced, role.accumulate)
        return num_slots(
            window=announced or 2 * role.num_stages, callers=len(self.callers), replicas=self.replicas,
            max_slots=role.max_slots,
        )  # fmt: skip

    # ---- telling ----

    def tell_news(self) -> None:
        """A HopStatus to all if a round field has changed since the last one; soon, if another has just told of a change: one neighbour could have all
        of them told at each of its own."""
        rounds = self.rounds
        stage0_certified = rounds.certified if self._is_origin else self._stage0_certified
        if (rounds.training, rounds.certified, stage0_certified, self.behind) == self._told:
            return
        if self._desk.now >= self._news_at:
            if self._told is not None:
                self._news_at = self._desk.now + NEWS_S
            self.tell_all()
        else:
            self.status_at = min(self.status_at, self._news_at)

    def tell_all(self) -> None:
        desk = self._desk
        self.status_at = desk.now + desk.timing.status_s
        self._told = (self.rounds.training, self.rounds.certified, self.stage0_certified, self.behind)
        if not self.callers and not self.callees:
            return
        where = self._caller_places()
        planned = planned_on(self.callees)
        for peer in (*self.callees, *self.callers):
            desk.send(peer, self._status_for(peer, where, planned))

    def tell(self, peer: PeerId) -> None:
        """A HopStatus to one that has just been linked."""
        self._desk.send(peer, self._status_for(peer, self._caller_places(), planned_on(self.callees)))

    def _status_for(
        self, peer: PeerId, where: Mapping[PeerId, tuple[float, float]], planned: Mapping[PeerId, Callee]
    ) -> HopStatus:
        caller = self.callers.get(peer)
        if caller is None:
            return self._status((0.0, 1.0) if peer in planned else (0.0, 0.0))
        return self._status(where.get(peer, (0.0, 0.0)), caller.transfers.median_s(self._desk.now) or 0.0)

    def _caller_places(self) -> Mapping[PeerId, tuple[float, float]]:
        return places(
            {
                peer: caller.status.service_s if caller.status is not None else 0.0
                for peer, caller in self.callers.items()
                if caller.plans_on_us
            }
        )

    def _status(self, place: tuple[float, float], body_s: float = 0.0) -> HopStatus:
        low, high = place
        return HopStatus(
            stage=self._role.stage, training_round=self.rounds.training, certified=self.rounds.certified,
            stage0_certified=self.stage0_certified, behind=self.behind, service_s=float(self.service_s),
            load=self._slots.in_use + self._slots.num_waiting, path_s=float(min(self.path_s, MAX_SECONDS)), slowest_s=float(self.slowest_s),
            width=float(min(self.plan.width, MAX_SECONDS)), low=float(low), high=float(high), body_s=float(min(body_s, MAX_SECONDS)),
            site=self._role.site,
        )  # fmt: skip
