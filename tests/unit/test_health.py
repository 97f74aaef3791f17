"""What a bootstrap's supervisor is told."""

from dataclasses import replace

from dilocox_peer.cli.health import STALE_S, RunHealth, judge, report
from dilocox_peer.cli.operate import peer_lines
from dilocox_peer.peer.lag import LoopLag
from dilocox_peer.types import PeerId

ME = PeerId("12D3KooWsomebody")
FIRST = RunHealth("ab" * 32, "first", "dilocox://ab@x", nodes=1, connections=2, beat_age_s=12.0)
SECOND = replace(FIRST, run="cd" * 32, run_name="second", link="dilocox://cd@x", nodes=0)


def test_it_is_well_when_every_run_was_found_well_of_late():
    assert judge(report(ME, [FIRST, SECOND], LoopLag())) == (
        True,
        "well: first (abababababab), 1 node known, 2 connections; second (cdcdcdcdcdcd), 0 nodes known, 2 connections",
    )


def test_one_try_in_vain_is_no_alarm():
    trouble = replace(FIRST, beat_age_s=STALE_S, trouble="timed out")
    assert judge(report(ME, [trouble], LoopLag()))[0]


def test_a_run_that_fails_for_long_is_named_with_the_reason():
    ill = replace(SECOND, beat_age_s=STALE_S + 31, trouble="no node took the manifest")
    assert judge(report(ME, [FIRST, ill], LoopLag())) == (
        False,
        "not well: second (cdcdcdcdcdcd) for 131 s: no node took the manifest",
    )


def test_a_peer_that_trains_is_no_bootstrap():
    is_well, line = judge({"peer": ME, "phase": "training"})
    assert not is_well
    assert "--name" in line


def test_status_shows_the_links():
    lines = peer_lines(report(ME, [FIRST, SECOND], LoopLag()))
    assert lines[1:] == ["  dilocox://ab@x", "  dilocox://cd@x"]
