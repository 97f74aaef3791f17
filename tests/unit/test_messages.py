import random
import tracemalloc
from contextlib import suppress
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox_peer.errors import ProtocolError
from dilocox_peer.peer.rounds.chain import Place
from dilocox_peer.peer.rounds.healing import LEAST_PAGE
from dilocox_peer.peer.rounds.justified import promise_statement
from dilocox_peer.types import PeerId, sha256
from dilocox_peer.wire.chain import Certificate, Entry, Plan, acceptance, head_of
from dilocox_peer.wire.checkpoints import Checkpoint
from dilocox_peer.wire.rounds import (
    MAX_LOCATOR,
    MAX_MESSAGE_BYTES,
    MAX_PAGE,
    Accepted,
    Ack,
    Cert,
    ChainPage,
    Contradiction,
    GetChain,
    Heartbeat,
    Leave,
    Message,
    Nack,
    Offer,
    Prepare,
    Promise,
    Promised,
    Proof,
    Propose,
    Statement,
    ViewAnswer,
    ViewCall,
    ViewPropose,
    ViewSign,
    Vouch,
    decode_message,
    encode_message,
)

SENDER = PeerId("12D3KooWSender")
HEAD = sha256(b"head")
PLAN = Plan("fp16", 4, 32, 64)
ENTRY = Entry(SENDER, 1_700_000_000_000, sha256(b"blob"), 12345, 64, sha256(b"state"))
ROSTER = (SENDER, PeerId("12D3KooWOther"))
PLACE = Place(0, HEAD, 3, 2, 5, 1, ROSTER, PLAN, voters=ROSTER)
VALUE = PLACE.round_value([ENTRY], PLACE.roster)
CERTIFICATE = Certificate(0, HEAD, 1, 2, VALUE, ((SENDER, b"s" * 64),))
AT = (0, HEAD, 1)
PROMISES = (Promised(SENDER, None, b"s" * 64), Promised(PeerId("12D3KooWOther"), (1, VALUE.digest()), b"t" * 64))

