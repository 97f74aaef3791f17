"""The training threads: calls in any order give what the same calls give one after the other in one thread.

Nothing here sleeps: the torch thread asks the clock once a micro-batch, so the test counts them and waits for the count.
"""

import math
import random
import threading

import numpy as np
import pytest
import torch

from dilocox_peer.compression.codec import uniform_policy
from dilocox_peer.compression.contribution import encode_contribution
from dilocox_peer.data.corpus import Corpus
from dilocox_peer.data.sources import Document
from dilocox_peer.errors import MalformedBlob
from dilocox_peer.manifest import CompressionSection, InnerSection, Manifest, ModelSection, OuterSection, RoundsSection
from dilocox_peer.model.architecture import layout_of
from dilocox_peer.model.inner import InnerOptimizer, schedule
from dilocox_peer.model.stage import build_stage
from dilocox_peer.peer.training import trainer as trainer_module
from dilocox_peer.peer.training.outer import OuterOptimizer, OuterSettings, initial_state
from dilocox_peer.peer.training.trainer import Trainer
from dilocox_peer.peer.training.worker import MAX_CALLS
from dilocox_peer.types import PeerId, sha256

PEER, INCARNATION, LIMIT, DEADLINE_S = PeerId("p"), 3, 3, 30.0
TEXT = np.frombuffer(np.random.default_rng(0).bytes(20_000), dtype=np.uint8)


def manifest_with(overlap="arrival", total=100, accumulate=1):
    return Manifest(
        model=ModelSection(layers=1, hidden_size=8, heads=2, kv_heads=1, mlp_size=8, context=8),
        inner=InnerSection(micro_batch=2, accumulate=accumulate),
        outer=OuterSection(overlap=overlap),
        rounds=RoundsSection(total=total, inner_steps=LIMIT),
        compression=CompressionSection(codec="none", adapt="off"),
    )


def text_corpus(kind=Corpus):
    return kind([Document("text", TEXT)], name="text", validation=0.1)


def head(number):
    return sha256(number.to_bytes(8, "big"))


class MicroBatches:
    """A clock that counts how often the torch thread asks it, and lets others wait for a count."""

    def __init__(self):
        self._changed = threading.Condition()
        self._count = 0

    def __call__(self):
        with self._changed:
            if threading.current_thread().name == "dilocox-torch":
                self._count += 1
                self._changed.notify_all()
            return float(self._count)

    def pass_time(self, seconds):
        with self._changed:
            self._count += seconds

    @property
    def count(self):
        return self._count

    def wait_for(self, count):
        with self._changed:
            assert self._changed.wait_for(lambda: self._count >= count, DEADLINE_S), f"{self._count} of {count}"


class Running:
    """A started trainer and its counted micro-batches; stopped at the end of the test."""

    def __init__(self, manifest, *, limit=LIMIT, corpus=None, state=None):
        self.manifest = manifest
        self.clock = MicroBatches()
        self.failures = []
        self.failed = threading.Event()
        self.corpus = corpus or text_corpus()
        self.trainer = Trainer(
            manifest, peer=PEER, incarnation=INCARNATION, corpus=self.corpus, clock=self.clock,
            on_failure=self._on_failure, micro_batch_limit=limit,
        )  # fmt: skip
        self.trainer.start(state or initial_state(manifest))

    def _on_failure(self, reason):
        self.failures.append(reason)
        self.failed.set()


@pytest.fixture
def run():
    started = []

    def start(*arguments, **keywords):
        started.append(Running(*arguments, **keywords))
        return started[-1]

    yield start
    for running in started:
        running.trainer.stop(DEADLINE_S)


