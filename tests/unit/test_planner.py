"""Plans: what may follow what, who decides, and what peers with equal chains make of equal reports."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox_peer.config import preset
from dilocox_peer.model.architecture import layout_of
from dilocox_peer.model.memory import StageSize, contribution_bytes
from dilocox_peer.network.uplink import SMALLEST_BYTES, UplinkMeter
from dilocox_peer.peer.planning.adaptive_planner import LinkPlanner, RankPlanner, measurement_of, planner_of
from dilocox_peer.peer.planning.measured import Measured
from dilocox_peer.peer.planning.plan import PlanBounds, first_plan, plan_bounds
from dilocox_peer.peer.planning.planner import SURE_AFTER, FixedPlanner, JudgingPlanner, Warmup
from dilocox_peer.peer.planning.timetable import Timetable
from dilocox_peer.peer.planning.worked import Worked
from dilocox_peer.peer.rounds.adoption import PLANNED_FROM, show_newest
from dilocox_peer.peer.rounds.chain import Chain, Place
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.chain import MAX_QUANTITY, Certificate, Entry, Plan, Report
from dilocox_peer.wire.declared import MAX_COUNT, replaced
from dilocox_peer.wire.directives import Directive

HEAD = Digest(b"h" * 32)


class Run:
    """A stage's chain as its peers' planners see it: every round is led by one of them in turn."""

    def __init__(self, manifest, peers=4, planners=4, blob_bytes=70_000):
        self.manifest, self.blob_bytes = manifest, blob_bytes
        self.bounds = plan_bounds(manifest)
        self.planners = [planner_of(manifest, layout_of(manifest, 0)) for _ in range(planners)]
        self.peers = [PeerId(f"peer{index}") for index in range(peers)]
        first = first_plan(manifest)
        self.place = replace(
            Place.genesis(0, HEAD, FixedPlanner(self.bounds).next(first)),
            roster=tuple(self.peers),
            voters=tuple(self.peers),
        )
        self.plans = {1: first, 2: self.place.plan}

    def round(self, report, peers=None):
        """peers: that contribute, all if not said."""
        proposals = {planner.next(self.place.plan) for planner in self.planners}
        assert len(proposals) == 1, "peers with the same chain decide alike"
        entries = [Entry(peer, 1, HEAD, self.blob_bytes, 32, b"", report) for peer in peers or self.peers]
        value = self.place.round_value(entries, self.peers, proposals.pop())
        assert self.place.why_not(value, 0, 16, self.bounds) is None
        certificate = Certificate(0, self.place.head, 0, 0, value, ())
        for planner in self.planners:
            planner.observe(certificate)
        self.place = self.place.then(certificate)
        self.plans[value.round + 2] = value.plan
        return self.plans[value.round]

    def until_the_end(self, report_of):
        number = 0
        while True:
            number += 1
            plan = self.round(report_of(self.plans[number]))
            if self.bounds.is_last(plan):
                return number


BLOB_BYTES = {"int4": 135_000, "int2": 68_000, "sign": 34_000, "topk": 16_000}


def exchange(plan, *, uplink_bps, delay_s=0.02, step_s=0.05, peers=4):
    transfer_s = 8 * BLOB_BYTES.get(plan.codec, 500_000) * (peers - 1) / uplink_bps
    return Report(round(uplink_bps / 1000), round(1e6 * step_s), round(1000 * (delay_s + transfer_s)), 400, 0)


def manifest_with(rounds=None, **compression):
    return preset(
        "tiny", compression={"codec": "int2", **compression}, rounds={"total": 200, "inner_steps": 32, **(rounds or {})}
    )


def test_on_a_slow_link_rounds_grow_and_the_run_keeps_its_steps():
    run = Run(manifest_with())
    rounds = run.until_the_end(lambda plan: exchange(plan, uplink_bps=2e5))
    last = run.plans[rounds]
    assert last.end == 200 * 32, "the steps of the manifest, to the last one"
    assert rounds < 200
    assert max(plan.inner_steps for plan in run.plans.values()) > 32
    for number in range(1, rounds):
        assert run.plans[number + 1].first_step == run.plans[number].end


def test_on_a_fast_link_rounds_shrink_as_far_as_the_bytes_allow():
    run = Run(manifest_with())
    run.until_the_end(lambda plan: exchange(plan, uplink_bps=1e9, delay_s=0.001))
    settled = run.plans[60]
    assert settled.inner_steps < 32
    assert settled.codec in ("sign", "topk"), "200 times fewer bytes at shorter rounds need a leaner codec"


@pytest.mark.parametrize(("first", "richest"), [("sign", "int4"), ("int4", "int4"), ("int8", "int8"), ("fp16", "fp16")])
def test_on_the_fastest_link_no_plan_takes_more_memory_than_members_were_told(first, richest):
    """A richer codec gains a twentieth of a percent, and takes 1 to 7 bytes a parameter that nobody who joined was told of."""
    manifest = preset(
        "tiny", stages={"count": 2}, compression={"codec": first, "times_fewer": 0}, rounds={"total": 200, "inner_steps": 32}
    )  # fmt: skip
    run = Run(manifest)
    run.until_the_end(lambda plan: exchange(plan, uplink_bps=1e9, delay_s=0.001))
    told = StageSize.of(manifest, 0).contribution_bytes
    assert {contribution_bytes(plan.codec) for plan in run.plans.values()} == {told}
    assert run.place.plan.codec == richest


def settled_run() -> tuple[Run, int]:
    """After 60 rounds, and the H that it has come to."""
    run = Run(manifest_with())
    for number in range(1, 61):
        run.round(exchange(run.plans[number], uplink_bps=4e6))
    return run, run.place.plan.inner_steps


def test_a_member_that_falls_out_moves_no_plan_while_the_others_still_wait_for_it():
    """Five rounds waited for it, and the plan doubled H for the next fourteen."""
    run, settled = settled_run()
    for number in range(61, 81):
        delay_s = 1.5 if 62 <= number <= 66 else 0.02  # a round's exchange is reported with the next
        run.round(exchange(run.plans[number], uplink_bps=4e6, delay_s=delay_s), run.peers[:3])
    assert {run.plans[number].inner_steps for number in range(61, 83)} == {settled}


def test_an_exchange_that_takes_longer_from_then_on_is_planned_for():
    run, settled = settled_run()
    for number in range(61, 91):
        gone = number % 2  # one falls out of every other round
        run.round(exchange(run.plans[number], uplink_bps=4e6, delay_s=1.5), run.peers[gone:])
    assert run.place.plan.inner_steps > settled


def test_several_stages_keep_their_rounds():
    manifest = preset(
        "tiny", stages={"count": 2}, rounds={"total": 60, "inner_steps": 32}, compression={"codec": "int2"}
    )
    run = Run(manifest)
    assert run.until_the_end(lambda plan: exchange(plan, uplink_bps=1e5)) == 60
    assert {plan.inner_steps for number, plan in run.plans.items() if number <= 60} == {32}
    assert run.plans[60].codec == "topk", "what may change there is the codec"


def test_the_rank_follows_the_spectrum_and_the_rounds_the_rank():
    manifest = preset(
        "small",
        compression={"codec": "lowrank-int4", "rank": 64, "adapt": "rank"},
        rounds={"total": 100, "inner_steps": 32, "min_inner_steps": 8},
    )
    run = Run(manifest, planners=2)
    assert isinstance(run.planners[0], RankPlanner)
    for _ in range(30):
        run.round(Report(0, 50_000, 10, 300, 20))
    assert run.place.plan.rank == 20
    assert run.place.plan.inner_steps == 10  # 32 * 20 / 64


def test_a_planner_shown_the_chain_again_decides_as_before():
    run = Run(manifest_with(), planners=1)
    certificates: list[Any] = []
    for number in range(1, 31):
        report = exchange(run.plans[number], uplink_bps=1e6)
        before = run.place
        run.round(report)
        certificates.append((before, run.place))
    planner = planner_of(run.manifest, layout_of(run.manifest, 0))
    place = Place.genesis(0, HEAD, FixedPlanner(run.bounds).next(first_plan(run.manifest)))
    for number, (_, after) in enumerate(certificates, 1):
        entries = [
            Entry(peer, 1, HEAD, 70_000, 32, b"", exchange(run.plans[number], uplink_bps=1e6)) for peer in run.peers
        ]
        certificate = Certificate(0, place.head, 0, 0, place.round_value(entries, run.peers, after.plan), ())
        planner.observe(certificate)
        place = place.then(certificate)
    assert planner.next(place.plan) == run.planners[0].next(run.place.plan)


def planned(codec, inner_steps):
    """A planner that has seen this plan certified, and the plan."""
    run = Run(manifest_with(), planners=1)
    planner = run.planners[0]
    assert isinstance(planner, LinkPlanner)
    odd = replaced(planner.next(run.place.plan), codec=codec, inner_steps=inner_steps)
    value = run.place.round_value([], run.peers, odd)
    assert run.place.why_not(value, 0, 16, run.bounds) is None
    planner.observe(Certificate(0, HEAD, 0, 0, value, ()))
    return planner, odd


def test_what_was_planned_otherwise_by_more_than_a_step_is_followed():
    planner, odd = planned("topk", 16)
    assert planner.next(odd) == Plan("topk", odd.rank, 16, odd.end)


def test_nobody_draws_the_planners_along_step_by_step():
    planner, odd = planned("int4", 16)
    assert planner.next(odd) == Plan("int2", odd.rank, 32, odd.end)


def test_a_plan_more_than_a_step_from_ours_is_refused():
    run = Run(manifest_with(), planners=1)
    planner = JudgingPlanner(run.planners[0])
    wish = planner.next(run.place.plan)
    assert (wish.codec, wish.inner_steps) == ("int2", 32)
    for changes in ({}, {"codec": "int4"}, {"codec": "sign"}, {"inner_steps": 16}, {"inner_steps": 64}):
        assert planner.why_not(replaced(wish, **changes), run.place.plan) is None, changes
    for changes in ({"codec": "none"}, {"codec": "topk"}, {"inner_steps": 15}, {"inner_steps": 65}):
        assert planner.why_not(replaced(wish, **changes), run.place.plan) is not None, changes
    reason = planner.why_not(replaced(wish, codec="none", inner_steps=8), run.place.plan)
    assert reason == "plans none, 8 steps where the certificates lead to int2, 32 steps"


def test_a_planner_that_learns_nothing_lets_no_step_pass():
    run = Run(manifest_with(adapt="off"), planners=1)
    planner = JudgingPlanner(run.planners[0])
    wish = planner.next(run.place.plan)
    assert planner.why_not(wish, run.place.plan) is None
    assert planner.why_not(replaced(wish, rank=wish.rank + 1), run.place.plan) is not None


def test_a_planner_that_came_into_the_middle_of_a_chain_judges_after_a_while():
    """After a restart the newest 256 certificates are shown to it, and after a switch those of two branches."""
    run = Run(manifest_with(), planners=1)
    certificates: list[Any] = []
    observe = run.planners[0].observe

    def watched(certificate: Certificate, bounds: PlanBounds | None = None) -> None:
        certificates.append(certificate)
        observe(certificate, bounds)

    run.planners[0].observe = watched  # type: ignore[method-assign]  # what it is shown, by the real one
    for number in range(1, SURE_AFTER + 12):
        run.round(exchange(run.plans[number], uplink_bps=1e6))
    planner = JudgingPlanner(planner_of(run.manifest, layout_of(run.manifest, 0)))
    odd = replaced(run.planners[0].next(run.place.plan), codec="none")
    for certificate in certificates[11:-1]:
        planner.observe(certificate)
        assert planner.why_not(odd, run.place.plan) is None
    planner.observe(certificates[-1])
    assert planner.why_not(odd, run.place.plan) is not None
    assert planner.why_not(run.planners[0].next(run.place.plan), run.place.plan) is None


def extended_run(chain: list[Certificate]) -> tuple[Run, JudgingPlanner]:
    """Ten times as long as the manifest says, as its owner wants from round 10 on. On a slow link until round 60, then on a fast one."""
    run = Run(manifest_with(rounds={"total": 40}), planners=1)
    judge = JudgingPlanner(run.planners[0])
    for number in range(1, 101):
        if number == 10:
            run.place = replace(run.place, directive=Directive(HEAD, 1, total_steps=400 * 32))
        bounds = run.place.bounds(run.bounds)
        report = exchange(run.plans[number], uplink_bps=2e5 if number < 60 else 1e9)
        entries = [Entry(peer, 1, HEAD, 70_000, 32, b"", report) for peer in run.peers]
        value = run.place.round_value(entries, run.peers, judge.next(run.place.plan, bounds))
        assert run.place.why_not(value, 0, 16, run.bounds) is None
        chain.append(Certificate(0, run.place.head, 0, 0, value, ()))
        run.place = run.place.then(chain[-1])
        run.plans[value.round + 2] = value.plan
        judge.observe(chain[-1], run.place.bounds(run.bounds))
    return run, judge


def test_a_run_that_was_made_longer_is_planned_by_what_is_measured_past_its_first_end() -> None:
    """Nothing was learned there: plans stayed as they were at that end, and who had been restarted since refused them."""
    chain: list[Certificate] = []
    run, judge = extended_run(chain)
    assert run.plans[60].first_step > 40 * 32
    assert run.plans[60].inner_steps > 32
    assert run.place.plan.inner_steps < 32
    bounds = run.place.bounds(run.bounds)
    newcomer = JudgingPlanner(planner_of(run.manifest, layout_of(run.manifest, 0)))
    for certificate in chain[-SURE_AFTER - 3 :]:
        newcomer.observe(certificate, bounds)
    assert newcomer.why_not(judge.next(run.place.plan, bounds), run.place.plan, bounds) is None
    assert judge.why_not(newcomer.next(run.place.plan, bounds), run.place.plan, bounds) is None


@pytest.mark.parametrize("seed", range(3))
def test_who_is_restarted_after_ends_that_were_moved_wishes_what_the_others_wish(seed: int) -> None:
    """Twice the run's last round is planned, and cut short, before its owner makes the run longer. Whoever was shown all that by the length of
    now took the short rounds for wishes, and those with one another's plans refused them."""
    rng = random.Random(seed)
    run = Run(manifest_with(rounds={"total": 40}), planners=1)
    judge, chain, bounds = JudgingPlanner(run.planners[0]), Chain(run.place), run.bounds
    uplink_bps, number, directives = 2e5, 0, 0
    while not bounds.is_last(run.plans[number + 1]):
        number += 1
        uplink_bps = 10 ** rng.uniform(5.0, 7.5) if rng.random() < 0.1 else uplink_bps
        directive = None
        if bounds.is_last(run.place.plan) and directives < 2:
            directives += 1
            directive = Directive(HEAD, directives, total_steps=(40 + 60 * directives) * 32)
        entries = [
            Entry(peer, 1, HEAD, 70_000, 32, b"", exchange(run.plans[number], uplink_bps=uplink_bps))
            for peer in run.peers
        ]
        value = run.place.round_value(entries, run.peers, judge.next(run.place.plan, bounds), directive)
        assert bounds.why_not(value.plan, run.place.plan) is None
        chain.append(Certificate(0, run.place.head, 0, 0, value, ()))
        run.place = chain.place
        bounds = run.place.bounds(run.bounds)
        run.plans[value.round + 2] = value.plan
        show_newest(judge, chain, run.bounds, 1)
        if number % 3 == 0:
            restarted = JudgingPlanner(planner_of(run.manifest, layout_of(run.manifest, 0)))
            show_newest(restarted, chain, run.bounds)
            assert restarted.next(run.place.plan, bounds) == judge.next(run.place.plan, bounds)
    assert directives == 2


