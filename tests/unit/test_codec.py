"""Every codec by one suite: what a tensor becomes, what is lost at most, and that nobody's bytes can break a decoder."""

import math
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilocox_peer.compression import blockwise
from dilocox_peer.compression.codec import CODECS, TensorCodec, codec_named
from dilocox_peer.compression.feedback import DECAY_BY_CODEC, residual_after, with_feedback
from dilocox_peer.compression.reader import GRAIN, PIECE, pieces
from dilocox_peer.compression.sizes import payload_limits
from dilocox_peer.errors import MalformedBlob
from dilocox_peer.manifest import CompressionSection

SHAPES = [(), (1,), (7,), (3, 5), (2, 3, 4), (0,), (0, 3), (300, 9), (64,), (65,), (256, 2), (257,), (4096,), (4097, 3)]
NUM_MUTATIONS = 2500
NUM_NIGHTLY_MUTATIONS = 100_000


@pytest.fixture(params=list(CODECS))
def codec(request) -> TensorCodec:
    return CODECS[request.param]


def normal(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def decoded(codec, payload, shape):
    out = torch.full(shape, torch.nan)
    codec.decode(memoryview(payload), out)
    return out


def blocks_of(x, size):
    return [block.double() for block in x.reshape(-1).split(size) if block.numel()]


def assert_within_the_stated_bound(codec, x, y):
    """The bounds of the codecs' docstrings, in float64."""
    floor = 2.0**-100  # what is smaller may stay in the residual whole
    match codec.name:
        case "none":
            assert torch.equal(x, y)
        case "fp16":
            clamped = x.clamp(-65504, 65504)
            assert bool(((clamped - y).abs() <= clamped.abs() * 2.0**-11 + 2.0**-25).all())
        case "int8" | "int4":
            steps, size = {"int8": (127, 64), "int4": (7, 128)}[codec.name]
            for x_B, y_B in zip(blocks_of(x, size), blocks_of(y, size), strict=True):
                limit = float(x_B.abs().max()) / (2 * steps) * (1 + 2.0**-8) + steps * floor
                assert float((x_B - y_B).abs().max()) <= limit
        case "int2" | "sign":
            for x_B, y_B in zip(blocks_of(x, 256), blocks_of(y, 256), strict=True):
                energy, mean = float((x_B**2).sum()), float(x_B.abs().mean())
                limit = energy - (1 - 2.0**-16) * len(x_B) * mean**2
                assert float(((x_B - y_B) ** 2).sum()) <= limit + 1e-5 * energy + len(x_B) * (2 * floor) ** 2
        case "topk":
            for x_C, y_C in zip(blocks_of(x, 4096), blocks_of(y, 4096), strict=True):
                energy, largest = float((x_C**2).sum()), float(x_C.abs().max())
                limit = energy - (1 - 2.0**-16) * largest**2
                assert float(((x_C - y_C) ** 2).sum()) <= limit + 1e-5 * energy + len(x_C) * (2 * floor) ** 2
        case "ecsq":
            for x_C, y_C in zip(blocks_of(x, 4096), blocks_of(y, 4096), strict=True):
                energy = float((x_C**2).sum())
                assert float(((x_C - y_C) ** 2).sum()) <= energy * (1 + 1e-5) + len(x_C) * (2 * floor) ** 2
        case "lowrank-int4":
            energy = float(x.double().square().sum())
            assert float((x - y).double().square().sum()) <= energy * (1 + 1e-5)
        case _:
            raise AssertionError(f"no bound stated for {codec.name}")


def kinds(shape, seed):
    """Tensors of every kind that training, or an accident, may give."""
    x = normal(shape, seed)
    keep = torch.rand(shape, generator=torch.Generator().manual_seed(seed + 1))
    rows, columns = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
    return {
        "random": x,
        "sparse": torch.where(keep < 0.01, x, 0.0),
        "rank 1": (normal((rows, 1), seed) @ normal((1, columns), seed + 2)).reshape(shape),
        "zero": torch.zeros(shape),
        "constant": torch.full(shape, -0.3),
        "denormal": x * 1e-40,
        "mixed": x * torch.exp2(torch.round(keep * 60 - 30)),
    }


@given(shape=st.sampled_from(SHAPES), name=st.sampled_from(list(CODECS)), seed=st.integers(0, 99))
def test_what_is_lost_is_within_the_stated_bound(shape, name, seed):
    codec = CODECS[name]
    for x in kinds(shape, seed).values():
        payload = codec.encode(x)
        smallest, largest = payload_limits(codec.name, shape)
        assert smallest <= len(payload) <= largest
        y = decoded(codec, payload, shape)
        assert_within_the_stated_bound(codec, x, y)
        residual = residual_after(x.clone(), y)
        assert bool(((y + residual - x).abs() <= (x.abs() + y.abs()) * 2.0**-23).all())


@given(
    values=st.lists(st.floats(-(2.0**127), 2.0**127, width=32), max_size=300),
    name=st.sampled_from([name for name in CODECS if name != "none"]),
)
def test_any_finite_number_is_decoded_to_a_finite_one_no_larger_than_the_bound(values, name):
    x = torch.tensor(values)
    y = decoded(CODECS[name], CODECS[name].encode(x), x.shape)
    assert bool(torch.isfinite(y).all())
    # Low rank bounds the whole tensor's error, the others each element.
    most = float(x.double().norm()) * 2 if name == "lowrank-int4" else max(map(abs, values), default=0.0)
    assert not values or float(y.abs().max()) <= most * (1 + 2.0**-8) + 2.0**-25


def test_zeros_are_decoded_to_zeros(codec):
    assert not decoded(codec, codec.encode(torch.zeros(700)), (700,)).any()


def test_none_is_exact():
    assert torch.equal(decoded(CODECS["none"], CODECS["none"].encode(normal((33, 5))), (33, 5)), normal((33, 5)))


def test_encoding_twice_gives_equal_bytes_and_leaves_the_input(codec):
    x = normal((64, 300))
    before = x.clone()
    assert codec.encode(x) == codec.encode(x.clone())
    assert torch.equal(x, before)


@pytest.mark.parametrize("name", ["none", "fp16", "int8", "int4", "int2", "sign"])
def test_a_large_payload_is_neither_zeroed_nor_copied_at_one_stroke(name):
    """`bytearray(n)` and `tobytes` hold every other thread, the event loop's too, as long as that takes."""
    assert isinstance(CODECS[name].encode(normal((3, 5))), memoryview)


@pytest.mark.parametrize("name", ["int8", "int4", "int2", "sign"])
@pytest.mark.parametrize("num_elements", [0, 1, 129, 300, PIECE + 321])
def test_every_byte_of_a_payload_is_written(name, num_elements, monkeypatch):
    x, payloads = normal((num_elements,)), set()
    for byte in (b"\x00", b"\xff"):
        monkeypatch.setattr(blockwise, "empty_payload", lambda size, byte=byte: memoryview(bytearray(byte * size)))
        payloads.add(bytes(CODECS[name].encode(x)))
    assert len(payloads) == 1


def test_decoding_gives_equal_bits_with_any_number_of_threads(codec):
    x = normal((300, 500))
    threads = torch.get_num_threads()
    try:
        payloads, results = set(), set()
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            payload = bytes(codec.encode(x))
            payloads.add(payload)
            results.add(decoded(codec, payload, x.shape).numpy().tobytes())
    finally:
        torch.set_num_threads(threads)
    assert len(payloads) == len(results) == 1


def test_huge_values_stay_finite_in_fp16():
    y = decoded(CODECS["fp16"], CODECS["fp16"].encode(torch.tensor([1e30, -1e30, 1.0])), (3,))
    assert y.tolist() == [65504.0, -65504.0, 1.0]


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("none", [1.0], "0000803f"),
        ("fp16", [1.0], "003c"),
        ("int8", [127.0, -127.0, 0.4], "803f ff 01 80"),  # scale 1
        ("int4", [7.0, -7.0, 0.4], "803f 1f 08"),  # scale 1; codes 15 and 1 in a byte, then 8 and padding
        ("int2", [1.0, -4.0, 1.0], "803f 8040 02 02"),  # levels 1 and 4; signs; who is upper
        ("sign", [1.0, -4.0, 1.0], "0040 02"),  # level 2
    ],
)
def test_the_bytes_are_these_on_every_machine(name, values, expected):
    payload = CODECS[name].encode(torch.tensor(values))
    assert payload == bytes.fromhex(expected)
    if name != "sign":
        assert torch.allclose(decoded(CODECS[name], payload, (len(values),)), torch.tensor(values), atol=0.4)


