"""What a round costs a peer of a large stage: time, memory, and how long the interpreter stands still.

    python benchmarks/heavy.py [--millions 50] [--codec int4] [--contributions 4] [--threads 1 2] [--rounds 3]

One process with a peer's own outer loop: the training's four vectors (weights, gradient, two moments) as they lie in memory, an outer
optimizer, a shelf of contributions and a folder of checkpoints on this disk. Each round: snapshot, offer, contribution onto the disk,
check of those that come from others, merge into the next checkpoint's file, shift, and that file made durable. For each step: seconds on the wall and of the process, nanoseconds a
parameter (and contribution), and the longest that another thread, which wants to run every 2 ms, was kept from it. In the end the most
bytes a parameter that the process took beside interpreter and libraries (VmHWM), and how much of it was no file's.
--threads: of the merge, one after another; the states they come to must be equal to the bit.
"""

import argparse
import re
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from swarm import header, spread

from dilocox_peer.compression.policy import policy_named
from dilocox_peer.files import make_durable
from dilocox_peer.model.memory import GB
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
    shelf, norms = Shelf(folder / "contributions"), KnownNorms(layout)
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
        del offer
        view = shelf.mapped(name)
        assert view is not None
        with steps.step("check"):
            norms.check(name, view)
        del view
        # The others' are as ours: what they hold makes no difference to what a merge costs.
        blobs = [view for _ in range(others + 1) if (view := shelf.mapped(name)) is not None]
        with steps.step("merge"):
            outcome = outer.merge(
                blobs, [1] * len(blobs), own=True, round_number=number, head=sha256(bytes([number])),
                norms=[norms.get(name)] * len(blobs),
            )  # fmt: skip
        del blobs
        with steps.step("shift"):
            weights_N.add_(outcome.shift_N)
        digests.append(outcome.state.digest)
        del outcome
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


def load() -> float:
    return float(Path("/proc/loadavg").read_text().split()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=50, help="of parameters")
    parser.add_argument("--codec", default="int4")
    parser.add_argument("--contributions", type=int, default=4, help="that are merged in a round")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of a merge")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(header())
    found = []
    for threads in arguments.threads:
        with tempfile.TemporaryDirectory(prefix="dilocox-heavy-", dir=Path.cwd()) as folder:
            Path("/proc/self/clear_refs").write_text("5")
            found.append(rounds(arguments, threads, Path(folder)))
    assert all(each == found[0] for each in found), "other bits with other threads"


if __name__ == "__main__":
    main()
