"""The outer loop of one peer: what it offers, what it settles, and that nothing is lost or counted twice."""

import math
import random
import sys
from typing import Any

import pytest
import torch

from dilocox_peer.compression.aggregate import contribution_squares
from dilocox_peer.compression.codec import uniform_policy
from dilocox_peer.compression.contribution import decode_contribution, encode_contribution
from dilocox_peer.errors import MalformedBlob, StateCorrupt
from dilocox_peer.manifest import Manifest, RunSection
from dilocox_peer.peer.state.checkpoint import GrowingCheckpoint
from dilocox_peer.peer.training import given_back
from dilocox_peer.peer.training.anchor_state import AnchorState, GrowingInMemory
from dilocox_peer.peer.training.crew import Crew
from dilocox_peer.peer.training.outer import OuterOptimizer, OuterSettings, first_state, initial_state
from dilocox_peer.types import Digest, Layout, RunId, sha256

LAYOUT = Layout.of([("a", (20, 10)), ("b", (7,))])
SIZE = LAYOUT.num_elements


def settings(codec="none", learning_rate=0.7, momentum=0.6):
    return OuterSettings(learning_rate, momentum, uniform_policy(codec))


def vector(seed, scale=1.0):
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)) * scale


def head(number):
    return sha256(number.to_bytes(8, "big"))


def state_of(anchor, momentum=None, round_number=0):
    momentum = torch.zeros(SIZE) if momentum is None else momentum
    return AnchorState.of(
        LAYOUT, head=head(round_number), round_number=round_number,
        anchor=anchor.numpy().tobytes(), momentum=momentum.numpy().tobytes(),
    )  # fmt: skip


def decoded(blob):
    out = torch.empty(SIZE)
    decode_contribution(blob, LAYOUT, out)
    return out


class Peer:
    """Local parameters on top of an outer loop, moved by random steps in multiples of 2**-12 (so sums are exact)."""

    def __init__(self, codec="none", **outer):
        self.loop = OuterOptimizer(settings(codec, **outer), state_of(torch.zeros(SIZE)))
        self.local = torch.zeros(SIZE)
        self.trained = torch.zeros(SIZE, dtype=torch.float64)

    def train(self, rng):
        step = torch.tensor([rng.randrange(-64, 65) for _ in range(SIZE)]) * 2.0**-12
        self.local += step
        self.trained -= step.double()

    def offer(self, micro_batches=1):
        return self.loop.offer(self.local.clone(), micro_batches)

    def merge(self, blobs, weights, own, round_number):
        moved, shift_N = self.loop.merge(blobs, weights, own=own, round_number=round_number, head=head(round_number))
        self.local += shift_N
        return moved, shift_N


def test_the_first_offer_is_anchor_minus_local():
    loop = OuterOptimizer(settings(), state_of(vector(1)))
    assert torch.equal(decoded(loop.offer(vector(2), 3).blob), vector(1) - vector(2))
    assert loop.unsettled_micro_batches == 3


def test_the_anchor_takes_a_nesterov_step_on_the_mean():
    """Two rounds against the formula at the top of peer/training/outer.py, in float64."""
    loop = OuterOptimizer(settings(), state_of(vector(0)))
    anchor, momentum = vector(0).double(), torch.zeros(SIZE, dtype=torch.float64)
    for round_number in (1, 2):
        offers = [OuterOptimizer(settings(), loop.state).offer(vector(10 * round_number + k), 1).blob for k in range(3)]
        mean = sum(decoded(blob).double() * weight for blob, weight in zip(offers, (1, 2, 5), strict=True)) / 8
        momentum = 0.6 * momentum + mean
        anchor = anchor - 0.7 * (mean + 0.6 * momentum)
        loop.merge(offers, [1, 2, 5], own=False, round_number=round_number, head=head(round_number))
    assert torch.allclose(loop.state.anchor_N().double(), anchor, atol=1e-6)
    assert torch.allclose(loop.state.momentum_N().double(), momentum, atol=1e-6)
    assert (loop.state.round, loop.state.head) == (2, head(2))