class Sequential:
    """The same peer without threads: what every call does, done at once. Written from the trainer's contract."""

    def __init__(self, manifest, limit=LIMIT):
        torch.set_num_threads(1)
        self.manifest, self.limit = manifest, limit
        self.corpus = text_corpus()
        self.stage = build_stage(manifest)
        self.optimizer = InnerOptimizer(self.stage.model, manifest.inner)
        self.outer = OuterOptimizer(OuterSettings.of(manifest), initial_state(manifest))
        self.round, self.in_round, self.closed, self.new, self.index = 1, 0, 0, 0, 0
        self.offered = self.held = self.blocked = False

    def train(self):
        while (
            self.in_round < self.limit
            and not self.held
            and not self.blocked
            and self.round <= self.manifest.rounds.total
        ):
            batch = self.corpus.train_batch(
                seed=0,
                peer=PEER,
                incarnation=INCARNATION,
                round_number=self.round,
                index=self.index,
                batch=2,
                context=8,
            )
            self.stage.train_micro_batch(*batch)
            self.index, self.in_round, self.new = self.index + 1, self.in_round + 1, self.new + 1
            position = (self.round - 1 + min(self.in_round / LIMIT, 1.0)) / self.manifest.rounds.total
            share = schedule(position, warmup=self.manifest.inner.warmup)
            self.optimizer.step(micro_batches=1, share=share)

    def close(self):
        offer = self.outer.offer(self.stage.model.flat_N.clone(), self.new)
        self.offered, self.blocked = True, self.manifest.outer.overlap == "none"
        self.closed, self.in_round, self.new, self.round = self.in_round, 0, 0, self.round + 1
        return offer

    def merge(self, blobs, weights, own, round_number):
        moved, shift_N = self.outer.merge(blobs, weights, own=own, round_number=round_number, head=head(round_number))
        self.stage.model.flat_N.add_(shift_N)
        if not self.offered:
            self.round, self.in_round = round_number + 1, 0
        self.offered = self.blocked = False
        return moved.state_digest

    def withdraw(self):
        self.outer.withdraw()
        if self.offered:
            self.round, self.in_round = self.round - 1, self.in_round + self.closed
        self.offered = self.blocked = False


def foreign_blob(manifest, seed):
    layout = layout_of(manifest)
    pseudo_gradient = torch.randn(layout.num_elements, generator=torch.Generator().manual_seed(seed)) * 1e-3
    return encode_contribution(layout, pseudo_gradient, uniform_policy("none"))


@pytest.mark.parametrize("overlap", ["arrival", "one-step", "none"])
@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_calls_gives_the_bits_of_one_thread(run, overlap, seed):
    rng = random.Random(seed)
    manifest = manifest_with(overlap)
    running, reference = run(manifest), Sequential(manifest)
    offer, certified = None, 0
    for _ in range(40):
        reference.train()
        running.clock.wait_for(reference.index)
        match rng.choice(["close", "merge", "merge", "miss", "void", "withdraw", "hold", "install"]):
            case "close" if offer is None:
                offer = reference.close()
                closing, _ = running.trainer.close().result(DEADLINE_S)
                assert closing.blob == offer.blob
                assert closing.micro_batches == offer.micro_batches
            case "merge" if offer is not None:
                certified += 1
                blobs, weights = [offer.blob, foreign_blob(manifest, certified)], [offer.micro_batches, 2]
                digest = reference.merge(blobs, weights, True, certified)
                merged = running.trainer.merge(blobs, weights, own=True, round_number=certified, head=head(certified))
                assert merged.result(DEADLINE_S).state_digest == digest
                offer = None
            case "miss" | "void" as kind:
                certified += 1
                blobs, weights = ([foreign_blob(manifest, certified)], [2]) if kind == "miss" else ([], [])
                digest = reference.merge(blobs, weights, False, certified)
                merged = running.trainer.merge(blobs, weights, own=False, round_number=certified, head=head(certified))
                assert merged.result(DEADLINE_S).state_digest == digest
                offer = None
            case "withdraw":
                reference.withdraw()
                running.trainer.withdraw().result(DEADLINE_S)
                offer = None
            case "hold":
                reference.held = not reference.held
                (running.trainer.hold() if reference.held else running.trainer.resume()).result(DEADLINE_S)
            case "install":
                shift = reference.outer.install(reference.outer.state, keep_pseudo_gradient=True)
                reference.stage.model.flat_N.add_(shift)
                reference.withdraw()
                running.trainer.install(running.trainer.state(), keep_pseudo_gradient=True).result(DEADLINE_S)
                offer = None
        progress = running.trainer.progress()
        assert progress.round == reference.round
    assert running.trainer.state() == reference.outer.state
    assert running.failures == []


