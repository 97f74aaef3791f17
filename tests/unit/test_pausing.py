"""Two may hold training, the rounds and the volunteer, and neither lets go for the other."""

import pytest

from dilocox_peer.config import preset
from dilocox_peer.events import Event, Paused, Resumed
from dilocox_peer.peer.pauses import Pauses
from dilocox_peer.peer.planning.timetable import Timetable
from dilocox_peer.peer.training.book import HoldReason, RoundBook
from dilocox_peer.types import PeerId, sha256
from dilocox_peer.wire.rounds import Heartbeat, decode_message, encode_message


@pytest.mark.parametrize("first", ["rounds", "pause"])
def test_training_goes_on_only_when_both_have_let_go(first):
    second: HoldReason = "pause" if first == "rounds" else "rounds"
    book = RoundBook(preset("tiny"), lambda: 0.0, Timetable(preset("tiny")))
    assert book.may_train
    book.hold(True, first)
    book.hold(True, second)
    book.hold(False, second)
    book.hold(False, second)
    assert not book.may_train
    book.hold(False, first)
    assert book.may_train


def test_a_heartbeat_carries_it():
    at = (0, sha256(b"head"), 1)
    for paused in (False, True):
        beat = Heartbeat(*at, 17, 3, 2, 5, 4, 0, True, b"", paused=paused)
        assert decode_message(encode_message(beat), PeerId("x")) == beat


class FakeTrainer:
    """Writes down what it is told, and is full on demand."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.is_full = False

    def hold(self, reason: str) -> None:
        self._take(f"hold {reason}")

    def resume(self, reason: str) -> None:
        self._take(f"resume {reason}")

    def _take(self, call: str) -> None:
        if self.is_full:
            raise RuntimeError("no room")
        self.told.append(call)


def test_a_pause_lasts_until_everybody_has_let_go():
    events: list[Event] = []
    pauses, trainer = Pauses(events.append), FakeTrainer()
    pauses.set_trainer(trainer)
    pauses.pause("operator", "asked to")
    pauses.pause("hours", "it is day")
    pauses.resume("operator", "asked to")
    pauses.resume("nobody", "for nothing")
    assert pauses.reasons == {"hours": "it is day"}
    assert (events, trainer.told) == ([Paused("asked to"), Paused("it is day")], ["hold pause"])
    pauses.resume("hours", "it is night")
    assert not pauses.is_paused
    assert (events[2:], trainer.told[1:]) == ([Resumed("it is night")], ["resume pause"])


def test_a_pause_that_is_asked_for_anew_is_told_with_its_new_reason() -> None:
    events: list[Event] = []
    pauses = Pauses(events.append)
    for why in ("asked to, until Fri 05:32", "asked to", "asked to"):
        pauses.pause("operator", why)
    assert events == [Paused("asked to, until Fri 05:32"), Paused("asked to")]


def test_every_new_trainer_is_paused():
    pauses, first, second = Pauses(lambda event: None), FakeTrainer(), FakeTrainer()
    pauses.pause("operator", "asked to")
    pauses.set_trainer(first)
    pauses.set_trainer(second)
    assert first.told == second.told == ["hold pause"]


def test_a_trainer_without_room_is_told_at_the_next_occasion():
    pauses, trainer = Pauses(lambda event: None), FakeTrainer()
    pauses.set_trainer(trainer)
    trainer.is_full = True
    pauses.pause("operator", "asked to")
    trainer.is_full = False
    pauses.pause("hours", "it is day")
    assert trainer.told == ["hold pause"]


def test_a_pause_of_the_whole_run_does_not_say_that_the_swarm_goes_on() -> None:
    events: list[Event] = []
    pauses = Pauses(events.append)
    pauses.pause("owner", "the run's owner has paused the run", is_everybody=True)
    pauses.pause("operator", "asked to")
    assert [event.line() for event in events] == [
        "paused: the run's owner has paused the run; nobody trains until it goes on"
    ]
