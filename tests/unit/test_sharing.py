"""Whose slices are whose: everybody comes to the same, the work is shared out, and what is certified stays where its residual is."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from dilocox_peer.errors import ProtocolError
from dilocox_peer.peer.rounds.chain import Place
from dilocox_peer.peer.rounds.slices import Sharing, averagers, ranked
from dilocox_peer.types import PeerId, sha256
from dilocox_peer.wire import versions
from dilocox_peer.wire.blobs import SLICE_TABLE, SlicePart, SliceTable
from dilocox_peer.wire.chain import (
    Averaged,
    Certificate,
    Entry,
    Plan,
    Report,
    Result,
    SliceOutcome,
    Value,
    average_statement,
)
from dilocox_peer.wire.declared import Parser, encode, replaced
from dilocox_peer.wire.rounds import (
    MAX_CARRIED_BYTES,
    Average,
    Averages,
    Carried,
    Cert,
    Gathered,
    Inputs,
    decode_message,
    encode_message,
)

PEERS = tuple(PeerId(f"p{number:02d}") for number in range(64))
SIGNED = b"s" * 64


def entry(peer: PeerId, kbps: int = 0) -> Entry:
    return Entry(peer, 1, sha256(peer.encode()), 10, 8, report=Report(uplink_kbps=kbps))


def result(index: int, by: tuple[PeerId, ...], base: bytes = b"") -> Result:
    outcome = SliceOutcome(sha256(b"blob", bytes([index])), 9, base, sha256(b"residual", bytes([index])))
    return Result(*outcome, tuple((peer, SIGNED) for peer in by))


def place(count: int, size: int) -> Place:
    genesis = Place.genesis(0, sha256(b"genesis"), Plan("int4", 0, 8), slices=count)
    return Place(0, genesis.head, 1, 0, 0, 1, PEERS[:size], genesis.plan, voters=PEERS[:size], sharing=genesis.sharing)


@pytest.mark.parametrize("size", [4, 5, 8, 16, 64])
@pytest.mark.parametrize("count", [4, 16, 64])
def test_slices_are_shared_out_evenly_with_owner_and_deputy(size: int, count: int) -> None:
    orders = ranked(Sharing(count), PEERS[:size])
    assert orders == ranked(Sharing(count), tuple(reversed(PEERS[:size]))), "in whatever order the roster is"
    assert all(sorted(order) == sorted(PEERS[:size]) for order in orders)
    load = Counter(peer for order in orders for peer in order[:2])
    assert max(load.values()) <= -(-2 * count // size) + 1


def test_who_vouched_for_a_slice_goes_on_with_it_and_a_newcomer_gets_its_share() -> None:
    orders = ranked(Sharing(16), PEERS[:8])
    results = tuple(result(index, order[:2]) for index, order in enumerate(orders))
    again = ranked(Sharing(16, results), PEERS[:8])
    assert [set(order[:2]) for order in again] == [set(order[:2]) for order in orders]
    without = ranked(Sharing(16, results), PEERS[1:8])
    kept = sum(len(set(order[:2]) & set(before[:2])) for order, before in zip(without, orders, strict=True))
    assert kept >= 32 - 2 * max(Counter(peer for order in orders for peer in order[:2]).values())
    grown = Counter(peer for order in ranked(Sharing(16, results), PEERS[:16]) for peer in order[:2])
    assert max(grown.values()) <= 3, "members of before keep no more than their share"
    assert len(grown) > 8


def test_a_slow_line_owns_nothing_while_enough_others_are_there() -> None:
    sharing = Sharing(16)
    roster = PEERS[:6]
    value = place(16, 6).round_value([entry(peer, 100_000) for peer in roster[1:]] + [entry(roster[0], 2_000)], roster)
    after = sharing.after(value)
    assert after.slow == {roster[0]}
    assert all(order.index(roster[0]) == 5 for order in ranked(after, roster))
    few = ranked(Sharing(16, slow=frozenset(roster[:3])), roster)
    assert {peer for order in few for peer in order[:2]} == set(roster), "not while it takes them"


def valid(count: int = 4, size: int = 5) -> tuple[Place, Value]:
    here = place(count, size)
    assert here.sharing is not None
    orders = ranked(here.sharing, here.roster)
    results = tuple(result(index, order[:2]) for index, order in enumerate(orders))
    return here, here.round_value([entry(peer) for peer in here.roster], here.roster, results=results)


def test_a_round_in_slices_has_a_result_of_each_and_things_are_those() -> None:
    here, value = valid()
    assert here.why_not(value, 1, 64) is None
    assert value.blobs == tuple(each.blob for each in value.results)
    assert [thing.slice for thing in value.things] == [0, 1, 2, 3]
    after = here.then(_certificate(here, value))
    assert after.sharing is not None
    assert after.sharing.base(2) == value.results[2].residual


def _certificate(here: Place, value: Value) -> Certificate:
    return Certificate(here.stage, here.head, here.view, 0, value, ())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda results: results[:3], "3 results of 4 slices"),
        (lambda results: (), "0 results of 4 slices"),
        (
            lambda results: (*results[:3], replaced(results[3], by=(results[3].by[0],) * 2)),
            "no two of those who may average",
        ),
        (
            lambda results: (*results[:3], replaced(results[3], by=(results[3].by[0], (PEERS[60], SIGNED)))),
            "no two of those who may average",
        ),
        (lambda results: (replaced(results[0], base=sha256(b"made up")), *results[1:]), "never certified"),
    ],
)
def test_other_results_may_not_follow(change, reason: str) -> None:
    here, value = valid()
    results = change(value.results)
    changed = replaced(value, what=Averaged(results) if results else "round")
    assert reason in str(here.why_not(changed, 1, 64))


def test_members_without_a_vote_average_nothing() -> None:
    """In an open run newcomers cost nothing to make: two that vouch for one slice would write what they like into the model."""
    here, value = valid(size=8)
    few = replace(here, voters=PEERS[4:8])
    assert set(averagers(few.roster, few.voters)) == set(PEERS[4:8])
    assert any({peer for peer, _ in each.by} & set(PEERS[:4]) for each in value.results)
    assert "no two of those who may average" in str(few.why_not(value, 1, 64))
    orders = ranked(few.sharing or Sharing(0), averagers(few.roster, few.voters))
    results = tuple(result(index, order[:2]) for index, order in enumerate(orders))
    assert few.why_not(replaced(value, what=Averaged(results)), 1, 64) is None
    assert set(averagers(PEERS[:8], PEERS[:2])) == set(PEERS[:8]), "two cannot decide between two"


def test_three_average_all_to_all_and_so_does_a_run_without_slices() -> None:
    here, value = valid()
    three = place(4, 3)
    assert not three.is_sliced
    assert here.is_sliced
    plain = three.round_value([entry(peer) for peer in three.roster], three.roster)
    assert three.why_not(plain, 1, 64) is None
    with_results = replaced(plain, what=value.what)
    assert "results of a round that has none" in str(three.why_not(with_results, 1, 64))
    old = replaced(plain, what=value.what)
    assert "results" in str(Place(0, three.head, 1, 0, 0, 1, three.roster, three.plan).why_not(old, 1, 64))


def test_messages_about_slices_survive_the_wire_and_a_stranger_cannot_stretch_them() -> None:
    at = (0, sha256(b"head"), 1)
    average = Average(3, sha256(b"blob"), 9, b"", sha256(b"lost"), SIGNED)
    for message in (
        Gathered(*at, (sha256(b"table"),)),
        Inputs(*at, 0, (entry(PEERS[0]),), (SIGNED,)),
        Averages(*at, sha256(b"inputs"), (average,)),
        Carried(*at, bytes(MAX_CARRIED_BYTES)),
    ):
        assert decode_message(encode_message(message), PEERS[0]) == message
    for stretched in (
        Gathered(*at, (sha256(b"table"),) * 65),
        Inputs(*at, 0, (), ()),
        Carried(*at, b""),
        Carried(*at, bytes(MAX_CARRIED_BYTES + 1)),
        Averages(*at, sha256(b"inputs"), (average,) * 65),
        Averages(*at, sha256(b"inputs"), (replaced(average, slice=64),)),
    ):
        with pytest.raises(ProtocolError):
            decode_message(encode_message(stretched), PEERS[0])


def test_a_value_with_results_is_read_as_it_was_written() -> None:
    _, value = valid()
    parser = Parser[Value](Value, "a value", 1 << 20)
    assert parser.read(encode(value)) == value
    assert average_statement(0, sha256(b"head"), sha256(b"inputs"), 1, value.results[1].outcome) != average_statement(
        0, sha256(b"head"), sha256(b"inputs"), 2, value.results[1].outcome
    )


def test_what_slices_write_is_what_they_wrote() -> None:
    """Certificates with results and tables lie on disks; the bytes of both, and of what averagers send, stay."""
    here, value = valid()
    at = (0, here.head, 1)
    average = Average(3, sha256(b"blob"), 9, b"", sha256(b"lost"), SIGNED)
    table = SliceTable(versions.CONTRIBUTION, sha256(b"layout"), (SlicePart(sha256(b"part"), 40, 0.25),))
    lines = (Path(__file__).parent / "golden" / "slices.txt").read_text().splitlines()
    assert [line.partition(" ")[::2] for line in lines] == [
        ("Gathered", encode_message(Gathered(*at, (sha256(b"table"),))).hex()),
        ("Inputs", encode_message(Inputs(*at, 0, (entry(PEERS[0]),), (SIGNED,))).hex()),
        ("Averages", encode_message(Averages(*at, sha256(b"inputs"), (average,))).hex()),
        ("Carried", encode_message(Carried(*at, b"table")).hex()),
        ("Cert", encode_message(Cert(*at, Certificate(0, here.head, 1, 0, value, ((PEERS[0], SIGNED),)))).hex()),
        ("SliceTable", encode(table).hex()),
        ("value", value.digest().hex()),
        ("statement", average_statement(0, here.head, sha256(b"inputs"), 1, value.results[1].outcome).hex()),
    ]
    assert SLICE_TABLE.read(encode(table)) == table