@pytest.mark.parametrize("seed", range(3))
def test_calls_made_at_once_are_carried_out_in_their_order(run, seed):
    """While held, a burst of calls nobody waits for gives the bits of the same calls one after the other."""
    manifest = manifest_with()
    rng = random.Random(seed)
    running, reference = run(manifest), Sequential(manifest)
    reference.train()
    running.clock.wait_for(LIMIT)
    running.trainer.hold().result(DEADLINE_S)
    pairs = []
    for round_number in range(1, 12):
        expected = reference.close()
        pairs.append((running.trainer.close(), expected.blob, lambda closed: closed[0].blob))
        if rng.random() < 0.3:
            reference.withdraw()
            running.trainer.withdraw()
            continue
        blobs, own = [expected.blob, foreign_blob(manifest, round_number)], rng.random() < 0.7
        blobs, weights = (blobs, [1, 2]) if own else (blobs[1:], [2])
        digest = reference.merge(blobs, weights, own, round_number)
        merge = running.trainer.merge(blobs, weights, own=own, round_number=round_number, head=head(round_number))
        pairs.append((merge, digest, lambda merged: merged.state_digest))
    for future, expected, of in pairs:
        assert of(future.result(DEADLINE_S)) == expected


def test_every_micro_batch_is_offered_once_while_training_runs_free(run):
    """No limit and no waiting: certificates come, miss and are withdrawn; the weights still add up."""
    running, rng = run(manifest_with(total=10_000), limit=None), random.Random(1)
    settled, round_number = 0, 0
    for _ in range(30):
        closing, _ = running.trainer.close().result(DEADLINE_S)
        if rng.random() < 0.5:
            round_number += 1
            merge = running.trainer.merge(
                [closing.blob], [closing.micro_batches], own=True, round_number=round_number, head=head(round_number)
            )
            merge.result(DEADLINE_S)
            settled += closing.micro_batches
        else:
            running.trainer.withdraw()
    running.trainer.hold().result(DEADLINE_S)
    trained = running.trainer.progress().tokens // 16
    assert settled + running.trainer.close().result(DEADLINE_S)[0].micro_batches == trained


def test_training_goes_on_after_a_close_or_waits_for_the_certificate(run):
    for overlap, goes_on in (("arrival", True), ("one-step", True), ("none", False)):
        running = run(manifest_with(overlap))
        running.clock.wait_for(LIMIT)
        closing, _ = running.trainer.close().result(DEADLINE_S)
        assert running.trainer.progress().round == 2
        if goes_on:
            running.clock.wait_for(2 * LIMIT)
        else:
            assert not running.trainer.progress().is_training
        running.trainer.merge([closing.blob], [3], own=True, round_number=1, head=head(1)).result(DEADLINE_S)
        running.clock.wait_for(2 * LIMIT)


def test_a_certificate_before_the_own_close_moves_the_round_on(run):
    manifest = manifest_with()
    running = run(manifest)
    running.clock.wait_for(LIMIT)
    merged = running.trainer.merge([foreign_blob(manifest, 1)], [3], own=False, round_number=1, head=head(1))
    merged.result(DEADLINE_S)
    running.clock.wait_for(2 * LIMIT)
    closing, _ = running.trainer.close().result(DEADLINE_S)
    assert closing.micro_batches == 2 * LIMIT


def test_a_withdrawn_round_goes_on_with_its_count(run):
    running = run(manifest_with())
    running.clock.wait_for(LIMIT)
    running.trainer.close().result(DEADLINE_S)
    running.trainer.hold().result(DEADLINE_S)
    trained_since = running.clock.count - LIMIT
    running.trainer.withdraw().result(DEADLINE_S)
    progress = running.trainer.progress()
    assert (progress.round, progress.micro_batches) == (1, LIMIT + trained_since)


