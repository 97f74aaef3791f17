"""One process of headline.py, in its network namespace: `headline_worker.py ROLE SETTINGS`. Not run by hand.

Compute is emulated in all roles: a micro-batch sleeps for batch_s and leaves a gradient of full size; optimizers, communication and
what else a step costs are real. Roles:

    peer      `join` itself: SETTINGS is followed by a file for the moments at which micro-batches end, then the peer's arguments
    loop      a peer's own training loop without a network: the limit of what is measured
    ddp       torch's DistributedDataParallel over gloo, float32; its buckets go out while the backward sleeps
    powersgd  the same with its PowerSGD hook, rank 4
    diloco    H local steps, then an all-reduce of the pseudo-gradient in fp16 that is waited for, then the outer step
    hivemind  the same averaged by hivemind's DecentralizedAverager in fp16: OpenDiLoCo without its averaging of states

All but `peer` say READY when they are warm, go on when a line comes in, and print RESULT with a JSON object. SETTINGS is JSON.
"""

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dilocox_peer.config import preset
from dilocox_peer.manifest import Manifest


@dataclass(frozen=True)
class Settings:
    """batch_s: that a micro-batch sleeps at one stage. units: steps to measure, of diloco and hivemind rounds."""

    batch_s: float
    inner_steps: int
    codec: str
    adapt: str
    peers: int
    stages: int
    accumulate: int
    units: int

    def manifest(self) -> Manifest:
        steps = {"inner_steps": self.inner_steps}
        if self.adapt == "off":
            steps |= {"min_inner_steps": self.inner_steps, "max_inner_steps": self.inner_steps}
        return preset(
            "tiny",
            model={
                "layers": 4,
                "hidden_size": 256,
                "heads": 4,
                "kv_heads": 2,
                "mlp_size": 576,
                "context": 256,
            },
            inner={"optimizer": "adamw", "learning_rate": 1e-4, "micro_batch": 4, "accumulate": self.accumulate},
            stages={"count": self.stages},
            rounds={"total": 100_000, "start_peers": self.peers, **steps},
            compression={"codec": self.codec, "adapt": self.adapt},
        )


