"""Where not every target counts, as in answers to be learned, each that does weighs the same, whichever micro-batch it is in."""

import math
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from dilocox_peer.config import preset
from dilocox_peer.model.activations import BodyFormat
from dilocox_peer.model.architecture import layers_of
from dilocox_peer.model.loss import counted, train_on
from dilocox_peer.model.passes import Passes
from dilocox_peer.model.stage import build_stage
from dilocox_peer.model.transformer import LlamaStage, initial_parameters
from dilocox_peer.peer.planning.timetable import Timetable
from dilocox_peer.peer.training.outer import initial_state
from dilocox_peer.peer.training.whole_loop import WholeLoop
from dilocox_peer.types import IGNORED, PeerId
from tests.unit.test_stage_loop import Pipe

CONTEXT, SEQUENCES, STEPS = 16, 8, 3
COUNTS = (16, 1, 9, 2, 0, 1, 12, 3)  # targets of each sequence of a step that count


class Answers:
    """A BatchSource whose sequences are the same in each order, and of which few targets count."""

    is_ready = True

    def __init__(self, counts: tuple[int, ...] = COUNTS) -> None:
        self._counts = counts

    def require_context(self, context: int) -> None:
        pass

    def train_batch(self, *, index: int, batch: int, context: int, **_: Any) -> tuple[Tensor, Tensor]:
        tokens = torch.stack([self._tokens(number, context) for number in range(index * batch, (index + 1) * batch)])
        targets = tokens[:, 1:].clone()
        for row in range(batch):
            targets[row, : context - self._counts[(index * batch + row) % len(self._counts)]] = IGNORED
        return tokens[:, :-1], targets

    @staticmethod
    def _tokens(number: int, context: int) -> Tensor:
        return torch.randint(97, 122, (context + 1,), generator=torch.Generator().manual_seed(number))


def manifest_of(micro_batch: int, *, stages: int = 1, clip_norm: float = 0.05) -> Any:
    return preset(
        "tiny",
        model={"layers": 3, "hidden_size": 32, "mlp_size": 48, "context": CONTEXT},
        stages={"count": stages, "schedule": "flush", "activations": "fp32"},
        inner={
            "optimizer": "adamw", "micro_batch": micro_batch, "accumulate": SEQUENCES // micro_batch,
            "clip_norm": clip_norm, "warmup": 0.0,
        },
        rounds={"total": 8, "inner_steps": 8},
        compression={"codec": "none"},
    )  # fmt: skip


def whole(manifest: Any, answers: Answers) -> WholeLoop:
    ticks = count()
    loop = WholeLoop(
        manifest, peer=PeerId("p"), incarnation=1, corpus=answers, devices=("cpu",), clock=lambda: float(next(ticks)),
        micro_batch_limit=STEPS * manifest.inner.accumulate, timetable=Timetable(manifest),
    )  # fmt: skip
    loop.begin(initial_state(manifest))
    return loop


def apart(one: Tensor, other: Tensor) -> float:
    """How far, as a part of the length; AdamW makes much of what rounding does to the smallest elements."""
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("clip_norm", [0.05, 100.0])
def test_eight_micro_batches_of_one_are_one_of_eight(clip_norm: float):
    """What steps are made of, parameters and the loss that is told are the same to rounding."""
    found = []
    for micro_batch in (1, 2, 8):
        loop = whole(manifest_of(micro_batch, clip_norm=clip_norm), Answers())
        while loop.train_on():
            pass
        flat_N, _gradient_N, *moments = loop.vectors()
        found.append((flat_N, *moments, torch.tensor(loop.close().train_loss)))
    for other in found[:-1]:
        for one, of_eight in zip(other, found[-1], strict=True):
            assert apart(one, of_eight) < 1e-4


def test_eight_micro_batches_of_one_are_one_of_eight_over_two_stages():
    # A sequence of which nothing counts is not sent to another stage.
    counts = tuple(max(1, each) for each in COUNTS)
    pipes = []
    for micro_batch in (1, 8):
        manifest = manifest_of(micro_batch, stages=2)
        pipe = Pipe(manifest, limit=STEPS * manifest.inner.accumulate, corpus=Answers(counts))
        pipe.run()
        pipes.append(pipe)
    for one, of_eight in zip(pipes[0].loops, pipes[1].loops, strict=True):
        assert one.optimizer.steps_done == of_eight.optimizer.steps_done == STEPS
        for mine, theirs in zip(one.optimizer.moments(), of_eight.optimizer.moments(), strict=True):
            assert apart(mine, theirs) < 1e-4
        assert apart(one.current.flat_N, of_eight.current.flat_N) < 1e-4
        assert one.progress.train_loss == pytest.approx(of_eight.progress.train_loss, rel=1e-5)


@pytest.mark.parametrize("logits_bytes", [5 * 4 * 256, 1 << 30])
def test_the_gradient_is_the_part_that_counts_of_that_of_the_mean(logits_bytes: int):
    """In parts as at once; the loss that it gives is the mean over what counts."""
    stage = build_stage(manifest_of(8))
    inputs_BT, targets_BT = Answers().train_batch(index=0, batch=8, context=CONTEXT)
    logits = stage.model.forward(inputs_BT)
    mean = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORED)
    mean.backward()
    told = float(mean.detach())
    expected = stage.model.flat_grad_N.clone()
    stage.model.zero_grad()
    loss = train_on(stage.model, inputs_BT, targets_BT, logits_bytes=logits_bytes)
    assert loss == pytest.approx(told, rel=1e-6)
    assert loss == pytest.approx(stage.evaluate([(inputs_BT, targets_BT)])[0], rel=1e-6)
    assert counted(targets_BT) == sum(COUNTS) / (8 * CONTEXT)
    torch.testing.assert_close(stage.model.flat_grad_N / counted(targets_BT), expected, rtol=1e-4, atol=1e-7)


def test_a_micro_batch_of_which_nothing_counts_changes_nothing():
    loop = whole(manifest_of(8), Answers((0,)))
    before = loop.vectors()[0].clone()
    while loop.train_on():
        pass
    assert loop.progress.micro_batches == STEPS
    assert torch.equal(loop.vectors()[0], before)
    assert math.isnan(loop.progress.train_loss)


def test_a_gradient_is_as_strong_as_usual_however_many_targets_count():
    """What is compared between neighbours: of few targets it would be ten times weaker, or stronger."""
    manifest = manifest_of(8, stages=2)
    body, stages = BodyFormat.of(manifest), []
    for number in range(2):
        stages.append(LlamaStage(manifest.model, layers_of(manifest, number)))
        stages[-1].flat_N.copy_(initial_parameters(stages[-1].layout, manifest.model, 1))
    strengths = []
    for each in (1, CONTEXT):
        inputs_BT, targets_BT = Answers((each,)).train_batch(index=0, batch=8, context=CONTEXT)
        output = Passes(body).begin("a", stages[0], inputs_BT, targets_BT)
        gradient, _ = Passes(body).turn(stages[1], output)
        assert body.counted(output) == counted(targets_BT) == each / CONTEXT
        strengths.append((body.strength(gradient), body.strength_for_all(gradient, output)))
    (few, few_for_all), (many, many_for_all) = strengths
    assert many > 2 * few
    assert few_for_all == pytest.approx(many_for_all, rel=0.5)
    assert many_for_all == many
