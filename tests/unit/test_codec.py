"""Codecs: what a tensor becomes, and that nobody's bytes can break the decoder."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilocox_peer.compression.codec import CODECS, TensorCodec, codec_named
from dilocox_peer.compression.feedback import residual_after, with_feedback
from dilocox_peer.errors import MalformedBlob

SHAPES = [(), (1,), (7,), (3, 5), (2, 3, 4), (0,), (300, 9)]


@pytest.fixture(params=sorted(CODECS))
def codec(request) -> TensorCodec:
    return CODECS[request.param]


def normal(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
def test_decoding_gives_back_the_shape_and_about_the_values(codec, shape):
    x = normal(shape)
    payload = codec.encode(x)
    smallest, largest = codec.payload_limits(shape)
    out = torch.full(shape, torch.nan)
    codec.decode(memoryview(payload), out)
    assert smallest <= len(payload) <= largest
    assert torch.allclose(out, x, rtol=2**-11, atol=1e-7)


def test_none_is_exact():
    x = normal((33, 5))
    out = torch.empty_like(x)
    CODECS["none"].decode(memoryview(CODECS["none"].encode(x)), out)
    assert torch.equal(out, x)


def test_encoding_twice_gives_equal_bytes_and_leaves_the_input(codec):
    x = normal((64, 3))
    before = x.clone()
    assert codec.encode(x) == codec.encode(x.clone())
    assert torch.equal(x, before)


def test_huge_values_stay_finite_in_fp16():
    out = torch.empty(3)
    CODECS["fp16"].decode(memoryview(CODECS["fp16"].encode(torch.tensor([1e30, -1e30, 1.0]))), out)
    assert out.tolist() == [65504.0, -65504.0, 1.0]


def test_bytes_are_little_endian_on_every_machine():
    assert CODECS["none"].encode(torch.tensor([1.0])).hex() == "0000803f"
    assert CODECS["fp16"].encode(torch.tensor([1.0])).hex() == "003c"


@given(payload=st.binary(max_size=64), rows=st.integers(0, 5))
def test_foreign_bytes_are_refused_or_fill_the_shape(payload, rows):
    for codec in CODECS.values():
        out = torch.zeros(rows, 3)
        try:
            codec.decode(memoryview(payload), out)
        except MalformedBlob:
            continue
        assert len(payload) == codec.payload_limits((rows, 3))[0]


def test_unknown_codec_is_named_in_the_refusal():
    with pytest.raises(MalformedBlob, match="'zip'"):
        codec_named("zip")


def test_what_a_codec_loses_is_sent_later(codec):
    """With error feedback the sum of what was decoded follows the sum of what was to be sent, whatever the codec."""
    movement, residual, decoded_sum = normal((50,), 1) * 1e-3, torch.zeros(50), torch.zeros(50)
    for _ in range(50):
        sent = with_feedback(movement, residual, 1.0)
        decoded = torch.empty(50)
        codec.decode(memoryview(codec.encode(sent)), decoded)
        residual = residual_after(sent, decoded)
        decoded_sum += decoded
    assert torch.allclose(decoded_sum + residual, movement * 50, atol=1e-6)


def test_decay_touches_the_residual_only():
    assert with_feedback(torch.ones(2), torch.full((2,), 2.0), 0.5).tolist() == [2.0, 2.0]
