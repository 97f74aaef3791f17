"""The operator's pauses: one that ends by itself, one that replaces another, and what each says."""

import time
from collections.abc import Callable

from dilocox_peer.cli.pausing import OPERATOR, Operator


class Timer:
    def __init__(self, seconds: float, act: Callable[[], None]) -> None:
        self.seconds, self.act, self.is_cancelled = seconds, act, False

    def cancel(self) -> None:
        self.is_cancelled = True


class SessionStub:
    def __init__(self) -> None:
        self.pauses: dict[str, str] = {}
        self.went_on: list[str] = []

    def pause(self, who: str, why: str) -> None:
        self.pauses[who] = why

    def resume(self, who: str, why: str) -> None:
        if self.pauses.pop(who, None) is not None:
            self.went_on.append(why)


def operator(away: str = "", wall: Callable[[], float] = time.time) -> tuple[Operator, SessionStub, list[Timer]]:
    session, timers = SessionStub(), list[Timer]()

    def call_later(seconds: float, act: Callable[[], None]) -> Timer:
        timers.append(Timer(seconds, act))
        return timers[-1]

    return Operator(session, " --name a", call_later, lambda: away, wall), session, timers


def test_a_pause_for_a_time_ends_by_itself_and_says_when() -> None:
    steered, session, timers = operator(wall=lambda: 0.0)  # that one stands still
    said = steered.pause(7200)
    assert said.startswith("paused until ")
    assert "`dilocox-peer resume --name a` trains on earlier" in said
    assert session.pauses[OPERATOR].startswith("asked to, until ")
    waited_s = 0.0
    while session.pauses:
        waited_s += timers[-1].seconds
        timers[-1].act()
    assert waited_s == 7200
    assert session.went_on == ["the time that it was paused for is over"]


def test_a_pause_for_a_time_goes_on_while_the_machine_sleeps() -> None:
    now = [1e9]
    steered, session, timers = operator(wall=lambda: now[0])
    steered.pause(7200)
    now[0] += 7199
    timers[-1].act()
    assert session.pauses
    now[0] += 1
    timers[-1].act()
    assert session.pauses == {}


def test_the_newest_word_counts() -> None:
    steered, session, timers = operator()
    steered.pause(60)
    assert "trains on" in steered.pause()
    assert timers[0].is_cancelled, "a pause without an end would end with the one before"
    steered.pause(90)
    assert steered.resume() == "training again"
    assert timers[1].is_cancelled
    assert session.went_on == ["asked to"]
    steered.pause(30)
    steered.close()
    assert timers[2].is_cancelled, "nothing is left behind when the peer leaves"


def test_who_else_holds_training_is_named() -> None:
    steered, session, _ = operator()
    session.pause("hours", "outside --hours 22:00-07:00")
    steered.pause(60)
    assert steered.resume() == "still paused: outside --hours 22:00-07:00"


def test_a_peer_that_is_away_is_said_to_be_paused_when_it_comes_back() -> None:
    away = "1 GB are used up: this peer comes back on 2026-12-01"
    steered, session, _ = operator(away)
    assert steered.pause() == f"{away}, and is paused then. `dilocox-peer resume --name a` trains on then"
    assert session.pauses == {OPERATOR: "asked to"}
    assert steered.pause(7200).startswith(f"{away}, and is paused then if that is before ")
    session.pause("hours", "outside --hours 22:00-07:00")
    assert steered.resume() == f"{away}, and is still paused then: outside --hours 22:00-07:00"
    session.resume("hours", "it is night")
    assert steered.resume() == f"{away}, and trains then"
