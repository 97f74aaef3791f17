"""The outer step of a merge, piece by piece on several threads: the bits of the plain formulas, whatever the codec."""

import threading

import numpy as np
import pytest
import torch

from dilocox_peer.compression.aggregate import SparseReader, TensorMean, shares_of
from dilocox_peer.compression.codec import CODECS
from dilocox_peer.compression.contribution import decode_contribution, encode_contribution
from dilocox_peer.compression.lengths import unit_of
from dilocox_peer.compression.policy import policy_named
from dilocox_peer.compression.reader import PIECE, pieces
from dilocox_peer.errors import StateCorrupt
from dilocox_peer.peer.training.anchor_state import AnchorState, GrowingInMemory
from dilocox_peer.peer.training.crew import Crew
from dilocox_peer.peer.training.outer import OuterOptimizer, OuterSettings, first_state
from dilocox_peer.store.outline import CHUNK_BYTES, outline_of
from dilocox_peer.types import Layout, sha256

# More than a piece, and a tensor after it that begins within a chunk: most chunks are looked at in a piece, the others in the end.
LAYOUT = Layout.of([("a", (550, 1000)), ("b", (30, 100)), ("c", (7,))])
N = LAYOUT.num_elements
LR, MU = 0.7, 0.6


def bits(vector):
    return vector.numpy().view(np.int32)


def state_of(anchor_N, momentum_N):
    return AnchorState.of(
        LAYOUT, head=sha256(b"before"), round_number=0, anchor=anchor_N.numpy().tobytes(), momentum=momentum_N.numpy().tobytes()
    )  # fmt: skip


