"""Low rank in 4 bits: what it finds, what it remembers, that decoding is exact, and which payloads are refused."""

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilocox_peer.compression.codec import RememberingCodec
from dilocox_peer.compression.contribution import ContributionEncoder, decode_contribution, encode_contribution
from dilocox_peer.compression.lowrank import Factors, LowRankCodec, largest_exponent
from dilocox_peer.compression.sizes import largest_rank, payload_limits
from dilocox_peer.errors import MalformedBlob
from dilocox_peer.types import Layout

SHAPE = (96, 160)


def normal(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def of_rank(rank, shape=SHAPE, seed=0):
    return normal((shape[0], rank), seed) @ normal((rank, shape[1]), seed + 1)


def with_spectrum(sizes, shape=SHAPE):
    left = torch.linalg.qr(normal((shape[0], len(sizes)), 5)).Q
    right = torch.linalg.qr(normal((shape[1], len(sizes)), 6)).Q
    return left @ torch.diag(sizes) @ right.t()


def decoded(payload, shape=SHAPE):
    out = torch.full(shape, torch.nan)
    LowRankCodec().decode(memoryview(payload), out)
    return out


def loss(x, payload):
    return float((x.double() - decoded(payload, x.shape).double()).norm() / x.double().norm())


@pytest.mark.parametrize("rank", [1, 2, 5, 12])
def test_a_matrix_of_that_rank_loses_to_the_four_bits_alone(rank):
    assert loss(of_rank(rank), LowRankCodec(12).encode(of_rank(rank))) < 0.25


@pytest.mark.parametrize("rank", [4, 12, 24])
def test_it_finds_nearly_the_best_subspace_once_warm(rank):
    """Within the quantisation of the best rank-r approximation (Eckart-Young) after a few equal tensors."""
    x = with_spectrum(0.9 ** torch.arange(96.0))
    best = float(torch.linalg.svdvals(x)[rank:].norm() / x.norm())
    encoder = LowRankCodec(rank).encoder()
    losses = [loss(x, encoder.encode(x)) for _ in range(5)]
    assert losses[-1] < (best**2 + 0.21**2) ** 0.5
    assert losses[-1] < losses[0] + 0.01


def test_a_warm_start_follows_a_subspace_that_turns_slowly():
    cold, warm = [], LowRankCodec(8).encoder()
    warm_losses = []
    for step in range(6):
        x = with_spectrum(0.8 ** torch.arange(60.0)) + 0.02 * normal(SHAPE, 100 + step)
        cold.append(loss(x, LowRankCodec(8).encode(x)))
        warm_losses.append(loss(x, warm.encode(x)))
    assert sum(warm_losses[1:]) <= sum(cold[1:]) + 0.01


def test_reset_forgets_and_other_shapes_start_afresh():
    encoder, codec = LowRankCodec(8).encoder(), LowRankCodec(8)
    first = encoder.encode(of_rank(30))
    encoder.encode(of_rank(30, seed=9))
    encoder.reset()
    assert encoder.encode(of_rank(30)) == first == codec.encode(of_rank(30))
    assert encoder.encode(of_rank(30, (50, 60))) == codec.encode(of_rank(30, (50, 60)))


def test_decoding_is_exact_whole_number_arithmetic():
    """Against integers in numpy, then the same two float32 products: equal to the bit, so on every machine."""
    x = with_spectrum(0.7 ** torch.arange(60.0)) * 3.7
    payload = LowRankCodec(16).encode(x)
    parts = Factors(memoryview(payload), *SHAPE, 16)

    def codes(packed, size):
        return (np.stack([packed & 15, packed >> 4], 1).reshape(-1)[: 16 * size].astype(np.int64) - 8).reshape(16, size)

    def scales(bits, size):
        return np.repeat((bits.astype(np.uint32) << 16).view(np.float32), 128 // 16)[:size]

    top = largest_exponent(16)
    right = codes(parts.right_codes, SHAPE[1]) << (top - parts.exponents.astype(np.int64))[:, None]
    whole = codes(parts.left_codes, SHAPE[0]).T @ right
    assert np.abs(whole).max() < 2**24
    expected = whole.astype(np.float32) * scales(parts.left_scales, SHAPE[0])[:, None]
    expected = expected * (scales(parts.right_scales, SHAPE[1]) * np.float32(2.0**-top))
    assert decoded(payload).numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("rank", [1, 2, 3, 64, 65, 1000, 4096])
def test_no_sum_of_codes_can_leave_the_exact_range(rank):
    assert 8 * 8 * 2 ** largest_exponent(rank) * rank <= 2**24


@given(scale=st.integers(-126, 127), seed=st.integers(0, 9))
def test_any_size_of_numbers_is_decoded_to_finite_ones(scale, seed):
    x = of_rank(3, seed=seed).clamp(-1, 1) * 2.0**scale
    payload = LowRankCodec(3).encode(x)
    y = decoded(payload)
    assert bool(torch.isfinite(y).all())
    if -70 < scale < 98:
        assert loss(x, payload) < 0.9


@pytest.mark.parametrize("name", ["zero", "denormal", "one element", "one row", "one column", "constant", "identity"])
def test_degenerate_matrices_do_not_break_the_basis(name):
    x = torch.zeros(SHAPE)
    match name:
        case "denormal":
            x.fill_(1e-42)
        case "one element":
            x[3, 7] = -5.0
        case "one row":
            x[3] = normal((160,))
        case "one column":
            x[:, 3] = normal((96,))
        case "constant":
            x.fill_(2.0)
        case "identity":
            x.fill_diagonal_(1.0)
    encoder = LowRankCodec(8).encoder()
    for _ in range(3):
        payload = encoder.encode(x)
        y = decoded(payload)
        assert float((x - y).norm()) <= float(x.norm())
    if name in ("one element", "one row", "one column", "constant"):
        assert float((x - y).norm()) < 0.2 * float(x.norm())


@pytest.mark.parametrize("shape", [(), (1,), (7,), (0,), (0, 4), (4, 0), (1, 9), (9, 1), (2, 3, 4), (5, 5)])
def test_any_shape_is_a_matrix(shape):
    x = normal(shape)
    payload = LowRankCodec().encode(x)
    smallest, largest = payload_limits(LowRankCodec.name, shape)
    assert smallest <= len(payload) <= largest
    y = decoded(payload, shape)
    assert float((x - y).norm()) <= float(x.norm()) * (1 + 1e-6)


def changed(position, value, shape=SHAPE):
    payload = bytearray(LowRankCodec(5).encode(of_rank(5, shape)))
    position %= len(payload)
    payload[position : position + len(value)] = value
    return payload


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "0 bytes"),
        (b"\x05", "1 bytes"),
        (b"\x05\x00", "rank 5 has"),
        (b"\xff\xff", "rank 65535 for shape"),
        (changed(0, b"\x04"), "rank 4 has"),
        (changed(2, b"\x10"), "exponent 16, at most 15"),
        (changed(7, b"\xc0\x7f"), "left scale of nan"),
        (changed(7, b"\x80\xbf"), "left scale of -1.0"),
        (changed(7, b"\x80\x7f"), "left scale of inf"),
        (changed(7, b"\x01\x00"), "left scale of"),
        (changed(7 + 2 * 4, b"\x80\x7f"), "right scale of inf"),
        (changed(-1, b"\x80", (95, 161)), "padding"),
    ],
)
def test_a_payload_that_cannot_be_is_refused_with_the_reason(payload, reason):
    shape = (95, 161) if reason == "padding" else SHAPE
    with pytest.raises(MalformedBlob, match=f"lowrank-int4: .*{reason}"):
        decoded(payload, shape)