def test_a_round_that_was_cut_short_at_the_first_end_shortens_no_other() -> None:
    run = Run(manifest_with(rounds={"total": 4, "inner_steps": 30, "min_inner_steps": 8}, adapt="link"), planners=1)
    planner, place = run.planners[0], replace(run.place, plan=Plan("int2", 64, 30, 87))
    bounds = replace(run.bounds, total_steps=100 * 30)
    planned = []
    for index in range(7):
        plan = planner.next(place.plan) if not index else JudgingPlanner(planner).next(place.plan, bounds)
        value = place.round_value([], run.peers, plan)
        certificate = Certificate(0, place.head, 0, 0, value, ())
        place = place.then(certificate)
        planner.observe(certificate, bounds if index else run.bounds)
        planned.append(plan.inner_steps)
    assert planned == [3, 8, 16, 30, 30, 30, 30]


@pytest.mark.parametrize("seed", range(4))
def test_planners_with_all_and_with_the_newest_certificates_are_within_a_step(seed):
    """Links that come and go, a chain of 400 rounds, and a restart after every 20: nobody refuses anybody."""
    rng = random.Random(seed)
    run = Run(manifest_with(rounds={"total": 4000}), planners=1)
    certificates: list[Any] = []
    observe = run.planners[0].observe

    def watched(certificate: Certificate, bounds: PlanBounds | None = None) -> None:
        certificates.append(certificate)
        observe(certificate, bounds)

    run.planners[0].observe = watched  # type: ignore[method-assign]  # what it is shown, by the real one
    uplink_bps = 1e6
    for number in range(1, 401):
        if rng.random() < 0.02:
            uplink_bps = 10 ** rng.uniform(5.0, 7.5)
        noisy = uplink_bps * rng.uniform(0.7, 1.4)
        run.round(exchange(run.plans[number], uplink_bps=noisy))
        if number % 20 == 0 and not run.bounds.is_last(run.place.plan):
            planner = JudgingPlanner(planner_of(run.manifest, layout_of(run.manifest, 0)))
            for certificate in certificates[-PLANNED_FROM:]:
                planner.observe(certificate)
            assert planner.why_not(run.planners[0].next(run.place.plan), run.place.plan) is None, number


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"first_step": 70}, "from step 70"),
        ({"codec": "nonsense"}, "does not use"),
        ({"rank": 5000}, "rank 5000"),
        ({"inner_steps": 128}, "128 inner steps after 32"),
        ({"inner_steps": 15}, "15 inner steps after 32"),
    ],
)
def test_plans_outside_the_bounds_are_refused(changes, reason):
    manifest = manifest_with()
    place = Place.genesis(0, HEAD, FixedPlanner(plan_bounds(manifest)).next(first_plan(manifest)))
    value = place.round_value([], [PeerId("a")])
    assert place.why_not(value, 0, 16, plan_bounds(manifest)) is None
    bad = replaced(value, plan=replaced(value.plan, **changes))
    assert reason in (place.why_not(bad, 0, 16, plan_bounds(manifest)) or "")