def rounds_of(codec, seed):
    """(contributions of three that agree, the anchor, the momentum)."""
    generator = torch.Generator().manual_seed(seed)
    common_N, anchor_N, momentum_N, *noise = (torch.randn(N, generator=generator) for _ in range(6))
    policy = policy_named(codec, rank=8)
    blobs = [encode_contribution(LAYOUT, common_N + 0.5 * each, policy) for each in noise]
    return blobs, anchor_N, momentum_N


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("codec", sorted(CODECS))
def test_a_merge_comes_to_the_bits_of_the_formulas_on_whole_vectors(codec, num_threads):
    """What it came to before it went piece by piece: a product and a sum each on its own, in the certificate's order."""
    blobs, anchor_N, momentum_N = rounds_of(codec, 5)
    counts = [1, 2, 2]
    crew = Crew(num_threads)
    outer = OuterOptimizer(
        OuterSettings(LR, MU, policy_named(codec, rank=8)), state_of(anchor_N, momentum_N), crew=crew
    )
    offer = outer.offer(anchor_N - torch.randn(N, generator=torch.Generator().manual_seed(9)), 2)
    moved, shift_N = outer.merge([*blobs, offer.blob], [*counts, 2], own=False, round_number=1, head=sha256(b"after"))
    crew.stop()

    assert set(moved.clip_factors[:3]) == {1.0}
    weights = [round(64 * factor) * count for factor, count in zip(moved.clip_factors, [*counts, 2], strict=True)]
    mean_N, decoded_N = torch.zeros(N), torch.empty(N)
    for blob, weight in zip([*blobs, offer.blob], weights, strict=True):
        decode_contribution(blob, LAYOUT, decoded_N)
        mean_N = mean_N + decoded_N * float(shares_of(np.ones((1, 1)), [weight], sum(weights))[0][0])
    next_momentum_N = momentum_N * MU + mean_N
    update_N = (next_momentum_N * MU + mean_N) * -LR
    next_anchor_N = anchor_N + update_N
    assert np.array_equal(bits(outer.state.momentum_N()), bits(next_momentum_N))
    assert np.array_equal(bits(outer.state.anchor_N()), bits(next_anchor_N))
    assert np.array_equal(bits(shift_N), bits(update_N))
    assert outer.state.outline == outline_of(outer.state.parts())


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_a_settled_contribution_leaves_what_its_codec_lost(codec):
    anchor_N, momentum_N = (torch.randn(N, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    policy = policy_named(codec, rank=8)
    outer = OuterOptimizer(OuterSettings(LR, MU, policy), state_of(anchor_N, momentum_N))
    snapshot_N = torch.randn(N, generator=torch.Generator().manual_seed(3))
    blob = bytes(outer.offer(snapshot_N.clone(), 1).blob)
    decoded_N = torch.empty(N)
    decode_contribution(blob, LAYOUT, decoded_N)
    _, shift_N = outer.merge([blob], [1], own=True, round_number=1, head=sha256(b"after"))
    sent_N = anchor_N - snapshot_N
    assert np.array_equal(bits(outer.residual_N), bits(sent_N - decoded_N))
    momentum_N = momentum_N * MU + (0.0 + decoded_N * 1.0)
    update_N = (momentum_N * MU + (0.0 + decoded_N * 1.0)) * -LR
    assert np.array_equal(bits(shift_N), bits(update_N + sent_N))


def test_a_mean_of_negative_zeros_is_a_positive_one():
    """As a sum that began at zero is; the sign would show in the momentum's bits."""
    raw = memoryview(torch.full((4,), -0.0).numpy().tobytes())
    out_X, scratch_X = torch.ones(4), torch.ones(4)
    for shares in ([1.0], [0.5, 0.5]):
        readers = [CODECS["none"].open(raw, (4,)) for _ in shares]
        TensorMean(readers, [np.full(1, share, np.float32) for share in shares]).read(0, 4, out_X, scratch_X)
        assert bits(out_X).tolist() == [0] * 4


class Dense:
    """A reader that can be read alone."""

    def __init__(self, reader):
        self.read = reader.read


@pytest.mark.parametrize("unit_shares", [[0.25], [0.25, 0.0, 2.0**-70, 0.3, 1.0]], ids=["one", "each its own"])
def test_what_sparse_contributions_add_is_what_they_come_to_whole(unit_shares):
    size, unit = PIECE + 70_001, unit_of(PIECE + 70_001)
    shares = [
        np.resize(np.array(unit_shares[first:] + unit_shares[:first], np.float32), -(-size // unit))
        for first in range(3)
    ]
    raw = [CODECS["topk"].encode(torch.randn(size, generator=torch.Generator().manual_seed(seed))) for seed in range(3)]
    readers = [CODECS["topk"].open(memoryview(each), (size,)) for each in raw]
    assert all(isinstance(each, SparseReader) for each in readers)
    for start, stop in pieces(size):
        found_X, whole_X, scratch_X = (torch.full((stop - start,), torch.nan) for _ in range(3))
        TensorMean(readers, shares, unit).read(start, stop, found_X, scratch_X)
        TensorMean([Dense(each) for each in readers], shares, unit).read(start, stop, whole_X, scratch_X)
        assert np.array_equal(bits(found_X), bits(whole_X))
        assert found_X.any()


class Counting(GrowingInMemory):
    """Counts the chunks that are read back."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.read_back: list[int] = []
        self._lock = threading.Lock()

    def chunk(self, index, scratch_X):
        with self._lock:
            self.read_back.append(index)
        return super().chunk(index, scratch_X)


def test_a_chunk_that_lies_within_a_piece_is_not_read_back():
    layout = Layout.of([("a", (4 * PIECE // 1024, 1024))])
    grown: list[Counting] = []

    def grow(head, number):
        grown.append(Counting(layout, head, number))
        return grown[0]

    outer = OuterOptimizer(
        OuterSettings(LR, MU, policy_named("sign", rank=8)), first_state(layout, torch.zeros(4 * PIECE), head=sha256(b"0")), grow=grow
    )  # fmt: skip
    blob = outer.offer(torch.ones(4 * PIECE), 1).blob
    outer.merge([blob], [1], own=True, round_number=1, head=sha256(b"1"))
    assert grown[0].read_back == []
    assert len(outer.state.outline.chunks) == 8 * 4 * PIECE // CHUNK_BYTES


def test_a_chunk_that_no_piece_holds_whole_is_read_back_once():
    grown: list[Counting] = []

    def grow(head, number):
        grown.append(Counting(LAYOUT, head, number))
        return grown[0]

    outer = OuterOptimizer(
        OuterSettings(LR, MU, policy_named("sign", rank=8)), first_state(LAYOUT, torch.zeros(N), head=sha256(b"0")), grow=grow
    )  # fmt: skip
    blob = outer.offer(torch.ones(N), 1).blob
    outer.merge([blob], [1], own=True, round_number=1, head=sha256(b"1"))
    assert 0 < len(grown[0].read_back) == len(set(grown[0].read_back)) < len(outer.state.outline.chunks)
    assert outer.state.outline == outline_of(outer.state.parts())


@pytest.mark.parametrize(("part", "start"), [("momentum", 3e38), ("anchor", 0.0)])
def test_what_is_not_finite_is_named(part, start):
    """An anchor that overflows where its momentum does not, and a momentum that does."""
    anchor_N = torch.full((N,), -3.4e38)
    outer = OuterOptimizer(
        OuterSettings(1.0, 0.99, policy_named("none", rank=8)), state_of(anchor_N, torch.full((N,), start))
    )
    blob = encode_contribution(LAYOUT, torch.full((N,), 3e38 if start else 1e37), policy_named("none", rank=8))
    with pytest.raises(StateCorrupt, match=f"{part} holds values that are not finite"):
        outer.merge([blob], [1], own=False, round_number=1, head=sha256(b"1"))