def test_the_largest_rank_is_below_two_bits_an_element():
    for shape in [(4096, 1024), (96, 96), (256, 96), (2048, 2048)]:
        bits = 8 * payload_limits(LowRankCodec.name, shape)[1] / (shape[0] * shape[1])
        assert bits < 2.125
        assert largest_rank(shape) >= min(shape) // 6
    assert largest_rank((0, 5)) == 0


def test_it_is_a_remembering_codec():
    assert isinstance(LowRankCodec(), RememberingCodec)


def test_a_contribution_encoder_remembers_and_anyone_decodes():
    layout = Layout.of([("a", SHAPE), ("b", (7,))])
    codec = LowRankCodec(8)
    encoder, policy = ContributionEncoder(layout, lambda _spec: codec), lambda _spec: codec
    flat = torch.cat([with_spectrum(0.8 ** torch.arange(60.0)).reshape(-1), normal((7,))])
    first = encoder.encode(flat)
    assert first == encode_contribution(layout, flat, policy)
    second = encoder.encode(flat)
    assert second != first
    out = torch.empty_like(flat)
    decode_contribution(second, layout, out)
    assert float((out - flat).norm()) < 0.5 * float(flat.norm())
    encoder.reset()
    assert encoder.encode(flat) == first


def test_a_tensor_that_changes_its_codec_starts_afresh():
    layout = Layout.of([("a", SHAPE)])
    now = [LowRankCodec(8)]
    encoder = ContributionEncoder(layout, lambda _spec: now[0])
    flat = of_rank(20).reshape(-1)
    encoder.encode(flat)
    now[0] = LowRankCodec(4)
    assert encoder.encode(flat) == encode_contribution(layout, flat, lambda _spec: now[0])


def test_python_objects_of_an_encode_stay_within_half_the_tensor():
    """numpy's memory and ours is traced; torch's own factors (R x M and R x N, three at a time) are counted by hand."""
    rows, columns, rank = 1024, 1024, 32
    x, encoder = normal((rows, columns)), LowRankCodec(rank).encoder()
    tracemalloc.start()
    try:
        encoder.encode(x)
        _, traced = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    factors = 3 * 4 * rank * (rows + columns)
    assert traced + factors < 0.5 * 4 * rows * columns