@given(st.integers(0, 2**32), st.integers(1, 5000))
def test_whatever_is_wished_the_plans_tile_the_run(seed, total):
    rng = random.Random(seed)
    bounds = PlanBounds(("int2",), 64, 4, 128, total)
    plan = bounds.after(Plan("int2", 1, 8, -8), codec="int2", rank=1, inner_steps=8)
    assert plan.first_step == 0
    for _ in range(5000):
        if bounds.is_last(plan):
            break
        wished = bounds.after(plan, codec="int2", rank=1, inner_steps=rng.randrange(1, 1000))
        assert bounds.why_not(wished, plan) is None
        plan = wished
    assert plan.end == total


def test_rounds_warm_up_by_doubling():
    warmup = Warmup(4, 32, 10_000)
    assert [warmup.inner_steps_at(step) for step in (0, 299, 300, 599, 600, 1200, 2400, 9999)] == [
        4,
        4,
        8,
        8,
        16,
        32,
        32,
        32,
    ]
    manifest = manifest_with(rounds={"first_inner_steps": 4}, adapt="off")
    run = Run(manifest, planners=1)
    rounds = run.until_the_end(lambda plan: Report())
    lengths = [run.plans[number].inner_steps for number in range(1, rounds + 1)]
    assert lengths[0] == 4
    assert sorted(set(lengths[:-1])) == [4, 8, 16, 32]
    assert sum(lengths) == 6400


