"""The dashboard as text, at the two sizes it is made for; smaller ones still say something. `UPDATE_GOLDEN=1` writes anew."""

import os
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from dilocox_peer.cli.screen import Size, View, render
from dilocox_peer.cli.screen_help import next_page
from dilocox_peer.events import Failed, PeerStarted, SeenPeer, SwarmSeen
from dilocox_peer.events_of_health import Trouble, TroublesSeen
from dilocox_peer.peer.status import Status
from dilocox_peer.types import PeerId
from tests.unit.dashboard_data import certified, joined, progress, status

GOLDEN = Path(__file__).parent / "golden"


def text_of(found: Status, now: float, size: Size, view: View = View(), **console: object) -> str:
    shape: dict[str, Any] = {"width": size.width, "height": size.height, "color_system": None, **console}
    out = Console(**shape)
    with out.capture() as captured:
        out.print(render(found, size, now, view), end="")
    return captured.get()


@pytest.mark.parametrize("size", [Size(80, 24), Size(120, 40)], ids=lambda size: f"{size.width}x{size.height}")
def test_a_peer_in_the_middle_of_its_run(size):
    found, now = status()
    text = text_of(found, now, size) + "\n"
    golden = GOLDEN / f"dashboard_{size.width}x{size.height}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("size", [Size(80, 24), Size(120, 40), Size(76, 20), Size(60, 15), Size(200, 60), Size(1, 1)])
@pytest.mark.parametrize(
    "view", [View(), View(panel=1), View(panel=2), View(panel=3), View(panel=4), View(help=1), View(help=9)]
)
@pytest.mark.parametrize("moment", ["nothing yet", "joined", "working"])
def test_every_picture_fills_its_size_exactly(size, view, moment):
    found, now = Status(), 0.0
    if moment == "joined":
        found.take(joined(), 0.0)
        found.take(PeerStarted(PeerId("me"), "run", 1, ()), 0.0)
    elif moment == "working":
        found, now = status()
    lines = text_of(found, now, size, view, width=max(20, size.width)).split("\n")
    assert len(lines) == max(6, size.height)
    assert {len(line) for line in lines} == {max(20, size.width)}


def troubled(number: int) -> tuple[Status, float]:
    """The peer in the middle of its run, and so many troubles over all that is shown."""
    found, now = status()
    found.take(TroublesSeen(tuple(Trouble("empty", stage, stops=True) for stage in range(number))), now)
    return found, now


@pytest.mark.parametrize("number", range(9))
@pytest.mark.parametrize("width", [20, 60, 76, 80, 120])
def test_with_troubles_above_the_panels_too_a_picture_fills_its_size_exactly(width, number):
    found, now = troubled(number)
    for height in range(6, 70):
        for view in (View(), View(panel=3), View(panel=4)):
            lines = render(found, Size(width, height), now, view).lines
            assert [sum(cell_len(text) for text, _ in line) for line in lines] == [width] * height, (height, view)


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("height", [20, 21, 22, 23, 24])
def test_the_newest_round_and_what_was_told_last_are_shown_at_the_smallest_size_with_four_panels(height, number):
    found, now = troubled(number)
    text = text_of(found, now, Size(76, height))
    assert "round 31: validation loss" in text, "told last"
    assert " 31/400 " in text
    assert "8,700 tok/s" in text
    assert ("nobody holds stage 0" in text) == bool(number)


def test_how_long_others_on_the_line_wait_is_shown_where_there_is_room():
    found, now = status()
    found.take(progress(1, upload_bps=8_000_000, line_bps=10_000_000, queueing_ms=3.4), now)
    assert "at most 8.00 Mbit/s, 0.80 of the 10.00" in text_of(found, now, Size(120, 40))


def test_an_empty_stage_stands_out_also_without_colour():
    found, now = status()
    found.take(joined(stages=4), now)
    assert "EMPTY" not in text_of(found, now, Size(80, 24)), "nobody has looked there yet"
    found.take(SwarmSeen((3,), ()), now)
    text = text_of(found, now, Size(80, 24))
    assert "EMPTY  nobody holds it" in text
    assert "thin" in text


