"""Top-k: what is kept, what its positions cost, and which payloads are refused."""

import math
import struct
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilocox_peer.compression.gaps import encode_gaps
from dilocox_peer.compression.reader import PIECE, pieces
from dilocox_peer.compression.sizes import CHUNK, MOST_KEPT, payload_limits
from dilocox_peer.compression.topk import TopKCodec, position_bits
from dilocox_peer.errors import MalformedBlob

CODEC = TopKCodec()


def normal(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def decoded(payload, shape):
    out = torch.full(shape, torch.nan)
    CODEC.decode(memoryview(payload), out)
    return out


def test_of_a_chunk_the_largest_are_kept_at_their_mean():
    x = normal((3 * CHUNK,), 1)
    y = decoded(CODEC.encode(x), x.shape)
    for x_C, y_C in zip(x.split(CHUNK), y.split(CHUNK), strict=True):
        sizes, kept = x_C.abs().topk(MOST_KEPT)
        assert torch.equal(torch.nonzero(y_C).squeeze(1), kept.sort().values)
        assert torch.allclose(y_C[kept], x_C[kept].sign() * sizes.mean(), rtol=2.0**-8)


def test_one_large_element_is_sent_alone():
    x = normal((CHUNK,), 1) * 1e-3
    x[1234] = -10.0
    y = decoded(CODEC.encode(x), x.shape)
    assert torch.nonzero(y).squeeze(1).tolist() == [1234]
    assert float(y[1234]) == pytest.approx(-10.0, rel=2.0**-8)


@given(
    positions=st.lists(st.integers(0, 2 * CHUNK + 99), max_size=400, unique=True),
    length=st.integers(2 * CHUNK + 100, 3 * CHUNK),
)
def test_any_positions_survive(positions, length):
    """Equal sizes at up to 8 % of a chunk: decoded exactly."""
    x = torch.zeros(length)
    for start in range(0, length, CHUNK):
        limit = -(-min(CHUNK, length - start) * MOST_KEPT // CHUNK)
        inside = [position for position in positions if start <= position < start + CHUNK][:limit]
        x[inside] = torch.where(torch.tensor(inside, dtype=torch.int64) % 3 == 0, -2.0, 2.0)
    assert torch.equal(decoded(CODEC.encode(x), x.shape), x)


def test_positions_cost_one_percent_more_than_their_entropy():
    """The figures of topk.py's text, which it must not exceed."""
    shape = (256, CHUNK)
    payload = CODEC.encode(normal(shape))
    bits, entropy = position_bits(shape, payload)
    num_signs = 256 * MOST_KEPT
    assert bits < 1.01 * entropy
    assert 8 * len(payload) < 1.025 * (entropy + num_signs)
    assert 8 * len(payload) / math.prod(shape) < 0.493


@pytest.mark.parametrize("num_kept", [1, 3, 10, 30, 100, 200])
def test_few_positions_cost_at_most_a_tenth_more(num_kept):
    rng = np.random.default_rng(num_kept)
    x = torch.zeros(512, CHUNK)
    for row in x:
        row[rng.choice(CHUNK, num_kept, replace=False)] = 1.0
    bits, entropy = position_bits(tuple(x.shape), CODEC.encode(x))
    assert bits < 1.1 * entropy


def test_a_constant_tensor_keeps_what_it_may():
    y = decoded(CODEC.encode(torch.full((CHUNK + 10,), 3.0)), (CHUNK + 10,))
    assert (int((y[:CHUNK] != 0).sum()), int((y[CHUNK:] != 0).sum())) == (MOST_KEPT, 1)
    assert set(y.tolist()) == {0.0, 3.0}


def payload_of(chunks, signs=b"", rest=b""):
    """chunks: (magnitude bits, count)."""
    return (
        b"".join(struct.pack("<H", bits) for bits, _ in chunks)
        + b"".join(struct.pack("<H", count) for _, count in chunks)
        + signs + rest
    )  # fmt: skip


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (payload_of([(0x3F80, 0)]), "count that does not fit"),
        (payload_of([(0, 1)], b"\x00", b"\x01"), "count that does not fit"),
        (payload_of([(0x3F80, 10)], b"\x00\x00", b"\xff\x01"), "count that does not fit"),  # 9 of 100 at most
        (payload_of([(0x7FC0, 1)], b"\x00", b"\x00" * 7), "magnitude of nan"),
        (payload_of([(0x3F80, 1)], b"\x02", b"\x00" * 6 + b"\x01"), "padding"),
        (payload_of([(0x3F80, 8)], b"\x00", b"\x00"), "within a stream"),
        (payload_of([(0x3F80, 1)], b"\x00", b"\x00" * 6), "0 quotients for 1"),
        (payload_of([(0x3F80, 1)], b"\x00", b"\x00" * 6 + b"\x03"), "2 quotients for 1"),
        (payload_of([(0x3F80, 1)], b"\x00", b"\x00" * 6 + b"\x01\x00"), "1 quotients for 1"),
        (payload_of([(0x3F80, 1)], b"\x00", b"\x01" * 6 + b"\x02"), "outside its chunk"),  # 63 + 64
        (payload_of([(0, 0)], b"\x00"), "quotients for 0"),
        (b"\x00", "1 bytes for shape"),
    ],
)
def test_a_payload_that_cannot_be_is_refused_with_the_reason(payload, reason):
    with pytest.raises(MalformedBlob, match=f"topk: .*{reason}"):
        decoded(payload, (100,))


