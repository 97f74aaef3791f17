"""What `status` and `pause` say of a peer, and to it."""

from dataclasses import replace
from typing import Any

import pytest

from dilocox_peer.cli.home import PeerHome
from dilocox_peer.cli.operate import owner_lines, peer_lines, run_lines, run_summary
from dilocox_peer.events import FirstRosterSigned, Left, Paused, Resumed, SeenPeer, SwarmSeen, short
from dilocox_peer.events_of_costs import UpkeepReckoned
from dilocox_peer.events_of_health import Trouble, TroublesSeen
from dilocox_peer.events_of_rounds import Credited, OwnerDirected
from dilocox_peer.peer.status import Status
from dilocox_peer.peer.summary import summary
from dilocox_peer.types import PeerId
from dilocox_peer.web.document import RunPage
from tests.simulated_run import simulated_facts, simulated_manifest
from tests.unit.dashboard_data import ME, certified, joined, progress


def test_a_round_of_a_small_model_does_not_show_as_no_bytes(tmp_path):
    found = Status()
    found.take(joined(stages=1, stage=0), 0.0)
    found.take(progress(1), 1.0)
    found.take(certified(1, expected_rounds=400, bytes_sent=35_000), 1.0)
    assert peer_lines(summary(found, 1.0))[-1].endswith("35.0 kB sent")


def test_nobody_reckons_how_long_a_run_takes_that_its_owner_has_paused():
    found = Status()
    found.take(joined(stages=1, stage=0), 0.0)
    found.take(progress(1), 1.0)
    for number in range(1, 9):
        found.take(certified(number, expected_rounds=400, own_included=True), 10.0 * number)
    assert summary(found, 81.0)["eta_s"] == pytest.approx(392 * 10, abs=20)
    found.take(Paused("asked to"), 82.0)
    assert summary(found, 83.0)["eta_s"] is not None, "the others go on"
    found.take(Paused("the run's owner has paused the run", is_everybody=True), 84.0)
    assert summary(found, 85.0)["eta_s"] is None
    found.take(Resumed("the run's owner has the run go on"), 86.0)
    assert summary(found, 87.0)["eta_s"] is not None


def test_how_fast_it_sends_and_how_long_others_wait_is_said(tmp_path):
    found = Status()
    found.take(joined(stages=1, stage=0), 0.0)
    found.take(progress(1), 1.0)
    assert not any("others wait" in line for line in peer_lines(summary(found, 1.0)))
    found.take(progress(2, upload_bps=8_000_000, line_bps=10_000_000, queueing_ms=3.4), 2.0)
    assert "  upload at most 8.00 Mbit/s, 0.80 of the 10.00 measured, others wait 3 ms on this line" in peer_lines(
        summary(found, 2.0)
    )
    found.take(progress(3, upload_bps=5_000_000, queueing_ms=41.0), 3.0)
    assert "  upload at most 5.00 Mbit/s, others wait 41 ms on this line" in peer_lines(summary(found, 3.0))
    assert summary(found, 3.0)["queueing_ms"] == 41.0


def test_status_says_what_the_owner_wants_and_what_is_wrong():
    found = Status()
    found.take(joined(stages=2, stage=0), 0.0)
    found.take(OwnerDirected(3, applies=True, wants="learning rate x 0.5", said="thank you all"), 1.0)
    late = PeerId("12D3KooWzzzzZZZZ")
    found.take(
        TroublesSeen((Trouble("empty", 1, stops=True, helper=late, in_s=40.0), Trouble("thin", 0, (late,)))), 1.0
    )
    lines = peer_lines(summary(found, 11.0))
    assert lines[1:4] == [
        '  the run\'s owner has it: learning rate x 0.5; says: "thank you all"',
        "  ! nobody holds stage 1: …zzzzZZZZ takes it in about 30 s",
        "  - stage 0 has one peer (…zzzzZZZZ), where others have more: should it go, the run waits until another takes its place",
    ]


def test_a_stage_is_called_empty_only_once_somebody_has_looked():
    found = Status()
    assert peer_lines(summary(found, 0.0), "attic") == ["no run yet  attic  starting"]
    found.take(Left("its part of 2026-11 is used up"), 0.0)
    assert peer_lines(summary(found, 0.0), "attic") == ["no run yet  attic  left: its part of 2026-11 is used up"]
    found.take(joined(stages=3, stage=0), 0.0)
    [line] = peer_lines(summary(found, 1.0), "attic")
    assert line.startswith(f"stdlib-125m  {short(ME)}  joining: ")
    assert "stage" not in line
    assert found.empty_stages() == []
    found.take(SwarmSeen((0, 1), (SeenPeer(ME, 0, 10.0, 3, "direct"),)), 2.0)
    assert [each["stage"] for each in summary(found, 3.0)["swarm"]] == [0, 1]
    assert peer_lines(summary(found, 3.0))[1:] == [
        "  stage 0: 1 peer, 0 tokens/s",
        "  stage 1: EMPTY, nobody holds it",
    ]
    assert found.empty_stages() == [1]


