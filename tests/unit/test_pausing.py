"""Two may hold training, the rounds and the volunteer, and neither lets go for the other."""

import pytest

from dilocox_peer.config import preset
from dilocox_peer.peer.messages import Heartbeat, decode_message, encode_message
from dilocox_peer.peer.timetable import Timetable
from dilocox_peer.peer.training import RoundBook
from dilocox_peer.types import PeerId, sha256


@pytest.mark.parametrize("first", ["rounds", "pause"])
def test_training_goes_on_only_when_both_have_let_go(first):
    second = {"rounds": "pause", "pause": "rounds"}[first]
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
