"""Statements of DiLoCo (arXiv 2311.08105) and DiLoCoX (arXiv 2506.21263) that the outer loop rests on.

The references are written here, from the papers, with plain tensors and torch's own optimizers;
nothing of peer/training/outer.py is in them.
"""

import pytest
import torch

from dilocox_peer.manifest import CompressionSection, InnerSection, Manifest, ModelSection, OuterSection, RoundsSection
from dilocox_peer.model.inner import InnerOptimizer
from dilocox_peer.model.stage import build_stage
from dilocox_peer.peer.training.outer import OuterOptimizer, OuterSettings, initial_state

ROUNDS, STEPS = 5, 4


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def manifest_with(*, learning_rate=0.7, momentum=0.6, codec="none", inner_learning_rate=1e-3):
    return Manifest(
        model=ModelSection(layers=1, hidden_size=16, heads=2, kv_heads=1, mlp_size=16, context=8),
        inner=InnerSection(micro_batch=4, learning_rate=inner_learning_rate),
        outer=OuterSection(learning_rate=learning_rate, momentum=momentum),
        rounds=RoundsSection(total=ROUNDS, inner_steps=STEPS),
        compression=CompressionSection(codec=codec),
    )


class Replica:
    """A model and its inner optimizer. Data: a fixed function of (stream, step)."""

    def __init__(self, manifest, stream):
        self.stage = build_stage(manifest)
        self.optimizer = InnerOptimizer(self.stage.model, manifest.inner)
        self.stream, self.step = stream, 0

    @property
    def flat(self):
        return self.stage.model.flat_N

    def train(self, num_steps):
        for _ in range(num_steps):
            generator = torch.Generator().manual_seed(1000 * self.stream + self.step)
            tokens = torch.randint(0, 256, (4, 9), generator=generator)
            self.stage.train_micro_batch(tokens[:, :-1], tokens[:, 1:])
            self.optimizer.step(micro_batches=1, share=1.0)
            self.step += 1


class Swarm:
    """Replicas with our outer loops, every one of them included in every round, in one thread."""

    def __init__(self, manifest, streams):
        self.replicas = [Replica(manifest, stream) for stream in streams]
        self.loops = [OuterOptimizer(OuterSettings.of(manifest), initial_state(manifest)) for _ in streams]
        self.round = 0

    def train(self, num_steps):
        for replica in self.replicas:
            replica.train(num_steps)

    def close(self):
        pairs = zip(self.loops, self.replicas, strict=True)
        return [loop.offer(replica.flat.clone(), STEPS).blob for loop, replica in pairs]

    def merge(self, blobs):
        self.round += 1
        for loop, replica in zip(self.loops, self.replicas, strict=True):
            weights = [STEPS] * len(blobs)
            _, shift_N = loop.merge(blobs, weights, own=True, round_number=self.round, head=loop.state.head)
            replica.flat.add_(shift_N)

    @property
    def anchor(self):
        digests = {loop.state.digest for loop in self.loops}
        assert len(digests) == 1
        return self.loops[0].state.anchor_N()


def run_blocking(swarm):
    for _ in range(ROUNDS):
        swarm.train(STEPS)
        swarm.merge(swarm.close())


def run_overlapped(swarm, late):
    """Each round's mean arrives `late` steps into the next round (STEPS: one-step delay, merged before the close)."""
    pending = None
    for _ in range(ROUNDS):
        swarm.train(late)
        if pending:
            swarm.merge(pending)
        swarm.train(STEPS - late)
        pending = swarm.close()
    swarm.merge(pending)


@pytest.mark.parametrize("late", [0, 1, STEPS])
def test_one_peer_with_outer_learning_rate_1_is_plain_adamw_to_the_bit(late):
    """DiLoCo section 2: with one worker and outer SGD of rate 1 nothing is left of the outer loop. Here exactly."""
    manifest = manifest_with(learning_rate=1.0, momentum=0.0)
    swarm, plain = Swarm(manifest, [0]), Replica(manifest, 0)
    run_overlapped(swarm, late)
    plain.train(ROUNDS * STEPS)
    assert torch.equal(swarm.replicas[0].flat, plain.flat)
    assert torch.allclose(swarm.anchor, plain.flat, atol=1e-6)  # a' = a + u, each rounded


@pytest.mark.parametrize("num_peers", [2, 3, 4])
def test_replicas_on_equal_data_are_one(num_peers):
    manifest = manifest_with(learning_rate=1.0, momentum=0.0)
    swarm, plain = Swarm(manifest, [0] * num_peers), Replica(manifest, 0)
    run_blocking(swarm)
    plain.train(ROUNDS * STEPS)
    assert torch.allclose(swarm.anchor, plain.flat, atol=1e-5)


