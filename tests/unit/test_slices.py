"""Slices of a contribution: they decode alone, whoever averages one comes to the same bytes, and together they are the mean."""

import math

import pytest
import torch

from dilocox_peer.compression import decoded
from dilocox_peer.compression.aggregate import aggregate
from dilocox_peer.compression.contribution import decode_contribution, encode_contribution, open_contribution
from dilocox_peer.compression.policy import policy_named
from dilocox_peer.compression.slices import (
    RESULT_CODEC,
    AveragedSlice,
    CertifiedMean,
    SliceInput,
    average_slice,
    check_part,
    cut,
    joined,
    read_table,
    sliced_payloads,
    table_of,
)
from dilocox_peer.errors import MalformedBlob
from dilocox_peer.types import Layout, TensorSpec
from dilocox_peer.wire.blobs import MAX_TABLE_BYTES, MOST_SQUARED, SlicePart, SliceTable
from dilocox_peer.wire.chain import MAX_SLICES
from dilocox_peer.wire.declared import encode

LAYOUT = Layout(
    (
        TensorSpec("embedding", (37, 24), "embedding"),
        TensorSpec("w", (64, 96)),
        TensorSpec("norm", (96,), "vector"),
        TensorSpec("head", (24, 40), "head"),
        TensorSpec("bias", (5,), "vector"),
    )
)
CODECS = ("none", "fp16", "int8", "int4", "int2", "sign", "topk")
COUNTS = (4, 7, 16, 64)


def contribution(seed: int, codec: str, count: int) -> tuple[bytes, list[bytes], torch.Tensor]:
    """Table, slices, and what was to be encoded."""
    generator = torch.Generator().manual_seed(seed)
    flat_N = torch.randn(LAYOUT.num_elements, generator=generator)
    whole, policy = cut(LAYOUT, count), policy_named(codec)
    blobs = [
        encode_contribution(layout, flat_N[start : start + layout.num_elements], policy)
        for layout, start in zip(whole.slices, whole.starts, strict=True)
    ]
    return table_of(whole, blobs), blobs, flat_N


@pytest.mark.parametrize("count", COUNTS)
def test_slices_are_the_vector_in_order_and_about_equally_long(count: int) -> None:
    whole = cut(LAYOUT, count)
    assert sum(layout.num_elements for layout in whole.slices) == LAYOUT.num_elements == whole.layout.num_elements
    assert [spec for layout in whole.slices for spec in layout.tensors] == list(whole.layout.tensors)
    assert {spec.is_vector for spec in whole.layout.tensors if spec.name.startswith(("norm", "bias"))} == {True}
    assert not any(spec.is_vector for spec in whole.layout.tensors if spec.name.startswith(("w", "head", "embedding")))
    longest = max(layout.num_elements for layout in whole.slices)
    assert longest <= LAYOUT.num_elements / count + 96


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("count", COUNTS)
def test_a_slice_decodes_alone_to_its_part_of_the_whole(codec: str, count: int) -> None:
    whole = cut(LAYOUT, count)
    _, blobs, _ = contribution(1, codec, count)
    at_once = torch.empty(LAYOUT.num_elements)
    for index, (layout, start) in enumerate(zip(whole.slices, whole.starts, strict=True)):
        decode_contribution(blobs[index], layout, at_once[start : start + layout.num_elements])
    scratch = torch.empty(1 << 19)
    together = torch.cat([values.clone() for _, _, values in joined(whole, blobs).decode_into(scratch)])
    assert torch.equal(together, at_once)


@pytest.mark.parametrize("codec", ["int4", "topk"])
def test_payloads_of_the_cut_tensors_make_the_slices(codec: str) -> None:
    whole, policy = cut(LAYOUT, 7), policy_named(codec)
    _, blobs, flat_N = contribution(2, codec, 7)
    payloads = [policy(spec).encode(flat_N[start:stop].view(spec.shape)) for spec, start, stop in whole.layout.spans()]
    assert [bytes(blob) for blob in sliced_payloads(whole, policy, payloads)] == blobs


