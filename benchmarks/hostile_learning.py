"""What contributions that hurt do to the loss, and which rule keeps them out: real training in one process, seeded.

    PYTHONPATH=. python benchmarks/hostile_learning.py [--codec topk] [--rounds 24] [--seeds 0] [--hostile 2] [--attacks ...] [--rules ...]

Six honest replicas train the tiny preset through the peer's own Stage, InnerOptimizer, codecs and OuterOptimizer; hostile members add
contributions of their own, made with knowledge of all honest ones of the round. A rule looks at the round's blobs, says whose weigh
nothing, and what the rest is clipped to; `the mean` is what peers do, all others are without compression/agreement.py. Printed for each pair: validation loss of the last anchor against the same honest replicas
alone (equal tokens of theirs), share of hostile contributions kept out, first round in which all were, and share of honest ones kept out;
and what comparing the contributions of a round takes of a processor, beside what a member trains in it (one thread, beyond the merge itself).
"""

import argparse
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from learning_sim import CURVE_BYTES, Evaluator, Method, Study, batch_of, peer_name
from swarm import header
from torch import Tensor

from dilocox_peer.compression import aggregate
from dilocox_peer.compression.agreement import WHOLE, parts_by_agreement
from dilocox_peer.compression.contribution import ContributionEncoder, decode_contribution
from dilocox_peer.config import preset
from dilocox_peer.data.corpus import Corpus, load_corpus
from dilocox_peer.model.inner import InnerOptimizer, schedule
from dilocox_peer.model.stage import Stage, build_stage
from dilocox_peer.peer.training.outer import OuterOptimizer, OuterSettings, initial_state, stage_policy
from dilocox_peer.types import Layout, sha256

HONEST = 6
STEPS = 8  # H
SCORED_TOKENS = 4096
LEAST_AGREEMENT = 0.4  # times the median of all


@dataclasses.dataclass
class Situation:
    """Of one round, for attacks and rules. contributions_MN: decoded, honest ones first."""

    number: int
    layout: Layout
    anchor_N: Tensor
    contributions_MN: list[Tensor]
    blobs: list[bytes]
    stage: Stage
    study: Study
    flipped_N: Tensor | None = None


def norm(x_N: Tensor) -> float:
    return float(x_N.double().norm())


def median_norm(now: Situation) -> float:
    return statistics.median_low([norm(each) for each in now.contributions_MN[:HONEST]])


def honest_mean(now: Situation) -> Tensor:
    return torch.stack(now.contributions_MN[:HONEST]).mean(0)


def at_norm(x_N: Tensor, length: float) -> Tensor:
    return x_N * (length / max(norm(x_N), 1e-30))


def noise(now: Situation, index: int) -> Tensor:
    return torch.randn(now.anchor_N.shape, generator=torch.Generator().manual_seed(97 * now.number + index))


def spike(now: Situation, index: int, *, rows: bool) -> Tensor:
    """The signs of the others' mean at next to no length, and all of the length that the clip lets be in one vector, or one row of each matrix."""
    x_N = at_norm(honest_mean(now), 1e-3 * median_norm(now)) + 1e-7 * noise(now, index)
    spans = [(spec, first) for spec, first, _stop in now.layout.spans() if spec.is_vector is not rows]
    for spec, first in spans if rows else spans[-1:]:
        width = spec.num_elements // spec.shape[0] if rows else spec.num_elements
        x_N[first : first + width] = 3.9 * median_norm(now) / (width * (len(spans) if rows else 1)) ** 0.5
    return x_N


