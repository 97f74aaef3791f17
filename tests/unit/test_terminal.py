"""The dashboard in a terminal, on a pseudo-terminal: a picture that fails gives the terminal back and says so."""

import os
import pty
import termios
import threading
from collections.abc import Callable, Iterator

import pytest

from dilocox_peer.cli.observer import Observer
from dilocox_peer.cli.terminal import Dashboard, Terminal

LEFT = b"\x1b[?1049l"  # the alternate screen


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
        Dashboard(Observer(), terminal, on_quit=fail, on_failure=on_failure, on_key=on_key, note=note),
    ):
        os.write(person, b"+")
        assert is_told.wait(10.0)
        assert termios.tcgetattr(program) == before
    assert told == ["the dashboard failed: OverflowError: timestamp out of range for platform time_t"]
    assert os.read(person, 1 << 16).endswith(LEFT)
