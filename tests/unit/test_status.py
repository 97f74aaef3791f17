"""A peer's status is a fold over its events: speeds from what moved, health with its reason, a map of who holds what."""

import json

import pytest

from dilocox_peer.cli.operate import peer_lines
from dilocox_peer.cli.screen import Size, render
from dilocox_peer.events import (
    EquivocationProved,
    Event,
    Failed,
    Left,
    MemberDoubted,
    MessageRefused,
    NeighbourLinked,
    NeighbourLost,
    Paused,
    PipelineProgress,
    Resumed,
    RoundCertified,
    RunComplete,
    SeenPeer,
    StageClaimed,
    StageSeen,
    SwarmSeen,
)
from dilocox_peer.events_of_costs import MonthCounted
from dilocox_peer.events_of_data import Evaluated
from dilocox_peer.events_of_reach import TurnedAway
from dilocox_peer.events_of_rounds import ContributionClipped, ContributionRefused, ContributionsMissed
from dilocox_peer.events_of_states import StageCopied, StateFetchFailed
from dilocox_peer.peer.status import MAX_LINE, MAX_LOG, MAX_PEERS, STALLED_S, Status, printable, stage_words
from dilocox_peer.peer.summary import summary
from dilocox_peer.types import PeerId
from tests.unit.dashboard_data import LAST, MATES, ME, certified, joined, progress, status


def folded(*events: Event, at_s: float = 100.0) -> Status:
    found = Status()
    for event in events:
        found.take(event, at_s)
    return found


def lease(name: str, stage: int, speed: float = 1000.0) -> SeenPeer:
    return SeenPeer(PeerId(name), stage, speed, 1, "direct")


def test_rates_are_of_what_moved_and_fall_to_zero_when_nothing_does():
    found = folded(joined())
    for second in range(8):
        found.take(progress(second), 100.0 + second)
    assert found.rates.tokens_per_s() == pytest.approx(8700.0)
    assert found.rates.up_bytes_per_s() == pytest.approx(350_000.0)
    assert found.busy() == pytest.approx(0.94)
    for second in range(8, 15):
        found.take(progress(7), 100.0 + second)
    assert found.rates.tokens_per_s() == found.rates.up_bytes_per_s() == found.busy() == 0.0


def test_who_has_left_is_no_faster_than_nothing():
    """With its month used up a peer waits for weeks: its last speed stood on the screen and in the metrics meanwhile."""
    found = folded(joined(), *(progress(second) for second in range(3)))
    for second in range(8):
        found.take(progress(second), 100.0 + second)
    found.take(Left("the 50 GB are used up"), 108.0)
    said = summary(found, 1000.0)
    assert (said["tokens_per_s"], said["busy"], said["up_bytes_per_s"], said["down_bytes_per_s"]) == (
        0.0,
        0.0,
        0.0,
        0.0,
    )


def test_counters_that_begin_anew_after_a_restart_give_no_negative_rate():
    found = folded(joined(), progress(500))
    found.take(joined(), 101.0)
    found.take(progress(0), 102.0)
    found.take(progress(1), 103.0)
    assert found.rates.tokens_per_s() == pytest.approx(8700.0)


def test_health_names_its_reason():
    assert Status().health(0.0) == ("wait", "starting")
    working = folded(joined(stages=1, stage=0), progress(0))
    assert working.health(100.5) == ("ok", "ok")
    assert working.health(110.0)[0] == "bad"
    working.take(progress(0), 100.0 + STALLED_S + 1)
    health, why = working.health(100.0 + STALLED_S + 1)
    assert health == "bad"
    assert "no micro-batch for 31 s" in why


def test_a_paused_peer_is_not_stalled_and_counts_anew_when_it_trains_again():
    found = folded(joined(stages=1, stage=0), progress(0), Paused("asked to"))
    found.take(progress(0), 500.0)
    assert found.phase == "paused"
    assert found.health(500.0) == ("wait", "paused: asked to")
    found.take(Resumed("asked to"), 501.0)
    found.take(progress(0), 502.0)
    assert found.health(502.0) == ("ok", "ok")


@pytest.mark.parametrize(
    ("event", "phase"),
    [(Left("interrupted"), "left"), (RunComplete(9, "h", "d"), "complete")],
    ids=["left", "complete"],
)
def test_the_end_is_a_phase(event, phase):
    assert folded(joined(), progress(0), event).phase == phase


