"""Memory of one training peer of the tiny preset, all its processes, and what it is made of.

    python benchmarks/memory.py [--rounds 10]
    python benchmarks/memory.py --stage 125m [--context 128] [--micro-batch 1] [--blobs 2] [--checkpointing]
    python benchmarks/memory.py --loss 128256

PSS (proportional set size, from /proc/PID/smaps_rollup): shared pages count in proportion, so the sum over processes is
what the peer really takes. Expected beforehand: the import of torch and hivemind is most of it, the model (252 k
parameters x 32 B = 8 MB) is little.

--stage: one peer's arithmetic at a preset's size in a process of its own, two rounds with a merge each: the most that it took
(VmHWM), beside what model/memory.py reckons, which claim, doctor and --max-memory go by. --loss: the most that loss and gradient
of 4 x 2048 tokens take over a vocabulary, beside hidden states and weights.
"""

import argparse
import asyncio
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
from swarm import WatchedSwarm, header, spread

from dilocox_peer.config import preset

IMPORTS = (
    ("python alone", "pass"),
    ("+ numpy, msgpack, rich, typer, pydantic", "import numpy, msgpack, rich.console, typer, pydantic"),
    ("+ torch", "import numpy, msgpack, rich.console, typer, pydantic, torch"),
    ("+ hivemind", "import numpy, msgpack, rich.console, typer, pydantic, torch, hivemind"),
)


def pss_mb(pid: int) -> float:
    return float(psutil.Process(pid).memory_full_info().pss) / 1e6


def import_mb(statement: str) -> float:
    """PSS in MB of a Python that has imported so much and waits."""
    child = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", f"{statement}\nprint('ready', flush=True)\ninput()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        return pss_mb(child.pid)
    finally:
        child.communicate("\n", timeout=20)


def peak_bytes() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def of_stage(arguments: Any, folder: Path) -> None:
    """Build, micro-batches, step, offer, merge, shift; twice, as the first merge has other vectors than later ones."""
    import torch

    from dilocox_peer.model.architecture import build_model
    from dilocox_peer.model.inner import InnerOptimizer
    from dilocox_peer.model.loss import train_on
    from dilocox_peer.model.memory import StageSize
    from dilocox_peer.peer.state.checkpoint import GrowingCheckpoint, read_checkpoint, write_checkpoint
    from dilocox_peer.peer.training.outer import OuterOptimizer, OuterSettings, initial_state
    from dilocox_peer.store.shelf import Shelf
    from dilocox_peer.types import Digest, RunId

    run_id = RunId("5c" * 32)

    manifest = preset(
        arguments.stage,
        model={"context": arguments.context},
        inner={"micro_batch": arguments.micro_batch},
    )
    size = StageSize.of(manifest, 0)
    torch.zeros(1).sum()
    before = psutil.Process().memory_info().rss
    model = build_model(manifest.model, checkpointing=arguments.checkpointing)
    optimizer = InnerOptimizer(model, manifest.inner)
    path = write_checkpoint(folder, run_id, initial_state(manifest))
    state = read_checkpoint(path, run_id, model.layout)

    def grow(head: Digest, number: int) -> GrowingCheckpoint:
        return GrowingCheckpoint(folder, run_id, model.layout, head, number)

    outer = OuterOptimizer(OuterSettings.of(manifest), state, grow=grow)
    model.flat_N.copy_(outer.state.shared()[0])
    state.let_go()
    shelf = Shelf(folder / "contributions")
    inputs_BT = torch.randint(0, 256, (arguments.micro_batch, arguments.context))
    for round_number in (1, 2):
        forget_peak()
        train_on(model, inputs_BT, inputs_BT)
        optimizer.step(micro_batches=1, share=1.0)
        trained = peak_bytes() - before
        offer = outer.offer(model.flat_N.clone(), 1)
        name = shelf.put(offer.blob)
        blobs = [view for _ in range(arguments.blobs) if (view := shelf.mapped(name)) is not None]
        outcome = outer.merge(
            blobs, [1] * len(blobs), own=True, round_number=round_number, head=Digest(bytes([round_number]) * 32)
        )
        model.flat_N.add_(outcome.shift_N)
        del outcome, blobs, offer
        print(
            f"round {round_number}: training {trained / 1e9:.2f} GB, all {(peak_bytes() - before) / 1e9:.2f} GB",
            flush=True,
        )
    measured = peak_bytes() - before
    reckoned = size.host_bytes(checkpointing=arguments.checkpointing) - size.base_bytes
    activations = size.activation_bytes(checkpointing=arguments.checkpointing)
    print(
        f"{arguments.stage}, {size.parameters / 1e6:.1f} M parameters, {arguments.micro_batch} x {arguments.context} tokens, "
        f"checkpointing {arguments.checkpointing}: measured {measured / 1e9:.3f} GB "
        f"({(measured - activations) / size.parameters:.1f} bytes a parameter beside activations), reckoned {reckoned / 1e9:.3f} GB "
        f"({reckoned / measured - 1:+.1%})"
    )


def of_loss(vocab_size: int) -> None:
    import torch

    from dilocox_peer.manifest import ModelSection
    from dilocox_peer.model.architecture import build_model
    from dilocox_peer.model.loss import train_on

    section = ModelSection(
        layers=1, hidden_size=64, heads=2, kv_heads=1, mlp_size=64, context=2048, vocab_size=vocab_size
    )
    model = build_model(section)
    model.flat_N.normal_(std=0.02)
    inputs_BT = torch.randint(0, vocab_size, (4, 2048))
    with torch.no_grad():
        model.hidden(inputs_BT)
    before = psutil.Process().memory_info().rss
    forget_peak()
    loss = train_on(model, inputs_BT, inputs_BT)
    whole = 4 * 4 * 2048 * vocab_size
    print(
        f"vocabulary of {vocab_size:,}, 4 x 2048 tokens: loss {loss:.3f}, {(peak_bytes() - before) / 1e9:.2f} GB at most beside the "
        f"weights; all logits in float32 at once are {whole / 1e9:.2f} GB"
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="certified before the peers are measured")
    parser.add_argument("--stage", help="of this preset, alone")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--blobs", type=int, default=2, help="contributions that are merged")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--loss", type=int, help="vocabulary")
    arguments = parser.parse_args()
    print(header())
    if arguments.stage or arguments.loss:
        if arguments.loss:
            return of_loss(arguments.loss)
        with tempfile.TemporaryDirectory(prefix="dilocox-memory-") as folder:
            of_stage(arguments, Path(folder))
        return
    for name, statement in IMPORTS:
        print(f"{name:45} {import_mb(statement):7.1f} MB", flush=True)
    async with WatchedSwarm(preset("tiny", rounds={"total": 100_000, "start_peers": 2})) as swarm:
        await swarm.start_bootstrap()
        peers = [await swarm.start_peer(f"peer{index}") for index in range(2)]
        await swarm.until(lambda: len(swarm.of("peer0", "RoundCertified")) >= arguments.rounds, peers, 300)
        totals = []
        for peer in peers:
            processes = [psutil.Process(peer.process.pid), *psutil.Process(peer.process.pid).children(recursive=True)]
            sizes = [(process.name(), pss_mb(process.pid)) for process in processes]
            totals.append(sum(megabytes for _name, megabytes in sizes))
            print(f"{peer.label}: " + ", ".join(f"{name} {megabytes:.1f} MB" for name, megabytes in sizes))
        print(f"one peer, all processes, MB (min / median / max): {spread(totals, '.1f')}")


if __name__ == "__main__":
    asyncio.run(main())