def test_the_timetable_reads_as_the_manifest_until_it_has_learned():
    table = Timetable(preset("tiny", rounds={"total": 10, "inner_steps": 8}, inner={"accumulate": 3}))
    assert [table.plan(number).first_step for number in (1, 2, 10, 11)] == [0, 8, 72, 80]
    assert (table.share(4), table.is_after_last(10), table.is_after_last(11)) == (24, False, True)
    assert table.position(3, 0.5) == pytest.approx(20 / 80)
    assert table.position(3, 7.0) == pytest.approx(24 / 80)
    table.learn({3: Plan("sign", 0, 16, 16)})
    assert table.plan(3).codec == "sign"
    assert (table.plan(4).first_step, table.share(4)) == (32, 48)
    assert table.position(4, 1.0) == pytest.approx(48 / 80)
    assert table.plan(6).end == 80
    assert (table.is_after_last(6), table.is_after_last(7)) == (False, True)


def test_by_tokens_the_position_is_what_certificates_count_and_what_the_last_round_lets_expect():
    inner = {"accumulate": 2, "micro_batch": 4, "tokens": 1000 * 4 * 64}  # 1000 micro-batches
    table = Timetable(preset("tiny", rounds={"total": 10, "inner_steps": 8}, inner=inner))
    assert table.goes_by_tokens
    assert not Timetable(preset("tiny")).goes_by_tokens
    assert table.position(1, 0.5) == pytest.approx(8 / 1000)
    table.learn_work(3, 120, 50)
    assert table.position(4, 0.0) == pytest.approx(0.12)
    assert table.position(4, 7.0) == pytest.approx(0.17)
    assert table.position(5, 0.5) == pytest.approx(0.195)
    table.learn_work(30, 990, 50)
    assert table.position(32, 1.0) == 1.0