def test_the_last_round_ends_the_training_with_a_learning_rate_of_zero(run):
    running = run(manifest_with(total=2))
    for round_number in (1, 2):
        running.clock.wait_for(LIMIT * round_number)
        closing, _ = running.trainer.close().result(DEADLINE_S)
        merge = running.trainer.merge([closing.blob], [1], own=True, round_number=round_number, head=head(round_number))
        merge.result(DEADLINE_S)
    progress = running.trainer.progress()
    assert (progress.round, progress.is_training, progress.learning_rate) == (3, False, 0.0)
    assert progress.tokens == 2 * LIMIT * 16
    assert math.isfinite(progress.train_loss)
    assert progress.tokens_per_s == pytest.approx(16.0)  # the test's clock counts a second a micro-batch


@pytest.mark.parametrize("comes_by", ["start", "install"])
def test_a_joiner_trains_on_from_the_states_round_with_a_ramp(run, comes_by):
    manifest = manifest_with()
    first = run(manifest)
    first.clock.wait_for(LIMIT)
    closing, _ = first.trainer.close().result(DEADLINE_S)
    first.trainer.merge([closing.blob], [1], own=True, round_number=1, head=head(1)).result(DEADLINE_S)
    state = first.trainer.state()
    assert state.round == 1
    if comes_by == "start":
        joiner = run(manifest, state=state)
        joiner.clock.wait_for(1)
    else:
        joiner = run(manifest, corpus=text_corpus(StuckCorpus))
        joiner.trainer.hold()
        installed = joiner.trainer.install(state, keep_pseudo_gradient=False)
        joiner.corpus.release.set()
        installed.result(DEADLINE_S)
        count = joiner.clock.count
        joiner.trainer.resume()
        joiner.clock.wait_for(count + 1)
    joiner.trainer.hold().result(DEADLINE_S)
    assert joiner.trainer.progress().round == 2
    assert 0 < joiner.trainer.progress().learning_rate < manifest.inner.learning_rate / 4


def test_gradients_accumulate_over_micro_batches(run):
    running = run(manifest_with(accumulate=LIMIT + 1))
    running.clock.wait_for(LIMIT)
    running.trainer.hold().result(DEADLINE_S)
    assert running.trainer.progress().learning_rate == 0.0  # no step yet
    closing, _ = running.trainer.close().result(DEADLINE_S)
    assert closing.micro_batches == LIMIT


def test_calls_out_of_turn_fail_alone(run):
    running = run(manifest_with())
    running.clock.wait_for(LIMIT)
    closing, _ = running.trainer.close().result(DEADLINE_S)
    with pytest.raises(RuntimeError, match="offer of round 1 is out"):
        running.trainer.close().result(DEADLINE_S)
    bad = running.trainer.merge([b"nonsense"], [1], own=True, round_number=1, head=head(1))
    with pytest.raises(MalformedBlob):
        bad.result(DEADLINE_S)
    good = running.trainer.merge([closing.blob], [1], own=True, round_number=1, head=head(1))
    assert good.result(DEADLINE_S).state_digest == running.trainer.state().digest
    twice = running.trainer.merge([closing.blob], [1], own=True, round_number=2, head=head(2))
    with pytest.raises(RuntimeError, match="none is out"):
        twice.result(DEADLINE_S)
    assert running.trainer.progress().round == 2
    assert running.failures == []


class BreakingCorpus(Corpus):
    def train_batch(self, **arguments):
        if arguments["index"] == 2:
            raise OSError("the disk is gone")
        return super().train_batch(**arguments)


def test_a_failure_while_training_is_told_once_and_fails_every_call(run):
    running = run(manifest_with(), corpus=text_corpus(BreakingCorpus))
    assert running.failed.wait(DEADLINE_S)
    assert running.failures == ["dilocox-torch: OSError: the disk is gone"]
    assert running.trainer.failure == running.failures[0]
    for call in (running.trainer.close, running.trainer.hold, running.trainer.withdraw):
        with pytest.raises(RuntimeError, match="the disk is gone"):
            call().result(DEADLINE_S)


