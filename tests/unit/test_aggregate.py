"""The mean of contributions: equal bits everywhere, and no contribution can take it over by its size."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilocox_peer.compression import decoded
from dilocox_peer.compression.aggregate import (
    REACH,
    UNIT_REACH,
    Mean,
    aggregate,
    capped_weights,
    clip_factors,
    contribution_norm,
    weights_of_their_own,
)
from dilocox_peer.compression.codec import CODECS, uniform_policy
from dilocox_peer.compression.contribution import encode_contribution
from dilocox_peer.compression.lengths import CLIP_STEPS, LEAST_FACTOR, LEAST_UNIT
from dilocox_peer.errors import MalformedBlob
from dilocox_peer.types import Layout

LAYOUT = Layout.of([("a", (300, 400)), ("b", (77,))])


def pseudo_gradient(seed, scale=1.0):
    return torch.randn(LAYOUT.num_elements, generator=torch.Generator().manual_seed(seed)) * scale


def blob_of(flat, codec="none"):
    return encode_contribution(LAYOUT, flat, uniform_policy(codec))


def test_the_mean_is_one_float32_product_and_one_sum_after_the_other():
    parts = [pseudo_gradient(seed) for seed in range(3)]
    weights = [5, 1, 3]
    expected = np.zeros(LAYOUT.num_elements, np.float32)
    for part, weight in zip(parts, weights, strict=True):
        expected = expected + part.numpy() * np.float32(weight / 9)
    mean = aggregate(LAYOUT, [blob_of(part) for part in parts], weights, norm_clip=4.0)
    assert mean.mean_N is not None
    assert mean.mean_N.numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_the_result_does_not_depend_on_the_number_of_threads(codec):
    blobs = [blob_of(pseudo_gradient(seed, 10.0 if seed == 2 else 1.0), codec) for seed in range(4)]
    before = torch.get_num_threads()
    try:
        results = []
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            results.append(aggregate(LAYOUT, blobs, [4, 3, 2, 1], norm_clip=4.0))
    finally:
        torch.set_num_threads(before)
    assert len({mean_of(result).numpy().tobytes() for result in results}) == 1
    assert len({result.norms for result in results}) == 1


def mean_of(result: Mean) -> torch.Tensor:
    assert result.mean_N is not None
    return result.mean_N


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_contributions_that_are_held_decoded_give_the_bits_of_those_that_are_read_again(codec, monkeypatch):
    blobs = [blob_of(pseudo_gradient(seed, 10.0 if seed == 2 else 1.0), codec) for seed in range(4)]
    held = aggregate(LAYOUT, blobs, [4, 3, 2, 1], norm_clip=4.0)
    monkeypatch.setattr(decoded, "DECODED_BYTES", 0)
    read = aggregate(LAYOUT, blobs, [4, 3, 2, 1], norm_clip=4.0)
    assert mean_of(held).numpy().tobytes() == mean_of(read).numpy().tobytes()
    assert (held.norms, held.clip_factors) == (read.norms, read.clip_factors)


def test_one_contribution_is_its_own_mean_to_the_bit():
    mean = aggregate(LAYOUT, [blob_of(pseudo_gradient(0))], [7], norm_clip=4.0)
    assert torch.equal(mean_of(mean), pseudo_gradient(0))


def test_nothing_contributed_has_no_mean():
    assert aggregate(LAYOUT, [], [], norm_clip=4.0).mean_N is None
    assert aggregate(LAYOUT, [blob_of(pseudo_gradient(0))], [0], norm_clip=4.0).mean_N is None


def test_a_contribution_without_micro_batches_counts_nothing():
    mean = aggregate(LAYOUT, [blob_of(pseudo_gradient(0)), blob_of(pseudo_gradient(1))], [0, 2], norm_clip=4.0)
    assert torch.equal(mean_of(mean), pseudo_gradient(1))


def test_a_contribution_a_thousand_times_larger_is_clipped_to_the_limit():
    blobs = [blob_of(pseudo_gradient(0)), blob_of(pseudo_gradient(1)), blob_of(pseudo_gradient(2, 1000.0))]
    mean = aggregate(LAYOUT, blobs, [1, 1, 1], norm_clip=4.0)
    assert mean.clip_factors[:2] == (1.0, 1.0)
    clipped_norm = mean.norms[2] * mean.clip_factors[2]
    assert (
        1.8 * mean.norms[1] < clipped_norm <= 2.0 * max(mean.norms[:2])
    )  # unit by unit to half of what the whole may be
    expected = (pseudo_gradient(0) + pseudo_gradient(1) + pseudo_gradient(2, 1000.0) * mean.clip_factors[2]) / 3
    off_N = mean_of(mean) - expected  # a unit in which it is still longer than the limit is clipped there
    assert off_N.norm() < 0.05 * expected.norm()


def test_a_malformed_blob_spoils_no_result():
    with pytest.raises(MalformedBlob):
        aggregate(LAYOUT, [blob_of(pseudo_gradient(0)), blob_of(pseudo_gradient(1))[:-1]], [1, 1], norm_clip=4.0)


def test_the_norm_is_the_euclidean_one():
    assert contribution_norm(blob_of(pseudo_gradient(3)), LAYOUT) == pytest.approx(
        float(torch.linalg.vector_norm(pseudo_gradient(3).double())), rel=1e-7
    )


def test_who_gathered_over_missed_rounds_may_be_larger():
    assert clip_factors([1.0, 1.0, 8.0], [32, 32, 64], norm_clip=4.0) == (1.0, 1.0, 1.0)
    assert clip_factors([1.0, 1.0, 8.0], [32, 32, 32], norm_clip=4.0) == (1.0, 1.0, 0.5)
    assert clip_factors([1.0, 1.0, 32.0], [32, 32, 3200], norm_clip=4.0) == (1.0, 1.0, 0.5)  # at most 4x


def test_idle_peers_cannot_clip_the_others_to_nothing():
    assert clip_factors([0.0, 0.0, 3.0], [0, 0, 32], norm_clip=4.0) == (1.0, 1.0, 1.0)


@given(
    norms=st.lists(st.just(0.0) | st.floats(1e-45, 1e45), min_size=1, max_size=8),
    data=st.data(),
)
def test_clip_factors_hide_the_last_bits_of_a_norm(norms, data):
    counts = data.draw(st.lists(st.integers(0, 100), min_size=len(norms), max_size=len(norms)))
    factors = clip_factors(norms, counts, norm_clip=4.0)
    assert all(factor == 0.0 or LEAST_FACTOR <= factor <= 1 for factor in factors)
    ratio = max(norms) / min([norm for norm in norms if norm > 0.0], default=1.0)
    assert min(factors) > 0.0 or ratio > 2.0**60, "nothing is left only of what is out of all proportion"
    for factor in factors:
        mantissa, _ = np.frexp(factor)
        assert mantissa * CLIP_STEPS == int(mantissa * CLIP_STEPS)


@pytest.mark.parametrize("counts", [[10, 0], [10, 10, 0, 0], [10, 10, 10, 0, 0, 0, 0]])
def test_what_idle_peers_residuals_come_to_holds_nobody_to_nothing(counts):
    """They are contributions without work, far shorter than the others; where they were half of all, 2 % was left of those."""
    blobs = [blob_of(pseudo_gradient(seed) * (1.0 if count else 0.005)) for seed, count in enumerate(counts)]
    mean = aggregate(LAYOUT, blobs, counts, norm_clip=4.0)
    assert mean.clip_factors[: counts.index(0)] == (1.0,) * counts.index(0)


@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize("size", [1e3, 1e30, 3e38])
def test_one_of_few_moves_nobody_further_than_the_inner_optimizer_can(others, size):
    """Nothing clipped who was alone in a round: a leader that named only its own contribution wrote the model anew, or made it infinite for all."""
    huge = torch.zeros(LAYOUT.num_elements)
    huge[::3] = size
    blobs = [blob_of(huge, "none"), *(blob_of(pseudo_gradient(seed)) for seed in range(others))]
    mean = mean_of(aggregate(LAYOUT, blobs, [1] * len(blobs), norm_clip=4.0, most_rms=0.01))
    moved = float(torch.linalg.vector_norm(mean.double()))
    honest = float(torch.linalg.vector_norm(pseudo_gradient(0).double())) if others else 0.0
    assert moved <= REACH * 0.01 * LAYOUT.num_elements**0.5 + honest


def test_one_of_two_that_contributes_next_to_nothing_leaves_the_other_what_it_did():
    """The lesser of two norms was the measure of both."""
    blobs = [blob_of(pseudo_gradient(0), "none"), blob_of(pseudo_gradient(1) * 1e-20, "none")]
    mean = aggregate(LAYOUT, blobs, [8, 8], norm_clip=4.0, most_rms=1.0)
    assert mean.clip_factors == (1.0, 1.0)


def test_a_few_elements_hold_no_more_than_their_part_of_what_one_may_move():
    spike = torch.zeros(LAYOUT.num_elements)
    spike[5] = 0.01 * LAYOUT.num_elements**0.5
    mean = mean_of(aggregate(LAYOUT, [blob_of(spike, "none")], [8], norm_clip=1.0, most_rms=0.01))
    unit = min(LEAST_UNIT, LAYOUT.tensors[0].num_elements)
    assert 0.0 < float(mean[5]) <= UNIT_REACH * REACH * 0.01 * unit**0.5


def test_a_copy_adds_nothing_to_what_it_is_a_copy_of():
    blobs = [blob_of(pseudo_gradient(seed)) for seed in range(3)]
    honest = mean_of(aggregate(LAYOUT, blobs, [5, 6, 7], norm_clip=4.0))
    for claims in ((6, 6), (9, 9)):
        copied = mean_of(aggregate(LAYOUT, [*blobs, blobs[1], bytearray(blobs[1])], [5, 6, 7, *claims], norm_clip=4.0))
        assert torch.equal(copied, honest), "a larger claim for a copy raises nothing"


def test_nothing_weighs_nothing_whatever_is_claimed_for_it():
    blobs, nothing = [blob_of(pseudo_gradient(seed)) for seed in range(2)], blob_of(torch.zeros(LAYOUT.num_elements))
    honest = mean_of(aggregate(LAYOUT, blobs, [5, 6], norm_clip=4.0))
    assert torch.equal(mean_of(aggregate(LAYOUT, [nothing, *blobs, nothing], [20, 5, 6, 1], norm_clip=4.0)), honest)
    assert aggregate(LAYOUT, [nothing, nothing], [5, 5], norm_clip=4.0).mean_N is None, (
        "a void round: momentum does not coast"
    )


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=8))
def test_each_contribution_weighs_once_whoever_names_it(named):
    blobs, norms = [bytes([which]) for which, _ in named], [float(which) for which, _ in named]
    weights = weights_of_their_own(blobs, norms, [count for _, count in named])
    for which in range(4):
        counts = [count for each, count in named if each == which and count]
        expected = min(counts) if which and counts else 0
        assert sum(weight for blob, weight in zip(blobs, weights, strict=True) if blob == bytes([which])) == expected


def test_no_one_of_three_outweighs_the_others_by_what_it_says():
    assert capped_weights([10, 12, 10_000]) == (10, 12, 48)
    assert capped_weights([10, 0, 1000]) == (10, 0, 1000), "of two nobody is usual"
    assert capped_weights([0, 0]) == (0, 0)
    rows = [torch.full((LAYOUT.num_elements,), value) for value in (1.0, 1.0, -1.0)]
    blobs = [encode_contribution(LAYOUT, row, uniform_policy("none")) for row in rows]
    mean = aggregate(LAYOUT, blobs, [100, 100, 10**9], norm_clip=4.0).mean_N
    assert mean is not None
    assert torch.equal(mean, mean_of(aggregate(LAYOUT, blobs, [100, 100, 400], norm_clip=4.0)))


def test_contributions_of_many_pieces_are_the_same_only_to_the_last_byte() -> None:
    one = bytes(range(256)) * 1024
    last, first = one[:-1] + b"x", b"x" + one[1:]
    assert weights_of_their_own([one, last, first], [1.0] * 3, [5, 5, 5]) == (5, 5, 5)
    assert weights_of_their_own([one, memoryview(bytearray(one)), last], [1.0] * 3, [5, 4, 5]) == (0, 4, 5)