def test_all_peers_of_a_certificate_reach_the_same_bits():
    """Whoever made which contribution, included or not, with whatever local parameters and residual of its own."""
    rng = random.Random(3)
    peers = [Peer("fp16") for _ in range(4)]
    for round_number in range(1, 6):
        offers = []
        for index, peer in enumerate(peers):
            peer.train(rng)
            offers.append((index, peer.offer(rng.randrange(1, 40))))
        certified = rng.sample(offers, rng.randrange(1, 5))
        blobs, weights = [offer.blob for _, offer in certified], [offer.micro_batches for _, offer in certified]
        included = {index for index, _ in certified}
        digests = {
            peer.merge(blobs, weights, index in included, round_number)[0].state_digest
            for index, peer in enumerate(peers)
        }
        assert len(digests) == 1


def test_own_progress_is_replaced_by_the_groups():
    loop = OuterOptimizer(settings(learning_rate=1.0, momentum=0.0), state_of(torch.zeros(SIZE)))
    snapshot, other = vector(1), -vector(2)
    offer = loop.offer(snapshot.clone(), 1)
    foreign = OuterOptimizer(settings(), state_of(torch.zeros(SIZE))).offer(other, 1)
    _, shift = loop.merge([offer.blob, foreign.blob], [1, 1], own=True, round_number=1, head=head(1))
    assert torch.allclose(snapshot + shift, (snapshot - vector(2)) / 2, atol=1e-6)


def test_without_our_contribution_the_local_parameters_only_follow_the_anchor():
    loop = OuterOptimizer(settings(), state_of(torch.zeros(SIZE)))
    loop.offer(vector(1), 4)
    foreign = OuterOptimizer(settings(), state_of(torch.zeros(SIZE))).offer(vector(2), 1)
    _, shift_N = loop.merge([foreign.blob], [1], own=False, round_number=1, head=head(1))
    assert torch.equal(shift_N, loop.state.anchor_N())
    assert loop.unsettled_micro_batches == 4
    local = vector(1) + shift_N
    again = loop.offer(local, 2)
    assert again.micro_batches == 6
    assert torch.allclose(decoded(again.blob), -vector(1), atol=1e-5)


@pytest.mark.parametrize("codec", ["none", "fp16"])
@pytest.mark.parametrize("seed", range(5))
def test_pseudo_gradient_is_settled_plus_pending_whatever_arrives_when(codec, seed):
    """I5 and I6: over random closes, unequal arrival, missed certificates and withdrawals, all that was trained is in
    certified contributions, in the residual, or in anchor - local: exactly, as multiples of 2**-12 add up exactly."""
    rng = random.Random(seed)
    peer = Peer(codec, learning_rate=1.0, momentum=0.0)
    settled = torch.zeros(SIZE, dtype=torch.float64)
    offer, round_number, counted, settled_count = None, 0, 0, 0
    for _ in range(60):
        peer.train(rng)
        match rng.choice(["train", "offer", "merge", "miss", "withdraw"]):
            case "offer" if offer is None:
                counted += 1
                offer = peer.offer(1)
            case "merge" if offer is not None:
                round_number += 1
                peer.merge([offer.blob], [offer.micro_batches], True, round_number)
                settled += decoded(offer.blob).double()
                settled_count += offer.micro_batches
                offer = None
            case "miss":
                round_number += 1
                foreign = Peer()
                foreign.train(rng)
                peer.merge([foreign.offer().blob], [1], False, round_number)
                offer = None
            case "withdraw":
                peer.loop.withdraw()
                offer = None
        pending = (peer.loop.anchor_N - peer.local).double()
        residual = peer.loop.residual_N.double()
        assert torch.equal(settled + pending + residual, peer.trained)
        assert counted == settled_count + peer.loop.unsettled_micro_batches


