"""What a round costs a peer of a large stage: time, memory, and how long the interpreter stands still.

    python benchmarks/heavy.py [--millions 50] [--codec int4] [--contributions 4] [--threads 1 2] [--rounds 3]
    python benchmarks/heavy.py --peers 2 [--millions 150] [--rounds 3] [--mbit 100] [--batch-s 1] [--inner-steps 20]
        [--moments bfloat16] [--residual bfloat16]

One process with a peer's own outer loop: the training's four vectors (weights, gradient, two moments) as they lie in memory, an outer
optimizer, a shelf of contributions and a folder of checkpoints on this disk. Each round: snapshot, offer, contribution onto the disk,
check of those that come from others, merge into the next checkpoint's file, shift, and that file made durable. For each step: seconds on the wall and of the process, nanoseconds a
parameter (and contribution), and the longest that another thread, which wants to run every 2 ms, was kept from it. In the end the most
bytes a parameter that the process took beside interpreter and libraries (VmHWM), and how much of it was no file's.
--threads: of the merge, one after another; the states they come to must be equal to the bit.

--peers: real peers of one stage over loopback with limits of --mbit; a micro-batch sleeps for --batch-s and leaves a gradient of full
size, all else is the peer's own, AdamW too. Per peer: the most that its processes took (its own, p2pd, helpers: peaks.py), beside what
`plan`, `doctor` and `join` tell of such a stage (without what forwards keep, as emulated compute keeps nothing); the latest that its event loop ran,
and without what it waited for a processor (standstills.py: the peers share this machine's), contributions that counted, what was said of
absent peers, how long checkpoints were flushed (none holds training up for longer than it takes), how much of the training's time passed
between micro-batches meanwhile and at other times, and the seconds from Ctrl-C to the end: of the first peer in mid-training, of the
second within a merge.
"""

import argparse
import asyncio
import os
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import standstills
import torch
from peaks import held, peaks_of
from swarm import WatchedSwarm, header, spread

from dilocox_peer.cli.children import Child
from dilocox_peer.compression.allowed import AllowedCodecs
from dilocox_peer.compression.lengths import Squares
from dilocox_peer.compression.policy import policy_named
from dilocox_peer.config import preset
from dilocox_peer.files import make_durable
from dilocox_peer.manifest import Manifest
from dilocox_peer.model.architecture import layout_of
from dilocox_peer.model.memory import BASE_BYTES, GB, StageSize
from dilocox_peer.peer.state.checkpoint import GrowingCheckpoint, path_of, prune, read_checkpoint, write_checkpoint
from dilocox_peer.peer.training.anchor_state import GrowingState
from dilocox_peer.peer.training.crew import Crew
from dilocox_peer.peer.training.known_norms import KnownNorms
from dilocox_peer.peer.training.outer import OuterOptimizer, OuterSettings, first_state
from dilocox_peer.store.shelf import Shelf
from dilocox_peer.types import Digest, Layout, RunId, TensorSpec, sha256

TICK_S = 0.002
RUN = RunId("5c" * 32)