def test_a_months_traffic_is_said_with_what_is_allowed():
    found = folded(joined(), MonthCounted("2026-11", 1_500_000, 2_500_000_000, 50_000_000_000))
    said = summary(found, 100.0)
    assert said["costs"]["month"]["received"] == 2_500_000_000
    assert "  in 2026-11 so far 1.5 MB sent and 2.5 GB received, of 50 GB" in peer_lines(said)
    found.take(MonthCounted("2026-12", 0, 0, 0), 101.0)
    assert "  in 2026-12 so far 0 B sent and 0 B received" in peer_lines(summary(found, 101.0))


def test_who_moves_to_another_stage_shows_its_rounds_and_no_copy_of_it():
    kept = StageCopied(2, 7, ME, 1000, 0.1, is_first=True)
    found = folded(joined(stages=3, stage=1), certified(8), kept)
    assert found.copies == {2: 7}
    assert "keeps a copy of stage 2, of round 7" in "\n".join(peer_lines(summary(found, 100.0)))
    found.take(joined(stages=3, stage=1), 101.0)
    assert len(found.rounds) == 1, "the network daemon died: the same stage"
    found.take(StageClaimed(2, "nobody holds it"), 102.0)
    found.take(joined(stages=3, stage=2), 103.0)
    assert found.stage == 2
    assert not found.rounds
    assert not found.copies


def test_a_stage_that_nobody_holds_is_empty_and_a_lone_peer_among_pairs_is_thin():
    found = folded(joined(stages=3, stage=0), SwarmSeen((0, 1, 2), (lease("a", 0), lease("b", 0), lease("c", 1))))
    assert found.empty_stages() == [2]
    assert [found.is_thin(stage) for stage in range(3)] == [False, True, True]


def test_a_stage_of_less_than_half_the_usual_speed_is_thin():
    leases = (lease("a", 0, 900), lease("b", 1, 1000), lease("c", 2, 400))
    found = folded(joined(stages=3, stage=0), SwarmSeen((0, 1, 2), leases))
    assert [found.is_thin(stage) for stage in range(3)] == [False, False, True]


def test_the_speed_of_a_stage_is_less_than_it_is_until_everybody_there_has_said_theirs():
    joiner = PeerId("c")
    found = folded(joined(stages=2, stage=0), SwarmSeen((0, 1), (lease("a", 0, 900), lease("b", 1, 300))))
    assert found.stage_speed_is_whole(1)
    assert found.is_thin(1)
    found.take(NeighbourLinked(joiner, 1), 101.0)
    assert not found.stage_speed_is_whole(1)
    assert not found.is_thin(1)  # for all we know: one that is fast may have come
    assert "  stage 1: 2 peers, at least 300 tokens/s" in peer_lines(summary(found, 101.0))
    assert "≥300 tok/s" in screen_text(found, 101.0)
    found.take(SwarmSeen((1,), (lease("b", 1, 300), lease("c", 1, 500))), 102.0)
    assert "  stage 1: 2 peers, 800 tokens/s" in peer_lines(summary(found, 102.0))


def test_a_stage_whose_only_peer_has_not_measured_itself_has_no_speed_of_0():
    found = folded(joined(stages=2, stage=0), SwarmSeen((0, 1), (lease("a", 0), lease("b", 1, 0.0))))
    assert "  stage 1: 1 peer, speed not known yet" in peer_lines(summary(found, 101.0))


def screen_text(found: Status, now: float) -> str:
    return "\n".join("".join(text for text, _style in line) for line in render(found, Size(80, 24), now).lines)


def test_one_peer_a_stage_is_not_thin_where_all_have_one():
    found = folded(joined(stages=2, stage=0), SwarmSeen((0, 1), (lease("a", 0), lease("b", 1))))
    assert not any(found.is_thin(stage) for stage in range(2))


def test_who_is_lost_no_longer_counts_and_who_is_no_longer_listed_is_forgotten():
    found, _now = status()
    found.take(NeighbourLost(MATES[0], "silent"), 1.0)
    assert sum(peer.counts for peer in found.of_stage(1)) == 3
    found.take(SwarmSeen((0, 1, 2), (lease(LAST, 2),)), 2.0)
    assert MATES[0] not in found.peers
    assert MATES[1] in found.peers, "still heard"


def test_stage_seen_says_who_leads_and_who_pauses():
    found = folded(joined(), StageSeen(1, (ME, *MATES), (ME, *MATES[:2]), (MATES[1],), MATES[0]))
    assert found.peers[MATES[0]].is_leader
    assert found.peers[MATES[1]].is_paused
    assert found.peers[MATES[2]].is_here is False


def test_a_peer_that_changes_its_stage_is_on_the_map_once():
    found = folded(joined(), SwarmSeen((0, 1), (lease("a", 0),)), SwarmSeen((0, 1), (lease("a", 1),)))
    assert [len(found.of_stage(stage)) for stage in range(2)] == [0, 1]