def test_decoded_plus_new_residual_is_what_was_sent():
    peer = Peer("fp16")
    residual = torch.zeros(SIZE)
    for round_number in range(1, 5):
        peer.local += vector(round_number) * 0.01
        sent = (peer.loop.anchor_N - peer.local) + residual
        offer = peer.offer()
        peer.merge([offer.blob], [1], True, round_number)
        residual = peer.loop.residual_N
        assert torch.equal(decoded(offer.blob) + residual, sent)
        assert residual.abs().max() > 0


def test_a_residual_in_half_precision_is_right_in_the_mean():
    """What is sent round for round, with what is kept in the end, is what was trained: to bfloat16's last place, and without bias."""
    halved = OuterSettings(0.7, 0.6, uniform_policy("int4"), is_residual_halved=True)
    start = first_state(LONG, torch.zeros(LONG.num_elements), head=head(0))
    loop = OuterOptimizer(halved, start)
    generator = torch.Generator().manual_seed(5)
    residual = torch.zeros(LONG.num_elements)
    for number in range(1, 4):
        local = loop.anchor_N + torch.randn(LONG.num_elements, generator=generator)
        sent = (loop.anchor_N - local) + residual
        offer = loop.offer(local, 1)
        codec_error = torch.empty(LONG.num_elements)
        decode_contribution(offer.blob, LONG, codec_error)
        torch.sub(sent, codec_error, out=codec_error)
        loop.merge([offer.blob], [1], own=True, round_number=number, head=head(number))
        assert loop.residual_N.dtype == torch.bfloat16
        residual = loop.residual_N.float()
        off = residual - codec_error
        assert (off.abs() <= codec_error.abs() * 2**-7 + 1e-12).all()
        assert abs(float(off.mean())) < 4 * float(off.std()) / LONG.num_elements**0.5


def test_a_lossless_codec_leaves_a_residual_of_exactly_zero():
    peer = Peer("none")
    for round_number in range(1, 4):
        peer.local += vector(round_number)
        peer.merge([peer.offer().blob], [1], True, round_number)
        assert not peer.loop.residual_N.any()


def test_a_void_round_moves_the_head_and_nothing_else():
    peer = Peer()
    peer.local += vector(1)
    peer.merge([peer.offer().blob], [1], True, 1)
    before = peer.loop.state
    _, shift_N = peer.merge([], [], False, 2)
    assert (peer.loop.state.digest, peer.loop.state.head, peer.loop.state.round) == (before.digest, head(2), 2)
    assert not shift_N.any()


def test_a_failed_merge_changes_nothing():
    peer = Peer()
    peer.local += vector(1)
    offer = peer.offer(2)
    before = peer.loop.state
    with pytest.raises(MalformedBlob):
        peer.merge([offer.blob, b"nonsense"], [1, 1], True, 1)
    assert peer.loop.state is before
    assert peer.loop.has_offer
    peer.merge([offer.blob], [2], True, 1)
    assert peer.loop.state.round == 1


def test_settling_without_an_offer_and_offering_twice_are_refused():
    peer = Peer()
    with pytest.raises(RuntimeError, match="none is out"):
        peer.merge([], [], True, 1)
    peer.offer()
    with pytest.raises(RuntimeError, match="an offer is out"):
        peer.offer()


def test_a_served_state_does_not_change_while_training_goes_on():
    peer = Peer()
    served = peer.loop.state
    before = bytes(served.anchor), bytes(served.momentum)
    for round_number in (1, 2):
        peer.local += vector(round_number)
        peer.merge([peer.offer().blob], [1], True, round_number)
    assert (bytes(served.anchor), bytes(served.momentum)) == before
    assert served.anchor.readonly


