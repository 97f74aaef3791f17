import pytest
import torch

from dilocox_peer.compression.lowrank import LowRankCodec
from dilocox_peer.peer.planning import spectrum as spectra
from dilocox_peer.peer.planning.adaptive import (
    EFFECT_AFTER,
    WINDOW,
    AdaptiveRank,
    Observation,
    RankSettings,
    inner_steps_of,
    next_rank,
)
from dilocox_peer.peer.planning.spectrum import effective_rank, needed_rank, spectrum
from dilocox_peer.types import Layout

SETTINGS = RankSettings(first=16, smallest=4, largest=24)


def matrix(rows, columns, values, seed=0):
    """A matrix with these singular values."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.linalg.qr(torch.randn(rows, len(values), generator=generator)).Q
    right = torch.linalg.qr(torch.randn(columns, len(values), generator=generator)).Q
    return left @ torch.diag(torch.tensor(values)) @ right.t()


def window(*, needed, residual):
    return [Observation(index, needed, residual) for index in range(WINDOW)]


@pytest.mark.parametrize(
    ("needed", "residual", "expected"),
    [
        (16, 0.5, 16),
        (13, 0.5, 16),  # 13 of 16 is not worth a change of shape
        (12, 0.5, 12),
        (1, 0.5, 4),
        (1, 0.9, 20),  # the guard: most is not sent, whatever the spectrum says
        (30, 0.5, 16),  # more is needed, but the residual is small: nothing is gained
        (30, 0.99, 20),
    ],
)
def test_the_rule(needed, residual, expected):
    assert next_rank(16, window(needed=needed, residual=residual), SETTINGS) == expected


def test_growth_ends_at_the_largest_rank():
    assert next_rank(24, window(needed=24, residual=0.99), SETTINGS) == 24


def test_medians_ignore_a_freak_round():
    rounds = window(needed=16, residual=0.5)
    rounds[2] = Observation(2, 1, 0.999)
    assert next_rank(16, rounds, SETTINGS) == 16


def test_a_decision_waits_for_a_whole_window_and_then_for_rounds_under_it():
    ranks = AdaptiveRank(SETTINGS)
    seen = [ranks.observe(Observation(round_number, 8, 0.3)) for round_number in range(1, 20)]
    assert seen[: WINDOW - 1] == [16] * (WINDOW - 1)
    assert seen[WINDOW - 1] == 8
    assert ranks.effective_round == WINDOW + EFFECT_AFTER
    ranks = AdaptiveRank(SETTINGS)
    for round_number in range(1, WINDOW + EFFECT_AFTER):  # the rounds in flight still have the old rank: not counted
        ranks.observe(Observation(round_number, 8, 0.3))
    for round_number in range(WINDOW + EFFECT_AFTER, 2 * WINDOW + EFFECT_AFTER - 1):
        ranks.observe(Observation(round_number, 4, 0.3))
        assert ranks.rank == 8
    assert ranks.observe(Observation(2 * WINDOW + EFFECT_AFTER - 1, 4, 0.3)) == 4


def test_what_was_certified_is_adopted():
    ranks = AdaptiveRank(SETTINGS)
    ranks.observe(Observation(1, 4, 0.1))
    ranks.adopt(20, effective_round=3)
    assert ranks.rank == 20
    for round_number in range(2, 3 + WINDOW - 1):
        assert ranks.observe(Observation(round_number, 20, 0.5)) == 20


def test_the_energy_rule_alone_collapses_inside_its_own_sketch_and_the_guarded_one_does_not():
    """As it was measured in larger runs: pseudo-gradients of full rank, each of three peers sends 16 directions of 128."""
    layout = Layout.of([("w", (128, 128))])
    guarded, bare = AdaptiveRank(SETTINGS), 16
    residuals = [torch.zeros(128, 128) for _ in range(3)]
    encoders = [LowRankCodec(16).encoder() for _ in residuals]
    for round_number in range(1, 2 * WINDOW):
        mean, sent, decoded = torch.zeros(128, 128), torch.zeros(128, 128), torch.empty(128, 128)
        for peer, encoder in enumerate(encoders):
            generator = torch.Generator().manual_seed(10 * round_number + peer)
            sent = torch.randn(128, 128, generator=generator) + 0.8 * residuals[peer]
            LowRankCodec().decode(memoryview(encoder.encode(sent)), decoded)
            residuals[peer] = sent - decoded
            mean += decoded / 3
        inside = spectrum(decoded, bare)
        bare = min(bare, effective_rank(inside, sum(value**2 for value in inside), energy=0.9))
        needed = needed_rank(layout, mean.flatten(), ["w"], rank=guarded.rank)
        lost = float(residuals[-1].square().sum() / sent.square().sum())
        assert guarded.observe(Observation(round_number, needed, lost)) >= 16
    assert bare < 12


def test_the_rank_of_a_pseudo_gradient_that_lost_its_rank_is_found():
    layout = Layout.of([("w", (96, 128)), ("norm", (96,))])
    ranks = AdaptiveRank(SETTINGS)
    mean = torch.cat([matrix(96, 128, [1.0, 0.9, 0.8, 0.7, 0.6, 0.5]).flatten(), torch.ones(96)])
    for round_number in range(1, WINDOW + 1):
        ranks.observe(Observation(round_number, needed_rank(layout, mean, ["w"], rank=ranks.rank), 0.04))
    assert ranks.rank == 6


def test_the_spectrum_is_that_of_the_matrix():
    values = [2.0**-index for index in range(20)]
    found = spectrum(matrix(80, 120, values), 12)
    assert found == pytest.approx(values[:12], rel=0.02)
    assert spectrum(torch.zeros(8, 4), 3) == pytest.approx([0.0] * 3)
    assert len(spectrum(torch.zeros(8, 4), 9)) == 4
    assert spectrum(torch.zeros(0, 4), 9) == []


@pytest.mark.parametrize(
    ("values", "total", "expected"),
    [([], 0.0, 0), ([3.0], 9.0, 1), ([3.0, 4.0], 25.0, 2), ([10.0, 0.1], 100.01, 1), ([1.0, 1.0], 100.0, 3)],
)
def test_effective_rank(values, total, expected):
    assert effective_rank(values, total) == expected


def test_inner_steps_follow_the_rank_in_the_faithful_mode():
    assert [inner_steps_of(rank, first_rank=16, first_inner_steps=32) for rank in (24, 16, 8, 1)] == [32, 32, 16, 4]


def test_without_a_low_rank_tensor_no_rank_is_needed():
    assert needed_rank(Layout.of([("norm", (4,))]), torch.ones(4), [], rank=7) == 0


def test_settings_of_a_layout():
    layout = Layout.of([("w", (96, 256)), ("v", (96,))])
    settings = RankSettings.of(layout, 64)
    assert (settings.first, settings.largest, settings.smallest) == (27, 27, 6)
    assert spectra.ENERGY < 1