Attack = Callable[[Situation, int], Tensor]
ATTACKS: dict[str, Attack] = {
    "sign flip": lambda now, index: -now.contributions_MN[index],
    "x4 flip": lambda now, index: at_norm(-now.contributions_MN[index], 4 * median_norm(now)),
    "random": lambda now, index: at_norm(
        noise(now, index),
        median_norm(now),
    ),
    "random x4": lambda now, index: at_norm(
        noise(now, index),
        4 * median_norm(now),
    ),
    "inner product": lambda now, index: at_norm(-honest_mean(now), median_norm(now)),
    "label flip": lambda now, index: now.flipped_N if now.flipped_N is not None else -honest_mean(now),
    "copy": lambda now, index: now.contributions_MN[index],
    "zero": lambda now, index: torch.zeros_like(now.anchor_N),
    "old": lambda now, index: OLD.setdefault(index, now.contributions_MN[index]),
    "elsewhere": lambda now, index: at_norm(
        noise(now, index) * (torch.stack(now.contributions_MN[:HONEST]).abs().sum(0) == 0),
        4 * median_norm(now),
    ),
    "mean x4 turned": lambda now, index: at_norm(-honest_mean(now), 3.9 * median_norm(now)) + 1e-6 * noise(now, index),
    "spike": lambda now, index: spike(now, index, rows=False),
    "spike in a row": lambda now, index: spike(now, index, rows=True),
    # These mean no ill: what they do to the loss, and what the mean makes of them, must be little.
    "two rounds late": lambda now, index: late(now, index),
    "other text": lambda now, index: now.flipped_N if now.flipped_N is not None else now.contributions_MN[index],
}
OLD: dict[int, Tensor] = {}
LATE: dict[int, list[Tensor]] = {}


def late(now: Situation, index: int) -> Tensor:
    waiting = LATE.setdefault(index, [])
    waiting.append(now.contributions_MN[index])
    return waiting.pop(0) if len(waiting) > 2 else waiting[0]


Verdict = tuple[set[int], float]  # kept out, norm_clip


def by_scores(scores: Sequence[float], least: float) -> set[int]:
    usual = statistics.median_low(scores)
    return {index for index, score in enumerate(scores) if score < least * usual}


def agreements(contributions_MN: Sequence[Tensor]) -> list[float]:
    """Of each contribution the median cosine with the others: accomplices that agree with each other gain nothing."""
    unit_MN = torch.stack([each.double() / max(norm(each), 1e-30) for each in contributions_MN])
    cosines_MM = (unit_MN @ unit_MN.T).tolist()
    return [
        statistics.median_low([each for other, each in enumerate(row) if other != index])
        for index, row in enumerate(cosines_MM)
    ]


def agreement(now: Situation) -> Verdict:
    return by_scores(agreements(now.contributions_MN), LEAST_AGREEMENT), 4.0


def agreement_of_signs(now: Situation) -> Verdict:
    signs = torch.stack([each.sign() for each in now.contributions_MN])
    total_N = signs.sum(0)
    scores = [float((each * (total_N - each)).sum() / max(float(each.abs().sum()), 1.0)) for each in signs]
    return by_scores(scores, 0.4), 4.0


