import struct
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from dilocox_peer.peer.rounds.chain import Place
from dilocox_peer.peer.rounds.durable import LOST_VOTES_VIEWS, Durable, Votes, encode_record, load_log
from dilocox_peer.types import PeerId, sha256
from dilocox_peer.wire.chain import Certificate, Plan, decode_chain, encode_chain
from dilocox_peer.wire.declared import replaced
from dilocox_peer.wire.journal import MAX_LEFT
from dilocox_peer.wire.rounds import Accepted

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


def golden() -> list[tuple[str, bytes]]:
    """What the code wrote before its records were declared; `before`, `unsigned`: what earlier ones wrote."""
    lines = (Path(__file__).parent / "golden" / "journal.txt").read_text().splitlines()
    return [(kind, bytes.fromhex(raw)) for kind, _, raw in (line.partition(" ") for line in lines)]


def test_a_log_on_disk_is_read_and_would_be_written_the_same() -> None:
    *records, (_, before), (_, unsigned), (_, chain) = golden()
    raw = b"".join(raw for _, raw in records)
    loaded = load_log(raw, GENESIS.head)
    assert (loaded.reason, loaded.valid_bytes) == ("", len(raw))
    assert loaded.durable is not None
    assert loaded.durable.appended == (FIRST, SECOND)
    assert loaded.durable.votes == Votes(SECOND.head)
    voted = load_log(records[0][1] + records[1][1], GENESIS.head).durable
    assert voted is not None
    assert voted.votes.accepted is not None
    assert len(voted.votes.accepted.promises) == 2
    assert len(voted.votes.accepted.authors) == 1
    assert voted.checkpoint is not None
    assert encode_record(Durable(0, (FIRST,), Votes(FIRST.head))) == records[0][1]
    assert encode_record(replace(voted, keep=1, appended=())) == records[1][1]
    assert encode_record(Durable(1, (SECOND,), Votes(SECOND.head))) == records[2][1]

    older = load_log(records[0][1] + before, GENESIS.head).durable
    assert older is not None
    assert older.votes.accepted == Accepted(3, SECOND.value)
    unshown = load_log(records[0][1] + unsigned, GENESIS.head).durable
    assert unshown is not None
    assert unshown.votes.accepted == replaced(voted.votes.accepted, authors=()), "as it was before authors signed"

    assert decode_chain(chain, len(chain)) == [FIRST, SECOND]
    assert encode_chain([FIRST, SECOND]) == chain


def test_a_log_of_another_version_says_who_must_update() -> None:
    payload = bytearray(STARTED[8:])
    payload[1] = 3
    raw = struct.pack(">II", len(payload), zlib.crc32(payload)) + payload
    assert "version 3, this peer speaks 2: this peer must update" in load_log(bytes(raw), GENESIS.head).reason


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
    assert tuple(loaded.durable.appended) == tuple(chain)


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


@pytest.mark.parametrize("size_bytes", [4, 8, 40, 5000])
def test_zeros_where_the_last_record_was_to_be_are_one_that_was_never_written(size_bytes: int) -> None:
    """So a power cut leaves a file that had its new length before its new bytes."""
    whole = load_log(STARTED + VOTED, GENESIS.head)
    loaded = load_log(STARTED + VOTED + bytes(size_bytes), GENESIS.head)
    assert not loaded.is_damaged
    assert loaded.durable == whole.durable
    assert load_log(STARTED + bytes(size_bytes) + VOTED, GENESIS.head).is_damaged, (
        "what follows shows that they are none"
    )
