"""What a plan learns over a given link: real training in one process, the time of exchanges computed from their bytes.

    python benchmarks/learning_link.py [--mbit 0.5 2 100] [--step-s 0.05] [--delay-s 0.05] [--seeds 0]

Four replicas, as learning.py has them, and the peer's own planner (peer/planning/adaptive_planner.py), fed by reports as certificates carry them.
An exchange takes `delay + 8 * blob bytes * 3 / uplink` seconds; training goes on meanwhile, and a round whose exchange takes
longer than it lasts goes on until it is done (overlap `arrival`). All train the same number of steps. Plans: the two that learning.py found best at
about 224 times fewer bytes, each kept; and adapted from the first of them, with several shares of a round that the exchange may take.
Expected beforehand: where the link is fast enough for the sparse short rounds all but int2 are equal; on slow ones
the adapted is near the better of the two kept.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from learning import DEFAULTS, header
from learning_sim import Method, Pending, Study, Swarm, bytes_of_round

from dilocox_peer.compression.codec import TensorCodec
from dilocox_peer.compression.ladder import LADDER
from dilocox_peer.config import preset
from dilocox_peer.data.corpus import load_corpus
from dilocox_peer.model.architecture import layout_of
from dilocox_peer.model.inner import schedule
from dilocox_peer.peer.planning.adaptive_planner import LinkPlanner
from dilocox_peer.peer.planning.controller import BUDGET, Controller, Limits, Setting
from dilocox_peer.peer.planning.measured import Measured
from dilocox_peer.peer.planning.plan import plan_bounds
from dilocox_peer.peer.planning.planner import FixedPlanner, Planner
from dilocox_peer.peer.rounds.chain import Place
from dilocox_peer.peer.training.outer import stage_policy
from dilocox_peer.types import Digest, PeerId, TensorSpec, sha256
from dilocox_peer.wire.chain import Certificate, Entry, Plan

TIMES_FEWER = 200.0


@dataclass(frozen=True, slots=True)
class Link:
    uplink_bps: float
    step_s: float
    delay_s: float

    def exchange_s(self, blob_bytes: int, peers: int) -> float:
        return self.delay_s + 8 * blob_bytes * (peers - 1) / self.uplink_bps


class LinkedSwarm(Swarm):
    """learning_sim's swarm with exchanges that take their time, and plans from certificates."""

    def __init__(self, study: Study, method: Method, link: Link, planner: Planner, first: Plan) -> None:
        super().__init__(study, method, lambda text: None)
        self._link, self._planner = link, planner
        peers = tuple(PeerId(f"peer{index}") for index in range(self._count))
        self._peers = peers
        second = first.next()
        self._place = replace(Place.genesis(0, Digest(bytes(32)), second), roster=peers)
        self._plans = {1: first, 2: second}
        self._policies: dict[str, Callable[[TensorSpec], TensorCodec]] = {}
        self._measured = Measured()
        self._due_at = 0
        self.shares: list[float] = []

    def train(self) -> float:
        """Validation loss of the last anchor."""
        number, done = 0, 0
        while done < self._steps:
            number += 1
            self._round, plan, here = number, self._plans[number], 0
            while done + here < self._steps and (here < plan.inner_steps or self._pending is not None):
                for replica in self._replicas:
                    replica.step(schedule((done + here + 1) / self._steps, warmup=self._manifest.inner.warmup))
                self._tick += 1
                here += 1
                if self._pending is not None and self._tick >= self._due_at:
                    self._merge_all()
            if self._pending is not None:
                self._merge_all()
            done += here
            self._close_round(plan, here)
        self._merge_all()
        return self.evaluator.whole(self._anchor_N())

    def _close_round(self, plan: Plan, steps: int) -> None:
        now_s = self._tick * self._link.step_s
        policy = self._policies.setdefault(plan.codec, stage_policy(plan.codec, 16))
        offers = [
            replica.loop.offer(replica.stage.model.flat_N.clone(), steps, codec_of=policy) for replica in self._replicas
        ]
        blobs = tuple(offer.blob for offer in offers)
        self._bytes += bytes_of_round([len(blob) for blob in blobs])
        exchange_s = self._link.exchange_s(max(map(len, blobs)), self._count)
        self.shares.append(exchange_s / (steps * self._link.step_s))
        self._due_at = self._tick + max(1, round(exchange_s / self._link.step_s))
        lost = statistics.mean(offer.lost for offer in offers)
        report = self._measured.on_close(  # a tick is a step, and what one trains counts as a token
            now_s, tokens=self._tick, tokens_a_step=1, lost=lost, uplink_bps=self._link.uplink_bps
        )
        self._measured.on_merge(exchange_s, needed_rank=0)
        entries = [
            Entry(peer, 1, sha256(blob), len(blob), steps, b"", report)
            for peer, blob in zip(self._peers, blobs, strict=True)
        ]
        value = self._place.round_value(entries, self._peers, self._planner.next(self._place.plan))
        certificate = Certificate(0, self._place.head, 0, 0, value, ())
        self._planner.observe(certificate)
        self._place = self._place.then(certificate)
        self._plans[value.round + 2] = value.plan
        everybody = frozenset(range(self._count))
        weights = tuple(offer.micro_batches for offer in offers)
        self._pending = Pending(self._round, blobs, weights, self._tick, everybody, ())

    @property
    def plans(self) -> str:
        used = [self._plans[number] for number in range(1, self._round + 1)]
        groups = groupby((plan.codec, plan.inner_steps) for plan in used)
        return " ".join(f"{len(list(group))}x{codec}/{inner_steps}" for (codec, inner_steps), group in groups)

    @property
    def bytes_sent(self) -> int:
        return self._bytes


