"""`replay`: a peer's event log, played in the dashboard as it happened, faster or slower."""

import threading
from collections.abc import Sequence

from dilocox_peer.cli.eventlog import read_event_file
from dilocox_peer.cli.flags import SPEEDS, ReplayFlags
from dilocox_peer.cli.observer import Observer
from dilocox_peer.cli.screen import View
from dilocox_peer.cli.terminal import Dashboard, ScreenFailed, Terminal, is_interactive, print_picture
from dilocox_peer.errors import ConfigError
from dilocox_peer.events import Event

STEP_S = 0.1  # of the real clock
FACTOR = 2.0
MAX_EVENTS = 2_000_000

TimedEvent = tuple[Event, float]


class Player:
    """How far a replay is. Pure: `advance` by real seconds gives the events that are due."""

    def __init__(self, events: Sequence[TimedEvent], speed: float) -> None:
        assert events, "nothing to play"
        self._events = events
        self._next = 0
        self.speed = speed
        self.is_stopped = False
        self.now_s = events[0][1]

    @property
    def is_over(self) -> bool:
        return self._next >= len(self._events)

    def advance(self, seconds: float) -> list[TimedEvent]:
        if self.is_stopped or self.is_over:
            return []
        self.now_s += seconds * self.speed
        first = self._next
        while not self.is_over and self._events[self._next][1] <= self.now_s:
            self._next += 1
        return list(self._events[first : self._next])

    def press(self, key: str) -> None:
        if key == " ":
            self.is_stopped = not self.is_stopped
        elif key in "+=":
            self.speed = min(SPEEDS[1], self.speed * FACTOR)
        elif key == "-":
            self.speed = max(SPEEDS[0], self.speed / FACTOR)

    def __str__(self) -> str:
        if self.is_over:
            return "replay: the end"
        return "replay: stopped" if self.is_stopped else f"replay {self.speed:g}x"


def run_replay(flags: ReplayFlags) -> None:
    """Plays the file to its end, and stays there until q. Without a terminal: shows the end. Raises ConfigError, ScreenFailed."""
    events: list[TimedEvent] = []
    path = flags.path
    for timed in read_event_file(path):
        events.append(timed)
        if len(events) > MAX_EVENTS:
            raise ConfigError(f"{path} has more than {MAX_EVENTS:,} events: cut it")
    if not events:
        raise ConfigError(f"{path} has no events: pass a file that `join --log-file` wrote")
    events.sort(key=lambda timed: timed[1])
    player = Player(events, flags.speed)
    observer = Observer(clock=lambda: player.now_s)
    if not is_interactive():
        for event, at_s in events:
            observer.take(event, at_s)
        print_picture(observer, events[-1][1], "end")
        return
    ended, failures = threading.Event(), list[str]()

    def fail(reason: str) -> None:
        failures.append(reason)
        ended.set()

    with (
        Terminal() as terminal,
        Dashboard(
            observer,
            terminal,
            on_quit=ended.set,
            on_failure=fail,
            on_key=player.press,
            note=lambda: str(player),
            view=View(quit_word="end"),
        ),
    ):
        while not ended.wait(STEP_S) and not terminal.is_gone:
            for event, at_s in player.advance(STEP_S):
                observer.take(event, at_s)
    if failures:
        raise ScreenFailed(failures[0])