@pytest.mark.parametrize("name", ["int8", "int4", "int2", "sign"])
@pytest.mark.parametrize(
    ("bits", "shown"), [("c07f", "nan"), ("807f", "inf"), ("80bf", "-1.0"), ("0080", "-0.0"), ("0100", "9.18"), ("0079", "4.1")]
)  # fmt: skip
def test_a_magnitude_that_cannot_be_is_named_in_the_refusal(name, bits, shown):
    payload = bytearray(CODECS[name].encode(normal((300,))))
    payload[2:4] = bytes.fromhex(bits)
    with pytest.raises(MalformedBlob, match=f"{name}: a magnitude of {shown}"):
        decoded(CODECS[name], payload, (300,))


@pytest.mark.parametrize("name", ["int4", "int2", "sign"])
def test_padding_that_is_not_zero_is_refused(name):
    payload = bytearray(CODECS[name].encode(normal((301,))))
    payload[-1] |= 0x80
    with pytest.raises(MalformedBlob, match="padding"):
        decoded(CODECS[name], payload, (301,))


def test_levels_in_the_wrong_order_are_refused():
    payload = bytearray(CODECS["int2"].encode(normal((256,))))
    payload[0:2], payload[2:4] = payload[2:4], payload[0:2]
    with pytest.raises(MalformedBlob, match="lower level above"):
        decoded(CODECS["int2"], payload, (256,))