def layout_of_size(num_elements: int) -> Layout:
    """As a decoder has it: an embedding, layers of matrices with norms between, a head. About so many elements."""
    width = 1024
    layers = max(1, round(num_elements * 0.8 / (12 * width * width)))
    rows = max(1, (num_elements - layers * 12 * width * width) // (2 * width))
    tensors = [TensorSpec("embedding", (rows, width), "embedding")]
    for layer in range(layers):
        tensors += [TensorSpec(f"{layer}.{name}", (width, width)) for name in "qkvo"]
        tensors += [TensorSpec(f"{layer}.up", (4 * width, width)), TensorSpec(f"{layer}.down", (width, 4 * width))]
    tensors.append(TensorSpec("head", (rows, width), "head"))
    tensors += [TensorSpec(f"{layer}.norm", (width,), "vector") for layer in range(layers)]
    return Layout(tuple(tensors))


def of_process(name: str) -> int:
    """Bytes of that name in /proc/self/status."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


class Watch:
    """The longest stop of the interpreter, and the most memory that is no file's, since the last look."""

    def __init__(self) -> None:
        self.stop_s = 0.0
        self.anonymous = 0
        threading.Thread(target=self._tick, daemon=True).start()

    def _tick(self) -> None:
        last = time.monotonic()
        while True:
            time.sleep(TICK_S)
            now = time.monotonic()
            self.stop_s, last = max(self.stop_s, now - last - TICK_S), now
            self.anonymous = max(self.anonymous, of_process("RssAnon"))


class Steps:
    """What each step took, of all rounds."""

    def __init__(self, watch: Watch, num_elements: int) -> None:
        self._watch = watch
        self._n = num_elements
        self.wall: dict[str, list[float]] = defaultdict(list)
        self.cpu: dict[str, list[float]] = defaultdict(list)
        self.stops: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        time.sleep(2 * TICK_S)
        self._watch.stop_s = 0.0
        wall, cpu = time.monotonic(), time.process_time()
        yield
        self.wall[name].append(time.monotonic() - wall)
        self.cpu[name].append(time.process_time() - cpu)
        time.sleep(2 * TICK_S)
        self.stops[name].append(self._watch.stop_s)

    def table(self, shares: dict[str, int]) -> None:
        """shares: of a step, what its nanoseconds are divided by beside the parameters."""
        print(f"{'step':12} {'wall, s':22} {'ns a parameter, wall':24} {'of processor time':24} longest stop, ms")
        for name, seconds in self.wall.items():
            each = 1e9 / self._n / shares.get(name, 1)
            print(
                f"{name:12} {spread(seconds, '.2f'):22} {spread([s * each for s in seconds], '.2f'):24} "
                f"{spread([s * each for s in self.cpu[name]], '.2f'):24} {spread([s * 1e3 for s in self.stops[name]], '.0f')}"
            )


def nearly(blob: bytes, number: int) -> bytes:
    """Another's contribution, which differs in its last byte: copies count once, and are not compared with the others."""
    return blob[:-1] + bytes([blob[-1] ^ number])


def squares_of_others(own: Squares | None, count: int) -> list[Squares | None]:
    """Norms of their own, as those of real contributions are: what has another's norm is compared with it byte by byte, which no round of honest peers takes."""
    assert own is not None, "it was not checked"
    return [own * (1.0 + index * 1e-6) for index in range(count)]


def rounds(arguments: argparse.Namespace, threads: int, folder: Path) -> list[Digest]:
    layout = layout_of_size(int(arguments.millions * 1e6))
    n = layout.num_elements
    torch.zeros(1).sum()
    before = of_process("VmRSS")
    watch = Watch()
    weights_N, gradient_N, *moments = (torch.full((n,), 0.5) for _ in range(4))
    policy = policy_named(arguments.codec, rank=64)
    path = write_checkpoint(folder, RUN, first_state(layout, weights_N.clone(), head=sha256(b"first")))

    def grow(head: Digest, number: int) -> GrowingState:
        return GrowingCheckpoint(folder, RUN, layout, head, number)

    settings = OuterSettings(0.7, 0.6, policy)
    outer = OuterOptimizer(settings, read_checkpoint(path, RUN, layout), crew=Crew(threads), grow=grow)
    shelf, norms = Shelf(folder / "contributions"), KnownNorms(layout, AllowedCodecs((arguments.codec,), 64))
    steps, digests = Steps(watch, n), []
    others = arguments.contributions - 1
    for number in range(1, arguments.rounds + 1):
        generator = torch.Generator().manual_seed(number)
        for start in range(0, n, 1 << 22):  # some training
            part = weights_N[start : start + (1 << 22)]
            part.add_(torch.randn(len(part), generator=generator), alpha=1e-3)
        with steps.step("snapshot"):
            snapshot_N = weights_N.clone()
        with steps.step("offer"):
            offer = outer.offer(snapshot_N, 1)
        del snapshot_N
        with steps.step("put"):
            name = shelf.put(offer.blob)
        raw_bytes, size = offer.raw_bytes, len(offer.blob)
        offered = bytes(offer.blob)
        del offer
        view = shelf.mapped(name)
        assert view is not None
        with steps.step("check"):
            norms.check(name, view)
        del view
        names = [name, *(shelf.put(nearly(offered, number)) for number in range(1, others + 1))]
        del offered
        blobs = [view for each in names if (view := shelf.mapped(each)) is not None]
        with steps.step("merge"):
            moved, shift_N = outer.merge(
                blobs, [1] * len(blobs), own=True, round_number=number, head=sha256(bytes([number])),
                squares=squares_of_others(norms.get(name), len(blobs)),
            )  # fmt: skip
        del blobs
        with steps.step("shift"):
            weights_N.add_(shift_N)
        digests.append(moved.state_digest)
        del shift_N
        with steps.step("checkpoint"):
            path = path_of(folder, outer.state) or Path()
            assert make_durable(path)
            prune(path)
    print(f"\n{threads} threads, {arguments.codec}, {size / 1e6:.1f} MB of {raw_bytes / 1e6:.0f}, load {load():.1f}")
    steps.table({"merge": arguments.contributions})
    peak = of_process("VmHWM") - before
    print(
        f"memory, bytes a parameter: {peak / n:.1f} at most, {(watch.anonymous - before) / n:.1f} of them no file's "
        f"({peak / GB:.2f} GB of {n / 1e6:.1f} M parameters)"
    )
    assert gradient_N is not None
    assert len(moments) == 2
    return digests


def limits() -> str:
    """How much faster two threads are than one at what a merge is made of: on memory's two sides, and on none. What two threads of a merge come to
    lies between."""
    size = 1 << 25
    pairs = [(torch.rand(size), torch.rand(size)) for _ in range(2)]

    def seconds(work: Callable[[torch.Tensor, torch.Tensor], object], threads: int) -> float:
        found = []
        for _ in range(7):
            each = [threading.Thread(target=work, args=pair) for pair in pairs[:threads]]
            began = time.monotonic()
            for thread in each:
                thread.start()
            for thread in each:
                thread.join()
            found.append(time.monotonic() - began)
        return statistics.median(found)

    works: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
        "copying": lambda one, other: one.copy_(other),
        "adding": lambda one, other: one.add_(other),
        "sines": lambda one, other: torch.sin(one, out=one),
    }
    times = ", ".join(f"{name} {2 * seconds(work, 1) / seconds(work, 2):.2f}" for name, work in works.items())
    return f"two threads on this machine, times one: {times}"


