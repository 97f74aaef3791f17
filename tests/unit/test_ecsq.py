"""ecsq: what becomes of means of sparse contributions, what they cost, and which payloads are refused."""

import struct
import tracemalloc

import pytest
import torch

from dilocox_peer.compression.codec import CODECS
from dilocox_peer.compression.ecsq import EcsqCodec
from dilocox_peer.compression.gaps import BitStreams
from dilocox_peer.compression.reader import PIECE
from dilocox_peer.compression.sizes import CHUNK, GROUP, payload_limits
from dilocox_peer.errors import MalformedBlob

CODEC = EcsqCodec()


def decoded(payload, n):
    out = torch.full((n,), torch.nan)
    CODEC.decode(memoryview(payload), out)
    return out


def normal(n, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def mean_of_topk(count, n=64 * CHUNK):
    """Of contributions that have a quarter of their variance in common."""
    topk, common, total = CODECS["topk"], normal(n, 99), torch.zeros(n)
    for each in range(count):
        one = torch.empty(n)
        topk.decode(memoryview(topk.encode(0.577 * common + normal(n, each))), one)
        total += one / count
    return total


@pytest.mark.parametrize(
    ("count", "bits", "error"), [(4, 1.35, 0.03), (8, 2.1, 0.03), (16, 2.7, 0.15), (32, 2.6, 0.25)]
)
def test_a_mean_of_sparse_contributions_costs_few_bits_and_loses_little(count, bits, error):
    """Less than int2 at the same bits or less: 0.29 to 0.44 at 2.125."""
    x = mean_of_topk(count)
    payload = CODEC.encode(x)
    assert 8 * len(payload) / len(x) <= bits
    assert float((decoded(payload, len(x)) - x).norm() / x.norm()) <= error


def test_where_all_are_multiples_of_a_step_few_of_them_little_is_lost():
    """As in a mean of contributions of one magnitude."""
    places = torch.randperm(CHUNK, generator=torch.Generator().manual_seed(1))[:900]
    x = torch.zeros(CHUNK)
    x[places] = torch.tensor([0.3, -0.3, 0.6, -0.9, 0.3]).repeat(180)
    assert float((decoded(CODEC.encode(x), CHUNK) - x).norm()) <= 0.15 * float(x.norm())


@pytest.mark.parametrize("n", [1, CHUNK - 1, CHUNK, GROUP, GROUP + 1, 2 * GROUP + CHUNK + 5])
def test_groups_and_chunks_of_any_length(n):
    x = normal(n, 3)
    assert float((decoded(CODEC.encode(x), n) - x).norm()) <= 0.3 * float(x.norm()) or n == 1


def group(layers, steps, counts, rest=b""):
    return bytes([layers]) + struct.pack(f"<{len(steps)}H", *steps) + struct.pack(f"<{len(counts)}H", *counts) + rest


def payload_of(*groups):
    return b"".join([*(struct.pack("<I", len(each)) for each in groups), *groups])


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (payload_of(group(0, [0x3F80], [])), "count that does not fit"),  # a step, and nothing that has it
        (payload_of(group(1, [0], [1], b"\x00\x00\x01")), "count that does not fit"),
        (payload_of(group(1, [0x3F80], [101], bytes(30))), "count that does not fit"),
        (payload_of(group(2, [0x3F80], [1, 2], bytes(9))), "count that does not fit"),  # more than in the layer before
        (payload_of(group(2, [0x3F80], [1, 0], bytes(9))), "count that does not fit"),  # a layer of nothing
        (payload_of(group(1, [0x7FC0], [1], bytes(9))), "magnitude of nan"),
        (payload_of(group(9, [0x3F80], [1])), "9 layers"),
        (payload_of(group(2, [0x3F80], [1])), "2 layers in"),
        (payload_of(group(1, [0x3F80], [8], b"\x00")), "within a stream"),
        (payload_of(group(1, [0x3F80], [1], b"\x02" + bytes(8))), "padding"),
        (payload_of(group(0, [0], [])) + b"\x00", "groups of"),
        (struct.pack("<I", 1 << 30) + bytes(8), "groups of"),
        (b"\x00", "bytes for shape"),
    ],
)
def test_a_payload_that_cannot_be_is_refused_with_the_reason(payload, reason):
    with pytest.raises(MalformedBlob, match=f"ecsq: .*{reason}"):
        decoded(payload, 100)


def test_a_later_group_that_cannot_be_is_refused_when_it_is_read():
    """Opening decodes nothing: a merge opens what its check has read whole."""
    x, broken = normal(PIECE, 3), group(9, [0x3F80], [1])
    whole = bytes(CODEC.encode(x))
    sizes = whole[: 4 * (PIECE // GROUP)]
    payload = b"".join([sizes, struct.pack("<I", len(broken)), whole[len(sizes) :], broken])
    reader, out = CODEC.open(memoryview(payload), (PIECE + 1,)), torch.empty(PIECE)
    reader.read(0, PIECE, out)
    assert torch.equal(out, decoded(whole, PIECE))
    with pytest.raises(MalformedBlob, match="9 layers"):
        reader.read(PIECE, PIECE + 1, out[:1])


def peak_of_refusing(work):
    """Bytes that were held at most until it was refused."""
    tracemalloc.start()
    try:
        with pytest.raises(MalformedBlob) as refused:
            work()
        return str(refused.value), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("first", [True, False])
def test_a_group_that_claims_the_bytes_of_all_is_refused_before_it_is_looked_at(first):
    """All bits of it 1: where they stand took 78 bytes an element of the whole tensor."""
    empty, num = group(0, [0] * 32, []), 16
    most = payload_limits("ecsq", (num * GROUP,))[1] - 4 * num - len(empty) * (num - 1)
    large = group(1, [0x3F80, *[0] * 31], [1, *[0] * 31])
    large += b"\xff" * (most - len(large))
    groups = [large, *[empty] * (num - 1)] if first else [*[empty] * (num - 1), large]
    payload, out = payload_of(*groups), torch.empty(num * GROUP)
    reason, peak = peak_of_refusing(lambda: CODEC.decode(memoryview(payload), out))
    assert "a group of" in reason
    assert peak < num * GROUP


def test_bits_are_counted_before_they_are_unpacked():
    data = memoryview(b"\xff" * (1 << 18))
    reason, peak = peak_of_refusing(lambda: BitStreams("ecsq", data).take_ones(1))
    assert reason == f"ecsq: {8 << 18} quotients for 1 kept elements"
    assert peak < len(data)