@pytest.mark.parametrize("name", ["int8", "int4", "int2", "sign", "topk", "ecsq", "lowrank-int4"])
def test_what_holds_nan_encodes_to_what_everyone_refuses(name):
    x = normal((600,))
    x[300] = torch.nan
    with pytest.raises(MalformedBlob, match=r"(magnitude|scale) of nan"):
        decoded(CODECS[name], CODECS[name].encode(x), (600,))


@given(payload=st.binary(max_size=64), rows=st.integers(0, 5))
def test_foreign_bytes_are_refused_or_fill_the_shape(payload, rows):
    for codec in CODECS.values():
        out = torch.zeros(rows, 3)
        try:
            codec.decode(memoryview(payload), out)
        except MalformedBlob:
            continue
        smallest, largest = payload_limits(codec.name, (rows, 3))
        assert smallest <= len(payload) <= largest


def mutate_and_decode(codec, num_mutations, seed):
    """Each mutated payload is refused, or decodes to a tensor of the right shape whose values the caller can check."""
    rng = random.Random(seed)
    originals = [(shape, codec.encode(normal(shape) * 0.01)) for shape in [(5,), (31, 33), (129,), (260, 20)]]
    refused = 0
    for _ in range(num_mutations):
        shape, original = rng.choice(originals)
        payload = bytearray(original)
        for _ in range(rng.choice([1, 1, 2, 8])):
            where = rng.randrange(len(payload)) if payload else 0
            match rng.randrange(6):
                case 0 | 1 if payload:
                    payload[where] ^= 1 << rng.randrange(8)
                case 2 if payload:
                    payload[where] = rng.choice([0, 1, 0x7F, 0x80, 0xFF])
                case 3:
                    del payload[where:]
                case 4:
                    payload[where:where] = rng.randbytes(rng.choice([1, 2, 7]))
                case _:
                    length = min(len(payload) - where, rng.choice([2, 4, 64]))
                    payload[where : where + length] = rng.randbytes(length)
        out = torch.zeros(shape)
        try:
            codec.decode(memoryview(payload), out)
        except MalformedBlob:
            refused += 1
            continue
        smallest, largest = payload_limits(codec.name, shape)
        assert smallest <= len(payload) <= largest
        assert codec.name in ("none", "fp16") or bool(torch.isfinite(out).all())
    return refused