# ---- real peers -----------------------------------------------------------------------------------------------------


def work(seconds: float, log: Path) -> None:
    """In a peer's process: its micro-batches are slept through, when they began and ended is written down; then the peer itself."""
    from dilocox_peer.__main__ import main as join
    from dilocox_peer.model.stage import Stage

    own = torch.Generator().manual_seed(os.getpid())  # what several offer alike is counted once
    pattern_X = torch.randn(1 << 20, generator=own) * 1e-3

    def train(self: Stage, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> float:
        began = time.time()
        for part in torch.split(self.model.flat_grad_N, len(pattern_X)):
            part.add_(pattern_X[: len(part)])
        time.sleep(seconds)
        with log.open("a") as file:
            file.write(f"{began} {time.time()}\n")
        return 5.0

    Stage.train_micro_batch = train  # type: ignore[method-assign]
    standstills.watch_into(log.with_suffix(".late"))
    join()


def manifest_of(arguments: argparse.Namespace) -> Manifest:
    steps = dict.fromkeys(("inner_steps", "min_inner_steps", "max_inner_steps"), arguments.inner_steps)
    width = 1024
    layers = max(1, round(arguments.millions * 1e6 / (16 * width * width)))
    return preset(
        "tiny",
        model={
            "layers": layers,
            "hidden_size": width,
            "heads": 16,
            "kv_heads": 16,
            "mlp_size": 4 * width,
            "context": 64,
        },
        inner={
            "optimizer": "adamw",
            "learning_rate": 1e-4,
            "micro_batch": 1,
            "accumulate": 1,
            "moments": arguments.moments,
        },
        rounds={"total": 1000, "start_peers": arguments.peers, **steps},
        compression={"codec": arguments.codec, "adapt": "off", "residual": arguments.residual},
    )


async def swarm_of(arguments: argparse.Namespace) -> None:
    manifest = manifest_of(arguments)
    n = layout_of(manifest).num_elements
    limits = [
        "--max-upload",
        str(arguments.mbit),
        "--max-download",
        str(arguments.mbit),
        "--threads",
        str(max(arguments.threads)),
    ]
    async with WatchedSwarm(manifest) as swarm:
        await swarm.start_bootstrap()
        labels = [f"peer{index}" for index in range(arguments.peers)]
        logs = {label: swarm.folder / f"{label}.batches" for label in labels}
        children = {
            label: await swarm.start_peer(
                label, more=limits, program=[__file__, "--work", str(arguments.batch_s), str(logs[label])]
            )
            for label in labels
        }
        running = list(children.values())

        def is_merged(rounds: int) -> bool:
            return all(len(swarm.of(label, "RoundCertified")) >= rounds for label in labels)

        await swarm.until(lambda: is_merged(arguments.rounds), running, 1800)
        peaks = {label: peaks_of(child.process.pid) for label, child in children.items()}
        left = {labels[0]: await seconds_to_leave(children[labels[0]])}
        if len(labels) > 1:
            closed = len(swarm.of(labels[1], "RoundClosed"))
            await swarm.until(lambda: len(swarm.of(labels[1], "RoundClosed")) > closed, [children[labels[1]]], 600)
            left[labels[1]] = await seconds_to_leave(children[labels[1]])
        print(
            f"\n{n / 1e6:.1f} M parameters, {arguments.codec}, {arguments.inner_steps} steps of {arguments.batch_s} s, load {load():.1f}"
        )
        size = StageSize.of(manifest, 0)
        told = size.host_bytes() - size.activation_bytes(checkpointing=False)
        for label in labels:
            tell_memory(label, peaks[label], told, n)
            tell(swarm, label, logs[label])
        for label, seconds in left.items():
            print(f"{label}: {seconds:.1f} s from Ctrl-C to the end")


def tell_memory(label: str, peaks: dict[str, int], told: int, n: int) -> None:
    """told: bytes of the same processes. n: parameters of the stage."""
    each = ", ".join(f"{name} {size / GB:.2f}" for name, size in peaks.items())
    taken = held(peaks)
    print(
        f"{label}: {taken / GB:.2f} GB at most ({(taken - BASE_BYTES) / n:.1f} bytes a parameter beside {BASE_BYTES / GB} GB), told "
        f"{told / GB:.2f} ({told / taken - 1:+.1%}); in GB: {each}"
    )


def tell(swarm: WatchedSwarm, label: str, log: Path) -> None:
    rounds = swarm.of(label, "RoundCertified")
    failures = [f"{each['where']}: {each['reason']}" for each in swarm.of(label, "Failed")]
    print(
        f"{label}: event loop {standstills.told(log.with_suffix('.late'))}; {len(rounds)} rounds of "
        f"{', '.join(str(len(each['contributors'])) for each in rounds)}; delay {spread([each['delay_s'] or 0 for each in rounds], '.1f')} s; "
        f"view changes {len(swarm.of(label, 'ViewChanged'))}, failures {failures}"
    )
    missed = [each["missed"] for each in swarm.of(label, "ContributionsMissed")]
    if missed:
        print(f"{label}: went without {missed}")
    print(f"{label}: members here: {[len(each['here']) for each in swarm.of(label, 'StageSeen')]}")
    batches = [tuple(map(float, line.split())) for line in log.read_text().splitlines()]
    writes = [(each["time"] - each["seconds"], each["time"]) for each in swarm.of(label, "CheckpointWritten")]
    pauses = [(after[0], after[0] - before[1]) for before, after in pairwise(batches)]
    during = [pause for at, pause in pauses if any(first <= at <= last for first, last in writes)]
    beside = [pause for at, pause in pauses if not any(first <= at <= last for first, last in writes)]
    whole_s = batches[-1][1] - batches[0][0]
    print(
        f"{label}: {len(writes)} checkpoints of {', '.join(f'{last - first:.1f}' for first, last in writes)} s, "
        f"{sum(last - first for first, last in writes) / whole_s:.2%} of its {whole_s:.0f} s of training; between micro-batches "
        f"{spread(during or [0.0], '.2f')} s while one was flushed, {spread(beside, '.2f')} s else"
    )


async def seconds_to_leave(child: Child) -> float:
    began = time.monotonic()
    child.process.send_signal(signal.SIGINT)
    await child.process.wait()
    return time.monotonic() - began


def load() -> float:
    return float(Path("/proc/loadavg").read_text().split()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=50, help="of parameters")
    parser.add_argument("--codec", default="int4")
    parser.add_argument("--contributions", type=int, default=4, help="that are merged in a round")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of a merge")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", type=int, default=0, help="real ones; 0: one process's arithmetic")
    parser.add_argument("--mbit", type=float, default=100.0, help="of each peer, up and down")
    parser.add_argument("--batch-s", type=float, default=1.0, help="that a micro-batch sleeps")
    parser.add_argument("--inner-steps", type=int, default=20)
    parser.add_argument("--moments", default="float32", help="of real peers' AdamW; bfloat16: half of it")
    parser.add_argument("--residual", default="float32", help="of real peers; bfloat16: half of it")
    if sys.argv[1:2] == ["--work"]:
        seconds, log = sys.argv[2:4]
        del sys.argv[1:4]
        return work(float(seconds), Path(log))
    arguments = parser.parse_args()
    print(header())
    if arguments.peers:
        return asyncio.run(swarm_of(arguments))
    torch.set_num_threads(1)
    found = []
    for threads in arguments.threads:
        with tempfile.TemporaryDirectory(prefix="dilocox-heavy-", dir=Path.cwd()) as folder:
            Path("/proc/self/clear_refs").write_text("5")
            found.append(rounds(arguments, threads, Path(folder)))
    print(limits())
    assert all(each == found[0] for each in found), "other bits with other threads"


if __name__ == "__main__":
    main()
