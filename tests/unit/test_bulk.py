"""The fetch protocol on bytes alone: what a reader makes of every way a stream can end or lie."""

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox_peer.errors import ProtocolError
from dilocox_peer.network.bulk import (
    END,
    REFUSAL,
    REPLY,
    REQUEST,
    PeerGone,
    PeerSilent,
    Receipts,
    Reply,
    RequestRefused,
    receive_reply,
    receive_request,
    send_reply,
)
from dilocox_peer.network.flow import Flow, Uplink
from dilocox_peer.network.frames import pack_header
from dilocox_peer.types import PeerId

PEER = PeerId("them")
BODY = bytes(range(200))


class Wire:
    """A StreamWriter that keeps what is written."""

    def __init__(self) -> None:
        self.raw = bytearray()
        self.writes: list[int] = []

    def write(self, data: bytes) -> None:
        self.raw += data
        self.writes.append(len(data))

    async def drain(self) -> None: ...


def wire_form(reply: Reply, *, chunk_bytes: int = 64) -> Wire:
    wire = Wire()

    async def pace(num_bytes: int) -> None:
        assert num_bytes <= chunk_bytes

    asyncio.run(send_reply(wire, reply, chunk_bytes=lambda: chunk_bytes, pace=pace, stall_timeout_s=1))  # type: ignore[arg-type]
    return wire


def receive(
    raw: bytes, *, ends: bool = True, max_body_bytes: int = 10_000, stall_timeout_s: float = 1.0
) -> tuple[dict[str, Any], bytes]:
    async def run() -> tuple[dict[str, Any], bytes]:
        reader = asyncio.StreamReader()
        reader.feed_data(raw)
        if ends:
            reader.feed_eof()
        header, body = await receive_reply(
            reader, PEER, max_body_bytes=max_body_bytes, stall_timeout_s=stall_timeout_s, on_bytes=lambda _number: None
        )
        return header, bytes(body)

    return asyncio.run(run())


@settings(max_examples=50)
@given(st.lists(st.binary(max_size=100), max_size=5), st.integers(1, 70))
def test_a_reply_arrives_as_it_was_sent(parts: list[bytes], chunk_bytes: int) -> None:
    wire = wire_form(Reply({"round": 3}, parts), chunk_bytes=chunk_bytes)
    assert receive(bytes(wire.raw)) == ({"round": 3}, b"".join(parts))
    assert max(wire.writes[1:-1], default=0) <= chunk_bytes


WHOLE = bytes(wire_form(Reply({"a": 1}, [BODY])).raw)


@settings(max_examples=50)
@given(st.integers(0, len(WHOLE) - 1))
def test_a_stream_that_ends_early_is_never_a_reply(cut: int) -> None:
    """That of a killed peer ends just so, without an error: anywhere, also between the body and its end mark."""
    with pytest.raises(PeerGone, match="the stream ended after"):
        receive(WHOLE[:cut])


def test_a_stream_that_stalls_is_silent() -> None:
    with pytest.raises(PeerSilent, match=r"nothing for 0.01 s after 150 of 200 bytes"):
        receive(WHOLE[: WHOLE.index(BODY) + 150], ends=False, stall_timeout_s=0.01)
    with pytest.raises(PeerSilent, match=r"after 200 of 200"):
        receive(WHOLE[: WHOLE.index(BODY) + 200], ends=False, stall_timeout_s=0.01)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (pack_header(REPLY, {}, 10_001), "body of 10001 bytes, at most 10000"),
        (pack_header(REPLY, {}, 2**62), "at most 10000"),
        (pack_header(REQUEST, {}, 0), "in place of a reply"),
        (pack_header(REPLY, {}, 0) + pack_header(REPLY, {}, 0), "in place of the end mark"),
        (pack_header(REPLY, {}, 0) + pack_header(END, {}, 1), "body of 1 bytes, at most 0"),
        (b"HTTP/1.1 200 OK\r\n\r\n<html></html>", "not a frame"),
        (pack_header(REPLY, {}, 0)[:-1] + b"\xc1", "header"),
    ],
)
def test_a_reply_that_lies_names_its_peer(raw: bytes, says: str) -> None:
    with pytest.raises(ProtocolError, match=says) as caught:
        receive(raw)
    assert caught.value.peer == PEER


