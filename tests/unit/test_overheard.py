"""Who is overheard averaging what was named by nobody here."""

from dilocox_peer.peer.rounds.overheard import MAX_OVERHEARD, Overheard
from dilocox_peer.types import PeerId, sha256

A, B, C = (PeerId(name) for name in "abc")
INPUTS, OTHERS = sha256(b"inputs"), sha256(b"others")


def test_a_member_is_news_once_and_counts_for_each_of_its_inputs() -> None:
    overheard = Overheard()
    assert not overheard.has_news()
    overheard.heard(A, INPUTS)
    assert overheard.has_news()
    overheard.heard(A, OTHERS)
    assert not overheard.has_news(), "it holds nobody up a second time"
    overheard.heard(B, INPUTS)
    overheard.heard(B, INPUTS)
    assert overheard.has_news()
    assert not overheard.has_news()
    assert (overheard.count(INPUTS), overheard.count(OTHERS)) == (2, 1)


def test_who_makes_inputs_up_is_remembered_for_a_few() -> None:
    overheard = Overheard()
    made_up = [sha256(str(number).encode()) for number in range(1000)]
    for inputs in made_up:
        overheard.heard(C, inputs)
    assert sum(overheard.count(inputs) for inputs in made_up) == MAX_OVERHEARD
