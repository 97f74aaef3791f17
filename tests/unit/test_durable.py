import pytest

from dilocox_peer.peer.planning.plan import Plan
from dilocox_peer.peer.rounds.chain import Certificate, Place
from dilocox_peer.peer.rounds.durable import (
    LOST_VOTES_VIEWS,
    MAX_LEFT,
    Accepted,
    Durable,
    Votes,
    encode_record,
    load_log,
)
from dilocox_peer.types import PeerId, sha256

PLAN = Plan("fp16", 0, 8)
GENESIS = Place.genesis(0, sha256(b"genesis"), PLAN)
ME = PeerId("me")
FIRST = Certificate(0, GENESIS.head, 1, 0, GENESIS.view_change((ME,)), ((ME, b"s"),))
AT_FIRST = GENESIS.then(FIRST)
SECOND = Certificate(0, FIRST.head, 1, 0, AT_FIRST.round_value([], (ME,)), ((ME, b"s"),))
OTHER = Certificate(0, FIRST.head, 2, 0, AT_FIRST.view_change((ME,)), ((ME, b"s"),))

STARTED = encode_record(Durable(0, (FIRST,), Votes(FIRST.head)))
VOTED = encode_record(Durable(1, (), Votes(FIRST.head, 3, Accepted(3, SECOND.value), 2, OTHER.value)))
GREW = encode_record(Durable(1, (SECOND,), Votes(SECOND.head)))
SWITCHED = encode_record(Durable(1, (OTHER,), Votes(OTHER.head)))


def test_an_empty_log_is_a_peer_that_never_was() -> None:
    assert load_log(b"", GENESIS.head).durable is None


def test_records_add_up() -> None:
    loaded = load_log(STARTED + VOTED, GENESIS.head)
    assert loaded.durable == Durable(0, (FIRST,), Votes(FIRST.head, 3, Accepted(3, SECOND.value), 2, OTHER.value))
    assert loaded.valid_bytes == len(STARTED + VOTED)
    assert load_log(STARTED + VOTED + GREW, GENESIS.head).durable == Durable(0, (FIRST, SECOND), Votes(SECOND.head))


def test_a_branch_switch_drops_what_was_above_the_ancestor() -> None:
    loaded = load_log(STARTED + GREW + SWITCHED, GENESIS.head)
    assert loaded.durable == Durable(0, (FIRST, OTHER), Votes(OTHER.head))


def test_a_torn_last_record_is_as_if_it_had_never_been_written() -> None:
    whole = load_log(STARTED + VOTED, GENESIS.head)
    for cut in range(1, len(GREW)):
        loaded = load_log(STARTED + VOTED + GREW[:cut], GENESIS.head)
        assert loaded.durable == whole.durable
        assert loaded.valid_bytes == whole.valid_bytes
        assert "torn" in loaded.reason


def test_damage_before_the_last_record_costs_the_votes() -> None:
    raw = bytearray(STARTED + VOTED + GREW)
    raw[len(STARTED) + 20] ^= 1
    loaded = load_log(bytes(raw), GENESIS.head)
    assert loaded.durable is not None
    assert loaded.durable.appended == (FIRST,)
    assert loaded.durable.votes == Votes(FIRST.head, view_change_signed=1 + LOST_VOTES_VIEWS)


def test_a_compacted_log_loads_the_same() -> None:
    loaded = load_log(STARTED + VOTED, GENESIS.head)
    assert loaded.durable is not None
    assert load_log(encode_record(loaded.durable), GENESIS.head).durable == loaded.durable


def test_a_log_of_another_run_is_not_believed() -> None:
    loaded = load_log(STARTED, sha256(b"another genesis"))
    assert loaded.valid_bytes == 0
    assert loaded.durable is not None
    assert loaded.durable.appended == ()


@pytest.mark.parametrize("junk", [b"\x00" * 40, b"junk", b"\xff" * 100])
def test_junk_is_dropped_with_a_reason(junk: bytes) -> None:
    loaded = load_log(STARTED + junk, GENESIS.head)
    assert loaded.valid_bytes == len(STARTED)
    assert loaded.reason


@pytest.mark.parametrize("length", [b"\x7f", b"\xff"])
def test_a_damaged_length_before_the_last_record_costs_the_votes_too(length: bytes) -> None:
    """It reaches beyond the end, like that of a torn record; what follows it shows that it is none."""
    loaded = load_log(STARTED + length + VOTED[1:] + VOTED, GENESIS.head)
    assert loaded.valid_bytes == len(STARTED)
    assert loaded.durable is not None
    assert loaded.durable.votes == Votes(FIRST.head, view_change_signed=1 + LOST_VOTES_VIEWS)


def test_a_chain_longer_than_any_list_of_a_message_is_read_back() -> None:
    place, chain = GENESIS, []
    for _ in range(200):
        chain.append(Certificate(0, place.head, place.view + 1, 0, place.view_change((ME,)), ((ME, b"s"),)))
        place = place.then(chain[-1])
    loaded = load_log(encode_record(Durable(0, tuple(chain), Votes(place.head))), GENESIS.head)
    assert loaded.durable is not None
    assert loaded.durable.appended == tuple(chain)


def test_heads_that_were_left_are_remembered_the_newest_of_them() -> None:
    heads = [sha256(str(number).encode()) for number in range(MAX_LEFT + 3)]
    raw = b"".join(
        encode_record(Durable(0, (), Votes(GENESIS.head, promised=number), left=(head,)))
        for number, head in enumerate(heads)
    )
    loaded = load_log(raw, GENESIS.head).durable
    assert loaded is not None
    assert loaded.left == tuple(heads[3:])
    again = load_log(encode_record(loaded), GENESIS.head).durable
    assert again == loaded
