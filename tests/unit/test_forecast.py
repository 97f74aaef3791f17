"""What `plan` reckons: what binds, and that it is what the parts of a peer reckon by themselves."""

from dataclasses import replace

import pytest

from dilocox_peer.config import preset
from dilocox_peer.manifest import Manifest
from dilocox_peer.model.activations import BodyFormat
from dilocox_peer.model.memory import StageSize
from dilocox_peer.model.partition import Costs, cut_into, cut_of
from dilocox_peer.peer.planning.forecast import (
    CODING_S,
    DELAY_S,
    PIPELINE_SHARE,
    RECOMPUTED,
    Forecast,
    Peers,
    best,
    busiest_share,
    forecast,
    line_share,
    operations,
)
from dilocox_peer.peer.planning.upkeep import FOLLOW_SHARE, KEPT_SHARE, RoundPace, talk_of_round
from dilocox_peer.peer.state import keeping
from dilocox_peer.pipeline.checks import FAR_SHARE

HOME = Peers(8, 20e6, 100e6, 0.05, 6000.0)
FAST = replace(HOME, uplink_bps=1e10, downlink_bps=1e10, round_trip_s=0.0)
RUN = preset("125m")


def test_one_stage_on_fast_lines_does_what_its_machines_do() -> None:
    found = forecast(RUN, FAST)
    assert found.binding == "compute"
    assert found.tokens_per_s == pytest.approx(8 * 6000)
    assert found.round_s == pytest.approx(found.setting.inner_steps * 4 * 8 * 1024 / 6000)
    assert found.duration_s * found.tokens_per_s == pytest.approx(1000 * 100 * 4 * 8 * 1024 * 8), (
        "all of the run's tokens"
    )
    assert found.needed_uplink_bps < FAST.uplink_bps


def test_stages_share_the_work_as_the_cut_shares_multiplications() -> None:
    run = cut_into(RUN, 4)
    found = forecast(run, FAST)
    tokens = run.inner.micro_batch * 1024
    assert found.replicas == 2
    assert found.micro_batch_s == pytest.approx(busiest_share(run) * tokens / 6000 / PIPELINE_SHARE)
    costs, cut = Costs.of(run.model), cut_of(run)
    assert busiest_share(run) >= max(cut) * costs.block_compute * 6 / operations(run)
    assert forecast(RUN, FAST).tokens_per_s > found.tokens_per_s > 0.5 * 8 * 6000


def test_on_a_home_line_activations_bind_and_the_line_that_would_do_is_told() -> None:
    run, narrow = cut_into(RUN, 4), replace(HOME, count=4)
    found, body = forecast(run, narrow), BodyFormat.of(run)
    assert found.binding == "activations"
    assert found.activation_bytes == body.step_bytes + body.hidden_bytes
    assert found.micro_batch_s == pytest.approx(8 * found.activation_bytes / 20e6)
    wide = replace(narrow, uplink_bps=1.01 * found.needed_uplink_bps, downlink_bps=1e10, round_trip_s=0.0)
    assert forecast(run, wide).binding == "compute"


def test_far_peers_wait_for_round_trips_unless_more_is_under_way() -> None:
    run = cut_into(RUN, 4)
    far = replace(FAST, round_trip_s=20.0)
    found = forecast(run, far)
    assert found.binding == "round trips"
    assert found.tokens_per_s < 0.5 * forecast(run, FAST).tokens_per_s


def test_rounds_bind_where_nothing_shorter_fits_a_line() -> None:
    found = forecast(preset("125m", rounds={"max_inner_steps": 100}), replace(HOME, uplink_bps=2e4))
    assert found.binding == "rounds"
    assert found.exchange_share > 0.9
    assert found.round_s >= found.exchange_s


def test_a_peer_that_is_alone_exchanges_nothing() -> None:
    found = forecast(RUN, replace(HOME, count=1))
    assert (found.exchange_s, found.times_fewer) == (0.0, 0.0)
    assert sent_of_work(found) == pytest.approx(3 * found.contribution_bytes), "to who keeps the run"
    assert forecast(RUN, HOME).exchange_s > DELAY_S


