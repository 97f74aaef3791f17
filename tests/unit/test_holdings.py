"""What is held, wanted and refused, by name and by what it is said to be."""

from types import SimpleNamespace
from typing import Any, cast

from dilocox_peer.peer.rounds.contract import BlobPart
from dilocox_peer.peer.rounds.holdings import Holdings
from dilocox_peer.peer.rounds.timing import Timing
from dilocox_peer.types import PeerId, sha256
from dilocox_peer.wire.chain import Thing

BLOB, TABLE, OTHER = sha256(b"blob"), sha256(b"table"), sha256(b"other table")
SOURCES = [PeerId("a")]


def test_what_is_refused_as_one_slice_may_be_had_as_another():
    """Two that named a true result as another slice's had it refused at everybody, and its slice could not be settled."""
    holdings = Holdings(Timing())
    for false, true in (
        (BlobPart("result", 1), BlobPart("result", 0)),
        (BlobPart("slice", 1, OTHER), BlobPart("slice", 1, TABLE)),
    ):
        assert holdings.want(BLOB, SOURCES, round_number=1, now=0.0, part=false)
        holdings.refused(BLOB, false)
        assert holdings.is_refused(BLOB, false)
        assert not holdings.may_want(BLOB, 1.0, false)
        assert holdings.want(BLOB, SOURCES, round_number=1, now=1.0, part=false) == []
        assert not holdings.is_refused(BLOB, true)
        assert holdings.may_want(BLOB, 1.0, true)
        [wanted] = holdings.want(BLOB, SOURCES, round_number=1, now=1.0, part=true)
        assert wanted.part == true
        holdings.refused(BLOB, true)


def test_a_table_that_is_refused_is_refused_as_a_contribution():
    holdings = Holdings(Timing())
    holdings.refused(BLOB, BlobPart("table"))
    assert holdings.is_refused(BLOB)
    assert not holdings.may_want(BLOB, 0.0)


def test_what_is_held_as_one_thing_is_not_held_as_another():
    """Somebody may offer a result's name as its contribution, or say that a table is a residual: those pass no check as that."""
    as_what = (None, BlobPart("table"), BlobPart("result", 0), BlobPart("result", 1), BlobPart("residual", 0))
    for held in as_what:
        holdings = Holdings(Timing())
        holdings.held(BLOB, 1, 10, part=held)
        for wanted in as_what:
            assert holdings.has(BLOB, wanted) is (wanted == held)
            assert holdings.may_want(BLOB, 0.0, wanted) is (wanted != held)
    holdings.lost(BLOB)
    assert not any(holdings.has(BLOB, each) for each in as_what)


def test_after_a_restart_what_was_certified_stays_as_long_as_before():
    """Who was behind by more than the newest rounds could not have it of a peer that had been started again, and had to fetch a whole state."""
    names = [sha256(bytes([number])) for number in range(3)]
    things = [Thing(name, 5, PeerId("a")) for name in names]
    chain = [SimpleNamespace(value=SimpleNamespace(round=number, things=(things[number],))) for number in (0, 1)]
    holdings = Holdings(Timing())
    holdings.found(names, cast("Any", chain), 20)
    assert [holdings.size_of(name) for name in names] == [5, 5, 0]
    assert holdings.forget_before(1, 16, 18) == (names[0],), "of no certificate that is kept"
    assert holdings.forget_before(1, 30, 30) == (names[2],), "of none at all"
