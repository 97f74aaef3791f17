"""Twenty hostile strings, as names, reasons and messages: none of them reaches a terminal as more than text."""

import io
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from dilocox_peer.cli.eventlog import write_line
from dilocox_peer.cli.operate import peer_lines
from dilocox_peer.cli.screen import Size, View, render
from dilocox_peer.events import (
    BootstrapReady,
    EquivocationProved,
    Event,
    Failed,
    MemberDoubted,
    MessageRefused,
    Paused,
    Remark,
    SeenPeer,
    SwarmSeen,
)
from dilocox_peer.events_of_rounds import ContributionRefused
from dilocox_peer.events_of_states import StateFetchFailed
from dilocox_peer.peer.status import Status, printable_lines
from dilocox_peer.peer.summary import summary
from dilocox_peer.types import PeerId
from tests.unit.dashboard_data import LAST, MATES, joined, status

SIZE = Size(80, 24)
HOSTILE = [
    "\x1b[2J\x1b[H", "\x1b]0;owned\x07", "\x1b]8;;http://evil.example\x07here\x1b]8;;\x07", "\x9b31mred", "\x1bP1;2|payload\x1b\\",
    "\r\noverwritten", "line\n00:00:00 the run is complete", "\x00\x07\x08\x08\x08\x7f", "\u202egnp.exe", "\u200b\u200d\ufeff\u2066x\u2069",
    "\u2028\u2029\x85next", "[bold red]urgent[/]", "[link=http://evil.example]here[/link]", "\ud800\udfff", "Z\u0351\u0346\u034b" * 60,
    "漢字" * 400, "\U0001f468\u200d\U0001f469\u200d\U0001f467" * 50, "%s %n {0} {self} $(reboot) `reboot`", "../../../etc/passwd",
    "\t\t\t\v\f" + "x" * 100_000,
]  # fmt: skip
assert len(HOSTILE) == 20


def events_with(words: str) -> list[Event]:
    """Everything in which a stranger's or the owner's words come to this peer."""
    other = MATES[0]
    return [
        replace(joined(), run_name=words, device=words),
        SwarmSeen((0, 1), (SeenPeer(other, 0, 1.0, 3, words),)),
        MemberDoubted(other, words, 32),
        EquivocationProved(LAST, words),
        ContributionRefused(other, 3, words),
        MessageRefused(other, words),
        StateFetchFailed(other, words),
        Paused(words),
        Remark(words),
        Failed(words, words),
    ]


def status_with(words: str) -> tuple[Status, float]:
    found, now = status()
    for event in events_with(words):
        found.take(event, now)
    return found, now


def is_text(line: str) -> bool:
    return all(each.isprintable() for each in line)


@pytest.mark.parametrize("words", HOSTILE, ids=range(20))
def test_the_dashboard_at_80x24_is_24_lines_of_80_printable_cells(words: str) -> None:
    found, now = status_with(words)
    for view in (View(), *(View(panel=number) for number in (1, 2, 3, 4)), View(help=1)):
        lines = ["".join(text for text, _style in line) for line in render(found, SIZE, now, view).lines]
        assert len(lines) == SIZE.height
        for line in lines:
            assert is_text(line), ascii(line)
            assert cell_len(line) == SIZE.width, ascii(line)


@pytest.mark.parametrize("words", HOSTILE, ids=range(20))
def test_a_log_for_people_has_one_stamped_line_an_event(words: str) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, highlight=False, soft_wrap=True, color_system=None)
    for event in events_with(words):
        write_line(event, 0.0, console)
    lines = out.getvalue().split("\n")
    assert all(is_text(line) for line in lines)
    assert sum(line[:1] not in ("", " ") for line in lines) == len(
        [each for each in events_with(words) if each.level != "debug"]
    )
    assert "owned" not in out.getvalue() or "\x1b" not in out.getvalue()


@pytest.mark.parametrize("words", HOSTILE, ids=range(20))
def test_status_of_a_peer_is_lines_of_text(words: str) -> None:
    found, now = status_with(words)
    lines = peer_lines(summary(found, now))
    assert lines
    assert all(is_text(line) for line in lines), [ascii(line) for line in lines if not is_text(line)]


def test_what_ends_a_command_is_said_without_control_characters() -> None:
    """The command's own way out, with what a peer gave as its reason."""
    program = (
        "import sys; from dilocox_peer.cli import main as cli; from dilocox_peer.errors import RunRefused\n"
        "def app(*_a, **_k): raise RunRefused('refused: \\x1b[2J\\x1b]0;owned\\x07 now\\nfine: joined')\n"
        "cli.app = app; sys.argv = ['dilocox-peer']; cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 4
    assert done.stderr == "dilocox-peer: refused: �[2J�]0;owned� now\n    fine: joined\n"


def test_the_line_to_join_by_stays_as_it_is() -> None:
    event = BootstrapReady(PeerId("p"), "r" * 64, "dilocox://link", ())
    assert printable_lines(event.line()).endswith("with:\n\n    dilocox-peer join dilocox://link\n")


def test_of_a_run_by_invitation_no_line_is_told_that_would_be_refused() -> None:
    invited = BootstrapReady(PeerId("p"), "r" * 64, "dilocox://link", (), "invite").line()
    assert "join" not in invited
    assert "`dilocox-peer invite run.toml` prints a link for each" in invited
    assert invited.endswith("without:\n\n    dilocox://link\n")
    listed = BootstrapReady(PeerId("p"), "r" * 64, "dilocox://link", (), "list").line()
    assert "`dilocox-peer invite run.toml` prints a link for each" in listed
    assert listed.endswith("those on its list with:\n\n    dilocox-peer join dilocox://link\n")