def test_a_batch_ramp_makes_the_first_rounds_smaller_by_steps_and_by_tokens():
    inner = {"accumulate": 4, "first_accumulate": 1, "batch_ramp": 0.5, "micro_batch": 4}
    rounds = {"total": 10, "inner_steps": 8}
    table = Timetable(preset("tiny", rounds=rounds, inner=inner))
    assert [table.micro_batches_a_step(number) for number in range(1, 8)] == [1, 1, 2, 2, 3, 4, 4]
    assert [table.share(number) for number in (1, 3, 7)] == [8, 16, 32]
    table = Timetable(preset("tiny", rounds=rounds, inner={**inner, "tokens": 1000 * 4 * 64}))
    assert table.share(1) == 8
    table.learn_work(3, 250, 50)
    assert (table.micro_batches_a_step(4), table.micro_batches_a_step(5)) == (2, 2)
    table.learn_work(8, 500, 50)
    assert table.share(9) == 32


def test_work_is_summed_over_whatever_branch_is_the_chain():
    def certificate(name, number, *counts):
        entries = [SimpleNamespace(micro_batches=count) for count in counts]
        return cast("Any", SimpleNamespace(head=name, value=SimpleNamespace(round=number, entries=entries)))

    chain = [certificate(b"a", 0), certificate(b"b", 1, 3, 4), certificate(b"c", 1), certificate(b"d", 2, 5)]
    worked = Worked()
    assert worked.by(9) == 0
    worked.follow(chain[:2])
    worked.follow(chain)
    assert [worked.by(number) for number in (-1, 0, 1, 2, 3)] == [0, 0, 7, 12, 12]
    worked.follow([*chain[:3], certificate(b"e", 2, 1, 1)])
    assert worked.by(2) == 9
    worked.follow([*chain[:3], certificate(b"f", 2, 5, 4, 2**31)])
    assert worked.by(2) == 7 + 5 + 4 + 4 * 5, "one of three claims all the work of the run"


