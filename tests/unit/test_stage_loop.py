"""Stages of a pipeline, coupled in one thread without a network: what they compute equals one whole model."""

import math
import random
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dilocox_peer.config import preset
from dilocox_peer.data.batches import BatchSource
from dilocox_peer.model.activations import BodyFormat
from dilocox_peer.model.architecture import LayerRange
from dilocox_peer.model.inner import InnerOptimizer
from dilocox_peer.model.stage import build_stage
from dilocox_peer.model.transformer import LlamaStage
from dilocox_peer.peer.planning.timetable import Timetable
from dilocox_peer.peer.training import given_back
from dilocox_peer.peer.training.outer import initial_state
from dilocox_peer.peer.training.stage_loop import StageLoop
from dilocox_peer.pipeline import contract
from dilocox_peer.pipeline.scheduler import Scheduler
from dilocox_peer.types import PeerId
from dilocox_peer.wire.declared import replaced
from dilocox_peer.wire.hops import MAX_LOSS, Grad, Refuse, Step
from tests.cut_runs import corpus as letters
from tests.cut_runs import manifest_of, one_model


class Rare:
    """A BatchSource: letters, and a z at the beginning of every fifth micro-batch."""

    is_ready = True

    def require_context(self, context: int) -> None:
        pass

    def train_batch(self, *, index: int, batch: int, context: int, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(97, 105, (batch, context + 1), generator=torch.Generator().manual_seed(index))
        tokens[0, 0] = 122 if index % 5 == 4 else 97
        return tokens[:, :-1], tokens[:, 1:]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Bench:
    """One stage's bench: its scheduler, and a queue of what it sends to the neighbours."""

    def __init__(self, pipe: "Pipe", stage: int, manifest: Any) -> None:
        self.pipe, self.stage, self.peer = pipe, stage, PeerId(f"peer{stage}")
        self.gone: list[Any] = []
        self.scheduler = Scheduler(
            me=self.peer, incarnation=1, stage=stage, num_stages=manifest.stages.count, mode=manifest.stages.schedule,
            accumulate=manifest.inner.accumulate, max_slots=64, rng=random.Random(stage), now=0.0,
        )  # fmt: skip

    def tell(self, happened: contract.HopInput) -> None:
        self.pipe.now += 1e-4
        self.act(self.scheduler.handle(happened, self.pipe.now))

    def act(self, actions: list[contract.HopAction]) -> None:
        for action in actions:
            match action:
                case contract.HopSend(peer, message, body):
                    self.pipe.wire.append((self.peer, peer, message, body))
                case contract.Release(micro_batch):
                    self.gone.append(micro_batch)
                case _:
                    pass

    def next_work(self):
        work, actions = self.scheduler.next_work(self.pipe.now)
        self.act(actions)
        return work

    def released(self):
        gone, self.gone = self.gone, []
        return gone

    def packed(self, micro_batch, seconds):
        pass

    def forward_done(self, micro_batch, body, seconds):
        self.tell(contract.ForwardDone(micro_batch, body, seconds))

    def backward_done(self, micro_batch, body, loss, seconds):
        self.tell(contract.BackwardDone(micro_batch, body, loss, seconds))

    def stepped(self, seconds):
        self.tell(contract.Stepped(seconds))

    def shifted(self):
        self.tell(contract.Shifted())

    def rounds(self, training, certified, issue_limit, accumulate):
        self.tell(contract.Rounds(training, certified, issue_limit, accumulate))

    def hold(self, is_held):
        self.tell(contract.Hold(is_held))

    def pause(self, is_paused):
        self.tell(contract.PauseWanted(is_paused))

    def load_share(self):
        return 1.0


class Pipe:
    """One peer a stage, all in this thread."""

    def __init__(
        self, manifest: Any, *, limit: int, corpus: BatchSource | None = None, half: int | None = None
    ) -> None:
        """corpus: what stage 0 reads; None: letters. half: the stage that computes in float16."""
        self.now = 0.0
        self.wire: deque[Any] = deque()
        self.bodies: list[Any] = []  # of Steps
        self.refused: list[Refuse] = []
        self.gradients: list[Any] = []  # of Grads
        self.distort: Callable[[int, Any], Any] = lambda number, body: body  # of the Steps, by their number
        self.told: float | None = None  # what the last stage tells as its loss; None: what it is
        stages = range(manifest.stages.count)
        self.benches = [Bench(self, stage, manifest) for stage in stages]
        self.loops = [
            StageLoop(
                manifest, stage, self.benches[stage], peer=PeerId("peer0"), incarnation=1,
                corpus=(corpus or letters()) if stage == 0 else None, device="cpu", clock=lambda: self.now,
                micro_batch_limit=limit if stage == 0 else None, timetable=Timetable(manifest),
                precision="float16" if stage == half else "float32",
            )
            for stage in stages
        ]  # fmt: skip
        for stage, loop in enumerate(self.loops):
            loop.begin(initial_state(manifest, stage))
        for stage in stages[:-1]:
            self.benches[stage].tell(contract.Linked(PeerId(f"peer{stage + 1}"), stage + 1))
            self.benches[stage + 1].tell(contract.Linked(PeerId(f"peer{stage}"), stage))

    def run(self, *, order: random.Random | None = None, pause_s: float = 0.0) -> None:
        """Until nobody has anything to do. pause_s: after each work the last stage asks twice for one, so long after the other."""
        while True:
            while self.wire:
                sender, receiver, message, body = self.wire.popleft()
                if isinstance(message, Step):
                    self.benches[int(sender[4:])].tell(contract.StepSent(receiver, message))
                    body = self.distort(len(self.bodies), body)
                self.gradients += [body] if isinstance(message, Grad) else []
                if isinstance(message, Grad) and self.told is not None:
                    message = replaced(message, told_loss=self.told)
                self.bodies += [body] if isinstance(message, Step) else []
                self.refused += [message] if isinstance(message, Refuse) else []
                self.benches[int(receiver[4:])].tell(contract.HopReceived(sender, message, body))
            loops = list(self.loops)
            if order is not None:
                order.shuffle(loops)
            if not any(loop.train_on() for loop in loops) and not self.wire:
                return
            for _ in range(2 if pause_s else 0):
                self.now += pause_s
                self.loops[-1].train_on()

    def parameters(self) -> dict[str, torch.Tensor]:
        found: dict[str, Any] = {}
        for loop in self.loops:
            layout, flat_N = loop.current.layout, loop.close().flat_N
            found |= {spec.name: flat_N[start:stop].view(spec.shape) for spec, start, stop in layout.spans()}
        return found


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("clip_norm", [0.05, 100.0])
def test_stages_in_flush_mode_equal_one_model_after_20_steps(stages: int, optimizer: str, clip_norm: float):
    manifest = manifest_of(stages, optimizer=optimizer, clip_norm=clip_norm)
    pipe = Pipe(manifest, limit=80)
    pipe.run()
    single = one_model(manifest_of(1, optimizer=optimizer, clip_norm=clip_norm), micro_batches=80, cut_like=manifest)
    for name, values in pipe.parameters().items():
        torch.testing.assert_close(values.flatten(), single[name].flatten(), rtol=0, atol=1e-5, msg=name)
    moved = build_stage(manifest).model
    start = {spec.name: moved.flat_N[a:b] for spec, a, b in moved.layout.spans()}
    assert max(float((single[name] - start[name]).abs().max()) for name in start) > 1e-2  # it went somewhere


@pytest.mark.parametrize("seed", range(5))
def test_a_forward_and_its_backward_use_the_same_weights_in_carry(seed: int):
    """autograd refuses a backward whose weights were changed in place, so every seed that ends is a proof."""
    pipe = Pipe(manifest_of(3, schedule="carry"), limit=60)
    pipe.run(order=random.Random(seed))
    assert [loop.progress.micro_batches for loop in pipe.loops] == [60, 60, 60]
    assert all(len(loop.passes) == 0 for loop in pipe.loops)


@pytest.mark.parametrize("schedule", ["carry", "flush"])
def test_stages_make_as_many_steps_however_slow_they_are(schedule: str):
    """A later stage made one after each micro-batch, and moved three times as far as its origins."""
    moved = []
    for pause_s in (0.0, 60.0):
        pipe = Pipe(manifest_of(2, schedule=schedule), limit=16)
        pipe.run(pause_s=pause_s)
        assert [loop.optimizer.steps_done for loop in pipe.loops] == [4, 4]
        moved.append(pipe.parameters())
    if schedule == "flush":
        assert all(torch.equal(moved[0][name], moved[1][name]) for name in moved[0])


def test_a_told_loss_counts_no_more_than_four_times_a_guess():
    """Nobody can check it, and one such made the mean what it liked."""
    manifest = manifest_of(2, schedule="carry")
    pipe = Pipe(manifest, limit=4)
    pipe.told = MAX_LOSS
    pipe.run()
    most = 4 * math.log(BodyFormat.of(manifest).vocab_size)
    assert pipe.loops[0].progress.train_loss == pytest.approx(most)
    assert pipe.loops[0].close().train_loss == pytest.approx(most)
    assert pipe.loops[1].progress.train_loss < 0.5 * most


def test_a_shift_while_forwards_are_out_reaches_the_weights_and_every_snapshot():
    pipe = Pipe(manifest_of(2, schedule="carry"), limit=60)
    origin = pipe.loops[0]
    for _ in range(3):
        origin.train_on()  # forwards that nobody answers yet
    before = origin.local_N().clone()
    origin.shift(torch.full_like(before, 0.25), certified=1)
    assert torch.equal(origin.close().flat_N, before + 0.25)
    origin.withdraw()
    pipe.run()
    assert origin.pending_N is None


@pytest.mark.skipif(sys.platform != "linux", reason="madvise as Linux has it")
def test_what_was_added_goes_back_to_the_system_and_not_what_waits(monkeypatch):
    monkeypatch.setattr(given_back, "LEAST_BYTES", 1)
    pipe = Pipe(manifest_of(2, schedule="carry"), limit=60)
    origin = pipe.loops[0]
    for _ in range(3):
        origin.train_on()  # forwards that nobody answers yet: shifts wait
    before = origin.local_N().clone()
    shifts = [torch.full_like(before, 0.25), torch.full_like(before, 0.5), torch.full_like(before, 0.125)]
    for number, shift in enumerate(shifts, 1):
        origin.shift(shift, certified=number)
    assert torch.equal(origin.close().flat_N, before + 0.875)
    assert [bool(shift[1024:-1024].any()) for shift in shifts] == [True, False, False]
    origin.withdraw()
    pipe.run()
    assert not shifts[0][1024:-1024].any()


def test_a_replaced_state_counts_no_more_and_drops_the_gradient():
    pipe = Pipe(manifest_of(2, schedule="carry"), limit=6)
    pipe.run()
    origin = pipe.loops[0]
    target = torch.randn_like(origin.current.flat_N)
    origin.replace(target, certified=3)
    while origin.train_on():
        pass
    assert torch.equal(origin.current.flat_N.detach(), target)
    assert origin.progress.round == 4
    assert origin.progress.micro_batches == 0


def replaced_with_two_in_the_gradient() -> tuple[Pipe, torch.Tensor, list[float]]:
    """A pipe whose origin's weights were just replaced; by what, and the micro-batches of its steps from here on."""
    pipe = Pipe(manifest_of(2, schedule="carry"), limit=6)
    pipe.run()
    origin, steps = pipe.loops[0], []
    assert pipe.benches[0].scheduler.versions.completed == 2
    step = origin.optimizer.step

    def recorded(*, micro_batches: float, share: float):
        steps.append(micro_batches)
        return step(micro_batches=micro_batches, share=share)

    origin.optimizer.step = recorded  # type: ignore[method-assign]  # how often, by the real one
    target = torch.randn_like(origin.current.flat_N)
    origin.replace(target, certified=0)
    while origin.train_on():
        pass
    return pipe, target, steps


def test_no_step_is_made_of_what_a_replaced_state_has_dropped():
    """The scheduler still counts it: AdamW would move the agreed weights by its moments alone."""
    pipe, target, steps = replaced_with_two_in_the_gradient()
    pipe.benches[0].tell(contract.Rounds(1, 0, 6, accumulate=2))
    pipe.run()
    assert pipe.benches[0].scheduler.versions.completed == 0
    assert steps == []
    assert torch.equal(pipe.loops[0].current.flat_N.detach(), target)


def test_the_step_after_a_replaced_state_is_the_mean_of_what_came_since():
    pipe, _target, steps = replaced_with_two_in_the_gradient()
    pipe.benches[0].tell(contract.Rounds(1, 0, 8))
    pipe.run()
    assert steps == [2]  # of the four that the scheduler counts


def last_of_two() -> tuple[Pipe, Any]:
    """A pipe whose last stage has two micro-batches in its gradient, and that stage's loop."""
    pipe = Pipe(manifest_of(2, schedule="carry"), limit=6)
    pipe.run()
    last = pipe.loops[1]
    assert pipe.benches[1].scheduler.versions.completed == 2
    return pipe, last


def spoiling(turn: Any) -> Any:
    """Passes.turn in half precision, with activations that it cannot hold."""

    def spoiled(model: Any, body: Any) -> Any:
        turn(model, body)
        model.flat_grad_N.fill_(torch.nan)
        raise FloatingPointError("the training loss is nan")

    return spoiled


def test_a_body_that_nothing_finite_comes_of_is_refused_and_its_receiver_goes_on():
    pipe, last = last_of_two()
    before = last.current.flat_N.clone()
    refused: list[Any] = []
    last.passes.turn = spoiling(last.passes.turn)
    pipe.benches[0].tell(contract.Rounds(1, 0, 8))
    for _ in range(8):
        while pipe.wire:
            sender, receiver, message, body = pipe.wire.popleft()
            refused += [message] if isinstance(message, Refuse) else []
            if isinstance(message, Step):
                pipe.benches[int(sender[4:])].tell(contract.StepSent(receiver, message))
            pipe.benches[int(receiver[4:])].tell(contract.HopReceived(sender, message, body))
        for loop in pipe.loops:
            loop.train_on()
    assert {message.reason for message in refused} == {"not finite"}
    assert len(refused) >= 4, "it is left alone once it was most of the last"
    assert torch.equal(last.current.flat_N, before)
    assert not last.current.flat_grad_N.any()
    assert last.progress.micro_batches == 6


def deep(stages: int) -> Any:
    return preset(
        "tiny",
        model={"layers": 8 * stages, "hidden_size": 48, "mlp_size": 96, "context": 32},
        inner={"micro_batch": 1, "accumulate": 4, "optimizer": "adamw"},
        stages={"count": stages, "schedule": "carry"},
        rounds={"total": 8, "inner_steps": 64},
        compression={"codec": "none"},
    )


def one_row(form: BodyFormat, body: Any) -> bytes:
    """Nothing but one last row, as strong as the body: it passes every look, and each norm's backward multiplies the others' gradient."""
    hidden_BTD = torch.zeros_like(form.unpack_hidden(body, torch.device("cpu")))
    hidden_BTD[:, -1] = form.strength(body) * math.sqrt(hidden_BTD.shape[1])
    made = form.pack_hidden(hidden_BTD) + bytes(form.targets_of(body))
    assert form.why_not(made, is_step=True) is None
    return made


@pytest.mark.parametrize("stages", [2, 3])
def test_a_gradient_that_would_break_the_protocol_is_not_sent_and_the_micro_batch_comes_to_nothing(stages: int):
    manifest = deep(stages)
    form, pipe = BodyFormat.of(manifest), Pipe(manifest, limit=24)
    pipe.distort = lambda number, body: one_row(form, body) if number == 2 else body
    pipe.run()
    assert [form.why_not(body, is_step=False) for body in pipe.gradients] == [None] * len(pipe.gradients)
    assert {message.reason for message in pipe.refused} == {"not finite"}
    assert pipe.loops[-1].optimizer.steps_done >= 4


def test_what_float16_cannot_hold_is_its_callers_once_steps_were_made_at_that_scale():
    manifest = deep(2)
    form, pipe = BodyFormat.of(manifest), Pipe(manifest, limit=48, half=1)
    pipe.distort = lambda number, body: one_row(form, body) if number == 20 else body
    pipe.run()
    scale = pipe.loops[1].current.scale
    assert scale is not None
    assert {message.reason for message in pipe.refused} == {"not finite"}
    assert scale.factor == scale.proven / 2
    assert pipe.loops[1].optimizer.steps_done >= 10


def test_a_step_whose_gradient_is_not_finite_is_left_out_in_a_stage_of_several():
    pipe, last = last_of_two()
    before = last.current.flat_N.clone()
    last.current.flat_grad_N.fill_(torch.inf)
    pipe.benches[0].tell(contract.Rounds(1, 0, 8))
    pipe.run()
    assert torch.equal(last.current.flat_N, before)
    pipe.benches[0].tell(contract.Rounds(1, 0, 12))
    pipe.run()
    assert bool(last.current.flat_N.isfinite().all())
    assert not torch.equal(last.current.flat_N, before)


def test_a_stage_whose_own_parameters_are_not_finite_ends():
    pipe, last = last_of_two()
    with torch.no_grad():
        last.current.flat_N[0] = torch.nan
    last.current.flat_grad_N.fill_(torch.inf)
    pipe.benches[0].tell(contract.Rounds(1, 0, 8))
    with pytest.raises(FloatingPointError):
        pipe.run()


def stretched(pipe: Pipe, stage: int, tokens: slice) -> None:
    """Has the first layer of a stage come to some hundred thousand at these tokens, and to usual values at others."""
    for loop in (pipe.loops[0], pipe.loops[stage]):
        flat_N = loop.current.flat_N.detach()
        views = {spec.name: flat_N[a:b].view(spec.shape) for spec, a, b in loop.current.layout.spans()}
        if loop is pipe.loops[0]:
            views["model.embed_tokens.weight"][:, 0] = 0.0
            views["model.embed_tokens.weight"][tokens] = 0.0
            views["model.embed_tokens.weight"][tokens, 0] = 50.0
        if loop is pipe.loops[stage]:
            first = min(name for name in views if "mlp.gate_proj" in name)
            for name in (first, first.replace("gate", "up")):
                views[name][0, 0] = 120.0


@pytest.mark.parametrize("stage", [0, 1])
def test_a_forward_that_float16_cannot_hold_is_not_sent(stage: int):
    """Its receiver would take it for a broken protocol, and the link would be gone; what else there is is trained on."""
    made = manifest_of(3, schedule="carry")
    manifest = made.model_copy(update={"inner": made.inner.model_copy(update={"learning_rate": 1e-6})})
    body = BodyFormat.of(manifest)
    pipe = Pipe(manifest, limit=24, corpus=Rare(), half=stage)
    stretched(pipe, stage, slice(122, 123))
    pipe.run()
    assert {body.why_not(each, is_step=True) for each in pipe.bodies} == {None}
    assert [loop.progress.micro_batches for loop in pipe.loops] == [24, 24, 24]
    refused = [(each.index, each.reason) for each in pipe.refused]
    assert refused == ([(index, "not finite") for index in (4, 9, 14, 19, 24)] if stage else [])
    assert all(len(loop.passes) == 0 for loop in pipe.loops)
    assert all(bool(loop.current.flat_N.isfinite().all()) for loop in pipe.loops)


def test_an_origin_that_can_hold_nothing_in_float16_is_told_what_to_use():
    pipe = Pipe(manifest_of(2, schedule="carry"), limit=24, half=0)
    stretched(pipe, 0, slice(0, 256))
    with pytest.raises(FloatingPointError, match=r"not finite, 16 times in a row.*use --precision bfloat16 or float32"):
        pipe.run()
    assert pipe.bodies == []


def test_an_origin_whose_own_parameters_are_not_finite_ends_with_its_first_forward():
    pipe = Pipe(manifest_of(2, schedule="carry"), limit=24)
    pipe.loops[0].current.flat_N.detach()[:] = torch.nan
    with pytest.raises(FloatingPointError, match=r"^activations that are not finite$"):
        pipe.run()
    assert pipe.bodies == []


def test_versions_share_one_gradient_and_the_optimizer_moves_with_them():
    manifest = manifest_of(1)
    first = LlamaStage(manifest.model, LayerRange.of(manifest.model))
    second = LlamaStage(manifest.model, LayerRange.of(manifest.model), flat_grad_N=first.flat_grad_N)
    optimizer = InnerOptimizer(first, manifest.inner)
    first.flat_grad_N.fill_(0.1)
    optimizer.step(micro_batches=1, share=1.0)
    second.flat_N.copy_(first.flat_N)
    optimizer.move_to(second)
    first_before = first.flat_N.clone()
    first.flat_grad_N.fill_(0.1)
    optimizer.step(micro_batches=1, share=1.0)
    assert torch.equal(first.flat_N, first_before)
    assert not torch.equal(second.flat_N, first_before)