def test_who_keeps_the_run_takes_a_copy_or_a_tenth_of_a_line_that_is_too_narrow_for_that() -> None:
    assert (KEPT_SHARE, FOLLOW_SHARE) == (keeping.LINE_SHARE, keeping.FOLLOW_SHARE)
    wide, narrow = (forecast(RUN, replace(HOME, count=2, uplink_bps=bps)) for bps in (1e9, 1e6))
    for found, copies in ((wide, 4.0), (narrow, 1 + KEPT_SHARE / found_share(narrow))):
        assert sent_of_work(found) == pytest.approx(copies * found.contribution_bytes, rel=0.01)


@pytest.mark.parametrize("bps", [1e6, 3e5])
def test_no_round_waits_for_the_copy_of_who_keeps_the_run(bps: float) -> None:
    wide, narrow = (forecast(RUN, replace(HOME, count=1, uplink_bps=each)) for each in (1e8, bps))
    assert (narrow.binding, narrow.tokens_per_s) == ("compute", wide.tokens_per_s)
    assert narrow.duration_s == wide.duration_s
    assert narrow.sent_bytes_a_day == pytest.approx(86400 * bps / 8), "what the line has"


def test_nothing_is_told_that_the_line_does_not_carry() -> None:
    """Where activations fill it, the copy of who keeps the run was told on top: 2.7 % more than there is."""
    cases = [(cut, count, bps) for cut in (1, 2, 4) for count in (4, 16) for bps in (1e6, 1e7, 1e8, 1e9)]
    found = [forecast(cut_into(RUN, cut), replace(HOME, count=count, uplink_bps=bps)) for cut, count, bps in cases]
    assert {each.binding for each in found} == {"activations", "compute"}
    for each, (_, _, bps) in zip(found, cases, strict=True):
        assert each.sent_bytes_a_day <= 86400 * bps / 8 * 1.000001


def sent_of_work(found: Forecast) -> float:
    """Bytes a round, but for messages and the directory."""
    talk = talk_of_round(RoundPace(found.replicas, 0, 0, found.setting.inner_steps * found.step_s))
    return found.sent_bytes_a_day * found.round_s / 86400 - talk


def found_share(found: Forecast) -> float:
    """Of a round, that the line is busy with the contribution to one other peer."""
    return 8 * found.contribution_bytes / 1e6 / (found.setting.inner_steps * found.step_s)


def test_memory_is_what_a_claim_reckons_and_recomputing_costs_a_third() -> None:
    size = StageSize.of(RUN, 0)
    plain, lean = size.host_bytes(), size.host_bytes(checkpointing=True)
    roomy, tight, none = (forecast(RUN, replace(FAST, memory_bytes=room)) for room in (plain, plain - 1, lean - 1))
    assert (roomy.memory_bytes, roomy.recomputes, roomy.binding) == (plain, False, "compute")
    assert (tight.memory_bytes, tight.recomputes, tight.binding) == (lean, True, "compute")
    assert tight.micro_batch_s == pytest.approx(RECOMPUTED * roomy.micro_batch_s)
    assert none.binding == "memory"
    assert best([none]) is None


def test_the_best_is_the_fastest_that_fits_and_of_equal_ones_the_fewer_stages() -> None:
    cuts = [forecast(cut_into(RUN, count), replace(HOME, memory_bytes=9 * 10**9)) for count in (1, 2, 4)]
    chosen = best(cuts)
    assert chosen is not None
    assert chosen.tokens_per_s == max(each.tokens_per_s for each in cuts if each.binding != "memory")
    assert best([cuts[0], replace(cuts[0], stages=2)]) is cuts[0]


def test_who_is_beyond_the_cap_has_no_place() -> None:
    found = forecast(RUN, replace(HOME, count=100))
    assert found.replicas == RUN.limits.max_peers
    assert found.peers < 100