def sent_bytes(interface: str = "eth0") -> int:
    """By this namespace's interface, frames and all."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    fields = next(line.split(":")[1].split() for line in lines if line.strip().startswith(f"{interface}:"))
    return int(fields[8])


def wait_for_start() -> None:
    print("READY", flush=True)
    sys.stdin.readline()


def tell(seconds: float, steps: int, sent: int) -> None:
    print("RESULT " + json.dumps({"seconds": seconds, "steps": steps, "sent": sent}), flush=True)


# ---- ours -----------------------------------------------------------------------------------------------------------


def emulate(batch_s: float, log: Path | None) -> None:
    """From here on micro-batches of this process are slept through; when each ends at an origin is written to log, 8 bytes each,
    and beside it (.routes) to whom each is sent, and (.ways) when it began and ended there, 16 bytes each."""
    import struct

    from dilocox_peer.model.activations import BodyFormat
    from dilocox_peer.model.architecture import StageModel
    from dilocox_peer.model.passes import Passes
    from dilocox_peer.model.stage import Stage
    from dilocox_peer.pipeline.downstream import Downstream
    from dilocox_peer.pipeline.flight import Flight

    own = torch.Generator().manual_seed(os.getpid())  # what several offer alike is counted once
    pattern_X = torch.randn(1 << 16, generator=own) * 1e-3
    file = log.open("ab", buffering=0) if log is not None else None
    models: dict[tuple[int, Any], StageModel] = {}
    begun: dict[tuple[int, Any], float] = {}  # moments
    hidden: dict[int, Tensor] = {}
    ways = log.with_suffix(".ways").open("ab", buffering=0) if log is not None else None

    def done() -> None:
        if file is not None:
            file.write(struct.pack("d", time.time()))

    def leave_gradient(model: StageModel) -> None:
        for part in torch.split(model.flat_grad_N, len(pattern_X)):
            part.add_(pattern_X[: len(part)])

    def sleep_until(moment: float) -> None:
        time.sleep(max(0.0, moment - time.perf_counter()))

    def train(self: Stage, inputs_BT: Tensor, targets_BT: Tensor) -> float:
        until = time.perf_counter() + batch_s
        leave_gradient(self.model)
        sleep_until(until)
        done()
        return 5.0

    def packed(self: Passes) -> bytes:
        body: BodyFormat = self._body
        if id(body) not in hidden:
            hidden[id(body)] = torch.randn(body.batch, body.tokens, body.width)
        return self._packed(hidden[id(body)])

    def begin(self: Passes, key: Any, model: StageModel, inputs_BT: Tensor, targets_BT: Tensor) -> bytes:
        until = time.perf_counter() + batch_s / 3
        models[id(self), key], begun[id(self), key] = model, time.time()
        found = packed(self) + self._body.pack_targets(targets_BT)
        sleep_until(until)
        return found

    def backward(self: Passes, key: Any, body: Any) -> None:
        until = time.perf_counter() + 2 * batch_s / 3
        model = models.pop((id(self), key))
        self._unpacked(body, torch.device("cpu"))
        leave_gradient(model)
        sleep_until(until)
        done()
        if ways is not None:
            ways.write(struct.pack("dd", begun.pop((id(self), key)), time.time()))

    def turn(self: Passes, model: StageModel, body: Any) -> tuple[bytes, float]:
        until = time.perf_counter() + batch_s
        self._unpacked(body, torch.device("cpu"))
        leave_gradient(model)
        found = packed(self)
        sleep_until(until)
        return found, 5.0

    def is_used(self: Passes, model: StageModel) -> bool:
        return any(each is model for (owner, _), each in models.items() if owner == id(self))

    def counted(self: Passes, key: Any) -> float:
        return 1.0

    def release(self: Passes, key: Any) -> None:
        models.pop((id(self), key), None)
        begun.pop((id(self), key), None)

    if log is not None:
        routes, send_step = log.with_suffix(".routes").open("a", buffering=1), Downstream.send_step

        def send_and_note(self: Downstream, flight: Flight) -> None:
            routes.write(f"{flight.callee}\n")
            send_step(self, flight)

        Downstream.send_step = send_and_note  # type: ignore[method-assign]
    Stage.train_micro_batch = train  # type: ignore[method-assign]
    emulated = {
        "begin": begin,
        "backward": backward,
        "turn": turn,
        "counted": counted,
        "is_used": is_used,
        "release": release,
    }
    # What a stage's loop asks and is not slept through finds nothing of the slept forwards, in mid-training.
    asked = {name for name in vars(Passes) if not name.startswith("_")} - {"take_codec_s", "forward"}
    assert asked == emulated.keys(), f"passes that are not emulated: {sorted(asked ^ emulated.keys())}"
    for name, method in emulated.items():
        setattr(Passes, name, method)


def run_loop(settings: Settings) -> None:
    from dilocox_peer.data.corpus import load_corpus
    from dilocox_peer.peer.planning.timetable import Timetable
    from dilocox_peer.peer.training.outer import initial_state
    from dilocox_peer.peer.training.whole_loop import WholeLoop
    from dilocox_peer.types import PeerId

    emulate(settings.batch_s, None)
    manifest = settings.manifest()
    loop = WholeLoop(
        manifest, peer=PeerId("12D3KooWbenchmark"), incarnation=1, corpus=load_corpus("stdlib", [], validation=0.05),
        devices=("cpu",), clock=time.monotonic, micro_batch_limit=None, timetable=Timetable(manifest),
    )  # fmt: skip
    loop.begin(initial_state(manifest))
    for _ in range(3):
        loop.train_on()
    wait_for_start()
    began = time.perf_counter()
    for _ in range(settings.units):
        assert loop.train_on()
    tell(time.perf_counter() - began, settings.units, 0)


# ---- the others -----------------------------------------------------------------------------------------------------


class Emulated(torch.nn.Module):
    """The same parameters, tensor by tensor; forward and backward sleep, the backward a share for each tensor."""

    def __init__(self, manifest: Manifest, batch_s: float) -> None:
        super().__init__()
        from dilocox_peer.model.architecture import layout_of

        specs = layout_of(manifest).tensors
        self.tensors = torch.nn.ParameterList(torch.randn(spec.shape) * 0.02 for spec in specs)
        self._forward_s = batch_s / 3
        total = sum(tensor.numel() for tensor in self.tensors)
        self._backward_s = [2 * batch_s / 3 * tensor.numel() / total for tensor in self.tensors]
        self._patterns = [torch.randn(tensor.shape) * 1e-3 for tensor in self.tensors]

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self._forward_s)
        for tensor, seconds, pattern in zip(self.tensors, self._backward_s, self._patterns, strict=True):
            x = _Layer.apply(x, tensor, pattern, seconds)
        return x.sum()


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, _tensor: Tensor, pattern: Tensor, seconds: float) -> Tensor:
        ctx.pattern, ctx.seconds = pattern, seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradients[0], ctx.pattern.clone(), None, None


class Trained:
    """A model with its optimizer: `step` is one inner step."""

    def __init__(self, settings: Settings, hook: str | None = None) -> None:
        self.model = Emulated(settings.manifest(), settings.batch_s)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self._called: torch.nn.Module = self.model
        if hook is not None:
            # PowerSGD in one bucket: with several its all-reduces start in another order on each rank now and then, and all wait.
            bucket_mb = 100 if hook == "powersgd" else None
            ddp = torch.nn.parallel.DistributedDataParallel(self.model, bucket_cap_mb=bucket_mb)
            if hook == "powersgd":
                from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

                state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
                ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            self._called = ddp
        self._x = torch.zeros(1, requires_grad=True)

    def step(self) -> None:
        self._called(self._x).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Outer:
    """DiLoCo's outer step: Nesterov on the averaged pseudo-gradient, which crosses in fp16."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters = list(model.parameters())
        self._anchor_N = self._flat()
        self._momentum_N = torch.zeros_like(self._anchor_N)

    def pseudo_gradient(self) -> Tensor:
        return self._anchor_N - self._flat()

    @torch.no_grad()
    def step(self, mean_N: Tensor) -> None:
        self._momentum_N.mul_(0.9).add_(mean_N)
        self._anchor_N.sub_(mean_N + 0.9 * self._momentum_N, alpha=0.7)
        torch.nn.utils.vector_to_parameters(self._anchor_N, self._parameters)

    def _flat(self) -> Tensor:
        return torch.nn.utils.parameters_to_vector(self._parameters).detach().clone()


