"""Frames cut out of bytes however these arrive, and what a hello means."""

import random
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox_peer.errors import ProtocolError
from dilocox_peer.network.frames import MAGIC, PREFIX_BYTES, pack_header, unpack_header
from dilocox_peer.network.link_frames import (
    Backoff,
    BufferReader,
    ChunkReader,
    Frame,
    FrameKind,
    Verdict,
    header_field,
    judge,
    rest_of,
)
from dilocox_peer.network.linkd_process import LinkSettings

MAX_BODY_BYTES = 100_000

frames = st.lists(
    st.tuples(
        st.sampled_from(list(FrameKind)),
        st.dictionaries(st.text(max_size=3), st.integers(0, 2**32) | st.binary(max_size=9000), max_size=3),
        st.binary(max_size=40) | st.integers(0, 30_000).map(lambda size: random.Random(size).randbytes(size)),
    ),
    max_size=5,
)


def wire(sent: list[tuple[FrameKind, dict[str, Any], bytes]]) -> bytes:
    return b"".join(pack_header(kind, header, len(body)) + body for kind, header, body in sent)


def content(received: list[Frame]) -> list[tuple[int, dict[str, Any], bytes]]:
    assert all(frame.body_bytes == sum(map(len, frame.parts)) for frame in received)
    return [(frame.kind, frame.header, b"".join(frame.parts)) for frame in received]


def through_buffers(raw: bytes, sizes: list[int]) -> list[Frame]:
    """What BufferReader makes of raw, when each receive brings at most one of the sizes."""
    reader, received, position, turn = BufferReader(MAX_BODY_BYTES), [], 0, 0
    while position < len(raw):
        space = reader.space()
        assert space
        piece = raw[position : position + min(len(space), sizes[turn % len(sizes)])]
        space[: len(piece)] = piece
        received += reader.take(len(piece))
        position, turn = position + len(piece), turn + 1
    return received


@given(frames, st.lists(st.integers(1, 20_000), min_size=1, max_size=5))
def test_every_way_of_arriving_gives_the_same_frames_to_the_buffer_reader(sent, sizes):
    assert content(through_buffers(wire(sent), sizes)) == sent


@given(frames, st.lists(st.integers(1, 20_000), min_size=1, max_size=5))
def test_every_way_of_arriving_gives_the_same_frames_to_the_chunk_reader(sent, sizes):
    raw, reader, received, position, turn = wire(sent), ChunkReader(MAX_BODY_BYTES), [], 0, 0
    while position < len(raw):
        piece = raw[position : position + sizes[turn % len(sizes)]]
        received += list(reader.feed(piece))
        position, turn = position + len(piece), turn + 1
    assert content(received) == sent
    assert not reader.in_frame


def test_a_large_body_is_received_in_a_buffer_of_its_own():
    body = random.Random(1).randbytes(60_000)
    raw = wire([(FrameKind.DATA, {"l": 1}, body), (FrameKind.DATA, {"l": 2}, body)])
    first, second = through_buffers(raw, [len(raw)])
    assert isinstance(first.parts[0], bytearray)
    assert first.parts[0] is not second.parts[0]
    assert len(first.parts) == 1


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: example\r\n\r\n", "not a frame"),
        (pack_header(FrameKind.DATA, {}, MAX_BODY_BYTES + 1), "at most 100000"),
        (pack_header(FrameKind.DATA, {}, 0)[:-1] + b"\xc1", "unreadable header"),
        (MAGIC.to_bytes(4, "big") + b"\x01\x00\x00\x00" + (2**31).to_bytes(4, "big") + bytes(8), "header of"),
    ],
)
def test_sizes_and_magic_are_refused_before_memory_is_taken(raw: bytes, reason: str):
    with pytest.raises(ProtocolError, match=reason):
        list(ChunkReader(MAX_BODY_BYTES).feed(raw))
    with pytest.raises(ProtocolError, match=reason):
        through_buffers(raw, [len(raw)])


@pytest.mark.parametrize("cut", [1, PREFIX_BYTES, PREFIX_BYTES + 1, -1])
def test_an_end_inside_a_frame_is_seen(cut: int):
    reader = ChunkReader(MAX_BODY_BYTES)
    assert not list(reader.feed(wire([(FrameKind.FRAME, {"h": b"x"}, b"body")])[:cut]))
    assert reader.in_frame