def test_validation_finds_its_round():
    found = folded(joined(), certified(1), certified(2), Evaluated(1, 1.25, 10))
    assert [each.val_loss for each in found.rounds] == [1.25, None]


def test_all_reduce_is_what_a_ring_of_the_contributors_sends_in_all_inner_steps():
    last = folded(certified(1, contributors=4)).rounds[-1]
    assert last.allreduce_bytes == pytest.approx(2 * 3 / 4 * 165_200_896 * 64)
    assert last.times_less == pytest.approx(last.allreduce_bytes / 20_900_000)
    assert folded(certified(1, contributors=1)).rounds[-1].times_less is None


def test_everything_that_grows_is_bounded():
    found = folded(joined())
    many = tuple(lease(f"p{index}", index % 3) for index in range(2 * MAX_PEERS))
    found.take(SwarmSeen((0, 1, 2), many), 1.0)
    for index in range(2 * MAX_LOG):
        found.take(Failed("somewhere", f"{index}"), 1.0)
    assert len(found.peers) == MAX_PEERS
    assert len(found.log) == MAX_LOG


def test_what_a_stranger_says_cannot_write_to_the_terminal():
    found = folded(MessageRefused(PeerId("x"), "\x1b[2Jgone\a" + "y" * 1000))
    assert "\x1b" not in found.log[-1].text
    assert "\a" not in found.log[-1].text
    assert len(found.log[-1].text) == MAX_LINE
    assert printable("plain é ▇") == "plain é ▇"


def test_the_summary_is_json_without_nan():
    empty = folded(joined(), progress(0, train_loss=float("nan")), certified(1, train_loss=float("nan")))
    for found, now in (status(), (Status(), 0.0), (empty, 100.0)):
        text = json.dumps(summary(found, now), allow_nan=False)
        assert json.loads(text)["phase"] == found.phase


def test_a_certificate_of_an_older_log_has_no_plan_and_is_shown_all_the_same():
    old = RoundCertified(1, "h", 1, 0, (ME,), (ME,), 5, True, 1.0, 10, 20, 2.0, "d")
    assert folded(old).rounds[-1].codec == ""


def test_what_the_link_carries_beyond_the_payload_is_a_share_of_it():
    found = Status()
    assert found.link_overhead() is None
    found.take(PipelineProgress(1, 0.5, 1, 0, 4, 0, 0, 600, 400), 1.0)
    assert found.link_overhead() is None  # linkd has not told yet
    found.take(PipelineProgress(1, 0.5, 1, 0, 4, 0, 0, 600, 400, 610, 410), 2.0)
    assert found.link_overhead() == pytest.approx(0.02)
    assert summary(found, 2.0)["link_overhead"] == pytest.approx(0.02)
    found.take(PipelineProgress(1, 0.5, 1, 0, 4, 0, 0, 6000, 4000, 610, 410), 3.0)
    assert found.link_overhead() == 0.0  # it tells less often than the payload is counted


def test_a_stage_is_named_by_its_number_and_those_there_are():
    assert stage_words(1, 3) == "stage 1 (of 0..2)"
    assert stage_words(0, 1) == "the whole model"


def test_what_p2pd_sends_is_a_rate_and_unknown_where_the_system_does_not_say():
    found = folded(joined())
    for second in range(6):
        found.take(progress(second), 100.0 + second)
    assert found.rates.daemon_bytes_per_s() is None
    assert summary(found, 105.0)["daemon_up_bytes_per_s"] is None
    for second in range(6, 14):
        found.take(
            progress(second, daemon_bytes_sent=1000 * second, daemon_bytes_received=500 * second), 100.0 + second
        )
    assert found.rates.daemon_bytes_per_s() == pytest.approx((1000.0, 500.0))
    assert summary(found, 113.0)["daemon_down_bytes_per_s"] == 500.0


def test_who_is_doubted_is_said_with_the_reason_and_a_proof_outweighs_it():
    found = folded(
        MemberDoubted(PeerId("x"), "asked for ballots", 32),
        EquivocationProved(PeerId("y"), "accepted two values in ballot 0"),
        MemberDoubted(PeerId("y"), "its contributions\a do not arrive", 0),
        MemberDoubted(PeerId("x"), "led nothing\x1b[2J", 64),
    )
    assert summary(found, 100.0)["doubted"] == [
        {"peer": "y", "reason": "accepted two values in ballot 0", "proven": True},
        {"peer": "x", "reason": "led nothing�[2J", "proven": False},
    ]
    flood = folded(*(MemberDoubted(PeerId(f"p{number}"), "nothing", 0) for number in range(1000)))
    assert len(flood.doubted) == 64


