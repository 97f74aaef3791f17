"""One process of benchmarks/pipeline.py, in its network namespace: a peer of a stage, a single process, or a rank of gloo.

Compute is emulated (a sleep of `--compute-ms` for a stage and micro-batch, a third of it the forward), because two cores
cannot give two stages a core each and measure anything else; the rest is the peer's own code: Trainer, StageLoop,
packing to int8, Scheduler, Conveyor, linkd. Writes one JSON line.
"""

import argparse
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dilocox_peer.config import preset
from dilocox_peer.data.corpus import Corpus
from dilocox_peer.data.sources import Document
from dilocox_peer.model.activations import BodyFormat
from dilocox_peer.model.passes import Passes
from dilocox_peer.peer.training.stage_loop import StageLoop
from dilocox_peer.signing import SigningKey
from dilocox_peer.types import LinkId

PORT = 9000
TOKENS = 512


def manifest_of(args: argparse.Namespace) -> Any:
    return preset(
        "tiny",
        model={"layers": 2, "hidden_size": args.width, "mlp_size": 256, "context": TOKENS},
        stages={"count": 2, "schedule": args.schedule, "activations": "int8"},
        inner={"optimizer": "adamw", "micro_batch": 1, "accumulate": args.micro_batches, "learning_rate": 1e-3},
        rounds={"total": 1000, "inner_steps": 1000},
    )


class EmulatedPasses(Passes):
    """Packs and unpacks what it would send and receive, and sleeps for the rest of the compute time."""

    def __init__(self, body: BodyFormat, compute_s: float) -> None:
        super().__init__(body)
        self._forward_s, self._backward_s = compute_s / 3, 2 * compute_s / 3
        self._hidden_BTD = torch.randn(body.batch, body.tokens, body.width)

    def counted(self, key):
        return 1.0

    def begin(self, key, model, inputs_BT, targets_BT):
        until = time.perf_counter() + self._forward_s
        body = self._body.pack_hidden(self._hidden_BTD) + self._body.pack_targets(targets_BT)
        _sleep(until)
        return body

    def backward(self, key, body):
        until = time.perf_counter() + self._backward_s
        self._body.unpack_hidden(body, torch.device("cpu"))
        _sleep(until)

    def turn(self, model, body):
        until = time.perf_counter() + self._forward_s + self._backward_s
        gradient = self._body.pack_hidden(self._body.unpack_hidden(body, torch.device("cpu")))
        _sleep(until)
        return gradient, 1.0


def _sleep(until: float) -> None:
    time.sleep(max(0.0, until - time.perf_counter()))