def test_a_small_piece_of_a_body_keeps_no_large_buffer_alive():
    raw = wire([(FrameKind.FRAME, {}, bytes(50_000)), (FrameKind.FRAME, {}, bytes(10))])
    large, small = ChunkReader(MAX_BODY_BYTES).feed(raw)
    assert isinstance(large.parts[0], memoryview)
    assert isinstance(small.parts[0], bytearray)


def test_a_body_that_comes_byte_by_byte_is_kept_in_one_piece():
    """Each byte of its own was kept as an object of 200 bytes and more, which no limit counted."""
    body = random.Random(1).randbytes(30_000)
    raw, reader, received = wire([(FrameKind.FRAME, {}, body)]), ChunkReader(MAX_BODY_BYTES), list[Frame]()
    for position in range(len(raw)):
        received += reader.feed(raw[position : position + 1])
    [frame] = received
    assert content(received) == [(FrameKind.FRAME, {}, body)]
    assert len(frame.parts) == 1


@given(st.lists(st.integers(1, 9000), min_size=1, max_size=60))
def test_pieces_of_a_body_are_never_many_for_its_size(sizes):
    reader = ChunkReader(MAX_BODY_BYTES * 10)
    [frame] = [
        each
        for piece in (pack_header(FrameKind.FRAME, {}, sum(sizes)), *map(bytes, sizes))
        for each in reader.feed(piece)
    ]
    assert sum(map(len, frame.parts)) == sum(sizes)
    assert len(frame.parts) <= 1 + 2 * sum(sizes) // 4096


@given(st.lists(st.binary(max_size=9), max_size=6), st.data())
def test_rest_of_buffers_is_what_was_not_written(buffers, data):
    written = data.draw(st.integers(0, sum(map(len, buffers))))
    assert b"".join(rest_of(list(buffers), written)) == b"".join(buffers)[written:]


@pytest.mark.parametrize(
    ("linked_with", "offered", "verdict"),
    [(None, 5, Verdict.ANEW), (5, 5, Verdict.JOIN), (5, 6, Verdict.ANEW), (5, 4, Verdict.STALE)],
)
def test_a_hello_joins_replaces_or_is_stale_by_its_generation(linked_with, offered, verdict):
    assert judge(linked_with, offered) is verdict


def test_backoff_doubles_to_its_bound_and_starts_again():
    backoff = Backoff(0.5, 15.0, random.Random(1))
    waits = [backoff.next_s() for _ in range(8)]
    for wait_s, middle_s in zip(waits, [0.5, 1, 2, 4, 8, 15, 15, 15], strict=True):
        assert 0.75 * middle_s <= wait_s <= 1.25 * middle_s
    backoff.reset()
    assert backoff.next_s() <= 0.625


def test_a_field_of_another_type_is_the_senders_fault():
    assert header_field({"g": 3}, "g", int) == 3
    for header in ({}, {"g": "3"}, {"g": True}):
        with pytest.raises(ProtocolError, match="no int 'g'"):
            header_field(header, "g", int)


def test_settings_that_could_never_send_are_refused():
    good: dict[str, Any] = {"key_seed": bytes(32), "listen": (), "protocol": "/x", "max_body_bytes": 1000}
    LinkSettings(**good, queue_bytes=80_000)
    with pytest.raises(ValueError, match="queue_bytes 60000 holds no frame"):
        LinkSettings(**good, queue_bytes=60_000)
    with pytest.raises(ValueError, match="32 bytes, not 31"):
        LinkSettings(**(good | {"key_seed": bytes(31)}), queue_bytes=80_000)


@pytest.mark.parametrize(
    "packed",
    [b"\xdc\x10\x00" * 1000 + b"\xc0" * 500, b"\x91" * 5000 + b"\xc0", b"\x81\xa0" * 900 + b"\xc0", b"\xd4\x50\xc0"],
    ids=["counts", "lists", "maps", "extension type"],
)
def test_a_header_that_is_deep_or_counts_wrongly_is_refused_before_memory_is_taken(packed: bytes):
    """Lists of 4096 in lists of 4096: msgpack makes room for each as it comes, 32 MB for 3 kB."""
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="unreadable header"):
            unpack_header(packed)
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()