def test_a_peer_reports_its_steps_and_its_exchange():
    measured = Measured()
    assert measured.on_close(10.0, tokens=800, tokens_a_step=200, lost=0.25, uplink_bps=0.0) == Report(0, 0, 0, 250, 0)
    measured.on_merge(0.125, needed_rank=7)
    assert measured.on_close(14.0, tokens=1600, tokens_a_step=200, lost=2.0, uplink_bps=2.5e6) == Report(
        2500, 1_000_000, 125, 1000, 7
    )
    measured.on_merge(None, needed_rank=0)
    assert measured.on_close(15.0, tokens=1600, tokens_a_step=200, lost=0.0, uplink_bps=0.0).step_us == 0


@pytest.mark.parametrize(
    ("train_loss", "wall_s", "reported"),
    [
        (2.5, 1_700_000_000.9, (2_500_000, 1_700_000_000_900)),
        (float("nan"), 0.0, (0, 0)),
        (float("inf"), -5.0, (0, 0)),
        (-1.0, 1e30, (0, MAX_COUNT)),
        (1e-9, 1.0, (1, 1000)),
        (1e300, 1.0, (MAX_QUANTITY, 1000)),
    ],
)
def test_a_peer_reports_its_loss_and_when_it_closed_a_round(train_loss, wall_s, reported):
    said = Measured().on_close(
        10.0, tokens=800, tokens_a_step=200, lost=0.0, uplink_bps=0.0, train_loss=train_loss, wall_s=wall_s
    )
    assert (said.loss_micronats, said.closed_ms) == reported


