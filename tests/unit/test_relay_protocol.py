"""What a relay answers to a request for a reservation, and what a hostile one may answer instead."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox_peer.network.relay_protocol import (
    MAX_ANSWER_BYTES,
    MAX_ID_BYTES,
    RESERVE,
    AskCircuit,
    AskPlace,
    RelayLimit,
    RelayStatus,
    answered,
    is_taken,
    length_of,
    passed_on,
    read_answer,
    read_request,
    reserved_until,
)

SMALL = bytes.fromhex("080222060878108080082864")


def test_a_limit_is_read():
    assert read_answer(SMALL) == (RelayLimit(num_bytes=128 << 10, seconds=120), "")


def test_a_relay_without_limits_has_none():
    assert read_answer(bytes.fromhex("08022864")) == (RelayLimit(num_bytes=0, seconds=0), "")


def test_reservation_and_voucher_are_passed_over():
    answer = bytes.fromhex("08021a080801120406047f002864")
    assert read_answer(answer) == (RelayLimit(num_bytes=0, seconds=0), "")


@pytest.mark.parametrize(
    ("status", "reason"), [("c801", "it refuses reservations"), ("c901", "it has no room for more"), ("01", "status 1")]
)
def test_a_refusal_has_a_reason(status: str, reason: str):
    assert read_answer(bytes.fromhex("080228" + status)) == (None, reason)


@pytest.mark.parametrize(
    "raw",
    ["", "0800", "2864", "080228", "08022a0164", "0802280a2264", "080222", "08022205" "0878" "2864", "0b", "08" + "ff" * 12],
)  # fmt: skip
def test_what_is_no_answer_is_refused(raw: str):
    found: tuple[RelayLimit | None, str] | None = None
    try:
        found = read_answer(bytes.fromhex(raw))
    except ValueError:
        return
    assert found[0] is None


@given(st.binary(max_size=64))
def test_any_bytes_are_read_or_refused(raw: bytes):
    try:
        limit, reason = read_answer(raw)
    except ValueError:
        return
    assert (limit is None) == bool(reason)


def test_an_answer_has_a_length_and_not_any():
    assert length_of(b"") is None
    assert length_of(b"\x05") == 5
    assert length_of(b"\x80") is None
    assert length_of(b"\x80\x01") == 128
    with pytest.raises(ValueError, match="without a length"):
        length_of(b"\x80\x80")
    with pytest.raises(ValueError, match=f"at most {MAX_ANSWER_BYTES}"):
        length_of(b"\xff\x7f")


# ---- the relay's part --------------------------------------------------------------------------------------------------

ID = bytes.fromhex("0024080112201122334455667788112233445566778811223344556677881122334455667788")


def body(raw: bytes) -> bytes:
    """A message without its length, which is right."""
    assert length_of(raw[:1]) == len(raw) - 1
    return raw[1:]


def test_what_we_ask_of_a_relay_a_relay_of_ours_understands():
    assert read_request(body(RESERVE)) == AskPlace()


def test_a_connection_is_asked_for_by_a_name_in_binary():
    """As go-libp2p writes it, with addresses that are passed over."""
    peer = b"\x0a" + bytes([len(ID)]) + ID + bytes.fromhex("12080402020202061267")
    assert read_request(b"\x08\x01\x12" + bytes([len(peer)]) + peer) == AskCircuit(ID)


@pytest.mark.parametrize("raw", ["", "0802", "0801", "080112", "08011200", "0801120210ff", "08011205" + "ff" * 5, "10"])
def test_what_asks_for_nothing_is_refused(raw: str):
    with pytest.raises(ValueError, match=r"."):
        read_request(bytes.fromhex(raw))


def test_a_name_that_is_too_long_is_refused():
    peer = b"\x0a" + bytes([MAX_ID_BYTES + 1]) + bytes(MAX_ID_BYTES + 1)
    with pytest.raises(ValueError, match="nobody"):
        read_request(b"\x08\x01\x12" + bytes([len(peer)]) + peer)


@given(st.binary(max_size=200))
def test_any_request_is_read_or_refused(raw: bytes):
    try:
        found = read_request(raw)
    except ValueError:
        return
    assert isinstance(found, AskPlace) or 0 < len(found.target) <= MAX_ID_BYTES


def test_what_a_relay_of_ours_answers_a_peer_of_ours_reads():
    assert read_answer(body(reserved_until(1_800_000_000))) == (RelayLimit(0, 0), "")
    assert read_answer(body(answered(RelayStatus.FULL))) == (None, "it has no room for more")


def test_whom_a_relay_passes_on_is_named():
    message = body(passed_on(ID))
    assert message == b"\x08\x00\x12" + bytes([len(ID) + 2]) + b"\x0a" + bytes([len(ID)]) + ID


def test_a_target_takes_who_is_passed_on_or_does_not():
    assert is_taken(bytes.fromhex("08012064"))
    assert not is_taken(bytes.fromhex("080120ca01"))
    with pytest.raises(ValueError, match="not a status"):
        is_taken(bytes.fromhex("0800"))
