"""Statements on adaptation and conservation that peer/planning/adaptive.py, controller.py and the outer loop rest on.

DiLoCoX: arXiv 2506.21263. PowerSGD: arXiv 1905.13727. MuLoCo: arXiv 2505.23725.
"""

import pytest
import torch

from dilocox_peer.compression.aggregate import Mean, aggregate
from dilocox_peer.compression.contribution import encode_contribution
from dilocox_peer.compression.lowrank import LowRankCodec
from dilocox_peer.compression.policy import policy_named
from dilocox_peer.manifest import CompressionSection, Manifest, ModelSection
from dilocox_peer.peer.planning.adaptive import AdaptiveRank, Observation, RankSettings, inner_steps_of
from dilocox_peer.peer.planning.spectrum import effective_rank, spectrum
from dilocox_peer.peer.training.anchor_state import AnchorState
from dilocox_peer.peer.training.outer import OuterOptimizer, OuterSettings, initial_state
from dilocox_peer.types import Layout


def normal(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rank", [64, 48, 32, 16])
def test_with_the_rank_the_local_steps_shrink_so_that_communication_keeps_its_share(rank):
    """DiLoCoX, adaptive gradient compression: H_t = H_1 r_t / r_1, bytes are proportional to r."""

    def per_step(rank):
        steps = inner_steps_of(rank, first_rank=64, first_inner_steps=128)
        return len(LowRankCodec(rank).encode(normal((512, 512), 0))) / steps

    assert per_step(rank) == pytest.approx(per_step(64), rel=0.05)


def test_the_rank_comes_from_a_window_of_rounds_not_from_one():
    """DiLoCoX: the rank estimate is taken over a window of outer steps."""
    ranks = AdaptiveRank(RankSettings(first=32, smallest=4, largest=64))
    for round_number, needed in enumerate([32, 32, 4, 32, 32], 1):
        ranks.observe(Observation(round_number, needed, 0.3))
    assert ranks.rank == 32


def test_as_the_pseudo_gradients_lose_rank_so_does_the_sketch():
    """DiLoCoX, rank diminishment: as training goes on the pseudo-gradient needs fewer directions, and is sent with fewer."""
    ranks, seen = AdaptiveRank(RankSettings(first=32, smallest=2, largest=64)), []
    for round_number in range(1, 60):
        true_rank = max(4, 32 - round_number)
        mean = normal((128, true_rank), round_number) @ normal((true_rank, 128), 100 + round_number)
        values = spectrum(mean, 48)
        seen.append(ranks.observe(Observation(round_number, effective_rank(values, float(mean.square().sum())), 0.2)))
    assert seen == sorted(seen, reverse=True)
    assert seen[0] == 32
    assert seen[-1] <= 5


def mean_of(result: Mean) -> torch.Tensor:
    assert result.mean_N is not None
    return result.mean_N


def test_the_mean_of_own_bases_has_the_rank_of_all_of_them_together():
    """Without a shared basis (PowerSGD, algorithm 1, has one) the average has up to peers * r directions, so its
    spectrum says more than a peer's own sketch."""
    layout = Layout.of([("w", (128, 128))])
    policy = policy_named("lowrank-int4", rank=8)
    blobs = [encode_contribution(layout, normal(128 * 128, seed), policy) for seed in range(4)]
    alone = mean_of(aggregate(layout, blobs[:1], [1], norm_clip=1e6)).view(128, 128)
    together = mean_of(aggregate(layout, blobs, [1] * 4, norm_clip=1e6)).view(128, 128)
    assert int(torch.linalg.matrix_rank(alone)) == 8
    assert int(torch.linalg.matrix_rank(together)) == 32


def test_pseudo_gradient_is_conserved_to_the_bit_with_unequal_arrival_and_missed_certificates():
    """DiLoCoX, one-step-delay overlap: no local step is lost or counted twice. With numbers whose sums are exact (small
    multiples of a power of two, groups of 1, 2 and 4) this holds without any rounding."""
    section = ModelSection(layers=1, hidden_size=16, heads=2, kv_heads=1, mlp_size=16, context=8)
    manifest = Manifest(model=section, compression=CompressionSection(codec="none"))
    layout = initial_state(manifest).layout
    zeros = memoryview(bytes(4 * layout.num_elements))
    state = AnchorState.of(layout, head=manifest.genesis(0), round_number=0, anchor=zeros, momentum=zeros)
    settings = OuterSettings(1.0, 0.0, policy_named("none"), norm_clip=1e6)
    loops = [OuterOptimizer(settings, state) for _ in range(4)]
    local = [torch.zeros(layout.num_elements) for _ in loops]
    moved, settled = ([torch.zeros(layout.num_elements) for _ in loops] for _ in range(2))
    generator = torch.Generator().manual_seed(0)

    def train(peer):
        pseudo_gradient_N = torch.randint(-8, 9, (layout.num_elements,), generator=generator) * 2.0**-8
        local[peer].sub_(pseudo_gradient_N)
        moved[peer].add_(pseudo_gradient_N)

    anchor_N = torch.zeros(layout.num_elements)
    for round_number, certified in enumerate([(0, 1, 2, 3), (1, 3), (2,), (0, 1), (), (0, 1, 2, 3)], 1):
        for peer in range(4):
            train(peer)
        before = [loop.state.anchor_N() - local[peer] for peer, loop in enumerate(loops)]
        offers = [loop.offer(local[peer].clone(), 1) for peer, loop in enumerate(loops)]
        for peer, late in enumerate((0, 1, 2, 4)):
            for _ in range(late):
                train(peer)
        for peer, loop in enumerate(loops):
            blobs = [offers[each].blob for each in certified]
            _, shift_N = loop.merge(
                blobs, [1] * len(blobs), own=peer in certified, round_number=round_number, head=state.head
            )
            local[peer].add_(shift_N)
        for peer in certified:
            settled[peer].add_(before[peer])
        if certified:
            anchor_N -= sum(before[peer] for peer in certified) / len(certified)
        for peer, loop in enumerate(loops):
            assert torch.equal(loop.state.anchor_N(), anchor_N)
            assert torch.equal(settled[peer] + (anchor_N - local[peer]), moved[peer])
