"""Moments of a fetch that the simulator seldom comes by: answers that are late, and liars that are first."""

from dilocox_peer.store.actions import Accused, AskRange, CheckChunk, CheckWhole, Finished
from dilocox_peer.store.fetch import STUCK_S, Fetch
from dilocox_peer.store.outline import CHUNK_BYTES, Outline
from dilocox_peer.types import PeerId, sha256

LIAR, HONEST = PeerId("liar"), PeerId("honest")
TRUE = Outline(2 * CHUNK_BYTES, (sha256(b"a"), sha256(b"b")))
FALSE = Outline(2 * CHUNK_BYTES, (sha256(b"x"), sha256(b"y")))
NAME = sha256(b"the thing")


def accused(actions) -> list[PeerId]:
    return [each.donor for each in actions if isinstance(each, Accused)]


def at_the_check_of_the_false_one() -> tuple[Fetch, CheckWhole]:
    """All chunks of a liar's outline are here, as it said; another donor is still to say what it has."""
    fetch = Fetch(NAME, [LIAR, HONEST])
    fetch.begin(0.0)
    todo, done = fetch.outlined(LIAR, FALSE, 0.0), []
    while todo:
        match action := todo.pop(0):
            case AskRange(donor, start, stop):
                todo += fetch.received(donor, stop - start, 1.0)
            case CheckChunk(index):
                todo += fetch.checked(action, FALSE.chunks[index], 1.0)
            case _:
                done.append(action)
    [whole] = [each for each in done if isinstance(each, CheckWhole)]
    return fetch, whole


def test_the_whole_is_checked_once_and_a_late_answer_accuses_nobody_else() -> None:
    fetch, check = at_the_check_of_the_false_one()
    assert check.outline == FALSE
    assert not any(isinstance(each, CheckWhole) for each in fetch.outlined(HONEST, TRUE, 2.0))
    assert not any(isinstance(each, CheckWhole) for each in fetch.tick(2.5))
    answered = fetch.checked_whole(check, False, 3.0)
    assert accused(answered) == [LIAR]
    assert [each.donor for each in answered if isinstance(each, AskRange)] == [HONEST]
    assert fetch.checked_whole(check, False, 3.1) == []


def test_a_false_outline_that_trickles_is_left_for_another_that_is_claimed() -> None:
    """The liar is asked first and gives a byte now and then; who was honest was asked for none in a day."""
    fetch, now = Fetch(NAME, [LIAR, HONEST]), 0.1
    fetch.begin(0.0)
    fetch.outlined(LIAR, FALSE, now)
    fetch.outlined(HONEST, TRUE, now)
    asked = set()
    while now < 120.0 and HONEST not in asked:
        now += 1.0
        actions = fetch.received(LIAR, 1, now) if int(now) % 10 == 0 else fetch.tick(now)
        asked |= {each.donor for each in actions if isinstance(each, AskRange)}
    assert HONEST in asked
    assert fetch.outline == TRUE


def test_a_chunk_that_ends_as_another_outline_is_gone_by_is_checked_by_neither() -> None:
    """Its last byte came between two looks, once the time of its outline was over: the check was of bytes that were dropped, and ended the fetch."""
    fetch = Fetch(NAME, [LIAR, HONEST])
    fetch.begin(0.0)
    fetch.outlined(LIAR, FALSE, 0.1)
    fetch.outlined(HONEST, TRUE, 0.4)
    fetch.received(LIAR, CHUNK_BYTES - 1, 1.0)
    while fetch.deadline() < STUCK_S:
        fetch.tick(fetch.deadline())
    actions = fetch.received(LIAR, 1, STUCK_S + 0.1)
    assert fetch.outline == TRUE
    assert actions == [AskRange(HONEST, 0, 2 * CHUNK_BYTES)]


def test_what_is_due_next_is_ahead_also_while_many_say_nothing() -> None:
    """A time that was over stayed the next one: the event loop turned without end until all had been asked."""
    donors = [PeerId(f"silent {number}") for number in range(40)]
    fetch, now = Fetch(NAME, donors), 0.0
    fetch.begin(now)
    for _ in range(6):
        due = fetch.deadline()
        assert due > now
        now = due
        fetch.tick(now)


def test_a_thing_of_one_chunk_that_the_name_proves_takes_the_place_of_a_long_lie() -> None:
    body = b"the thing"
    fetch = Fetch(sha256(body), [LIAR, HONEST])
    fetch.begin(0.0)
    fetch.outlined(LIAR, FALSE, 0.0)
    actions = fetch.outlined(HONEST, Outline(len(body), (sha256(body),)), 1.0, is_here=True)
    assert isinstance(actions[-1], Finished)
    assert fetch.outline is not None
    assert fetch.outline.size_bytes == len(body)


def test_a_lie_does_not_take_the_place_of_what_the_name_proves() -> None:
    body = b"the thing"
    fetch = Fetch(sha256(body), [HONEST, LIAR, PeerId("other liar")])
    fetch.begin(0.0)
    fetch.outlined(HONEST, Outline(len(body), (sha256(body),)), 0.0)
    fetch.outlined(LIAR, FALSE, 0.0)
    fetch.outlined(PeerId("other liar"), FALSE, 0.0)
    assert fetch.outline is not None
    assert fetch.outline.size_bytes == len(body)
