"""Statements on compressed contributions that the codecs and the outer loop rest on, each with its source.

DiLoCoX: arXiv 2506.21263. SparseLoCo: arXiv 2508.15706. PowerSGD: arXiv 1905.13727. Error feedback: Karimireddy et al., arXiv 1901.09847.
"""

import pytest
import torch

from dilocox_peer.compression.aggregate import aggregate
from dilocox_peer.compression.codec import CODECS
from dilocox_peer.compression.contribution import decode_contribution, encode_contribution
from dilocox_peer.compression.feedback import residual_after, with_feedback
from dilocox_peer.compression.lowrank import LowRankCodec
from dilocox_peer.compression.policy import policy_named
from dilocox_peer.manifest import CompressionSection, Manifest, ModelSection, OuterSection
from dilocox_peer.peer.training.outer import OuterOptimizer, OuterSettings, initial_state

LOSSY = ["fp16", "int8", "int4", "int2", "sign", "topk", "lowrank-int4"]
MODEL = ModelSection(layers=1, hidden_size=16, heads=2, kv_heads=1, mlp_size=16, context=8)


def manifest_with(codec, learning_rate=0.7, momentum=0.6):
    return Manifest(
        model=MODEL,
        outer=OuterSection(learning_rate=learning_rate, momentum=momentum),
        compression=CompressionSection(codec=codec),
    )


