"""A terminal taken over and given back, and the dashboard in it: a thread that draws twice a second and reads keys.

The thread is its own so that a terminal that does not take what is written (a slow ssh, a stopped screen) holds up
nobody. What is drawn is screen.py. Whatever ends the program short of kill -9 puts the terminal back as it was.
"""

import os
import select
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, cast

from rich.console import Console

from dilocox_peer.cli.observer import Observer
from dilocox_peer.cli.screen import Panel, Picture, Size, View, render
from dilocox_peer.cli.screen_help import next_page
from dilocox_peer.errors import DilocoxError
from dilocox_peer.events import Remark
from dilocox_peer.peer.status import printable

REFRESH_S = 0.5
WRITE_S = 1.0  # a terminal that takes nothing for so long is given up
STOP_S = 2.0
PRINTED = Size(100, 32)  # of a picture that is written to no terminal
_ENTER = "\x1b[?1049h\x1b[?25l\x1b[2J"
_LEAVE = "\x1b[0m\x1b[?25h\x1b[?1049l"


class ScreenFailed(DilocoxError):
    """A picture could not be drawn, or a key not be followed: the terminal is given back, and what was shown went on without it."""


def is_interactive() -> bool:
    """Whether there is somebody to look at a dashboard and press keys, on a terminal that can show one."""
    try:
        both = os.isatty(sys.stdin.fileno()) and os.isatty(sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):
        return False
    return both and os.environ.get("TERM", "dumb") != "dumb"


class Terminal:
    """`with Terminal() as terminal`: the alternate screen and single keys, until the block ends."""

    def __init__(self, in_fd: int | None = None, out_fd: int | None = None) -> None:
        self._in = sys.stdin.fileno() if in_fd is None else in_fd
        self._out = sys.stdout.fileno() if out_fd is None else out_fd
        self._saved: list[Any] | None = None
        self._shown: list[str] = []
        self._wake_out, self._wake_in = os.pipe()
        self._is_gone = False

    def __enter__(self) -> Self:
        self._saved = termios.tcgetattr(self._in)
        try:
            self._take()
        except BaseException:
            self.give_back()
            raise
        return self

    def _take(self) -> None:
        """Raises termios.error, OSError."""
        tty.setcbreak(self._in, termios.TCSANOW)
        mode = termios.tcgetattr(self._in)
        # Ctrl-C stays what it is. Ctrl-Z and Ctrl-\ would leave the peer stopped or dead and the screen taken, Ctrl-S
        # would freeze the picture.
        mode[0] &= ~termios.IXON
        disabled = os.fpathconf(self._in, "PC_VDISABLE")
        for key in (termios.VSUSP, termios.VQUIT):
            mode[6][key] = bytes([disabled])
        termios.tcsetattr(self._in, termios.TCSANOW, mode)
        self._shown = []
        self._write(_ENTER)

    def may_draw(self) -> bool:
        """Whether it is ours to draw on and to read from. Not while a shell has it again (this process was stopped, and goes on in the background):
        the picture would lie on what is typed there, and a read would stop the process. Had a shell had it, it is taken once more."""
        if self._saved is None or not self._is_in_front():
            return False
        with suppress(termios.error, OSError):  # a terminal that has gone is found when it is read
            if termios.tcgetattr(self._in)[3] & termios.ICANON:
                self._take()
        return True

    def _is_in_front(self) -> bool:
        try:
            return os.tcgetpgrp(self._in) in (os.getpgrp(), 0)
        except OSError:  # it is not the one that this session is controlled from
            return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.give_back()
        os.close(self._wake_in)
        os.close(self._wake_out)

    @property
    def size(self) -> Size:
        try:
            width, height = os.get_terminal_size(self._out)
        except OSError:
            width, height = 80, 24
        return Size(width or 80, height or 24)

    @property
    def is_gone(self) -> bool:
        """Whether it no longer takes or gives anything."""
        return self._is_gone

    def show(self, text: str, *, anew: bool) -> None:
        """Puts the lines of text on the screen; of a picture like the last one only those that changed."""
        lines = text.split("\n")
        if anew or len(lines) != len(self._shown):
            self._shown = []
        shown = self._shown or [""] * len(lines)
        changed = [f"\x1b[{row + 1};1H{line}" for row, line in enumerate(lines) if line != shown[row]]
        if not self._shown:
            changed.insert(0, "\x1b[2J")
        self._shown = lines
        if changed:
            self._write("".join(changed) + "\x1b[0m")

    def keys(self, timeout_s: float) -> str:
        """What was typed, as soon as something is, or after timeout_s, or when woken; "" for nothing."""
        read_from = [self._in, self._wake_out] if self._is_in_front() else [self._wake_out]
        try:
            ready, _, _ = select.select(read_from, [], [], timeout_s)
            if self._wake_out in ready:
                os.read(self._wake_out, 64)
            if self._in not in ready:
                return ""
            raw = os.read(self._in, 64)
        except (OSError, ValueError):
            raw = b""
        if not raw:
            self._is_gone = True
        return raw.decode(errors="ignore")

    def wake(self) -> None:
        with suppress(OSError):
            os.write(self._wake_in, b"w")

    def give_back(self) -> None:
        """As it was; before the block ends, or by its end."""
        if self._saved is None:
            return
        saved, self._saved = self._saved, None
        if not self._is_in_front():  # a shell has it, and whoever sets it from the background is stopped
            return
        self._is_gone = False
        self._write(_LEAVE)
        with suppress(termios.error, OSError):
            termios.tcsetattr(self._in, termios.TCSANOW, saved)

    def _write(self, text: str) -> None:
        left = text.encode(errors="replace")
        deadline = time.monotonic() + WRITE_S
        try:
            while left and not self._is_gone:
                _, ready, _ = select.select([], [self._out], [], max(0.0, deadline - time.monotonic()))
                if not ready:
                    self._shown = []
                    return
                left = left[os.write(self._out, left[:4096]) :]
        except (OSError, ValueError):
            self._is_gone = True