def test_the_bytes_of_one_position():
    x = torch.zeros(100)
    x[63] = -1.0
    payload = CODEC.encode(x)
    assert payload.hex(" ") == "80 3f 01 00 01 01 01 01 01 01 01 01"[: len(payload) * 3 - 1]
    assert torch.equal(decoded(payload, (100,)), x)


def test_refusal_takes_no_more_than_the_limits_allow():
    smallest, largest = payload_limits(CODEC.name, (CHUNK,))
    assert largest < CHUNK / 8
    with pytest.raises(MalformedBlob, match="expected"):
        decoded(bytes(largest + 1), (CHUNK,))
    assert smallest == 4


def chunks_of_every_kind(num_elements):
    """Of each chunk none to as many as it may keep, of one size: decoded exactly."""
    rng, x = np.random.default_rng(7), np.zeros(num_elements, np.float32)
    for number, start in enumerate(range(0, num_elements, CHUNK)):
        length = min(CHUNK, num_elements - start)
        most = -(-length * MOST_KEPT // CHUNK)
        kept = rng.choice(length, [0, 1, most, rng.integers(most + 1)][number % 4], replace=False)
        x[start + kept] = rng.choice([-1, 1], len(kept)) * 2.0 ** (number % 5)
    return torch.from_numpy(x)


def test_parts_are_read_in_any_order_and_again():
    x = chunks_of_every_kind(3 * PIECE + 5 * CHUNK + 77)
    reader, parts = CODEC.open(memoryview(CODEC.encode(x)), tuple(x.shape)), list(pieces(len(x)))
    for start, stop in [*parts, *reversed(parts), (0, len(x)), parts[2]]:
        out = torch.full((stop - start,), torch.nan)
        reader.read(start, stop, out)
        assert torch.equal(out, x[start:stop])


def test_groups_with_nothing_and_long_streams_are_found():
    x = torch.zeros(12 * PIECE + 3 * CHUNK)
    for first in (1, 2, 5, 6, 7, 8, 9):
        x[first * PIECE : (first + 1) * PIECE] = chunks_of_every_kind(PIECE)
    x[first * PIECE : (first + 2) * PIECE] = normal((2 * PIECE,)).sign() * (torch.arange(2 * PIECE) % 16 == 0)
    payload = CODEC.encode(x)
    assert len(payload) > 100_000, "streams of several pieces"
    reader = CODEC.open(memoryview(payload), tuple(x.shape))
    for start, stop in reversed(list(pieces(len(x)))):
        out = torch.full((stop - start,), torch.nan)
        reader.read(start, stop, out)
        assert torch.equal(out, x[start:stop])


def test_what_is_opened_takes_next_to_nothing_beside_its_payload():
    """A merge opens a tensor of every contribution at once: decoded, four of them take as much as the tensor."""
    x = normal((4 * PIECE,))
    payload = memoryview(CODEC.encode(x))
    CODEC.open(payload, tuple(x.shape))
    tracemalloc.start()
    try:
        reader = CODEC.open(payload, tuple(x.shape))
        kept_bytes, _ = tracemalloc.get_traced_memory()
        assert kept_bytes < len(payload) // 4
        reader.read(0, PIECE, torch.empty(PIECE))
        assert tracemalloc.get_traced_memory()[0] < len(payload) // 4
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("gap", [200, 3000, 65535])
def test_a_position_outside_a_later_chunk_is_refused_when_it_is_read(gap):
    """Opening decodes nothing: a merge opens what its check has read whole."""
    num_chunks = PIECE // CHUNK + 3
    counts, gaps = np.full(num_chunks, 2, "<u2"), np.full(2 * num_chunks, 4000, np.uint16)
    gaps[1::2] = 94
    signs, lengths = bytes(-(-2 * num_chunks // 8)), np.full(num_chunks, CHUNK)

    def payload():
        streams = encode_gaps(gaps, counts.astype(np.int64), lengths)
        return b"".join([struct.pack("<H", 0x3F80) * num_chunks, counts.tobytes(), signs, *streams])

    assert int(torch.count_nonzero(decoded(payload(), (num_chunks * CHUNK,)))) == 2 * num_chunks
    gaps[-3] = gap
    reader, out = CODEC.open(memoryview(payload()), (num_chunks * CHUNK,)), torch.empty(PIECE)
    reader.read(0, PIECE, out)
    assert int(torch.count_nonzero(out)) == 2 * PIECE // CHUNK
    with pytest.raises(MalformedBlob, match="outside its chunk"):
        reader.read(PIECE, num_chunks * CHUNK, out[: 3 * CHUNK])