def normal(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def decoded(codec, x):
    out = torch.empty_like(x)
    codec.decode(memoryview(codec.encode(x)), out)
    return out


@pytest.mark.parametrize("name", LOSSY)
def test_every_codec_is_a_contraction(name):
    """Error feedback converges for compressors with |x - C(x)|**2 <= (1 - delta) |x|**2 (1901.09847, assumption A)."""
    for seed in range(5):
        for x in (
            normal((40, 300), seed),
            normal((40, 300), seed) ** 5,
            normal((40, 1), seed) * normal((1, 300), seed),
        ):
            assert float((x - decoded(CODECS[name], x)).norm()) < float(x.norm())


def test_scaled_sign_keeps_the_share_that_the_theory_says():
    """delta of the scaled sign is |x|_1**2 / (n |x|_2**2) (1901.09847, lemma 8), block by block; 2/pi if normal."""
    x = normal((64, 256), 0)
    lost = (x - decoded(CODECS["sign"], x)).square().sum() / x.square().sum()
    assert float(lost) == pytest.approx(1 - 2 / torch.pi, abs=0.01)


@pytest.mark.parametrize("name", LOSSY)
def test_what_compression_loses_stays_bounded_and_the_rest_arrives(name):
    """1901.09847, theorem II: with error feedback the sum of what was sent differs from the sum of the pseudo-gradients by the
    last residual only, which does not grow with the number of rounds (here: after 80 no larger than 1.5 times after 40).
    """
    pseudo_gradient, codec = normal((16, 256), 7), CODECS[name]
    residual, total = torch.zeros_like(pseudo_gradient), torch.zeros_like(pseudo_gradient)
    norms = []
    for _ in range(80):
        sent = with_feedback(pseudo_gradient, residual, 1.0)
        y = decoded(codec, sent)
        residual = residual_after(sent, y)
        total += y
        norms.append(float(residual.norm()))
    assert torch.allclose(total + residual, pseudo_gradient * 80, rtol=1e-4, atol=1e-3)
    assert norms[79] <= 1.5 * norms[39] + 1e-6


@pytest.mark.parametrize("name", LOSSY)
def test_pseudo_gradient_is_conserved_with_unequal_arrival(name):
    """DiLoCoX, error compensation over one-step-delay overlap: each local pseudo-gradient enters certified contributions once.

    Three peers, random pseudo-gradients, some arrive late, certificates leave peers out in turn. What a peer's certified
    contributions decoded to, plus residual, plus what is unsettled (a - w), is what it moved. With decay 1 only: a decay
    forgets a share of the residual by intention.
    """
    manifest = manifest_with(name, learning_rate=1.0, momentum=0.0)
    codec_now = [name]
    settings = OuterSettings(1.0, 0.0, lambda spec: policy_named(codec_now[0])(spec), residual_decay=1.0, norm_clip=1e6)
    state = initial_state(manifest)
    loops = [OuterOptimizer(settings, state) for _ in range(3)]
    local = [state.anchor_N() for _ in loops]
    moved = [torch.zeros(state.layout.num_elements) for _ in loops]
    settled = [torch.zeros(state.layout.num_elements) for _ in loops]

    def train(peer, seed):
        pseudo_gradient = normal(state.layout.num_elements, seed) * 1e-2
        local[peer] -= pseudo_gradient
        moved[peer] += pseudo_gradient

    for round_number in range(1, 9):
        for peer in range(3):
            train(peer, 10 * round_number + peer)
        offers = [loop.offer(local[peer].clone(), 4) for peer, loop in enumerate(loops)]
        for peer in range(round_number % 3):  # some have gone on before the certificate arrives
            train(peer, 1000 + 10 * round_number + peer)
        included = [peer for peer in range(3) if round_number % 4 != peer]
        blobs = [offers[peer].blob for peer in included]
        for peer, loop in enumerate(loops):
            _, shift_N = loop.merge(
                blobs, [4] * len(blobs), own=peer in included, round_number=round_number, head=state.head
            )
            local[peer] += shift_N
            if peer in included:
                contribution = torch.empty(state.layout.num_elements)
                decode_contribution(offers[peer].blob, state.layout, contribution)
                settled[peer] += contribution
    codec_now[0] = "none"  # now everything that is left goes, exactly
    for peer, loop in enumerate(loops):
        rest = torch.empty(state.layout.num_elements)
        decode_contribution(loop.offer(local[peer].clone(), 0).blob, state.layout, rest)
        assert torch.allclose(settled[peer] + rest, moved[peer], atol=1e-5)


def test_top_k_is_taken_chunk_by_chunk():
    """SparseLoCo: the largest of every chunk, not of the tensor, so that no small-valued tensor part is starved."""
    x = torch.cat([normal((4096,), 0), normal((4096,), 1) * 1e-3])
    y = decoded(CODECS["topk"], x)
    assert int((y[:4096] != 0).sum()) == int((y[4096:] != 0).sum()) == 328


def test_error_feedback_brings_every_element_its_turn():
    """SparseLoCo: what top-k leaves out accumulates until it is large enough; after some rounds everything was sent."""
    pseudo_gradient, codec = normal((4096,), 3).abs() + 0.5, CODECS["topk"]
    residual, seen = torch.zeros(4096), torch.zeros(4096, dtype=torch.bool)
    for _ in range(60):
        sent = with_feedback(pseudo_gradient, residual, 1.0)
        y = decoded(codec, sent)
        residual = residual_after(sent, y)
        seen |= y != 0
    assert bool(seen.all())


def test_with_a_decay_the_residual_is_a_geometric_sum_at_most():
    """With decay 0.8, top-k's: |e| <= c |m| / (1 - 0.8 c) with c the codec's largest relative loss."""
    codec, residual, worst = CODECS["topk"], torch.zeros(8192), 0.0
    for round_number in range(60):
        sent = with_feedback(normal((8192,), round_number), residual, 0.8)
        y = decoded(codec, sent)
        worst = max(worst, float((sent - y).norm() / sent.norm()))
        residual = residual_after(sent, y)
        assert float(residual.norm()) <= worst * 8192**0.5 * 1.05 / (1 - 0.8 * worst)


@pytest.mark.parametrize(
    ("name", "least"), [("int8", 3.8), ("int4", 7.7), ("int2", 15.0), ("sign", 30.1), ("topk", 65.0)]
)
def test_contributions_are_that_many_times_smaller_than_float32(name, least):
    """32 over the bits an element that blockwise.py and topk.py state; a matrix the size of a real stage's."""
    assert 4 * (1 << 20) / len(CODECS[name].encode(normal((1024, 1024), 0))) > least


def test_gram_schmidt_is_not_needed_and_qr_keeps_the_basis_orthogonal_on_rank_deficient_input():
    """PowerSGD (1905.13727, algorithm 1) orthogonalises by Gram-Schmidt, which loses all orthogonality where the rank is
    below the sketch's. Ours finds an exact rank 8 with a sketch of 24."""
    x = normal((128, 8), 0) @ normal((8, 200), 1)
    assert float((x - decoded(LowRankCodec(24), x)).norm()) < 0.2 * float(x.norm())


def test_a_warm_start_turns_one_iteration_a_round_into_power_iteration():
    """PowerSGD section 3: reusing the last round's factor, one multiplication a round converges to the best rank r."""
    left, right = torch.linalg.qr(normal((128, 64), 0)).Q, torch.linalg.qr(normal((200, 64), 1)).Q
    x = left @ torch.diag(0.95 ** torch.arange(64.0)) @ right.t()
    best = float(torch.linalg.svdvals(x)[12:].norm())
    encoder, losses = LowRankCodec(12).encoder(), []
    for _ in range(12):
        out = torch.empty_like(x)
        LowRankCodec().decode(memoryview(encoder.encode(x)), out)
        losses.append(float((x - out).norm()))
    assert losses[-1] < losses[0]
    assert losses[-1] < 1.04 * (best**2 + (0.17 * float(x.norm())) ** 2) ** 0.5


def test_any_subset_of_own_basis_contributions_is_a_round():
    """Differs from PowerSGD: each peer encodes in its own basis, so a decoded subset's mean needs nothing of the rest."""
    layout = initial_state(manifest_with("none")).layout
    peers = [normal(layout.num_elements, seed) for seed in range(3)]
    policy = policy_named("lowrank-int4", rank=2)
    blobs = [encode_contribution(layout, flat, policy) for flat in peers]
    groups = [[blobs[0]], [blobs[2]], [blobs[0], blobs[2]]]
    one, other, pair = (aggregate(layout, group, [1] * len(group), norm_clip=1e6).mean_N for group in groups)
    assert one is not None
    assert other is not None
    assert pair is not None
    assert torch.equal(pair, one * 0.5 + other * 0.5)


def test_low_rank_with_full_feedback_keeps_a_stale_residual_and_with_decay_a_bounded_one():
    """Karimireddy et al. feed all of it back (decay 1): with a rank below the pseudo-gradient's |e| / |sent| is .95, 0.8 is better."""
    sizes = {}
    for decay in (1.0, 0.8):
        residual, encoder = torch.zeros(96, 96), LowRankCodec(6).encoder()
        for round_number in range(30):
            sent = with_feedback(normal((96, 96), round_number), residual, decay)
            out = torch.empty_like(sent)
            LowRankCodec().decode(memoryview(encoder.encode(sent)), out)
            residual = residual_after(sent, out)
        sizes[decay] = float(residual.norm()) / 96
    assert sizes[0.8] < 1.7 < 2.0 < sizes[1.0]