def swarm(study: Study, link: Link, codec: str, inner_steps: int, budget: float | None) -> LinkedSwarm:
    steps = study.steps(DEFAULTS)
    manifest = preset(
        study.preset,
        rounds={"total": max(1, steps // inner_steps), "inner_steps": inner_steps},
        compression={"codec": codec},
    )
    bounds = replace(plan_bounds(manifest), total_steps=None)
    planner: Planner = FixedPlanner(bounds)
    if budget is not None:
        limits = Limits(codecs=LADDER, times_fewer=TIMES_FEWER, budget=budget)
        start = Setting(codec, 16, inner_steps)
        planner = LinkPlanner(Controller(layout_of(manifest, 0), start, limits), bounds)
    return LinkedSwarm(study, DEFAULTS, link, planner, Plan(codec, 16, inner_steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, nargs="+", default=[0.5, 2.0, 100.0])
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--delay-s", type=float, default=0.05)
    parser.add_argument("--tokens", type=int, default=512 * 2048)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--budgets", type=float, nargs="+", default=[BUDGET, 0.5, 1.0])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    corpus = load_corpus("stdlib", (), validation=0.05)
    print(header(corpus))
    print(
        f"# 4 replicas, {arguments.tokens:,} tokens, {arguments.step_s} s a step, {arguments.delay_s} s an exchange beside its bytes"
    )
    print("Mbit/s  plan              seed    loss  exchange  times fewer  rounds x codec/H", flush=True)
    cases: list[tuple[str, str, int, float | None]] = [
        ("topk/8 kept", "topk", 8, None),
        ("int2/32 kept", "int2", 32, None),
    ]
    cases += [(f"adapted to {budget:g}", "topk", 8, budget) for budget in arguments.budgets]
    for mbit in arguments.mbit:
        for name, codec, inner_steps, budget in cases:
            for seed in map(int, arguments.seeds.split(",")):
                study = Study(corpus, 4, arguments.tokens, seed)
                run = swarm(study, Link(1e6 * mbit, arguments.step_s, arguments.delay_s), codec, inner_steps, budget)
                loss = run.train()
                steps = study.steps(DEFAULTS)
                fewer = run.evaluator.all_reduce_bytes(steps, 1) / run.bytes_sent
                print(
                    f"{mbit:6g}  {name:16} {seed:5} {loss:8.4f} {statistics.mean(run.shares):8.0%} {fewer:12.0f}  {run.plans}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