def test_of_more_stages_than_lines_the_empty_ones_are_shown():
    found = Status()
    found.take(joined(stages=40, stage=0), 0.0)
    peers = tuple(SeenPeer(PeerId(f"p{stage}"), stage, 100.0, 1, "direct") for stage in range(40) if stage != 33)
    found.take(SwarmSeen(tuple(range(40)), peers), 0.0)
    text = text_of(found, 0.0, Size(80, 24))
    assert "33" in text
    assert "EMPTY" in text
    assert "34 more stages" in text


def test_no_colour_is_kept_when_the_reader_wants_none():
    found, now = status()
    coloured = text_of(found, now, Size(80, 24), force_terminal=True, color_system="standard", no_color=False)
    plain = text_of(found, now, Size(80, 24), force_terminal=True, color_system="standard", no_color=True)
    assert "\x1b[1;36m" in coloured
    assert not any(f"{code}m" in plain for code in (31, 32, 33, 36, 41, 44))


@pytest.mark.parametrize("codec", ["topk", "lowrank-int4"])
def test_the_columns_of_the_rounds_stand_below_their_heads_in_long_runs(codec):
    found = Status()
    found.take(joined(stages=1, stage=0), 0.0)
    for number in (998, 999, 1000):
        found.take(certified(number, expected_rounds=1600, codec=codec, rank=0, own_included=True), float(number))
    lines = text_of(found, 1000.0, Size(80, 24), View(panel=3)).split("\n")
    head = next(line for line in lines if "round" in line and "who" in line)
    rows = [line for line in lines if "/1600" in line]
    assert len(rows) == 3
    for row in rows:
        assert row.index(codec) == head.index("codec")
        assert row.index("/1600") + len("/1600") == head.index("round") + len("round")


def test_a_stalled_peer_says_so_first():
    found, now = status()
    found.take(progress(7), now + 40)
    lines = text_of(found, now + 40, Size(80, 24)).split("\n")
    assert "stalled" in lines[2]


def test_a_long_reason_is_whole_in_the_log_alone_and_cut_in_the_small_panel():
    found, now = status()
    reason = "because " * 25 + "of that"
    found.take(Failed("lease", reason), now)
    assert "of that" not in text_of(found, now, Size(80, 24))
    assert "of that" in text_of(found, now, Size(80, 24), View(panel=4))


def test_the_help_is_whole_at_the_smallest_size():
    text = text_of(Status(), 0.0, Size(80, 24), View(help=1))
    assert "…" not in text
    assert "byte this peer sent" in text


HELP = ["q", "p", "1 2 3 4", "l", "?", "◆ ★ ● ○", "◌ ‖ ✖", "thin", "≥", "who", "delay", "* ✖ ⇣", "less"]


@pytest.mark.parametrize("size", [Size(40, 12), Size(24, 8), Size(60, 15), Size(20, 6), Size(80, 24)], ids=str)
def test_every_sign_is_reached_however_small_the_terminal(size):
    pages, page = list[str](), 1
    while page:
        text = text_of(Status(), 0.0, size, View(help=page))
        assert "…" not in text.partition("\n")[2].rpartition("\n")[0], "what a sign means is cut"
        pages.append(text)
        assert len(pages) < 99
        page = next_page(page, size.width, size.height, "leave", may_pause=True)
    inner = [line[2:-2] for text in pages for line in text.split("\n")[2:-2]]
    assert [key for line in inner if (key := line[:9].strip())] == HELP
    said = "".join(line[9:].replace(" ", "") for line in inner)
    for first, last in (
        ("inorder", "iskept"),
        ("thispeer;", "announced"),
        ("reachedthrough", "gone"),
        ("bytesofafloat32", "peersent"),
    ):
        assert first in said
        assert last in said
    assert len(pages) == 1 or "1/" in pages[0]


def test_a_narrow_footer_names_the_key_of_the_help():
    assert "? help" in text_of(Status(), 0.0, Size(40, 12))


def test_square_brackets_are_text():
    found, now = status()
    found.take(Failed("x", "[red]no markup[/red]"), now)
    assert "[red]no markup[/red]" in text_of(found, now, Size(80, 24))