def test_without_overlap_it_is_diloco():
    """DiLoCo, algorithm 1: workers start from theta, H inner AdamW steps, outer Nesterov on the mean of theta - theta_i.

    The inner optimizer's state stays with its worker; the outer optimizer is torch's SGD(nesterov=True).
    """
    manifest = manifest_with()
    swarm = Swarm(manifest, [0, 1, 2])
    run_blocking(swarm)

    workers = [Replica(manifest, stream) for stream in (0, 1, 2)]
    theta = workers[0].flat.clone().requires_grad_()
    outer = torch.optim.SGD([theta], lr=0.7, momentum=0.6, nesterov=True)
    for _ in range(ROUNDS):
        for worker in workers:
            worker.flat.copy_(theta.detach())
            worker.train(STEPS)
        theta.grad = torch.stack([theta.detach() - worker.flat for worker in workers]).mean(0)
        outer.step()
    assert torch.allclose(swarm.anchor, theta.detach(), atol=1e-5)
    assert (theta.detach() - initial_state(manifest).anchor_N()).abs().max() > 1e-2  # it went somewhere


def test_one_step_overlap_is_the_delayed_outer_step():
    """DiLoCoX, one-step-delay overlap (our overlap "one-step"): the mean of round t is applied at the end
    of round t+1, when each worker's round-t progress is replaced by the group's and its round-t+1 progress kept."""
    manifest = manifest_with()
    swarm = Swarm(manifest, [0, 1, 2])
    run_overlapped(swarm, STEPS)

    workers = [Replica(manifest, stream) for stream in (0, 1, 2)]
    anchor = workers[0].flat.clone()
    momentum = torch.zeros_like(anchor)
    in_flight, snapshots = None, None
    for round_number in range(ROUNDS + 1):
        if round_number < ROUNDS:
            for worker in workers:
                worker.train(STEPS)
        if in_flight is not None:
            mean = sum(in_flight) / len(in_flight)
            momentum = 0.6 * momentum + mean
            anchor = anchor - 0.7 * (mean + 0.6 * momentum)
            assert snapshots is not None
            for worker, snapshot in zip(workers, snapshots, strict=True):
                worker.flat.copy_(anchor + (worker.flat - snapshot))
        snapshots = [worker.flat.clone() for worker in workers]
        in_flight = [anchor - snapshot for snapshot in snapshots]
    assert torch.allclose(swarm.anchor, anchor, atol=1e-5)


def test_arrival_without_delay_is_blocking():
    """A mean that arrives after no local step at all is merged as in plain DiLoCo (2311.08105, algorithm 1)."""
    manifest = manifest_with()
    blocking, arriving = Swarm(manifest, [0, 1]), Swarm(manifest, [0, 1])
    run_blocking(blocking)
    run_overlapped(arriving, 0)
    assert torch.equal(blocking.anchor, arriving.anchor)


def test_after_a_merge_every_replica_stands_on_the_anchor():
    manifest = manifest_with()
    swarm = Swarm(manifest, [0, 1])
    run_blocking(swarm)
    for replica in swarm.replicas:
        assert torch.allclose(replica.flat, swarm.anchor, atol=1e-6)


def test_fp16_contributions_with_error_feedback_follow_the_exact_ones():
    """DiLoCoX: compression with error feedback does not change where training goes, only by its last residual."""
    anchors = {}
    for codec in ("none", "fp16"):
        swarm = Swarm(manifest_with(codec=codec), [0, 1])
        run_overlapped(swarm, 1)
        anchors[codec] = swarm.anchor
    moved = (anchors["none"] - initial_state(manifest_with()).anchor_N()).norm()
    assert (anchors["fp16"] - anchors["none"]).norm() < 2e-3 * moved


def test_anchors_are_equal_to_the_bit_whatever_the_order_of_processes():
    """DiLoCo's outer step is replicated, not broadcast: every peer must compute the same bits from a certificate."""
    manifest = manifest_with(codec="fp16")
    swarm, permuted = Swarm(manifest, [0, 1, 2, 3]), Swarm(manifest, [2, 0, 3, 1])
    for _ in range(3):
        for each in (swarm, permuted):
            each.train(STEPS)
        by_stream = {replica.stream: blob for replica, blob in zip(permuted.replicas, permuted.close(), strict=True)}
        certified = swarm.close()
        assert certified == [by_stream[stream] for stream in (0, 1, 2, 3)]
        swarm.merge(certified)
        permuted.merge(certified)
    assert torch.equal(swarm.anchor, permuted.anchor)