def cpu_s(pid: int) -> float:
    """User and system seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_stage(args: argparse.Namespace) -> dict[str, Any]:
    from dilocox_peer.peer.links.conveyor import Conveyor
    from dilocox_peer.peer.links.dialling import LinkAddress
    from dilocox_peer.peer.training.outer import initial_state
    from dilocox_peer.peer.training.trainer import Trainer

    manifest = manifest_of(args)
    stage = int(os.environ["RANK"])
    keys = [SigningKey(bytes([each + 1]) * 32) for each in range(2)]
    seeds = [bytes([each + 101]) * 32 for each in range(2)]
    failures: list[str] = []
    conveyor = Conveyor(
        manifest, stage, key=keys[stage], run_id=manifest.run_id, incarnation=1, link_seed=seeds[stage],
        listen=(f"/ip4/{os.environ['NODE_IP']}/tcp/{PORT}",), listener=lambda event: None, on_failure=failures.append,
    )  # fmt: skip
    corpus = None
    if stage == 0:
        text = np.random.default_rng(0).integers(97, 123, 100_000, dtype=np.uint8)
        corpus = Corpus([Document("a", text)], name="letters", validation=0.1)
    trainer = Trainer(
        manifest, peer=keys[stage].peer_id, incarnation=1, corpus=corpus, stage=stage, bench=conveyor.bench,
        on_failure=failures.append,
    )  # fmt: skip
    assert isinstance(trainer.loop, StageLoop)
    trainer.loop.passes = EmulatedPasses(BodyFormat.of(manifest), args.compute_ms / 1e3)
    conveyor.bench.set_on_work(trainer.nudge)
    trainer.start(initial_state(manifest, stage))
    conveyor.start()
    if stage == 0:
        link = SigningKey(seeds[1]).peer_id
        address = f"/ip4/{os.environ['PEER_IPS'].split(',')[1]}/tcp/{PORT}/p2p/{link}"
        conveyor.set_neighbours([LinkAddress(keys[1].peer_id, LinkId(link), (address,))])
    tick = threading.Event()
    warm, steps = args.micro_batches * args.warm_steps, args.micro_batches * args.steps

    def reach(count: int) -> float:
        deadline = time.monotonic() + 240
        while trainer.progress().micro_batches < count:
            assert not failures, failures
            assert time.monotonic() < deadline, f"{trainer.progress()} {conveyor.status()}"
            tick.wait(0.002)
        return time.perf_counter()

    assert conveyor._link._linkd is not None
    linkd = conveyor._link._linkd.process.pid
    began, cpu_before, bytes_before = reach(warm), cpu_s(linkd), conveyor.status().bytes_sent
    main_before = cpu_s(os.getpid())
    ended = reach(warm + steps)
    sent = conveyor.status().bytes_sent - bytes_before
    result = {
        "micro_batches_per_s": steps / (ended - began), "bytes_sent": sent, "linkd_cpu_s": cpu_s(linkd) - cpu_before,
        "main_cpu_s": cpu_s(os.getpid()) - main_before, "seconds": ended - began, "window": conveyor.status().micro_batches.window,
        "resent": conveyor.status().micro_batches.resent, "rtt_s": next(iter(conveyor.status().rtt_s.values()), None),
    }  # fmt: skip
    if stage == 1:
        tick.wait(3.0)  # the origin may still wait for an answer
    conveyor.stop(5.0)
    trainer.stop(5.0)
    return result


def run_single(args: argparse.Namespace) -> dict[str, Any]:
    """Both stages' compute in one process, and the step: the reference."""
    from dilocox_peer.model.inner import InnerOptimizer
    from dilocox_peer.model.stage import build_stage

    torch.set_num_threads(1)
    manifest = manifest_of(args)
    model = build_stage(manifest).model
    optimizer = InnerOptimizer(model, manifest.inner)
    steps = max(2, args.steps // 2)
    for step in range(-1, steps):
        if step == 0:
            began = time.perf_counter()
        for _ in range(args.micro_batches):
            time.sleep(2 * args.compute_ms / 1e3)
        model.flat_grad_N.fill_(0.01)
        optimizer.step(micro_batches=args.micro_batches, share=1.0)
    return {"micro_batches_per_s": steps * args.micro_batches / (time.perf_counter() - began)}


def run_gloo(args: argparse.Namespace) -> dict[str, Any]:
    """torch.distributed.pipelining's 1F1B with the same emulated compute; it sends float32."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    forward_s, backward_s = args.compute_ms / 3e3, 2 * args.compute_ms / 3e3

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            time.sleep(forward_s)
            return x * 1.0

        @staticmethod
        def backward(ctx, gradient):
            time.sleep(backward_s)
            return gradient

    class Part(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(1))

        def forward(self, x):
            return Slow.apply(x * self.scale)

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    stage = PipelineStage(Part(), rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, args.micro_batches, loss_fn=lambda y, target: (y * target).mean())
    x = torch.randn(args.micro_batches, TOKENS, args.width)
    steps = max(2, args.steps // 2)
    for step in range(-1, steps):
        if step == 0:
            dist.barrier()
            began = time.perf_counter()
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=x)
    rate = steps * args.micro_batches / (time.perf_counter() - began)
    dist.destroy_process_group()
    return {"micro_batches_per_s": rate}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("stage", "single", "gloo"))
    parser.add_argument("--schedule", default="carry")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--compute-ms", type=float, default=50.0)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warm-steps", type=int, default=3)
    args = parser.parse_args()
    run = {"stage": run_stage, "single": run_single, "gloo": run_gloo}[args.role]
    print("RESULT " + json.dumps(run(args)), flush=True)


if __name__ == "__main__":
    main()