def test_a_missed_round_or_a_pause_makes_no_step_slower():
    """A step takes one second: what was reported was two after a missed round, and hours after a pause."""
    measured = Measured()
    measured.on_close(10.0, tokens=800, tokens_a_step=200, lost=0.0, uplink_bps=0.0)
    measured.on_merge(1.0, needed_rank=0)
    measured.on_merge(None, needed_rank=0)  # certified without us
    assert (
        measured.on_close(18.0, tokens=800 + 8 * 200, tokens_a_step=200, lost=0.0, uplink_bps=0.0).step_us == 1_000_000
    )
    for second in range(20, 7200):
        measured.on_idle(float(second), tokens=2600)
    assert (
        measured.on_close(7203.0, tokens=2600 + 4 * 200, tokens_a_step=200, lost=0.0, uplink_bps=0.0).step_us
        == 1_000_000
    )


def test_a_step_takes_the_harmonic_mean_and_the_transfer_is_no_delay():
    entries = [
        Entry(PeerId(name), 1, HEAD, 125_000, 8, b"", Report(8000, step_us, 600, 0, 0))
        for name, step_us in (("a", 50_000), ("b", 150_000))
    ]
    measured = measurement_of(7, entries, 1.0)
    assert measured is not None
    assert measured.step_s == pytest.approx(0.075)
    assert measured.delay_s == pytest.approx(0.6 - 0.125)
    assert measurement_of(7, [replaced(entries[0], report=Report())], 1.0) is None


def test_the_uplink_is_measured_over_replies_side_by_side():
    meter = UplinkMeter()
    meter.begin(0.0)
    meter.sent(SMALLEST_BYTES // 2)
    meter.end(0.9)
    assert meter.bps == 0.0, "that little tells of the way there and back"
    meter.begin(10.0)
    meter.begin(10.5)
    meter.sent(SMALLEST_BYTES)
    meter.end(11.0)
    meter.sent(SMALLEST_BYTES)
    meter.end(12.0)
    assert meter.bps == pytest.approx(8 * 2 * SMALLEST_BYTES / 2.0)


def test_who_is_alone_plans_for_two():
    run = Run(manifest_with(), peers=1, planners=1)
    for number in range(1, 41):
        run.round(exchange(run.plans[number], uplink_bps=1e9, delay_s=0.001, peers=1))
    assert {plan.codec for plan in run.plans.values()} <= {"int2", "sign", "topk"}