MESSAGES: list[Message] = [
    Heartbeat(*AT, 17, 3, 2, 5, 4, 11, True, b""),
    Leave(*AT, 17),
    Offer(*AT, ENTRY, b"s" * 64),
    Propose(*AT, 0, VALUE, b"s" * 64),
    Propose(*AT, 3, VALUE, b"s" * 64, PROMISES, (b"a" * 64, b"b" * 64)),
    Ack(*AT, 3, VALUE.digest(), b"s" * 64),
    Nack(*AT, 3, 5, (ENTRY.blob,)),
    Prepare(*AT, 3),
    Promise(*AT, 3, None, b"s" * 64),
    Promise(*AT, 3, Accepted(1, VALUE, b"t" * 64, PROMISES), b"s" * 64),
    Proof(*AT, *Contradiction(SENDER, Statement(b"one", b"s" * 64), Statement(b"other", b"t" * 64))),
    ViewCall(*AT, 2),
    ViewAnswer(*AT, 2),
    ViewPropose(*AT, 2, PLACE.view_change((SENDER,))),
    ViewSign(*AT, 2, VALUE.digest(), b"s" * 64),
    Cert(*AT, CERTIFICATE),
    GetChain(*AT, (HEAD, sha256(b"older"))),
    ChainPage(*AT, (CERTIFICATE, CERTIFICATE), True),
    Vouch(*AT, Checkpoint(0, HEAD, 8, 7, HEAD, 1_700_000_000_000, False, b"s" * 64)),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_survives_the_wire(message: Message) -> None:
    assert decode_message(encode_message(message), SENDER) == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_is_refused_if_cut_or_continued(message: Message) -> None:
    raw = encode_message(message)
    for broken in (raw[:-1], raw + b"\x00", b"", msgpack.packb([*msgpack.unpackb(raw), 0])):
        with pytest.raises(ProtocolError):
            decode_message(broken, SENDER)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_flipped_byte_is_refused_or_read_as_a_valid_message_never_an_exception(message: Message) -> None:
    raw, rng = bytearray(encode_message(message)), random.Random(0)
    for _ in range(200):
        broken = bytearray(raw)
        broken[rng.randrange(len(broken))] = rng.randrange(256)
        with suppress(ProtocolError):
            decode_message(bytes(broken), SENDER)


def test_what_a_stranger_wrote_makes_no_second_line_and_no_long_one() -> None:
    value = list(msgpack.unpackb(encode_message(MESSAGES[3]))[6])
    reason = refused(MESSAGES[3], 6, ["round\nsomething else" * 1000, *value[1:]])
    assert "\n" not in reason
    assert len(reason) < 400


def golden(name: str) -> list[tuple[str, bytes]]:
    """What the code wrote before messages were declared: name and bytes."""
    lines = (Path(__file__).parent / "golden" / name).read_text().splitlines()
    return [(kind, bytes.fromhex(raw)) for kind, _, raw in (line.partition(" ") for line in lines)]


def test_the_bytes_are_those_of_an_earlier_version() -> None:
    before = golden("rounds.txt")
    assert [raw for _, raw in before[: len(MESSAGES)]] == [encode_message(message) for message in MESSAGES]
    for kind, raw in before:
        message = decode_message(raw, SENDER)
        assert type(message).__name__ == kind
        assert encode_message(message) == raw


def test_what_is_hashed_and_signed_is_what_it_was() -> None:
    before = dict(golden("signed.txt"))
    full = decode_message(golden("rounds.txt")[-1][1], SENDER)
    assert isinstance(full, Cert)
    checkpoint = Checkpoint(0, HEAD, 8, 7, HEAD, 1_700_000_000_000, False, b"s" * 64)
    assert before == {
        "value": VALUE.digest(),
        "void": PLACE.view_change((SENDER,)).digest(),
        "full": full.certificate.value.digest(),
        "head": CERTIFICATE.head,
        "full_head": full.certificate.head,
        "head_of": head_of(3, HEAD, 1, VALUE),
        "acceptance": acceptance(0, HEAD, 1, 2, VALUE),
        "promise": promise_statement(AT, 3, None),
        "promise_accepted": promise_statement(AT, 3, (1, VALUE.digest())),
        "checkpoint": checkpoint.signed_bytes(),
    }


def test_who_must_update_is_said() -> None:
    assert "version 2, this peer speaks 3: who wrote it must update" in refused(MESSAGES[0], 0, 2)
    assert "version 4, this peer speaks 3: this peer must update" in refused(MESSAGES[0], 0, 4)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_no_field_may_be_left_out_and_none_has_a_second_encoding(message: Message) -> None:
    items = msgpack.unpackb(encode_message(message))
    for broken in (items[:-1], [*items[:4], float(items[4]), *items[5:]]):
        with pytest.raises(ProtocolError):
            decode_message(msgpack.packb(broken), SENDER)
    raw = encode_message(message)
    with pytest.raises(ProtocolError, match="another encoding"):
        decode_message(raw[:2] + b"\xcc" + raw[2:], SENDER)  # the kind, in two bytes


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(raw: bytes) -> None:
    with suppress(ProtocolError):
        decode_message(raw, SENDER)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(0, 2**63) | st.binary(max_size=40) | st.text(max_size=5), st.lists
    )
)
def test_any_structure_is_read_or_refused(item: object) -> None:
    with suppress(ProtocolError):
        decode_message(msgpack.packb([1, 5, item]), SENDER)


def refused(message: Message, position: int, value: object) -> str:
    items = msgpack.unpackb(encode_message(message))
    items[position] = value
    with pytest.raises(ProtocolError) as error:
        decode_message(msgpack.packb(items), SENDER)
    assert error.value.peer == SENDER
    return error.value.reason


def test_fields_of_the_wrong_type_length_or_range_are_refused() -> None:
    beat = MESSAGES[0]
    assert "version 4" in refused(beat, 0, 4)
    assert "Invalid value 99 - at `$[0]`" in refused(beat, 1, 99)
    assert "`int` >= 0 - at `$[1]`" in refused(beat, 2, -1)  # a place counts from the kind on
    assert "`bytes` of length >= 32" in refused(beat, 3, b"short")
    assert "`bytes` of length <= 32" in refused(beat, 3, bytes(33))
    assert "`bytes` of length >= 32" in refused(beat, 3, b"")
    assert "Expected `int`, got `bool`" in refused(beat, 4, True)
    assert "`int` <= 9007199254740992" in refused(beat, 5, 2**60)
    assert "Expected `bool`, got `int`" in refused(beat, 11, 1)
    assert "state digest of 5 bytes" in refused(beat, 12, b"digit")