def test_mutated_payloads_are_refused_or_decoded(codec):
    assert 0 < mutate_and_decode(codec, NUM_MUTATIONS, seed=1) < NUM_MUTATIONS


@pytest.mark.nightly
@pytest.mark.slow
def test_a_hundred_thousand_mutated_payloads_are_refused_or_decoded(codec):
    torch.set_num_threads(1)  # small products: with others at work on the machine more threads wait for each other
    mutate_and_decode(codec, NUM_NIGHTLY_MUTATIONS, seed=2)


# Resident memory is the whole process's, so each codec has a process of its own: what other tests have loaded, cached
# and freed is not there. Printed: the bytes beyond what was resident before, of an encode and of a decode.
MEASURE = """
import ctypes, gc, sys
from pathlib import Path

import torch

from dilocox_peer.compression.codec import CODECS

torch.set_num_threads(1)
status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def kib(field):
    return int(next(line for line in status.read_text().splitlines() if line.startswith(field + ":")).split()[1])


def highest_resident_bytes_beyond_now(step):
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    clear.write_text("5")  # resets the peak
    before = kib("VmRSS")
    step()
    return 1024 * (kib("VmHWM") - before)


codec = CODECS[sys.argv[1]]
x, out = torch.randn(2048, 2048, generator=torch.Generator().manual_seed(0)), torch.zeros(2048, 2048)
payload = codec.encode(x)
codec.decode(memoryview(payload), out)  # libraries have loaded their parts and buffers now
print(highest_resident_bytes_beyond_now(lambda: codec.encode(x)))
print(highest_resident_bytes_beyond_now(lambda: codec.decode(memoryview(payload), out)))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
@pytest.mark.parametrize("name", ["int8", "int4", "int2", "sign", "topk", "ecsq", "lowrank-int4"])
def test_an_encode_takes_half_the_tensors_memory_at_most_and_a_decode_less_than_the_tensor(name):
    """Payload included; measured as resident memory, since torch's own buffers are not Python's."""
    measured = subprocess.run([sys.executable, "-c", MEASURE, name], capture_output=True, text=True, check=True)
    encoding, decoding = map(int, measured.stdout.split())
    tensor = 4 * 2048 * 2048
    slack = 512 * 1024  # pages of the allocator, of other threads
    assert encoding <= 0.5 * tensor + slack
    assert decoding < tensor


def test_unknown_codec_is_named_in_the_refusal():
    with pytest.raises(MalformedBlob, match="'zip'"):
        codec_named("zip")


def test_what_a_codec_loses_is_sent_later(codec):
    """With error feedback the sum of what was decoded follows the sum of what was to be sent, whatever the codec."""
    pseudo_gradient, residual, decoded_sum = normal((50, 20), 1) * 1e-3, torch.zeros(50, 20), torch.zeros(50, 20)
    for _ in range(50):
        sent = with_feedback(pseudo_gradient, residual, 1.0)
        y = decoded(codec, codec.encode(sent), sent.shape)
        residual = residual_after(sent, y)
        decoded_sum += y
    assert torch.allclose(decoded_sum + residual, pseudo_gradient * 50, atol=1e-6)
    assert float(residual.norm()) < 0.6 * float((pseudo_gradient * 50).norm())


def test_decay_touches_the_residual_only():
    assert with_feedback(torch.ones(2), torch.full((2,), 2.0), 0.5).tolist() == [2.0, 2.0]


def test_manifest_table_and_decay_know_the_same_codecs():
    results_alone = {"ecsq"}
    for name in CODECS.keys() - results_alone:
        assert CompressionSection.model_validate({"codec": name}).codec == name
    assert DECAY_BY_CODEC.keys() == CODECS.keys()
    assert all(0 < decay <= 1 for decay in DECAY_BY_CODEC.values())
    with pytest.raises(ValueError, match="codec"):
        CompressionSection.model_validate({"codec": "ecsq"})


def test_two_bits_are_two_bits():
    num_elements = 1 << 20
    sizes = {name: payload_limits(name, (num_elements,))[1] * 8 / num_elements for name in CODECS}
    assert (sizes["int8"], sizes["int4"], sizes["int2"], sizes["sign"]) == (8.25, 4.125, 2.125, 1.0625)


def test_the_two_levels_are_the_reference_ones():
    """PlaneCodec's rule for two levels, written plainly in float64."""
    x = normal((16, 256), 3)
    y = decoded(CODECS["int2"], CODECS["int2"].encode(x), x.shape)
    for x_B, y_B in zip(x.double().numpy(), y.numpy(), strict=True):
        a = np.abs(x_B)
        upper = a > a.mean()
        expected = np.where(upper, a[upper].mean(), a[~upper].mean()) * np.where(x_B < 0, -1, 1)
        np.testing.assert_allclose(y_B, expected, rtol=2.0**-8)


