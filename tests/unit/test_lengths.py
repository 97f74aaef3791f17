"""How long units of a contribution are: right, the same however it is added up, and what is left of those that are far too long."""

import math

import numpy as np
import pytest
import torch

from dilocox_peer.compression.contribution import encode_contribution, open_contribution
from dilocox_peer.compression.lengths import (
    LEAST_UNIT,
    MOST_UNITS,
    length_of,
    scale,
    squares_of,
    unit_factors,
    unit_of,
    units_of,
)
from dilocox_peer.compression.policy import policy_named
from dilocox_peer.compression.reader import PIECE
from dilocox_peer.types import Layout

SHAPES = [(0,), (1,), (LEAST_UNIT - 1,), (LEAST_UNIT + 1,), (3, 700), (600, 1000)]
LAYOUT = Layout.of([(f"t{index}", shape) for index, shape in enumerate(SHAPES)])


def squares(flat_N: torch.Tensor) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    blob = encode_contribution(LAYOUT, flat_N, policy_named("none"))
    return squares_of(open_contribution(blob, LAYOUT), LAYOUT)


@pytest.mark.parametrize("size", [1, LEAST_UNIT, LEAST_UNIT * MOST_UNITS, LEAST_UNIT * MOST_UNITS + 1, 10**7, 10**9])
def test_a_piece_is_whole_units_and_a_tensor_has_few(size: int) -> None:
    unit = unit_of(size)
    assert PIECE % unit == 0
    assert -(-size // unit) <= MOST_UNITS or unit == PIECE


@pytest.mark.parametrize("spread", [0.0, 3.0, 30.0])
def test_the_squares_of_each_unit_are_those_of_its_elements(spread: float) -> None:
    generator = torch.Generator().manual_seed(1)
    flat_N = torch.randn(LAYOUT.num_elements, generator=generator)
    flat_N *= 10.0 ** (spread * torch.randn(LAYOUT.num_elements, generator=generator)).clamp(-36, 36)
    found, places = squares(flat_N), list(units_of(LAYOUT))
    assert places[-1].stop == len(found)
    for (spec, first, stop), units in zip(LAYOUT.spans(), places, strict=True):
        parts = torch.split(flat_N[first:stop].double(), unit_of(spec.num_elements)) if stop > first else ()
        assert list(found[units]) == pytest.approx([float(part.dot(part)) for part in parts], rel=1e-5)
    assert length_of(found) == pytest.approx(float(flat_N.double().norm()), rel=1e-5)


def test_no_order_and_no_number_of_threads_changes_a_bit() -> None:
    generator = torch.Generator().manual_seed(2)
    flat_N = torch.randn(LAYOUT.num_elements, generator=generator)
    first, last = LAYOUT.spans()[-1][1:]
    unit = unit_of(last - first)
    turned_N = flat_N.clone()
    for start in range(first, last, unit):
        turned_N[start : min(start + unit, last)] = flat_N[start : min(start + unit, last)].flip(0)
    assert (
        squares(turned_N)[list(units_of(LAYOUT))[-1]].tobytes() == squares(flat_N)[list(units_of(LAYOUT))[-1]].tobytes()
    )
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert squares(flat_N).tobytes() == squares(flat_N.clone()).tobytes()
        several = squares(flat_N)
        torch.set_num_threads(1)
        assert squares(flat_N).tobytes() == several.tobytes()
    finally:
        torch.set_num_threads(threads)


def test_nothing_denormals_and_the_largest_floats_have_lengths() -> None:
    largest = float(torch.finfo(torch.float32).max)
    for value in (0.0, -0.0, 1e-45, 1e-38, largest, -largest):
        found = squares(torch.full((LAYOUT.num_elements,), value))
        assert np.isfinite(found).all()
        assert length_of(found) == pytest.approx(
            abs(np.float64(np.float32(value))) * math.sqrt(LAYOUT.num_elements), rel=1e-5
        )


def left(lengths: list[list[float]], counts: list[int], factors: list[float] | None = None) -> list[list[float]]:
    squares_MU = [np.array(row) ** 2 for row in lengths]
    own = [1.0] * len(counts) if factors is None else factors
    found: list[list[float]] = unit_factors(squares_MU, counts, own, [1.0] * len(counts), norm_clip=4.0).tolist()
    return found


def test_a_unit_far_longer_than_is_usual_there_is_clipped_and_nothing_else() -> None:
    found = left([[1.0, 1.0], [1.0, 2.0], [1.0, 40.0]], [8, 8, 8])
    assert found[0] == found[1] == [1.0, 1.0]
    assert found[2][0] == 1.0
    assert 0.19 < found[2][1] <= 8.0 / 40.0


def test_two_that_have_anything_there_or_weigh_anything_tell_nothing_of_a_third() -> None:
    assert left([[1.0], [1.0], [0.0], [40.0]], [8, 0, 8, 8]) == [[1.0]] * 4
    assert left([[1.0], [40.0]], [8, 8]) == [[1.0]] * 2


def test_what_a_contribution_is_clipped_to_as_a_whole_is_the_most_of_each_unit() -> None:
    assert left([[1.0, 1.0], [1.0, 1.0], [100.0, 1.0]], [8, 8, 8], [1.0, 1.0, 0.5])[2][1] == 0.5
    assert left([[1.0, 1.0], [1.0, 1.0], [100.0, 1.0]], [8, 8, 8], [1.0, 1.0, 0.5])[2][0] < 0.05


def test_units_are_scaled_each_by_its_own_share() -> None:
    values_X = torch.ones(2 * LEAST_UNIT + 5)
    scaled = scale(values_X.clone(), np.array([0.5, 2.0, 3.0], np.float32), LEAST_UNIT)
    assert scaled.split(LEAST_UNIT)[0].unique().tolist() == [0.5]
    assert scaled.split(LEAST_UNIT)[1].unique().tolist() == [2.0]
    assert scaled.split(LEAST_UNIT)[2].unique().tolist() == [3.0]
    assert scale(values_X, np.full(3, 0.25, np.float32), LEAST_UNIT).unique().tolist() == [0.25]