def test_lists_are_bounded() -> None:
    assert f"length <= {MAX_LOCATOR}" in refused(MESSAGES[-3], 5, [HEAD] * (MAX_LOCATOR + 1))
    items = msgpack.unpackb(encode_message(MESSAGES[-1]))
    assert f"length <= {MAX_PAGE}" in refused(MESSAGES[-2], 5, [items[5][0]] * (MAX_PAGE + 1))


def test_plans_and_reports_are_whole_numbers_in_bounds() -> None:
    items = msgpack.unpackb(encode_message(MESSAGES[3]))
    for bad in (float("nan"), 0.5, -1, True):
        value = list(items[6])
        value[6] = [*value[6][:3], bad]
        assert "Expected `int`" in refused(MESSAGES[3], 6, value)
        entry = list(value[4][0])
        entry[6] = [*entry[6][:3], bad, 0]
        value = [*items[6][:4], [entry], *items[6][5:]]
        assert "Expected `int`" in refused(MESSAGES[3], 6, value)


def test_names_are_plain_text() -> None:
    entry = msgpack.unpackb(encode_message(MESSAGES[2]))[5]
    for bad in ("", "x" * 65, "tab\t", "end\n", "é", b"bytes", None):
        assert "Expected `str`" in refused(MESSAGES[2], 5, [bad, *entry[1:]])


def test_size_is_checked_before_anything_is_decoded() -> None:
    with pytest.raises(ProtocolError, match=f"at most {MAX_MESSAGE_BYTES} are read"):
        decode_message(b"\xdd" + b"\xff" * MAX_MESSAGE_BYTES, SENDER)


def test_a_list_that_claims_more_than_there_is_allocates_nothing() -> None:
    with pytest.raises(ProtocolError, match="no short list"):
        decode_message(b"\xdd\xff\xff\xff\xff", SENDER)
    chain = encode_message(ChainPage(*AT, (), False))  # its last two bytes: no certificates, and there are no more
    assert peak_bytes_of_refusing(chain[:-2] + b"\xdd\xff\xff\xff\xff", f"length <= {MAX_PAGE}") < 64 * 1024


def test_a_long_list_is_refused_before_there_is_one() -> None:
    """A message of empty lists, a byte each, would take 64 times its size."""
    count = MAX_MESSAGE_BYTES - 5
    many = b"\xdd" + count.to_bytes(4, "big") + b"\x90" * count
    assert peak_bytes_of_refusing(many, "no short list") < 64 * 1024
    for message in (ChainPage(*AT, (), False), GetChain(*AT, ())):
        head = encode_message(message)[: -2 if isinstance(message, ChainPage) else -1]
        raw = head + b"\xdd" + (count - len(head)).to_bytes(4, "big") + b"\x90" * (count - len(head))
        # One copy of the message, without its version.
        assert peak_bytes_of_refusing(raw, "`array` of length <=") < MAX_MESSAGE_BYTES + 64 * 1024


def peak_bytes_of_refusing(raw: bytes, reason: str) -> int:
    said = ""
    tracemalloc.start()
    try:
        decode_message(raw, SENDER)
    except ProtocolError as error:
        said = error.reason
    finally:
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert reason in said
    return peak_bytes


def test_deep_nesting_is_refused() -> None:
    for bomb in (b"\x91" * 100_000, encode_message(MESSAGES[2])[:-80] + b"\x91" * 100_000):
        with pytest.raises(ProtocolError):
            decode_message(bomb, SENDER)


def test_maps_and_extension_types_are_refused() -> None:
    for raw in (msgpack.packb({"a": 1}), msgpack.packb([1, {"a": 1}]), msgpack.packb([msgpack.ExtType(1, b"x")])):
        with pytest.raises(ProtocolError):
            decode_message(raw, SENDER)


def test_a_full_page_of_the_largest_rosters_fits_a_message() -> None:
    roster = tuple(PeerId(f"12D3KooW{number:044d}") for number in range(64))
    entries = [Entry(peer, 2**50, sha256(b"blob"), 2**40, 2**31, sha256(b"state")) for peer in roster]
    place = Place(0, HEAD, 2**40, 2**40, 2**40, 2**40, roster, PLAN)
    certificate = Certificate(
        0, HEAD, 2**40, 2**40, place.round_value(entries, roster), tuple((peer, b"s" * 64) for peer in roster)
    )
    page = ChainPage(*AT, (certificate,) * LEAST_PAGE, False)
    assert len(encode_message(page)) < MAX_MESSAGE_BYTES
    assert decode_message(encode_message(page), SENDER) == page