def run_ddp(settings: Settings, hook: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    trained = Trained(settings, hook)
    for _ in range(5):  # buckets are laid anew after the first, PowerSGD begins after two
        trained.step()
    dist.barrier()
    wait_for_start()
    before, began = sent_bytes(), time.perf_counter()
    for _ in range(settings.units):
        trained.step()
    tell(time.perf_counter() - began, settings.units, sent_bytes() - before)
    dist.destroy_process_group()


def run_diloco(settings: Settings) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    trained = Trained(settings)
    outer = Outer(trained.model)
    trained.step()
    dist.barrier()
    wait_for_start()
    before, began = sent_bytes(), time.perf_counter()
    for _ in range(settings.units):
        for _ in range(settings.inner_steps):
            trained.step()
        half_N = outer.pseudo_gradient().half()
        dist.all_reduce(half_N)
        outer.step(half_N.float() / settings.peers)
    tell(time.perf_counter() - began, settings.units * settings.inner_steps, sent_bytes() - before)
    dist.destroy_process_group()


def run_hivemind(settings: Settings) -> None:
    from hivemind import DHT, DecentralizedAverager
    from hivemind.compression import Float16Compression

    rank, folder = int(os.environ["RANK"]), Path(os.environ["MEETING"])
    where = [f"/ip4/{os.environ['NODE_IP']}/tcp/0"]
    met = folder / "addresses"
    while rank and not met.exists():
        time.sleep(0.05)
    dht = DHT(initial_peers=met.read_text().split() if rank else [], host_maddrs=where, start=True)
    if not rank:
        (folder / "addresses.new").write_text("\n".join(map(str, dht.get_visible_maddrs())))
        (folder / "addresses.new").rename(met)
    trained = Trained(settings)
    outer = Outer(trained.model)
    averager = DecentralizedAverager(
        [torch.zeros_like(outer.pseudo_gradient())], dht, prefix="headline", target_group_size=settings.peers, start=True,
        min_matchmaking_time=5.0, compression=Float16Compression(),
    )  # fmt: skip
    trained.step()
    wait_for_start()
    before, began, groups = sent_bytes(), time.perf_counter(), []
    for _ in range(settings.units):
        for _ in range(settings.inner_steps):
            trained.step()
        with averager.get_tensors() as tensors:
            tensors[0].copy_(outer.pseudo_gradient())
        gathered = averager.step(gather=rank, timeout=600.0)
        groups.append(len(gathered or [rank]))
        with averager.get_tensors() as tensors:
            outer.step(tensors[0].clone())
    seconds = time.perf_counter() - began
    print(f"groups of {groups}", flush=True)
    tell(seconds, settings.units * settings.inner_steps, sent_bytes() - before)
    sys.stdin.readline()  # the others may still fetch from it
    averager.shutdown()
    dht.shutdown()


def main() -> None:
    role, settings = sys.argv[1], Settings(**json.loads(sys.argv[2]))
    torch.set_num_threads(1)
    if role == "peer":
        from dilocox_peer.__main__ import main as join

        log = Path(sys.argv[3])
        del sys.argv[1:4]
        emulate(settings.batch_s, log)
        return join()
    match role:
        case "loop":
            run_loop(settings)
        case "ddp" | "powersgd":
            run_ddp(settings, role)
        case "diloco":
            run_diloco(settings)
        case "hivemind":
            run_hivemind(settings)
    return None


if __name__ == "__main__":
    main()