def test_fewer_peers_than_stages_are_refused() -> None:
    with pytest.raises(ValueError, match="4 stages need as many peers, there are 3"):
        forecast(cut_into(RUN, 4), replace(HOME, count=3))


@pytest.mark.parametrize(
    ("replicas", "down", "share"), [(2, 1.0, 0.8), (3, 1.0, 0.66), (4, 1.4, 0.66), (4, 1.5, 0.8), (64, 5.0, 0.8)]
)
def test_more_than_two_on_even_lines_send_with_less_of_theirs(replicas: int, down: float, share: float) -> None:
    assert line_share(replicas, replace(HOME, downlink_bps=down * HOME.uplink_bps)) == share


def test_what_waits_at_those_who_receive_is_in_an_exchange() -> None:
    even, home = (forecast(RUN, replace(HOME, downlink_bps=down)) for down in (20e6, 100e6))
    assert even.setting == home.setting
    times = (even.exchange_s - DELAY_S) / (home.exchange_s - DELAY_S)
    assert 1.1 < times < 0.8 / 0.66


def test_stages_at_one_site_share_its_line_for_rounds_and_keep_activations_at_home() -> None:
    run, lines = cut_into(RUN, 4), replace(HOME, count=8)
    apart, together = (forecast(run, replace(lines, by_site=each)) for each in (False, True))
    assert (apart.binding, together.binding) == ("activations", "compute")
    assert together.micro_batch_s == pytest.approx(busiest_share(run) * together_tokens(run) / 6000 / PIPELINE_SHARE)
    assert together.activation_bytes == apart.activation_bytes, "between two stages as many"
    assert together.sent_bytes_a_day < 0.2 * apart.sent_bytes_a_day, "over the line"
    alone = forecast(RUN, replace(HOME, count=2, by_site=True))
    assert alone == forecast(RUN, replace(HOME, count=2)), "a replica of one stage is one peer"


def together_tokens(run: Manifest) -> int:
    return run.inner.micro_batch * run.model.context


def test_an_exchange_by_site_has_all_contributions_of_the_site_on_one_line() -> None:
    steps = dict.fromkeys(("inner_steps", "min_inner_steps", "max_inner_steps"), 500)
    run = preset("125m", compression={"codec": "int4", "adapt": "off"}, rounds=steps)
    wide = replace(HOME, count=2, round_trip_s=0.0)
    one = forecast(run, wide)
    two = forecast(cut_into(run, 2), replace(wide, count=4, by_site=True))
    crossed = (
        two.activation_bytes / FAR_SHARE * 8 / two.micro_batch_s
    )  # a stage of two is an end: each sends a body, and gets one
    slower = wide.uplink_bps / (wide.uplink_bps - 2 * crossed)
    travels = [each.exchange_s - DELAY_S - CODING_S * each.parameters for each in (one, two)]
    assert travels[1] == pytest.approx(slower * travels[0], rel=0.01), "two halves at once, beside what checks send"


def test_a_micro_batch_is_on_its_way_as_long_as_a_full_window_takes() -> None:
    run = cut_into(preset("125m", inner={"accumulate": 32, "micro_batch": 1}), 2)
    near, far = (forecast(run, replace(FAST, round_trip_s=seconds)) for seconds in (0.0, 1.0))
    assert near.way_s == pytest.approx(6 * near.micro_batch_s), "two a stage, and two on the way"
    assert far.way_s > near.way_s + 1.0
    assert far.micro_batch_s == near.micro_batch_s, "a window that grows with the way keeps all busy"
    drained = with_schedule(run, "flush")
    assert forecast(drained, FAST).way_s == pytest.approx(32 * near.micro_batch_s)
    assert forecast(RUN, FAST).way_s == forecast(RUN, FAST).micro_batch_s


def with_schedule(run: Manifest, schedule: str) -> Manifest:
    return run.model_copy(update={"stages": run.stages.model_copy(update={"schedule": schedule})})