@pytest.mark.parametrize("codec", CODECS)
def test_the_slices_of_a_mean_are_the_mean_as_everybody_computes_it(codec: str) -> None:
    count, weights = 7, [8, 3, 100, 8]
    whole = cut(LAYOUT, count)
    made = [contribution(seed, codec, count) for seed in range(4)]
    means = []
    for index, layout in enumerate(whole.slices):
        inputs = [
            SliceInput(table, tuple(part.squared for part in read_table(table, whole).parts), blobs[index], weight)
            for (table, blobs, _), weight in zip(made, weights, strict=True)
        ]
        averaged = average_slice(
            layout, inputs, norm_clip=4.0, codec_of=policy_named("none"), residual=b"", beacon=b"inputs"
        )
        assert not any(averaged.residual), "nothing is lost without a codec"
        means.append(averaged.blob)
    at_once = [
        encode_contribution(
            whole.layout,
            torch.cat([v.clone() for _, _, v in joined(whole, b).decode_into(torch.empty(1 << 19))]),
            policy_named("none"),
        )
        for _, b, _ in made
    ]
    expected_N = aggregate(whole.layout, at_once, weights, norm_clip=4.0).mean_N
    assert expected_N is not None
    mean = CertifiedMean(whole, means)
    for index, (spec, start, stop) in enumerate(whole.layout.spans()):
        out, scratch = torch.empty(spec.num_elements), torch.empty(spec.num_elements)
        mean.open(index).read(0, spec.num_elements, out, scratch)
        assert torch.equal(out, expected_N[start:stop])


@pytest.mark.parametrize("codec", ["int4", "int2", "sign", "topk"])
def test_what_a_result_loses_goes_with_the_next_one(codec: str) -> None:
    """Over many rounds of the same mean the results add up to it: error feedback of the owner's."""
    whole = cut(LAYOUT, 4)
    layout, table_and_blobs = whole.slices[1], contribution(3, "none", 4)
    table, blobs, flat_N = table_and_blobs
    wanted = flat_N[whole.starts[1] : whole.starts[1] + layout.num_elements]
    squared = tuple(part.squared for part in read_table(table, whole).parts)
    residual, total_N, rounds = b"", torch.zeros_like(wanted), 40
    for _ in range(rounds):
        one = average_slice(
            layout, [SliceInput(table, squared, blobs[1], 8)], norm_clip=4.0, codec_of=policy_named(codec),
            residual=residual, beacon=b"inputs",
        )  # fmt: skip
        other = average_slice(
            layout, [SliceInput(table, squared, blobs[1], 8)], norm_clip=4.0, codec_of=policy_named(codec),
            residual=residual, beacon=b"inputs",
        )  # fmt: skip
        assert one == other, "owner and deputy come to the same bytes"
        decoded = torch.empty_like(wanted)
        decode_contribution(one.blob, layout, decoded)
        total_N += decoded
        residual = bytes(one.residual)
    decay = 0.8 if codec == "topk" else 1.0
    error = float((total_N / rounds - wanted).norm() / wanted.norm())
    assert error < (0.2 if decay == 1.0 else 0.6)


def test_a_slice_is_what_its_table_says_to_the_last_bit_of_its_norm() -> None:
    whole = cut(LAYOUT, 4)
    table, blobs, _ = contribution(4, "int4", 4)
    parts = read_table(table, whole).parts
    assert len(table) <= MAX_TABLE_BYTES
    for index, part in enumerate(parts):
        check_part(blobs[index], whole.slices[index], part)
    norm = math.sqrt(math.fsum(part.squared for part in parts))
    scratch = torch.empty(1 << 19)
    assert norm == pytest.approx(
        float(torch.cat([values.clone() for _, _, values in joined(whole, blobs).decode_into(scratch)]).norm())
    )
    other = contribution(5, "int4", 4)[1]
    with pytest.raises(MalformedBlob, match="another norm"):
        check_part(other[0], whole.slices[0], parts[0])
    with pytest.raises(MalformedBlob, match="bytes"):
        check_part(blobs[1], whole.slices[1], parts[0])


@pytest.mark.parametrize("raw", [b"", b"\x93", b"nonsense", b"\xc0" * 5000])
def test_what_is_no_table_is_refused(raw: bytes) -> None:
    with pytest.raises(MalformedBlob):
        read_table(raw, cut(LAYOUT, 4))