@pytest.mark.parametrize("shape", [(3, PIECE // 2 + 77), (1500, 400), (2, 2 * PIECE + 128)])
def test_the_pieces_of_a_tensor_are_those_of_the_whole(codec, shape):
    """In any order; rows shorter and longer than a piece."""
    payload = codec.encode(normal(shape))
    whole = decoded(codec, payload, shape).view(-1)
    reader, parts = codec.open(memoryview(payload), shape), list(pieces(whole.numel()))
    assert len(parts) > 1
    for start, stop in reversed(parts):
        out = torch.full((stop - start,), torch.nan)
        reader.read(start, stop, out)
        assert torch.equal(out, whole[start:stop])


def test_a_tensor_is_read_from_any_grain_on(codec):
    shape = (3, PIECE // 2 + 77)
    payload = codec.encode(normal(shape))
    whole = decoded(codec, payload, shape).view(-1)
    reader = codec.open(memoryview(payload), shape)
    for grains in (1, 3, 4):
        for start in range(0, len(whole), GRAIN):
            stop = min(start + grains * GRAIN, len(whole))
            out = torch.full((stop - start,), torch.nan)
            reader.read(start, stop, out)
            assert torch.equal(out, whole[start:stop])


@pytest.mark.parametrize("num_elements", [1, 129, 1000, PIECE + 321])
@pytest.mark.parametrize(("name", "block"), [("int8", 64), ("int4", 128)])
def test_integers_decode_to_the_bits_of_their_formula(name, block, num_elements):
    """(code - zero) * scale, in float32, of every code and of scales that are 0 among them; no zero is a negative one."""
    rng = np.random.default_rng(num_elements)
    num_blocks = math.ceil(num_elements / block)
    scales = rng.integers(0x0D80, 0x7780, num_blocks).astype("<u2") * (rng.random(num_blocks) > 0.1).astype("<u2")
    codes = rng.integers(0, 256 if name == "int8" else 16, num_elements, dtype=np.uint8)
    packed = codes
    if name == "int4":
        padded = np.append(codes, np.zeros(num_elements % 2, np.uint8))
        packed = padded[0::2] | (padded[1::2] << 4)
    widened = np.repeat((scales.astype(np.uint32) << 16).view(np.float32), block)[:num_elements]
    zero = np.float32(128 if name == "int8" else 8)
    expected = (codes.astype(np.float32) - zero) * widened
    found = decoded(CODECS[name], scales.tobytes() + packed.tobytes(), (num_elements,))
    assert np.array_equal(found.numpy().view(np.int32), expected.view(np.int32))
