import contextlib
import math

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox_peer.errors import ProtocolError
from dilocox_peer.pipeline.hop import (
    MAX_HOPS_BYTES,
    MAX_MESSAGES,
    Ack,
    Cancel,
    Grad,
    Grant,
    HopMessage,
    MicroBatchId,
    Refuse,
    Reserve,
    Status,
    Step,
    Wait,
    decode_hops,
    encode_hops,
)
from dilocox_peer.types import PeerId

SENDER = PeerId("12D3KooWSender")
ID = MicroBatchId(PeerId("12D3KooWQVfA4vRPxrGUKMQUVfR9eWk5bJDGxzkvTyYvV1TyzKJU"), 1_700_000_000_000, 41)
MESSAGES: list[HopMessage] = [
    Reserve(ID, 3, 7),
    Grant(ID, 7),
    Wait(ID, 2, 7),
    Step(ID, 3, 12, 7),
    Grad(ID, 1.5, 2, 7),
    Ack(ID, 7),
    Cancel(ID, 7),
    Refuse(ID, "leaving", 7),
    Status(1, 4, 3, 2, 1, 0.25, 5, 0.04, 0.5, 2.5, (0.25, 0.5)),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_survives_the_wire(message: HopMessage) -> None:
    assert decode_hops(encode_hops([message]), SENDER) == (message,)


def test_messages_keep_their_order_and_the_last_may_have_a_body() -> None:
    messages = [Ack(ID, 1), Grant(ID, 2), Step(ID, 3, 12, 7)]
    assert decode_hops(encode_hops(messages), SENDER) == tuple(messages)


def test_a_body_before_the_last_message_is_refused() -> None:
    raw = msgpack.packb([*msgpack.unpackb(encode_hops([MESSAGES[3]])), *msgpack.unpackb(encode_hops([MESSAGES[5]]))])
    with pytest.raises(ProtocolError, match="not the last"):
        decode_hops(raw, SENDER)


def test_a_loss_that_is_not_finite_arrives_as_nan() -> None:
    for loss in (math.nan, math.inf, -math.inf):
        (message,) = decode_hops(encode_hops([Grad(ID, loss, 0)]), SENDER)
        assert isinstance(message, Grad)
        assert math.isnan(message.loss)


def test_a_header_of_no_or_too_many_messages_is_refused() -> None:
    one = msgpack.unpackb(encode_hops([Ack(ID)]))
    for items in ([], one * (MAX_MESSAGES + 1)):
        with pytest.raises(ProtocolError):
            decode_hops(msgpack.packb(items), SENDER)


def test_a_step_header_is_small() -> None:
    assert len(encode_hops([Step(ID, 3, 12, 2**47)])) < 90


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_is_refused_if_cut_or_continued(message: HopMessage) -> None:
    (fields,) = msgpack.unpackb(encode_hops([message]))
    for broken in ([fields[:-1]], [[*fields, 0]], [[99, *fields[1:]]], [fields[0]], [[]], fields):
        with pytest.raises(ProtocolError):
            decode_hops(msgpack.packb(broken), SENDER)
    raw = encode_hops([message])
    for cut in (raw[:-1], raw + b"\x00", b""):
        with pytest.raises(ProtocolError):
            decode_hops(cut, SENDER)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_fields_of_the_wrong_type_or_range_are_refused(message: HopMessage) -> None:
    (fields,) = msgpack.unpackb(encode_hops([message]))
    for place in range(1, len(fields)):
        for wrong in (True, -1, 2**60, "x" * 100, b"x", [], math.nan, math.inf, "\n"):
            broken = [*fields[:place], wrong, *fields[place + 1 :]]
            with pytest.raises(ProtocolError):
                decode_hops(msgpack.packb([broken]), SENDER)


def test_a_header_above_the_cap_is_not_even_parsed() -> None:
    with pytest.raises(ProtocolError, match="at most"):
        decode_hops(b"\x90" * (MAX_HOPS_BYTES + 1), SENDER)


@given(st.binary(max_size=200))
def test_any_bytes_are_messages_or_a_protocol_error(raw: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        decode_hops(raw, SENDER)


@given(st.sampled_from(MESSAGES), st.integers(0, 10**6), st.integers(0, 255))
def test_a_flipped_byte_is_refused_or_read_never_an_exception(message: HopMessage, place: int, byte: int) -> None:
    raw = bytearray(encode_hops([message]))
    raw[place % len(raw)] = byte
    with contextlib.suppress(ProtocolError):
        decode_hops(bytes(raw), SENDER)