def test_a_refusal_is_told() -> None:
    for header, says in (
        ({"reason": "busy"}, "busy"),
        ({}, "no reason"),
        ({"reason": "x" * 9999}, "x" * 300),
        ({"reason": 5}, "5"),
    ):
        with pytest.raises(RequestRefused, match=says) as caught:
            receive(pack_header(REFUSAL, header, 0))
        assert len(caught.value.reason) <= 300


def test_a_request_has_no_body() -> None:
    async def run(raw: bytes) -> dict[str, Any]:
        reader = asyncio.StreamReader()
        reader.feed_data(raw)
        reader.feed_eof()
        return await receive_request(reader)

    assert asyncio.run(run(pack_header(REQUEST, {"round": 1}, 0))) == {"round": 1}
    for raw in (pack_header(REQUEST, {}, 1), pack_header(REPLY, {}, 0), b"x" * 100):
        with pytest.raises(ProtocolError):
            asyncio.run(run(raw))


# ---- acknowledged ---------------------------------------------------------------------------------------------------


async def test_no_more_is_sent_than_is_acknowledged() -> None:
    flow, wire, heard, reader = Flow(Uplink(), is_urgent=True), Wire(), list[int](), asyncio.StreamReader()
    body = bytes(4 * flow.window)
    first = flow.window
    async with Receipts(reader, flow, heard.append, num_bytes=len(body)) as receipts:
        sending = asyncio.create_task(_send(wire, body, receipts))
        await _rest()
        assert first - flow.piece_bytes <= flow.in_flight <= first
        came = flow.in_flight
        for lie in (0, 10 * len(body), came - 1):  # the last is in the middle of a piece: it counts for those before
            reader.feed_data(lie.to_bytes(8, "big"))
        await _rest()
        assert sum(heard) < came, "only what was sent can have come"
        while not sending.done():
            reader.feed_data(receipts.num_sent.to_bytes(8, "big"))
            await _rest()
        await sending
    assert sum(heard) == len(body)
    assert flow.in_flight == 0


async def test_a_receiver_that_goes_ends_the_sending_and_frees_its_room() -> None:
    flow, reader = Flow(Uplink(), is_urgent=True), asyncio.StreamReader()
    async with Receipts(reader, flow, lambda _number: None, num_bytes=4 * flow.window) as receipts:
        sending = asyncio.create_task(_send(Wire(), bytes(4 * flow.window), receipts))
        await _rest()
        reader.feed_eof()
        with pytest.raises(ConnectionResetError):
            await sending
    assert flow.in_flight == 0


async def test_a_receiver_that_acknowledges_nothing_is_given_up() -> None:
    flow = Flow(Uplink(), is_urgent=True)
    with pytest.raises(TimeoutError):
        async with Receipts(asyncio.StreamReader(), flow, lambda _number: None, num_bytes=4 * flow.window) as receipts:
            await _send(Wire(), bytes(4 * flow.window), receipts, stall_timeout_s=0.01)
    assert flow.in_flight == 0


async def test_what_follows_the_last_receipt_is_left_for_the_next_request() -> None:
    flow, reader, body = Flow(Uplink(), is_urgent=True), asyncio.StreamReader(), b"x" * 100
    async with Receipts(reader, flow, lambda _number: None, num_bytes=len(body)) as receipts:
        sending = asyncio.create_task(_send(Wire(), body, receipts))
        await _rest()
        reader.feed_data((100).to_bytes(8, "big") + b"the next request")
        await sending
        await _rest()
        assert receipts.are_complete
    reader.feed_eof()
    assert await reader.read() == b"the next request"


async def _send(wire: Wire, body: bytes, receipts: Receipts, stall_timeout_s: float = 10.0) -> None:
    async def pace(_num_bytes: int) -> None: ...

    await send_reply(
        wire, Reply({}, [body]), chunk_bytes=lambda: 1 << 20, pace=pace, stall_timeout_s=stall_timeout_s, receipts=receipts  # type: ignore[arg-type]
    )  # fmt: skip


async def _rest() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.mark.parametrize("total", [2**60, 0, 1])
def test_receipts_without_end_end_the_reply(total: int) -> None:
    """False, or of nothing new: the loop read them for as long as they came, a megabyte in 68 ms."""

    async def run() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(total.to_bytes(8, "big") * 5000)
        async with Receipts(reader, Flow(Uplink(), is_urgent=False), lambda _: None, num_bytes=1 << 20) as receipts:
            await receipts.room_for(1000)
            while True:
                await receipts.room_for(1 << 30)

    with pytest.raises(ConnectionResetError):
        asyncio.run(asyncio.wait_for(run(), 10))
