"""The dashboard in a terminal, on a pseudo-terminal: a picture that fails gives the terminal back and says so, and so does a terminal that hangs up."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dilocox_peer.cli.flags import ReplayFlags
from dilocox_peer.cli.observer import Observer
from dilocox_peer.cli.replay import run_replay
from dilocox_peer.cli.terminal import Dashboard, Terminal
from dilocox_peer.events import Remark

TAKEN, LEFT = b"\x1b[?1049h", b"\x1b[?1049l"  # the alternate screen


@pytest.fixture
def ends() -> Iterator[tuple[int, int]]:
    """(of who looks and types, of the program)"""
    person, program = pty.openpty()
    yield person, program
    os.close(person)
    os.close(program)


def fail() -> str:
    raise OverflowError("timestamp out of range for platform time_t")


def fail_at(_key: str) -> None:
    fail()


@pytest.mark.parametrize(
    ("note", "on_key"), [(fail, lambda _key: None), (lambda: "", fail_at)], ids=["drawing", "a key"]
)
def test_a_dashboard_that_fails_gives_the_terminal_back_and_says_so_in_one_line(
    ends: tuple[int, int], note: Callable[[], str], on_key: Callable[[str], None]
) -> None:
    person, program = ends
    before = termios.tcgetattr(program)
    told, is_told = list[str](), threading.Event()

    def on_failure(reason: str) -> None:
        told.append(reason)
        is_told.set()

    with (
        Terminal(program, program) as terminal,
        Dashboard(Observer(), terminal, on_quit=lambda: None, on_failure=on_failure, on_key=on_key, note=note),
    ):
        os.write(person, b"+")
        assert is_told.wait(10.0)
        assert termios.tcgetattr(program) == before
    assert told == ["the dashboard failed: OverflowError: timestamp out of range for platform time_t"]
    read_until(person, LEFT)


@pytest.mark.timeout(20)
def test_a_key_turns_the_pages_of_the_help(ends: tuple[int, int]) -> None:
    person, program = ends
    termios.tcsetwinsize(program, (12, 40))
    with (
        Terminal(program, program) as terminal,
        Dashboard(Observer(), terminal, on_quit=lambda: None, on_failure=pytest.fail),
    ):
        for page in range(1, 7):
            os.write(person, b"?")
            read_until(person, f"help {page}/6".encode())
        os.write(person, b"?")
        read_until(person, b"my peer")


def read_until(fd: int, wanted: bytes) -> None:
    """Raises AssertionError when what writes there is at its end before; a test that hangs has a time limit."""
    seen = b""
    while wanted not in seen:
        piece = os.read(fd, 1 << 16)
        assert piece, seen
        seen += piece


@contextmanager
def replaying(folder: Path, terminal: int, shell: str = ":") -> "Iterator[subprocess.Popen[bytes]]":
    """A replay on that terminal, started by sh after this command; killed if it does not end by itself."""
    log = folder / "log.jsonl"
    log.write_text("".join(json.dumps(Remark(f"line {at_s}").record(float(at_s))) + "\n" for at_s in range(1000)))
    with subprocess.Popen(
        ["sh", "-c", f'{shell}; exec "$@"', "sh", sys.executable, "-m", "dilocox_peer", "replay", str(log)],
        stdin=terminal, stdout=terminal, stderr=terminal, env={**os.environ, "TERM": "xterm"},
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # which tests that run under nohup ignore
    ) as replay:  # fmt: skip
        try:
            yield replay
        finally:
            if replay.poll() is None:
                replay.kill()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_replay_that_a_signal_ends_gives_the_terminal_back(
    ends: tuple[int, int], tmp_path: Path, number: signal.Signals
) -> None:
    person, program = ends
    before = termios.tcgetattr(program)
    with replaying(tmp_path, program) as replay:
        read_until(person, TAKEN)
        replay.send_signal(number)
        read_until(
            person, LEFT
        )  # before it is waited for: a terminal that nobody reads takes no more, and it would wait for that
        assert replay.wait(30.0) == -number
    assert termios.tcgetattr(program) == before


def test_a_replay_under_nohup_goes_on_when_its_terminal_hangs_up(ends: tuple[int, int], tmp_path: Path) -> None:
    person, program = ends
    with replaying(tmp_path, program, shell="trap '' HUP") as replay:
        read_until(person, TAKEN)
        replay.send_signal(signal.SIGHUP)
        os.write(person, b"q")
        read_until(person, LEFT)
        assert replay.wait(30.0) == 0


@pytest.fixture
def in_kolkata(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Asia/Kolkata")
        time.tzset()
        yield
    time.tzset()


def test_a_replay_without_a_terminal_shows_local_time_and_offers_no_pause(
    tmp_path: Path, in_kolkata: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """It showed UTC, unmarked, where the dashboard and all logs for people have local time."""
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps({"time": 1_790_000_000.0, "event": "Remark", "text": "seen"}) + "\n")
    run_replay(ReplayFlags(path=path))
    shown = capsys.readouterr().out
    assert time.strftime("%H:%M:%S", time.gmtime(1_790_000_000 + 19_800)) in shown
    assert time.strftime("%H:%M:%S", time.gmtime(1_790_000_000)) not in shown
    assert "q end" in shown
    assert "p pause" not in shown


@pytest.mark.timeout(20)
def test_a_dashboard_that_a_shell_had_stopped_takes_the_terminal_again(
    ends: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `kill -STOP` and `fg` keys waited for Enter, lay on the picture, and were the shell's words when it ended."""
    person, program = ends
    before = termios.tcgetattr(program)
    keys = list[str]()
    with (
        Terminal(program, program) as terminal,
        Dashboard(Observer(), terminal, on_quit=lambda: None, on_failure=pytest.fail, on_key=keys.append),
    ):
        read_until(person, b"my peer")
        monkeypatch.setattr(os, "tcgetpgrp", lambda _fd: 1)
        time.sleep(0.7)  # what it draws and reads at this moment
        drain(person)
        termios.tcsetattr(program, termios.TCSANOW, before)  # as a shell does
        os.write(person, b"words of the shell\n")
        time.sleep(1.2)
        assert TAKEN not in drain(person), "it draws nothing in the background"
        assert keys == []
        assert os.read(program, 64) == b"words of the shell\n"
        monkeypatch.undo()
        read_until(person, TAKEN)
        os.write(person, b"+")
        while not keys:
            time.sleep(0.01)
    assert termios.tcgetattr(program) == before


def test_a_dashboard_that_ends_in_the_background_leaves_the_terminal_to_the_shell(
    ends: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system stops whoever sets a terminal from there: the run was over, and its peer stayed."""
    person, program = ends
    with Terminal(program, program):
        read_until(person, TAKEN)
        monkeypatch.setattr(os, "tcgetpgrp", lambda _fd: 1)
        mode = termios.tcgetattr(program)
    assert termios.tcgetattr(program) == mode
    assert not drain(person)


def drain(fd: int) -> bytes:
    """All that is there to be read."""
    seen = b""
    while select.select([fd], [], [], 0.1)[0]:
        seen += os.read(fd, 1 << 16)
    return seen
