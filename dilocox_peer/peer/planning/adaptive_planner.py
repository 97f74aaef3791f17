"""The planners that adapt: from what contributors report in certificates to codec, rank and H. Pure.

    LinkPlanner   adapt = "link": controller.py, so that an exchange takes at most its share of a round
    RankPlanner   adapt = "rank": DiLoCoX's rule, the rank from the spectrum and H with it (adaptive.py)

Reports of certificate t are measured up to round t; the plan decided next, in certificate t + 1, is of round t + 3.
"""

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from dilocox_peer.compression.ladder import LOW_RANK, codecs_beside
from dilocox_peer.manifest import Manifest
from dilocox_peer.model.memory import contribution_bytes
from dilocox_peer.peer.planning.adaptive import AdaptiveRank, Observation, RankSettings, inner_steps_of
from dilocox_peer.peer.planning.controller import WINDOW, Controller, Limits, Measurement, Setting
from dilocox_peer.peer.planning.plan import PlanBounds, adapts_inner_steps, first_plan, plan_bounds, total_steps
from dilocox_peer.peer.planning.planner import (
    Continuity,
    FixedPlanner,
    Planner,
    Warmup,
    is_a_step,
)
from dilocox_peer.peer.planning.sent import contributions_sent
from dilocox_peer.peer.planning.told import slow_link, told_by_most, usual_step_s
from dilocox_peer.types import Layout, PeerId
from dilocox_peer.wire.chain import Certificate, Entry, Plan
from dilocox_peer.wire.declared import replaced

UNMEASURED_KBPS = 1_000_000  # of a peer whose contributions never filled a buffer
PLANNED_AHEAD = 2  # a certificate plans the round after next


class LinkPlanner:
    """Follows the controller; during a warm-up of H it watches and keeps to the warm-up.

    A plan that was certified is taken for its own only if it is further away than a step: by steps that honest members let
    pass, one after the other, a hostile leader would else draw all of them where it likes.
    """

    is_exact = False

    def __init__(
        self, controller: Controller, bounds: PlanBounds, *, warmup: Warmup | None = None, is_sliced: bool = False
    ) -> None:
        """is_sliced: contributions are averaged in slices."""
        self._controller = controller
        self._is_sliced = is_sliced
        self._bounds = bounds
        self._warmup = warmup
        self._continuity = Continuity()
        self._exchanges = _Exchanges()
        self._planned: Plan | None = None  # by the newest certificate of a round
        self.reason = ""

    def observe(self, certificate: Certificate, bounds: PlanBounds | None = None) -> None:
        value = certificate.value
        self._continuity.observe(certificate)
        until_now, self._bounds = self._bounds, bounds or self._bounds
        if value.kind != "round":
            return
        self._exchanges.certified(value.entries)
        before, self._planned = self._planned, value.plan
        is_cut_short = until_now.is_last(value.plan) or self._bounds.is_last(value.plan)
        if self._is_warming_up(value.plan.first_step) or is_cut_short:
            return
        planned = Setting(value.plan.codec, value.plan.rank, value.plan.inner_steps)
        wish = self._controller.setting
        wished = replaced(value.plan, codec=wish.codec, rank=wish.rank, inner_steps=wish.inner_steps)
        if before is not None and before.end == value.plan.first_step:
            # H doubles at most: after a short one it is not there yet.
            wished = self._bounds.after(before, codec=wish.codec, rank=wish.rank, inner_steps=wish.inner_steps)
        if not (self._continuity.is_sure and is_a_step(value.plan, wished)):
            self._controller.adopt(planned, value.round + PLANNED_AHEAD)
        copies = contributions_sent(len(value.entries), value.plan.codec, is_sliced=self._is_sliced)
        measured = measurement_of(value.round, value.entries, copies)
        if measured is not None:
            measured = replace(measured, delay_s=self._exchanges.delay_s(measured.delay_s))
            _, reason = self._controller.observe(measured)
            self.reason = reason or self.reason

    def next(self, before: Plan) -> Plan:
        setting = self._controller.setting
        steps = setting.inner_steps
        if self._warmup is not None and self._is_warming_up(before.end):
            steps = self._warmup.inner_steps_at(before.end)
        return self._bounds.after(before, codec=setting.codec, rank=setting.rank, inner_steps=steps)

    def _is_warming_up(self, step: int) -> bool:
        return self._warmup is not None and not self._warmup.is_over_at(step)


class _Exchanges:
    """The delay to plan with. What contributors report with a round is that of the round before, and if a member fell out of that one it
    is mostly a wait.

    Members wait so in a few rounds, and then no more (rounds/conduct.py): a plan made for it would be left a moment later. So the delay
    before stands in for it, for at most WINDOW rounds in a row.
    """

    def __init__(self) -> None:
        self._contributors: deque[frozenset[PeerId]] = deque(maxlen=WINDOW + 2)  # of the newest rounds
        self._taken_s: float | None = None
        self._num_passed = 0  # delays that were not taken, in a row

    def certified(self, entries: Sequence[Entry]) -> None:
        """A round with these."""
        self._contributors.append(frozenset(entry.peer for entry in entries))

    def delay_s(self, reported_s: float) -> float:
        """In seconds, where the newest round's contributors report so many."""
        *earlier, exchanged = list(self._contributors)[:-1] or [frozenset[PeerId]()]
        is_short = bool(frozenset[PeerId]().union(*earlier) - exchanged)
        if is_short and self._taken_s is not None and self._num_passed < WINDOW:
            self._num_passed += 1
            return self._taken_s
        self._num_passed, self._taken_s = 0, reported_s
        return reported_s