def test_stopping_ends_both_threads_whatever_they_do(run):
    free, held, waiting = run(manifest_with(), limit=None), run(manifest_with()), run(manifest_with("none"))
    held.trainer.hold()
    waiting.trainer.close()
    for running in (free, held, waiting):
        running.trainer.stop(DEADLINE_S)
        with pytest.raises(RuntimeError, match="the trainer was stopped"):
            running.trainer.close().result(DEADLINE_S)
        assert running.failures == []
    assert not trainer_threads()


def trainer_threads() -> list[threading.Thread]:
    """Of trainers; other tests may have left a pool of another kind to the garbage collector."""
    return [each for each in threading.enumerate() if each.name.startswith(("dilocox-torch", "dilocox-outer"))]


def test_stopping_before_the_start_is_fine():
    trainer = Trainer(manifest_with(), peer=PEER, incarnation=1, corpus=text_corpus())
    trainer.stop(1.0)
    assert not trainer_threads()


def test_giving_up_on_a_call_does_not_undo_half_of_it(run):
    running = run(manifest_with())
    running.clock.wait_for(LIMIT)
    closing = running.trainer.close()
    assert not closing.cancel()
    assert closing.result(DEADLINE_S)[0].micro_batches > 0


class StuckCorpus(Corpus):
    """Keeps the torch thread inside a micro-batch until released."""

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self.entered, self.release = threading.Event(), threading.Event()

    def train_batch(self, **arguments):
        self.entered.set()
        assert self.release.wait(DEADLINE_S)
        return super().train_batch(**arguments)


@pytest.fixture
def stuck(run):
    corpus = text_corpus(StuckCorpus)
    running = run(manifest_with(), corpus=corpus)
    assert corpus.entered.wait(DEADLINE_S)
    yield running, corpus
    corpus.release.set()


def test_more_calls_than_the_queue_holds_are_refused(stuck):
    running, _ = stuck
    for _ in range(MAX_CALLS):
        running.trainer.hold()
    with pytest.raises(RuntimeError, match="64 calls are waiting"):
        running.trainer.hold()


def test_a_thread_that_does_not_end_in_time_is_named_and_calls_that_waited_fail(stuck):
    running, corpus = stuck
    waiting = [running.trainer.close(), running.trainer.hold()]
    with pytest.raises(TimeoutError, match="dilocox-torch is still at work"):
        running.trainer.stop(0.01)
    corpus.release.set()
    for future in waiting:
        with pytest.raises(RuntimeError, match="the trainer was stopped"):
            future.result(DEADLINE_S)


@pytest.fixture
def given(monkeypatch):
    """The vectors whose memory goes back to the system."""
    found: list[torch.Tensor] = []
    monkeypatch.setattr(trainer_module, "give_back", found.extend)
    return found


def test_the_memory_of_threads_that_have_ended_goes_back(run, given):
    running = run(manifest_with(), limit=None)
    running.trainer.stop(DEADLINE_S)
    ours = {vector.data_ptr() for vector in running.trainer.loop.vectors()}
    assert ours < {vector.data_ptr() for vector in given}  # and the residual


def test_the_memory_of_a_thread_that_is_at_work_stays(stuck, given):
    running, _corpus = stuck
    with pytest.raises(TimeoutError, match="dilocox-torch is still at work"):
        running.trainer.stop(0.01)
    ours = {vector.data_ptr() for vector in running.trainer.loop.vectors()}
    assert not ours & {vector.data_ptr() for vector in given}
    running.trainer.give_up()  # nobody hears of it any more
    assert ours <= {vector.data_ptr() for vector in given}


def test_a_standstill_is_seen_by_who_asks(run):
    """The lease says the speed: a stage that stalled would look fast to newcomers, and get none of them."""
    running = run(manifest_with())
    running.clock.wait_for(LIMIT)
    running.trainer.hold().result(DEADLINE_S)
    working = running.trainer.progress()
    assert (working.tokens_per_s, working.busy > 0) == (pytest.approx(16.0), True)
    running.clock.pass_time(3600)
    stalled = running.trainer.progress()
    assert 0 < stalled.tokens_per_s < 0.01
    assert stalled.busy < working.busy / 1000
