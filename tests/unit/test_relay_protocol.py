"""What a relay answers to a request for a reservation, and what a hostile one may answer instead."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox_peer.network.relay_protocol import MAX_ANSWER_BYTES, RelayLimit, length_of, read_answer

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