class RankPlanner:
    """The paper's: rank from the spectrum of the mean over a window of rounds; H in proportion to it, where it may change."""

    is_exact = False

    def __init__(self, ranks: AdaptiveRank, first: Plan, bounds: PlanBounds) -> None:
        self._ranks = ranks
        self._first = first
        self._bounds = bounds
        self._continuity = Continuity()
        self.reason = ""

    def observe(self, certificate: Certificate, bounds: PlanBounds | None = None) -> None:
        value = certificate.value
        self._continuity.observe(certificate)
        needed = told_by_most([entry.report.needed_rank for entry in value.entries])
        if value.kind != "round":
            return
        if not (self._continuity.is_sure and is_a_step(value.plan, replaced(value.plan, rank=self._ranks.rank))):
            self._ranks.adopt(value.plan.rank, value.round + PLANNED_AHEAD)
        if needed:
            lost = statistics.median_low([entry.report.lost_permille for entry in value.entries]) / 1000
            before, needs = self._ranks.rank, statistics.median_low(needed)
            if self._ranks.observe(Observation(value.round, needs, lost)) != before:
                self.reason = f"the mean needs rank {needs}, {lost:.0%} stays in the residual"

    def next(self, before: Plan) -> Plan:
        rank = self._ranks.rank
        steps = inner_steps_of(rank, first_rank=self._first.rank, first_inner_steps=self._first.inner_steps)
        return self._bounds.after(before, codec=before.codec, rank=rank, inner_steps=steps)


def planner_of(manifest: Manifest, layout: Layout) -> Planner:
    """The planner that the manifest asks for."""
    bounds, compression, rounds = plan_bounds(manifest), manifest.compression, manifest.rounds
    warmup = None
    if rounds.first_inner_steps:
        warmup = Warmup(rounds.first_inner_steps, rounds.inner_steps, total_steps(manifest))
    if compression.adapt == "link":
        controller = controller_of(manifest, layout)
        return LinkPlanner(controller, bounds, warmup=warmup, is_sliced=bool(manifest.rounds.num_slices))
    if compression.adapt == "rank" and compression.codec == LOW_RANK:
        ranks = AdaptiveRank(RankSettings.of(layout, compression.rank))
        return RankPlanner(ranks, first_plan(manifest), bounds)
    return FixedPlanner(bounds, warmup=warmup)


def controller_of(manifest: Manifest, layout: Layout) -> Controller:
    """What adapt = "link" decides by, as the manifest bounds it. No codec takes more memory than the one that the run begins with: members were told that much."""
    bounds, compression, rounds = plan_bounds(manifest), manifest.compression, manifest.rounds
    is_free, told = adapts_inner_steps(manifest), contribution_bytes(compression.codec)
    limits = Limits(
        smallest_inner_steps=bounds.smallest_inner_steps if is_free else rounds.inner_steps,
        largest_inner_steps=bounds.largest_inner_steps if is_free else rounds.inner_steps,
        codecs=tuple(each for each in codecs_beside(compression.codec) if contribution_bytes(each) <= told),
        times_fewer=compression.times_fewer,
        budget=compression.exchange_share,
        is_sliced=bool(manifest.rounds.num_slices),
    )
    return Controller(layout, Setting(compression.codec, compression.rank, rounds.inner_steps), limits)


def measurement_of(round_number: int, entries: Sequence[Entry], copies: float) -> Measurement | None:
    """What a round's contributors report, as the controller takes it; None if most of them have not measured a step yet. copies: of its
    contribution that each sent."""
    reports = [entry.report for entry in entries]
    step_s = usual_step_s([report.step_us for report in reports])
    if step_s is None:
        return None
    uplinks_bps = tuple(1000.0 * (report.uplink_kbps or UNMEASURED_KBPS) for report in reports)
    exchanges_ms = told_by_most([report.exchange_ms for report in reports])
    exchange_s = statistics.median_low(exchanges_ms) / 1000 if exchanges_ms else 0.0
    size_bytes = statistics.median(entry.size_bytes for entry in entries)
    transfer_s = 8 * size_bytes * copies / slow_link(uplinks_bps)
    needed = told_by_most([report.needed_rank for report in reports])
    return Measurement(
        round=round_number,
        uplinks_bps=uplinks_bps,
        step_s=step_s,
        delay_s=max(0.0, exchange_s - transfer_s),
        residual=statistics.median_low([report.lost_permille for report in reports]) / 1000,
        needed_rank=statistics.median_low(needed) if needed else None,
    )
