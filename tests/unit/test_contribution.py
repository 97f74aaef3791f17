"""Contributions: a whole pseudo-gradient as one blob, and blobs from strangers."""

import struct

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilocox_peer.compression.codec import CODECS, uniform_policy
from dilocox_peer.compression.contribution import decode_contribution, encode_contribution, open_contribution
from dilocox_peer.compression.sizes import blob_limits, raw_bytes
from dilocox_peer.errors import MalformedBlob
from dilocox_peer.types import Layout, canonical

LAYOUT = Layout.of([("a", (4, 3)), ("b", (5,)), ("c", ())])

layouts = st.lists(st.lists(st.integers(1, 6), max_size=3).map(tuple), max_size=5).map(
    lambda shapes: Layout.of([(f"t{index}", shape) for index, shape in enumerate(shapes)])
)


def normal(size, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def blob_with(header, body=b""):
    packed = canonical(header)
    return struct.pack(">I", len(packed)) + packed + body


def header_of(blob):
    (length,) = struct.unpack(">I", blob[:4])
    return msgpack.unpackb(blob[4 : 4 + length]), blob[4 + length :]


@given(layout=layouts, name=st.sampled_from(sorted(CODECS)), seed=st.integers(0, 99))
def test_round_trip_of_any_layout(layout, name, seed):
    flat = normal(layout.num_elements, seed)
    blob = encode_contribution(layout, flat, uniform_policy(name))
    out = torch.full_like(flat, torch.nan)
    decode_contribution(blob, layout, out)
    smallest, largest = blob_limits(layout, lambda _spec: name)
    assert smallest <= len(blob) <= largest
    assert largest <= blob_limits(layout)[1]
    for spec, start, stop in layout.spans():  # each tensor by itself, whatever its codec loses
        alone = torch.empty(spec.shape)
        CODECS[name].decode(memoryview(CODECS[name].encode(flat[start:stop].view(spec.shape))), alone)
        assert torch.equal(out[start:stop], alone.view(-1))


def test_a_policy_may_mix_codecs():
    blob = encode_contribution(LAYOUT, normal(18), lambda spec: CODECS["fp16" if len(spec.shape) == 2 else "none"])
    assert [codec.name for codec in open_contribution(blob, LAYOUT).codecs] == ["fp16", "none", "none"]
    assert raw_bytes(LAYOUT) == 72


def test_equal_pseudo_gradients_give_equal_bytes():
    assert encode_contribution(LAYOUT, normal(18), uniform_policy("fp16")) == encode_contribution(
        LAYOUT, normal(18), uniform_policy("fp16")
    )


@given(data=st.data(), name=st.sampled_from(sorted(CODECS)))
def test_a_mutated_blob_is_refused_or_decodes_to_finite_values(data, name):
    blob = bytearray(encode_contribution(LAYOUT, normal(18), uniform_policy(name)))
    match data.draw(st.sampled_from(["flip", "cut", "insert", "noise"])):
        case "flip":
            blob[data.draw(st.integers(0, len(blob) - 1))] ^= data.draw(st.integers(1, 255))
        case "cut":
            del blob[data.draw(st.integers(0, len(blob) - 1)) :]
        case "insert":
            blob.insert(data.draw(st.integers(0, len(blob))), data.draw(st.integers(0, 255)))
        case "noise":
            blob = bytearray(data.draw(st.binary(max_size=200)))
    out = torch.zeros(18)
    try:
        decode_contribution(blob, LAYOUT, out)
    except MalformedBlob:
        return
    assert bool(torch.isfinite(out).all())


@pytest.mark.parametrize("name", sorted(CODECS))
def test_every_truncation_is_refused(name):
    blob = encode_contribution(LAYOUT, normal(18), uniform_policy(name))
    for length in range(len(blob)):
        with pytest.raises(MalformedBlob):
            decode_contribution(blob[:length], LAYOUT, torch.zeros(18))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused_by_tensor_name(value):
    flat = normal(18)
    flat[13] = value
    blob = encode_contribution(LAYOUT, flat, uniform_policy("none"))
    with pytest.raises(MalformedBlob, match=r"b holds values that are not finite"):
        decode_contribution(blob, LAYOUT, torch.zeros(18))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda header: header.__setitem__(0, "something"), "Invalid value 'something'"),
        (lambda header: header.__setitem__(1, 2), "version 2, this peer speaks 1: this peer must update"),
        (lambda header: header.__setitem__(2, bytes(32)), "another layout"),
        (lambda header: header[3].append("none"), "4 codecs"),
        (lambda header: header[3].__setitem__(0, "zip"), "unknown codec 'zip'"),
        (lambda header: header[3].__setitem__(0, 7), "Expected `str`, got `int`"),
        (lambda header: header[4].__setitem__(0, 3), "a in none: 3 bytes, expected 48"),
        (lambda header: header[4].__setitem__(0, -1), "`int` >= 0"),
        (lambda header: header[4].__setitem__(0, True), "Expected `int`, got `bool`"),
        (lambda header: header.pop(), "at least length 5"),
    ],
)
def test_a_wrong_header_is_refused_with_the_reason(change, reason):
    header, body = header_of(encode_contribution(LAYOUT, normal(18), uniform_policy("none")))
    change(header)
    with pytest.raises(MalformedBlob, match=reason):
        open_contribution(blob_with(header, body), LAYOUT)


def test_trailing_bytes_are_refused():
    blob = encode_contribution(LAYOUT, normal(18), uniform_policy("none"))
    with pytest.raises(MalformedBlob, match="announces"):
        open_contribution(blob + b"x", LAYOUT)


def test_an_announced_header_of_gigabytes_is_refused_unread():
    with pytest.raises(MalformedBlob, match="header of 4294967295 bytes"):
        open_contribution(b"\xff" * 100, LAYOUT)