class Dashboard:
    """`with Dashboard(observer, terminal, ...)`: drawn until the block ends. Callbacks are called in its thread."""

    def __init__(
        self,
        observer: Observer,
        terminal: Terminal,
        *,
        on_quit: Callable[[], None],
        on_failure: Callable[[str], None],
        on_pause: Callable[[bool], None] | None = None,
        on_key: Callable[[str], None] = lambda key: None,
        note: Callable[[], str] = lambda: "",
        view: View = View(),
    ) -> None:
        """on_failure(reason, of one line): nothing is drawn any more, and the terminal is given back. on_pause(wanted): None where nothing can be paused. on_key: keys that are not the dashboard's own."""
        self._observer = observer
        self._terminal = terminal
        self._on_quit = on_quit
        self._on_failure = on_failure
        self._on_pause = on_pause
        self._on_key = on_key
        self._note = note
        self._view = replace(view, may_pause=on_pause is not None)
        self._stopped = threading.Event()
        self._console = Console(file=sys.stdout, force_terminal=True, highlight=False, markup=False)
        self._size = Size(0, 0)
        self._thread = threading.Thread(target=self._run, name="dashboard", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._terminal.wake()
        self._thread.join(STOP_S)

    def _run(self) -> None:
        try:
            while not self._stopped.is_set() and not self._terminal.is_gone:
                if self._terminal.may_draw():
                    self._draw()
                for key in self._terminal.keys(REFRESH_S):
                    self._press(key)
        except Exception as error:  # a task boundary: it must not leave a dead picture, in which no key works
            self._terminal.give_back()
            self._on_failure(printable(f"the dashboard failed: {type(error).__name__}: {error}"))

    def _draw(self) -> None:
        size, now = self._terminal.size, self._observer.clock()
        offset_s = time.localtime(now).tm_gmtoff
        view = replace(self._view, note=self._note(), utc_offset_s=offset_s)
        picture = self._observer.read(lambda status: render(status, size, now, view))
        self._terminal.show(as_text(picture, size, self._console), anew=size != self._size)
        self._size = size

    def _press(self, key: str) -> None:
        view = self._view
        match key:
            case "q":
                self._on_quit()
            case "p" if self._on_pause is not None:
                self._on_pause(self._observer.read(lambda status: status.paused is None))
            case "?" | "h":
                size = self._terminal.size
                page = next_page(view.help, size.width, size.height, view.quit_word, may_pause=view.may_pause)
                self._view = replace(view, help=page)
            case "l":
                self._view = replace(view, help=0, panel=None if view.panel == 4 else 4)
            case "1" | "2" | "3" | "4":
                panel = cast("Panel", int(key))
                self._view = replace(view, help=0, panel=None if view.panel == panel else panel)
            case "0":
                self._view = replace(view, help=0, panel=None)
            case _:
                self._on_key(key)


def print_picture(observer: Observer, now: float, quit_word: str) -> None:
    """The dashboard once, as lines, where there is no terminal to take keys from. now: wall clock, shown as this machine's local time."""
    view = View(quit_word=quit_word, may_pause=False, utc_offset_s=time.localtime(now).tm_gmtoff)
    picture = observer.read(lambda status: render(status, PRINTED, now, view))
    Console(width=PRINTED.width, height=PRINTED.height).print(picture, no_wrap=True)


def as_text(picture: Picture, size: Size, console: Console) -> str:
    """picture with the terminal's colours."""
    with console.capture() as captured:
        options = console.options.update(width=size.width, height=size.height)
        console.print(picture, end="", no_wrap=True, crop=False, overflow="ignore", width=options.max_width)
    return captured.get()


@contextmanager
def errors_as_events(observer: Observer) -> Iterator[None]:
    """What this process and its helpers write to standard error becomes lines of the log, not dirt on the screen."""
    saved, (read_end, write_end) = os.dup(2), os.pipe()
    reader = threading.Thread(target=_read_lines, args=(read_end, observer), name="stderr", daemon=True)
    sys.stderr.flush()
    os.dup2(write_end, 2)
    os.close(write_end)
    reader.start()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(saved, 2)
        os.close(saved)
        reader.join(0.5)  # it ends when the last helper is gone


def _read_lines(fd: int, observer: Observer) -> None:
    with open(fd, "rb") as lines:
        while line := lines.readline(4096):
            text = printable(line.decode(errors="replace").strip())
            if text:
                observer(Remark(text))