def test_whose_messages_and_states_were_refused_is_said_with_the_last_reason_and_how_often():
    found = folded(
        MessageRefused(PeerId("x"), "a branch that nobody has signed"),
        StateFetchFailed(PeerId("y"), "another state than was certified"),
        MessageRefused(PeerId("x"), "a checkpoint\a of nobody's"),
    )
    assert summary(found, 100.0)["refused"] == [
        {"peer": "y", "reason": "another state than was certified", "times": 1},
        {"peer": "x", "reason": "a checkpoint\ufffd of nobody's", "times": 2},
    ]
    flood = folded(
        MemberDoubted(PeerId("z"), "nothing", 0),
        *(MessageRefused(PeerId(f"p{number}"), "nothing") for number in range(1000)),
    )
    assert (len(flood.refused), len(flood.doubted)) == (64, 1)
    lines = peer_lines(summary(flood, 100.0))
    assert "  …z is not waited for: nothing" in lines
    assert "  …p999 was refused once, the last time: nothing" in lines


def test_who_is_turned_away_is_said_until_it_is_over():
    found = folded(
        TurnedAway("x", "more than it may ask for, 100 times", 60.0),
        TurnedAway("8.8.4.0/24", "what\x1b[2J cannot be read, 25 times", 1e6),
    )
    at_s = found.last_event_s
    assert at_s is not None
    assert [each["who"] for each in summary(found, at_s + 1)["turned_away"]] == ["x", "8.8.4.0/24"]
    assert summary(found, at_s + 100)["turned_away"] == [
        {"who": "8.8.4.0/24", "reason": "what\ufffd[2J cannot be read, 25 times", "for_s": 999_900}
    ]
    flood = folded(*(TurnedAway(f"p{number}", "nothing", 60.0) for number in range(1000)))
    assert len(flood.turned_away) == 64


def test_the_share_of_contributions_that_count_and_who_was_left_out_is_said():
    slow = PeerId("12D3slow")
    found = folded(
        joined(),
        certified(6, contributors=2),
        ContributionsMissed(7, ((slow, "was on its way 3.5 s after the first"),)),
        certified(7, contributors=1),
    )
    said = summary(found, 100.0)
    assert said["contributions_counted"] == 0.75
    assert said["contributions_missed"] == {
        "round": 7,
        "peers": [{"peer": slow, "why": "was on its way 3.5 s after the first"}],
    }
    assert (
        "  75% of the contributions to the last rounds counted; round 7 went without …12D3slow was on its way 3.5 s after the first"
        in peer_lines(said)
    )


def test_whose_contributions_were_refused_or_clipped_is_said_with_the_reason():
    bad, large = PeerId("12D3bad"), PeerId("12D3huge")
    found = folded(
        joined(),
        ContributionRefused(bad, 6, "unreadable"),
        ContributionRefused(bad, 7, "layers.0\a holds values that are not finite"),
        certified(7, contributors=3, norms=(2.0, 2.0, 20.0), clip_factors=(1.0, 1.0, 0.375)),
        ContributionClipped(large, 7, 20.0, 2.0, 0.375),
    )
    said = summary(found, 100.0)
    assert said["contributions_refused"] == [
        {"peer": bad, "round": 7, "reason": "layers.0\ufffd holds values that are not finite", "times": 2}
    ]
    assert said["contributions_clipped"] == [
        {"peer": large, "round": 7, "norm": 20.0, "median_norm": 2.0, "factor": 0.375, "times": 1}
    ]
    assert (said["last_round"]["refused"], said["last_round"]["clipped"]) == (1, 1)
    assert [each["clip_factor"] for each in said["last_round"]["weighed"]] == [1.0, 1.0, 0.375]
    lines = "\n".join(peer_lines(said))
    assert "…12D3bad had contributions refused 2 times, last in round 7: layers.0\ufffd holds values" in lines
    assert (
        "…12D3huge had contributions clipped once, last in round 7: its norm 20, the group's median 2, scaled by 0.375"
        in lines
    )
    flood = folded(*(ContributionRefused(PeerId(f"p{number}"), 1, "nothing") for number in range(1000)))
    assert len(flood.contributions.by_peer) == 64


def test_a_round_of_an_older_log_has_no_norms():
    """Nor has one in slices: that all weighed all is not known, and not said."""
    found = folded(certified(7))
    assert (found.contributions.weighed, found.rounds[-1].clipped) == ({}, None)
    said = summary(found, 100.0)["last_round"]
    assert (said["weighed"], said["clipped"]) == ([], None)
    assert folded(certified(7, contributors=0)).rounds[-1].clipped == 0