@pytest.mark.skipif(sys.platform != "linux", reason="madvise as Linux has it")
@pytest.mark.parametrize("ends", ["withdrawn", "settled by a void round", "installed"])
def test_an_offer_that_ends_goes_back_to_the_system(monkeypatch, ends):
    monkeypatch.setattr(given_back, "LEAST_BYTES", 1)
    layout = Layout.of([("a", (8192,))])
    outer = OuterOptimizer(settings("int4"), first_state(layout, torch.zeros(8192), head=head(0)))
    local = torch.randn(8192, generator=torch.Generator().manual_seed(1))
    blob = outer.offer(local, 1).blob
    residual = outer.residual_N.fill_(0.5)
    assert local[1024:-1024].all()
    match ends:
        case "withdrawn":
            outer.withdraw()
        case "settled by a void round":
            outer.merge([blob], [0], own=True, round_number=1, head=head(1))
        case _:
            state = first_state(layout, torch.ones(8192), head=head(5))
            assert outer.install(state, keep_pseudo_gradient=False).all()
            assert not residual[1024:-1024].any()
    assert not local[1024:-1024].any()


def test_an_installed_state_carries_the_pseudo_gradient_or_drops_it():
    for keep in (True, False):
        peer = Peer()
        peer.local += vector(1, 0.01)
        peer.offer(3)
        local = peer.loop.install(state_of(vector(5), vector(6), 9), keep_pseudo_gradient=keep)
        assert not peer.loop.has_offer
        assert peer.loop.state.round == 9
        after = peer.local + local if keep else local
        pending = vector(5) - after
        assert torch.allclose(pending, -vector(1, 0.01) if keep else torch.zeros(SIZE), atol=1e-6)
        assert peer.loop.unsettled_micro_batches == (3 if keep else 0)


def test_the_state_digest_names_every_bit():
    base = state_of(vector(1), vector(2))
    changed = vector(1)
    changed[5] = torch.nextafter(changed[5], torch.tensor(10.0))
    assert state_of(changed, vector(2)).digest != base.digest
    assert state_of(vector(2), vector(1)).digest != base.digest
    assert state_of(vector(1), vector(2), round_number=3).digest == base.digest  # of the state, not of its place


def test_states_of_the_wrong_size_or_not_finite_are_refused():
    with pytest.raises(StateCorrupt, match="anchor of 4 bytes"):
        AnchorState.of(LAYOUT, head=Digest(bytes(32)), round_number=0, anchor=bytes(4), momentum=bytes(4 * SIZE))
    with pytest.raises(StateCorrupt, match="momentum holds values"):
        state_of(vector(1), torch.full((SIZE,), torch.inf))


def test_the_initial_state_is_a_function_of_the_manifest():
    manifest = Manifest(run=RunSection(seed=4))
    assert initial_state(manifest).digest == initial_state(manifest).digest
    assert initial_state(manifest).digest != initial_state(Manifest()).digest
    assert initial_state(manifest).head == manifest.genesis(0)
    assert not initial_state(manifest).momentum_N().any()


LONG = Layout.of([("a", (700, 997)), ("b", (513,)), ("c", (3, 1000, 130)), ("d", (7,))])  # tensors of several pieces


def merged(codec, crew=None, grow=None, *, is_residual_halved=False):
    """Three peers' contributions over two rounds, merged by the first of them: its state, its shift and its optimizer."""
    policy = uniform_policy(codec)
    settings = OuterSettings(0.7, 0.6, policy, is_residual_halved=is_residual_halved)
    start = first_state(LONG, torch.zeros(LONG.num_elements), head=head(0))
    loop = OuterOptimizer(settings, start, crew=crew, grow=grow)
    generator = torch.Generator().manual_seed(3)
    for number in (1, 2):
        offers = [
            each.offer(torch.randn(LONG.num_elements, generator=generator), 1 + index)
            for index, each in enumerate(
                (loop, OuterOptimizer(settings, loop.state), OuterOptimizer(settings, loop.state))
            )
        ]
        _, shift_N = loop.merge(
            [offer.blob for offer in offers], [offer.micro_batches for offer in offers], own=True,
            round_number=number, head=head(number),
        )  # fmt: skip
    return loop.state, shift_N, loop.offer(torch.zeros(LONG.num_elements), 1).blob


