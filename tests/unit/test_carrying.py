"""Tables that go out beside the offers that name them."""

from dilocox_peer.peer.rounds.carrying import MAX_SENDERS, Carrying
from dilocox_peer.peer.rounds.contract import Closed
from dilocox_peer.types import PeerId, sha256
from dilocox_peer.wire.chain import Entry
from dilocox_peer.wire.rounds import MAX_CARRIED_BYTES, Carried, Gathered, Offer

ME, HEAD = PeerId("me"), sha256(b"head")


def offer(table: bytes) -> Offer:
    return Offer(0, HEAD, 0, Entry(ME, 1, sha256(table), 10, 1), b"s" * 64)


def closed(table: bytes, *, sliced: bool = True) -> Closed:
    return Closed(HEAD, offer(table).entry, (sha256(b"slice"),) if sliced else (), table if sliced else b"")


def test_a_table_goes_out_beside_its_offer_and_beside_nothing_else() -> None:
    carrying = Carrying()
    assert carrying.together(offer(b"table")) == (offer(b"table"),)
    carrying.closed(closed(b"table"))
    assert carrying.together(offer(b"table")) == (Carried(0, HEAD, 0, b"table"), offer(b"table"))
    assert len(carrying.together(offer(b"an older table"))) == 1
    assert len(carrying.together(Gathered(0, HEAD, 0, (sha256(b"table"),)))) == 1
    carrying.closed(closed(b"whole", sliced=False))
    assert len(carrying.together(offer(b"whole"))) == 1


def test_what_is_too_large_is_fetched() -> None:
    carrying = Carrying()
    for size, goes in ((MAX_CARRIED_BYTES, True), (MAX_CARRIED_BYTES + 1, False)):
        carrying.closed(closed(bytes(size)))
        assert (len(carrying.together(offer(bytes(size)))) == 2) is goes


def test_what_came_is_taken_by_its_name_once_and_is_bounded() -> None:
    carrying = Carrying()
    carrying.came(ME, b"table")
    assert carrying.take(sha256(b"another")) is None
    assert carrying.take(sha256(b"table")) == b"table"
    assert carrying.take(sha256(b"table")) is None
    for number in range(100):
        carrying.came(ME, b"%d" % number)
    carrying.came(PeerId("other"), b"other")
    assert [carrying.take(sha256(b"%d" % number)) for number in (97, 98, 99)] == [None, b"98", b"99"]
    for number in range(MAX_SENDERS):
        carrying.came(PeerId(f"p{number}"), b"of %d" % number)
    assert carrying.take(sha256(b"other")) is None
    assert carrying.take(sha256(b"of 0")) == b"of 0"