def on_data(now: Situation) -> Verdict:
    """Each contribution is tried on the same random batches: what it takes off the loss there."""
    model = now.stage.model
    kept_N = model.flat_N.clone()
    inputs_BT, targets_BT = batch_of(now.study, [peer_name(500)], 10_000 + now.number, SCORED_TOKENS // 64, 64)

    def loss(flat_N: Tensor) -> float:
        model.flat_N.copy_(flat_N)
        return float(now.stage.evaluate([(inputs_BT, targets_BT)])[0])

    before = loss(now.anchor_N)
    scores = [before - loss(now.anchor_N - 0.5 * each) for each in now.contributions_MN]
    model.flat_N.copy_(kept_N)
    return {
        index
        for index, score in enumerate(scores)
        if score < 0.25 * max(0.0, statistics.median_low(scores)) or score < 0
    }, 4.0


RULES: dict[str, Callable[[Situation], Verdict]] = {
    "the mean": lambda now: (set(), 4.0),  # as peers take it
    "norm clip 4": lambda now: (set(), 4.0),  # as it was before compression/agreement.py
    "norm clip 1": lambda now: (set(), 1.0),
    "signs": agreement_of_signs,
    "agreement": agreement,
    "on data": on_data,
}


class Trial:
    def __init__(self, study: Study, method: Method, rounds: int) -> None:
        self.study, self.rounds = study, rounds
        self.manifest = preset(
            study.preset, run={"seed": study.seed},
            inner={"optimizer": method.optimizer, "learning_rate": method.learning_rate},
            outer={"learning_rate": method.outer_learning_rate, "momentum": method.outer_momentum},
            rounds={"total": rounds, "inner_steps": STEPS}, compression={"codec": method.codec},
        )  # fmt: skip
        self.policy = stage_policy(method.codec, 16)
        self.settings = dataclasses.replace(OuterSettings.of(self.manifest), codec_of=self.policy)

    def trained(
        self,
        stage: Stage,
        optimizer: InnerOptimizer,
        index: int,
        number: int,
        *,
        is_flipped: bool = False,
        study: Study | None = None,
    ) -> None:
        inner = self.manifest.inner
        for step in range(STEPS):
            inputs_BT, targets_BT = batch_of(
                study or self.study,
                [peer_name(index)],
                (number - 1) * STEPS + step,
                inner.micro_batch,
                self.manifest.model.context,
            )
            if is_flipped:
                targets_BT = 255 - targets_BT
            stage.train_micro_batch(inputs_BT, targets_BT)
            share = ((number - 1) * STEPS + step + 1) / (self.rounds * STEPS)
            optimizer.step(micro_batches=1, share=schedule(share, warmup=inner.warmup))

    def run(self, attack: str | None, rule: str, hostile: int) -> tuple[float, list[set[int]], list[list[float]]]:
        """(loss, kept out of each round, agreements of each round)."""
        OLD.clear()
        state = initial_state(self.manifest)
        loops = [OuterOptimizer(self.settings, state) for _ in range(HONEST)]
        stages = [build_stage(self.manifest) for _ in range(HONEST)]
        optimizers = [InnerOptimizer(each.model, self.manifest.inner) for each in stages]
        evaluator = Evaluator(self.study, self.manifest, self.rounds * STEPS)
        liar, liar_optimizer = None, None
        self.other = self.study
        if attack == "other text":
            self.other = dataclasses.replace(self.study, corpus=other_text())
        if attack in ("label flip", "other text"):
            liar = build_stage(self.manifest)
            liar_optimizer = InnerOptimizer(liar.model, self.manifest.inner)
        encoders = [ContributionEncoder(state.layout, self.policy) for _ in range(hostile)]
        out, told = [], []
        self.factors: list[tuple[float, ...]] = []
        self.training_s, self.comparing_s = list[float](), list[float]()
        LATE.clear()
        for number in range(1, self.rounds + 1):
            began = time.process_time()
            for index, (stage, optimizer) in enumerate(zip(stages, optimizers, strict=True)):
                self.trained(stage, optimizer, index, number)
            self.training_s.append((time.process_time() - began) / HONEST)
            blobs = [
                bytes(loop.offer(stage.model.flat_N.clone(), STEPS).blob)
                for loop, stage in zip(loops, stages, strict=True)
            ]
            anchor_N = loops[0].state.anchor_N()
            contributions = [self.decoded(blob, state.layout) for blob in blobs]
            now = Situation(
                number,
                state.layout,
                anchor_N,
                contributions,
                blobs,
                evaluator._stage,
                self.study,
                loops[0].state.momentum_N(),
            )
            if liar is not None and liar_optimizer is not None:
                liar.model.flat_N.copy_(anchor_N)
                self.trained(liar, liar_optimizer, 100, number, is_flipped=attack == "label flip", study=self.other)
                now.flipped_N = anchor_N - liar.model.flat_N
            if attack is not None:
                for index in range(hostile):
                    blob = (
                        blobs[index] if attack == "copy" else bytes(encoders[index].encode(ATTACKS[attack](now, index)))
                    )
                    blobs.append(blob)
                    contributions.append(self.decoded(blob, state.layout))
            told.append(agreements(contributions))
            kept_out, clip = RULES[rule](now)
            out.append(kept_out)
            weights = [0 if index in kept_out else STEPS for index in range(len(blobs))]
            aggregate.parts_by_agreement = (  # type: ignore[attr-defined]
                self.compared if rule == "the mean" else lambda _layout, each, *_: (WHOLE,) * len(each)
            )
            for loop, stage in zip(loops, stages, strict=True):
                loop._settings = dataclasses.replace(self.settings, norm_clip=clip)
                moved, shift_N = loop.merge(blobs, weights, own=True, round_number=number, head=sha256(b"%d" % number))
                stage.model.flat_N.add_(shift_N)
                kept_out |= {index for index, factor in enumerate(moved.clip_factors) if factor == 0.0}
            self.factors.append(moved.clip_factors)
        return evaluator._loss(loops[0].state.anchor_N(), CURVE_BYTES), out, told

    def compared(self, *arguments: Any, **named: Any) -> Any:
        """parts_by_agreement, and its time."""
        began = time.process_time()
        parts = parts_by_agreement(*arguments, **named)
        self.comparing_s.append(time.process_time() - began)
        return parts

    def scoring(self) -> str:
        """What comparing takes, in each merge, of what a member trains in a round."""
        if not self.comparing_s:
            return ""
        took_s, trained_s = statistics.median(self.comparing_s), statistics.median(self.training_s)
        return f"; comparing {1000 * took_s:.1f} ms a round, training {1000 * trained_s:.0f}: {took_s / trained_s:.1%}"

    def decoded(self, blob: bytes, layout: Layout) -> Tensor:
        out_N = torch.empty(layout.num_elements)
        decode_contribution(blob, layout, out_N)
        return out_N


def other_text() -> Corpus:
    """Prose beside the others' source code: this project's own."""
    return load_corpus("files", sorted((Path(__file__).parents[1] / "docs").rglob("*.md")), validation=0.05)


def weighs(factors: Sequence[Sequence[float]]) -> str:
    """What the mean left of contributions, of 1: honest and hostile, the least and the mean."""
    honest = [each for row in factors for each in row[:HONEST]]
    hostile = [each for row in factors for each in row[HONEST:]]
    told = f"honest weigh {min(honest):.2f} at least, {statistics.mean(honest):.3f} in the mean"
    return told + (f", the others {statistics.mean(hostile):.2f}" if hostile else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codec", default="topk")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--hostile", type=int, default=2)
    parser.add_argument("--attacks", default=",".join(ATTACKS), help='"": how the honest alone fare')
    parser.add_argument("--rules", default=",".join(RULES))
    parser.add_argument("--spread", action="store_true", help="also what honest and hostile members agree, by round")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(header())
    corpus = load_corpus("stdlib", [], validation=0.05)
    method = Method(
        "sparse",
        codec=arguments.codec,
        inner_steps=STEPS,
        learning_rate=3e-2,
        outer_learning_rate=0.8,
        outer_momentum=0.4,
    )
    for seed in map(int, arguments.seeds.split(",")):
        if not arguments.attacks:
            trial = Trial(Study(corpus, HONEST, 0, seed), method, arguments.rounds)
            trial.run(None, "the mean", 0)
            less, tenth, refused = (
                sum(factor < bound for row in trial.factors for factor in row) for bound in (1.0, 0.9, 1e-9)
            )
            print(
                f"seed {seed}: of {HONEST * arguments.rounds} honest contributions {less} weigh less than their work, {tenth} by a tenth and more, "
                f"{refused} nothing; {weighs(trial.factors)}{trial.scoring()}"
            )
            continue
        trial = Trial(Study(corpus, HONEST, 0, seed), method, arguments.rounds)
        started = time.process_time()
        alone, out, _ = trial.run(None, "norm clip 4", 0)
        print(f"# seed {seed}: {HONEST} honest alone {alone:.4f} ({time.process_time() - started:.0f} s)", flush=True)
        for rule in arguments.rules.split(","):
            if rule in ("the mean", "agreement", "signs", "on data"):
                loss, out, _ = trial.run(None, rule, 0)
                print(
                    f"{rule:12} {'nobody':14} {loss:8.4f} {loss / alone - 1:+8.1%}   honest out {len([1 for each in out for _ in each])}",
                    flush=True,
                )
                print(" " * 28 + weighs(trial.factors), flush=True)
        for attack in arguments.attacks.split(","):
            for rule in arguments.rules.split(","):
                loss, out, told = trial.run(attack, rule, arguments.hostile)
                everybody = set(range(HONEST, HONEST + arguments.hostile))
                caught = sum(len(each & everybody) for each in out) / (len(out) * arguments.hostile)
                honest_out = sum(len(each - everybody) for each in out) / (len(out) * HONEST)
                first = next((number for number, each in enumerate(out, 1) if everybody <= each), math.inf)
                print(
                    f"{rule:12} {attack:14} {loss:8.4f} {loss / alone - 1:+8.1%}  hostile out {caught:4.0%} from {first}  "
                    f"honest out {honest_out:.2%}  {weighs(trial.factors)}{trial.scoring()}", flush=True,
                )  # fmt: skip
                if arguments.spread:
                    for number in (0, 1, len(told) // 2, len(told) - 1):
                        print("   ", number + 1, " ".join(f"{each:6.3f}" for each in told[number]), flush=True)


if __name__ == "__main__":
    main()