@pytest.mark.parametrize(
    ("codec", "halved"), [("int4", False), ("int4", True), ("topk", False), ("lowrank-int4", False)]
)
def test_the_bits_do_not_depend_on_threads_or_on_where_the_state_grows(codec, halved, tmp_path):
    one = merged(codec, is_residual_halved=halved)
    crew = Crew(3)

    def grow(at, number):
        return GrowingCheckpoint(tmp_path, RunId("ab" * 32), LONG, at, number)

    three = merged(codec, crew, grow, is_residual_halved=halved)
    crew.stop()
    assert three[0] == one[0]
    assert torch.equal(three[1], one[1])
    assert three[2] == one[2]  # the residual is in it


def test_a_merge_that_is_stopped_leaves_no_file(tmp_path):
    crew = Crew(2)

    def grow(at, number):
        crew.stop()
        return GrowingCheckpoint(tmp_path, RunId("ab" * 32), LONG, at, number)

    with pytest.raises(InterruptedError):
        merged("int4", crew, grow)
    assert list(tmp_path.iterdir()) == []


def test_norms_that_are_known_are_gone_by():
    loop = OuterOptimizer(settings(), state_of(torch.zeros(SIZE)))
    blobs = [OuterOptimizer(settings(), loop.state).offer(vector(k), 1).blob for k in range(3)]
    known = [contribution_squares(blob, LAYOUT) for blob in blobs]
    moved, _ = loop.merge(
        blobs, [1, 1, 1], own=False, round_number=1, head=head(1), squares=[known[0], None, 1e4 * known[2]]
    )
    assert moved.norms == tuple(pytest.approx(math.sqrt(sum(each))) for each in (*known[:2], 1e4 * known[2]))
    assert moved.clip_factors[2] < 1.0


def test_after_a_merge_that_failed_half_way_nothing_more_is_computed_from_what_it_left():
    """Residual and pseudo-gradient had been written over in part: merged again, both were wrong by as much as the numbers themselves."""
    layout = Layout.of([("a", (20, 10)), ("b", (30,))])

    class Full(GrowingInMemory):
        def write(self, part: Any, start: int, values: Any) -> None:
            if start:
                raise OSError(28, "No space left on device")
            super().write(part, start, values)

    state = first_state(layout, torch.zeros(layout.num_elements), head=sha256(b"0"))
    settings = OuterSettings(1.0, 0.0, uniform_policy("sign"))
    outer = OuterOptimizer(settings, state, grow=lambda head, number: Full(layout, head, number))
    own = outer.offer(torch.randn(layout.num_elements, generator=torch.Generator().manual_seed(1)), 8)

    def merge() -> None:
        outer.merge([own.blob], [8], own=True, round_number=1, head=sha256(b"1"))

    with pytest.raises(OSError, match="No space"):
        merge()
    with pytest.raises(RuntimeError, match="half way"):
        merge()
    with pytest.raises(RuntimeError, match="half way"):
        outer.offer(torch.zeros(layout.num_elements), 8)
    assert outer.state is state


def test_momentum_that_nobody_adds_to_fades_to_nothing_and_not_to_denormal_numbers():
    """With those many a processor takes ten times as long, and one that flushes them comes to another digest."""
    loop = OuterOptimizer(settings(), state_of(vector(0)))
    still = torch.zeros(LAYOUT.num_elements)
    still[:7] = 1.0
    blobs = [encode_contribution(LAYOUT, each, uniform_policy("none")) for each in (vector(1, 1e-3), still)]
    for number in range(1, 201):
        loop.merge([blobs[number > 1]], [1], own=False, round_number=number, head=head(number))
    momentum_N = loop.state.momentum_N()
    assert not bool(((momentum_N != 0.0) & (momentum_N.abs() < 2.0**-126)).any())
    assert int((momentum_N != 0.0).sum()) == 7