def test_a_run_from_outside_shows_its_loss_and_the_time_left_where_it_can_be_read():
    manifest = simulated_manifest(200, 2)
    facts = simulated_facts(manifest, peers=4, rounds=40)
    seen = [
        SeenPeer(each.peer, stage, each.tokens_per_s, 38, each.reachability)
        for stage, of in enumerate(facts.stages)
        for each in of.holders
    ]
    known = RunPage(manifest).take(facts)
    lines = run_lines(manifest, run_summary(manifest, seen, known))
    assert "round 40/200" in lines[0]
    assert lines[1:3] == [
        "  training: rounds are being certified",
        f"  loss {known['now']['loss']:.4f}, {known['now']['tokens']:,} tokens, about 106 minutes left",
    ]
    unread = run_lines(manifest, run_summary(manifest, seen))
    assert "round 38/200" in unread[0]
    costs = [line for line in lines if line.startswith("    a peer takes up to")]
    assert len(costs) == manifest.stages.count
    assert all(line.endswith(" down a day") for line in costs)
    assert unread[1:] == [line for line in lines[3:] if line not in costs]


def test_one_announcement_does_not_say_which_round_a_run_is_at() -> None:
    """One of five said a thousand million, and `status LINK` did so."""
    manifest = simulated_manifest(200, 2)
    seen = [SeenPeer(PeerId(f"peer{index}"), 0, 1.0, 8 if index else 10**9, "direct") for index in range(5)]
    assert run_summary(manifest, seen)["round"] == 8
    known: dict[str, Any] = {"now": {"round": 7}, "stages": []}
    assert run_summary(manifest, seen, known)["round"] == 8
    assert run_summary(manifest, seen[:1], known)["round"] == 9
    assert run_summary(manifest, [], known)["round"] == 7
    assert run_summary(manifest, [])["round"] == 0
    newcomers = [replace(peer, round=0) for peer in seen[:4]]
    assert run_summary(manifest, [*newcomers, seen[4]])["round"] == 8, "who fetches the state first is at none"


def test_a_command_to_a_peer_with_a_name_of_its_own_has_the_name(tmp_path):
    assert PeerHome.at(tmp_path, "a", None).name_flag == " --name a"
    assert PeerHome.at(tmp_path, "default", None).name_flag == ""


def test_that_the_next_session_goes_on_with_what_was_trained_is_told_where_something_was() -> None:
    assert Credited(0, 0, 0, 0.0, has_trained=True).line().endswith("goes on with what it has trained")
    assert Credited(0, 0, 0, 0.0, has_trained=False).line().endswith("nothing was trained this time")


def test_of_a_complete_run_its_model_is_named_and_no_stage_is_called_empty() -> None:
    manifest = simulated_manifest(8, 2)
    facts = simulated_facts(manifest, peers=4, rounds=8)
    over = [replace(stage, holders=(), roster=(), is_over=True) for stage in facts.stages]
    lines = run_lines(
        manifest, run_summary(manifest, [], RunPage(manifest).take(replace(facts, stages=over))), "dilocox://x"
    )
    assert lines[1].startswith("  complete: ")
    assert lines[-1] == "  its model: dilocox-peer export 'dilocox://x' --out model"
    assert not any("stage" in line or "a day" in line for line in lines)


def test_an_owner_that_wants_nothing_is_not_told_of_but_for_what_it_says() -> None:
    nothing = {"owner_wants": "as the run's settings say", "owner_says": ""}
    assert owner_lines(nothing) == []
    assert owner_lines({**nothing, "owner_says": "hello"}) == ['  the run\'s owner says: "hello"']
    assert owner_lines({**nothing, "owner_wants": "paused"}) == ["  the run's owner has it: paused"]


def test_what_links_carry_beside_next_to_nothing_is_not_told() -> None:
    found = Status()
    found.take(joined(), 0.0)
    found.take(progress(1), 1.0)
    status = {**summary(found, 1.0), "link_overhead": 11.168}
    assert "the links carry" not in "\n".join(peer_lines({**status, "up_bytes_per_s": 1000.0, "down_bytes_per_s": 0.0}))
    assert "the links carry 1116.8% more" in "\n".join(
        peer_lines({**status, "up_bytes_per_s": 1000.0, "down_bytes_per_s": 2000.0})
    )


def test_the_last_second_of_a_run_is_not_told_as_time_that_is_left() -> None:
    assert "the run takes" not in UpkeepReckoned(1, 1, 1, 0.4).line()
    assert UpkeepReckoned(1, 1, 1, 1.0).line().endswith("the run takes about 1 second more")


def test_one_peer_is_no_peers() -> None:
    assert "1 peer (" in FirstRosterSigned(0, (ME,)).line()
    assert "of the one peer that it begins with" in Trouble("waiting", 0, number=0, of=1).cause
