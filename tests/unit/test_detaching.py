"""What a peer in the background is started with."""

from pathlib import Path

from dilocox_peer.cli.detaching import arguments_of_child

OWN = ["join", "--no-detach", "--plain", "--log-file", "/a/log.jsonl"]


def test_flags_of_the_child_stand_where_flags_may_stand():
    log = Path("/a/log.jsonl")
    assert arguments_of_child(["join", "--detach", "--", "dilocox://x"], log) == [*OWN, "--", "dilocox://x"]
    assert arguments_of_child(["join", "dilocox://x", "--name", "a", "--detach"], log) == [
        *OWN,
        "dilocox://x",
        "--name",
        "a",
    ]
    assert arguments_of_child(["join", "--log-file", "b", "--detach", "x"], None) == [*OWN[:3], "--log-file", "b", "x"]


def test_what_is_no_flag_stays():
    assert arguments_of_child(["join", "--detach", "--", "--detach"], None) == [*OWN[:3], "--", "--detach"]