@pytest.mark.parametrize("squared", [1e308, 2.0**301, -1.0])
def test_a_table_with_a_norm_that_no_floats_have_is_refused_and_the_largest_can_be_added(squared: float) -> None:
    whole = cut(LAYOUT, 4)
    table = read_table(contribution(8, "int4", 4)[0], whole)
    parts = tuple(SlicePart(part.blob, part.size_bytes, squared) for part in table.parts)
    with pytest.raises(MalformedBlob, match="float"):
        read_table(encode(SliceTable(table.version, table.layout, parts)), whole)
    assert 2**40 * float(torch.finfo(torch.float32).max) ** 2 < MOST_SQUARED
    assert math.isfinite(math.fsum([MOST_SQUARED] * MAX_SLICES))


def test_a_table_of_other_slices_and_a_slice_of_another_are_refused() -> None:
    table, blobs, _ = contribution(6, "int4", 4)
    with pytest.raises(MalformedBlob):
        read_table(table, cut(LAYOUT, 7))
    with pytest.raises(MalformedBlob):
        open_contribution(blobs[0], cut(LAYOUT, 4).slices[1])


def test_a_residual_that_is_none_is_refused() -> None:
    whole = cut(LAYOUT, 4)
    table, blobs, _ = contribution(7, "int4", 4)
    squared = tuple(part.squared for part in read_table(table, whole).parts)
    for residual in (b"1234", b"\xff" * (4 * whole.slices[0].num_elements)):
        with pytest.raises(MalformedBlob, match="residual"):
            average_slice(
                whole.slices[0], [SliceInput(table, squared, blobs[0], 8)], norm_clip=4.0,
                codec_of=policy_named("int4"), residual=residual, beacon=b"",
            )  # fmt: skip


def test_what_pushes_against_the_others_and_a_copy_weigh_nothing_in_a_slice() -> None:
    whole = cut(LAYOUT, 4)
    layout = whole.slices[1]
    common = torch.randn(LAYOUT.num_elements, generator=torch.Generator().manual_seed(8))

    def given(factor: float, noise: int) -> tuple[bytes, bytes, tuple[float, ...]]:
        flat_N = factor * common + 0.3 * torch.randn(
            LAYOUT.num_elements, generator=torch.Generator().manual_seed(noise)
        )
        blobs = [
            encode_contribution(each, flat_N[start : start + each.num_elements], policy_named("int8"))
            for each, start in zip(whole.slices, whole.starts, strict=True)
        ]
        table = table_of(whole, blobs)
        return table, blobs[1], tuple(part.squared for part in read_table(table, whole).parts)

    honest = [given(1.0, noise) for noise in range(5)]

    def mean(made: list[tuple[bytes, bytes, tuple[float, ...]]]) -> bytes:
        inputs = [SliceInput(table, squared, blob, 8) for table, blob, squared in made]
        averaged = average_slice(
            layout, inputs, norm_clip=4.0, codec_of=policy_named("none"), residual=b"", beacon=b"drawn"
        )
        return bytes(averaged.blob)

    assert mean([*honest, given(-1.0, 9)]) == mean(honest)
    assert mean([*honest, honest[0]]) == mean(honest)


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_decoded_once_and_what_is_decoded_as_it_is_read_come_to_the_same_bytes(
    codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = cut(LAYOUT, 4)
    made = [contribution(seed, codec, 4)[:2] for seed in range(5)]

    def averaged(index: int) -> AveragedSlice:
        inputs = [
            SliceInput(table, tuple(part.squared for part in read_table(table, whole).parts), blobs[index], 8)
            for table, blobs in made
        ]
        return average_slice(
            whole.slices[index], inputs, norm_clip=4.0, codec_of=policy_named(RESULT_CODEC[codec]), residual=b"", beacon=b"drawn"
        )  # fmt: skip

    once = [averaged(index) for index in range(4)]
    monkeypatch.setattr(decoded, "DECODED_BYTES", 0)
    assert [averaged(index) for index in range(4)] == once
