import contextlib
import math
import random
import re
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox_peer.errors import ProtocolError
from dilocox_peer.pipeline.contract import HopReceived, Linked
from dilocox_peer.pipeline.scheduler import Scheduler
from dilocox_peer.types import PeerId
from dilocox_peer.wire.declared import replaced
from dilocox_peer.wire.hops import (
    LEAST_SECONDS,
    MAX_HOPS_BYTES,
    MAX_MESSAGES,
    MAX_SECONDS,
    Cancel,
    Grad,
    GradAck,
    HopMessage,
    HopStatus,
    MicroBatchId,
    Refuse,
    Reserve,
    SlotGrant,
    SlotWait,
    Step,
    decode_hops,
    encode_hops,
    tellable,
)

SENDER = PeerId("12D3KooWSender")
ID = MicroBatchId(PeerId("12D3KooWQVfA4vRPxrGUKMQUVfR9eWk5bJDGxzkvTyYvV1TyzKJU"), 1_700_000_000_000, 41)
MESSAGES: list[HopMessage] = [
    Reserve(*ID, 7, 3),
    SlotGrant(*ID, 7),
    SlotWait(*ID, 7, 2),
    Step(*ID, 7, 3, 12),
    Grad(*ID, 7, 1.5, 2),
    GradAck(*ID, 7),
    Cancel(*ID, 7),
    Refuse(*ID, 7, "leaving"),
    HopStatus(1, 4, 3, 2, 1, 0.25, 5, 0.04, 0.5, 2.5, 0.25, 0.5, 0.125, "lab.2"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_survives_the_wire(message: HopMessage) -> None:
    assert decode_hops(encode_hops([message]), SENDER) == (message,)


def golden(name: str) -> list[tuple[str, bytes]]:
    """What an earlier version wrote: the bytes of each kind of message, from before they were declared."""
    lines = (Path(__file__).parent / "golden" / name).read_text().splitlines()
    return [(kind, bytes.fromhex(raw)) for kind, _, raw in (line.partition(" ") for line in lines)]


def test_the_bytes_are_those_of_an_earlier_version() -> None:
    before = golden("hops.txt")
    assert [raw for _, raw in before[: len(MESSAGES)]] == [encode_hops([message]) for message in MESSAGES]
    for kind, raw in before:
        messages = decode_hops(raw, SENDER)
        assert encode_hops(messages) == raw
        assert kind in ("Header", type(messages[0]).__name__)


def test_only_one_encoding_of_a_message_is_read() -> None:
    """Else two peers could hold different bytes for one message, and an older one refuse what a newer one takes."""
    (status,) = msgpack.unpackb(encode_hops([MESSAGES[8]]))
    (grant,) = msgpack.unpackb(encode_hops([MESSAGES[1]]))
    for other in (
        msgpack.packb([[*status[:6], 1, *status[7:]]]),  # a whole number where a float belongs
        msgpack.packb([status[:-3]]),  # without the fields that have defaults
        msgpack.packb([status], use_single_float=True),
        b"\xdc\x00\x01" + msgpack.packb(grant),  # a list's length in more bytes than it takes
    ):
        with pytest.raises(ProtocolError, match="another encoding"):
            decode_hops(other, SENDER)


def test_a_name_with_a_line_end_is_refused() -> None:
    (grant,) = msgpack.unpackb(encode_hops([MESSAGES[1]]))
    with pytest.raises(ProtocolError, match="matching regex"):
        decode_hops(msgpack.packb([[1, "peer\n", *grant[2:]]]), SENDER)


def test_messages_keep_their_order_and_the_last_may_have_a_body() -> None:
    messages: list[HopMessage] = [GradAck(*ID, 1), SlotGrant(*ID, 2), Step(*ID, 7, 3, 12)]
    assert decode_hops(encode_hops(messages), SENDER) == tuple(messages)


def test_a_body_before_the_last_message_is_refused() -> None:
    raw = msgpack.packb([*msgpack.unpackb(encode_hops([MESSAGES[3]])), *msgpack.unpackb(encode_hops([MESSAGES[5]]))])
    with pytest.raises(ProtocolError, match="not the last"):
        decode_hops(raw, SENDER)


def test_a_loss_that_is_not_finite_arrives_as_nan() -> None:
    for loss in (math.nan, math.inf, -math.inf, 1e300, 1001.0, -1.0):
        (message,) = decode_hops(encode_hops([Grad(*ID, 0, tellable(loss), 0)]), SENDER)
        assert isinstance(message, Grad)
        assert math.isnan(message.loss)


def test_a_header_of_no_or_too_many_messages_is_refused() -> None:
    one = msgpack.unpackb(encode_hops([GradAck(*ID, 0)]))
    items: Any
    for items in ([], one * (MAX_MESSAGES + 1)):
        with pytest.raises(ProtocolError):
            decode_hops(msgpack.packb(items), SENDER)


def test_a_step_header_is_small() -> None:
    assert len(encode_hops([Step(*ID, 2**47, 3, 12)])) < 90


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_is_refused_if_cut_or_continued(message: HopMessage) -> None:
    (fields,) = msgpack.unpackb(encode_hops([message]))
    broken: Any
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
    wrong: Any
    for place in range(1, len(fields)):
        for wrong in (True, -1, 2**60, "x" * 100, b"x", [], math.nan, math.inf, "\n"):
            broken = [*fields[:place], wrong, *fields[place + 1 :]]
            with pytest.raises(ProtocolError):
                decode_hops(msgpack.packb([broken]), SENDER)


@pytest.mark.parametrize("place", [6, 8, 9, 10])
def test_times_so_short_that_speeds_are_infinite_are_refused(place: int) -> None:
    """1 / 5e-324 is infinite: the plan of routes would be NaN, and the pipeline's thread would end."""
    (fields,) = msgpack.unpackb(encode_hops([MESSAGES[8]]))
    with pytest.raises(ProtocolError, match="of Status is 5e-324"):
        decode_hops(msgpack.packb([[*fields[:place], 5e-324, *fields[place + 1 :]]]), SENDER)


@pytest.mark.parametrize("short", [LEAST_SECONDS, 0.0])
def test_the_shortest_times_that_are_let_in_leave_plan_and_window_finite(short: float) -> None:
    status = HopStatus(1, 0, 0, 0, 0, short, 0, MAX_SECONDS, short)
    (told,) = decode_hops(encode_hops([status]), SENDER)
    origin = Scheduler(
        me=PeerId("me"), incarnation=1, stage=0, num_stages=2, mode="carry", accumulate=32, max_slots=16,
        rng=random.Random(1), now=0.0,
    )  # fmt: skip
    for peer in ("quick", "usual"):
        origin.handle(Linked(PeerId(peer), 1), 0.0)
    origin.handle(HopReceived(PeerId("usual"), replaced(MESSAGES[8], service_s=0.1)), 0.0)
    origin.handle(HopReceived(PeerId("quick"), told), 0.0)
    assert sum(origin.plan.weights.values()) == pytest.approx(1.0)
    assert 1 <= origin.window <= 32


def test_a_loss_that_no_model_has_is_refused() -> None:
    (fields,) = msgpack.unpackb(encode_hops([MESSAGES[4]]))
    for loss in (1e308, 1000.1, -1e-6, -1e308):
        with pytest.raises(
            ProtocolError,
            match=re.escape("`float` <= 1000.0 - at `$[0][5]`" if loss > 0 else "`float` >= 0.0 - at `$[0][5]`"),
        ):
            decode_hops(msgpack.packb([[*fields[:5], loss, *fields[6:]]]), SENDER)


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
