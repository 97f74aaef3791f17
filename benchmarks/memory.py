"""Memory of one training peer of the tiny preset, all its processes, and what it is made of.

    python benchmarks/memory.py [--rounds 10]
    python benchmarks/memory.py --stage 125m [--context 128] [--micro-batch 1] [--blobs 2] [--checkpointing] [--moments bfloat16]
    python benchmarks/memory.py --published FOLDER [--lora-rank 8] [--stages 2 --of-stage 1] [--borders] [...]
    python benchmarks/memory.py --table FOLDER         # a published model's, in the configurations below
    python benchmarks/memory.py --loss 128256
    python benchmarks/memory.py --kept --published FOLDER --context 1024     # of a forward, with checkpointing and without; or --stage

PSS (proportional set size, from /proc/PID/smaps_rollup): shared pages count in proportion, so the sum over processes is
what the peer really takes. Expected beforehand: the import of torch and hivemind is most of it, the model (252 k
parameters x 32 B = 8 MB) is little.

--stage, --published: one peer's arithmetic at a preset's or a published model's size in a process of its own, two rounds with a merge
each: the most that it took (VmHWM) beside interpreter and libraries, and what model/memory.py reckons, which claim, doctor and
--max-memory go by. --loss: the most that loss and gradient
of 4 x 2048 tokens take over a vocabulary, beside hidden states and weights. --kept: what tensors hold between a forward and its backward.
"""

import argparse
import asyncio
import ctypes
import gc
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
from swarm import WatchedSwarm, header, spread

from dilocox_peer.cli.flags import BaseType, InitFlags
from dilocox_peer.cli.published import published_manifest
from dilocox_peer.config import preset
from dilocox_peer.model.partition import cut_into

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


def taken() -> int:
    return int(psutil.Process().memory_info().rss)


def trim() -> None:
    """What the allocator has kept of memory that is free goes back, so that it is not counted as free room later."""
    ctypes.CDLL(None).malloc_trim(0)


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def manifest_of(arguments: Any) -> Any:
    """Of the stage that is measured: a preset's run, or one of a published model's folder."""
    inner = {"micro_batch": arguments.micro_batch, "moments": arguments.moments}
    if arguments.accumulate:
        inner["accumulate"] = arguments.accumulate
    if arguments.stage:
        manifest = preset(arguments.stage, model={"context": arguments.context}, inner=inner)
        manifest = cut_into(manifest, arguments.stages) if arguments.stages > 1 else manifest
    else:
        flags = InitFlags(
            published=arguments.published,
            context=arguments.context,
            stages=arguments.stages,
            lora_rank=arguments.lora_rank,
            base_dtype=None if arguments.base_dtype is None else BaseType(arguments.base_dtype),
        )
        manifest = published_manifest(flags, arguments.published)
        manifest = manifest.model_copy(update={"inner": manifest.inner.model_copy(update=inner)})
    changes: dict[str, Any] = {
        "compression": manifest.compression.model_copy(update={"codec": "int4", "residual": arguments.residual})
    }
    if arguments.borders:
        changes["data"] = manifest.data.model_copy(
            update={"source": "shards", "catalogue": "ab" * 32, "packing": "best-fit"}
        )
    return manifest.model_copy(update=changes)


def of_stage(arguments: Any, folder: Path) -> None:
    """Build, micro-batches, step, offer, merge, shift; twice, as the first merge has other vectors than later ones."""
    import torch

    from dilocox_peer.model.activations import BodyFormat
    from dilocox_peer.model.architecture import build_model, frozen_layout_of, layers_of, prepare
    from dilocox_peer.model.frozen import FrozenBase, read_base
    from dilocox_peer.model.inner import InnerOptimizer
    from dilocox_peer.model.memory import StageSize
    from dilocox_peer.model.passes import Passes
    from dilocox_peer.model.published import design_of
    from dilocox_peer.model.stage import Stage
    from dilocox_peer.model.weights import open_folder
    from dilocox_peer.peer.state.checkpoint import GrowingCheckpoint, read_checkpoint, write_checkpoint
    from dilocox_peer.peer.training.outer import OuterOptimizer, OuterSettings, initial_state
    from dilocox_peer.store.shelf import Shelf
    from dilocox_peer.types import Digest, RunId

    run_id = RunId("5c" * 32)
    manifest, index = manifest_of(arguments), arguments.of_stage
    count, layers = manifest.stages.count, layers_of(manifest, index)
    size = StageSize.of(manifest, index)
    opened = None if arguments.published is None else open_folder(arguments.published)
    frozen, base, section = frozen_layout_of(manifest, index), None, manifest.model
    if frozen is not None:
        assert opened is not None, "adapters of a published model"
        with (folder / "base").open("wb") as file:
            read_base(opened, design_of(section), frozen, file.write)
    first = write_checkpoint(folder, run_id, initial_state(manifest, index, folder=opened))
    prepare(manifest)
    tiny = torch.zeros(8, 8, requires_grad=True)
    (tiny @ tiny).sum().backward()
    gc.collect()
    trim()
    before = taken()
    if frozen is not None:
        base = FrozenBase.open(folder / "base", frozen)
    model = build_model(section, layers, checkpointing=arguments.checkpointing, base=base)
    other = model.version() if count > 1 else None
    optimizer = InnerOptimizer(model, manifest.inner)
    state = read_checkpoint(first, run_id, model.layout)

    def grow(head: Digest, number: int) -> GrowingCheckpoint:
        return GrowingCheckpoint(folder, run_id, model.layout, head, number)

    outer = OuterOptimizer(OuterSettings.of(manifest), state, grow=grow)
    model.flat_N.copy_(outer.state.shared()[0])
    state.let_go()
    if other is not None:
        other.flat_N.copy_(model.flat_N)
    shelf = Shelf(folder / "contributions")
    tokens_BT = torch.randint(0, 256, (arguments.micro_batch, arguments.context))
    inputs_BT = tokens_BT.clone()
    if arguments.borders:
        inputs_BT[:, ::100] = ~inputs_BT[:, ::100]
    body = BodyFormat.of(manifest)
    hidden = torch.randn(arguments.micro_batch, arguments.context, section.hidden_size)
    starts_BT = inputs_BT < 0 if arguments.borders else None
    passes = Passes(body)

    def micro_batches() -> None:
        """As many as are under way at once: forwards, then backwards; a last stage turns each round."""
        if count == 1:
            Stage(model).train_micro_batch(inputs_BT, tokens_BT)
            return
        received = body.pack_hidden(hidden) + body.pack_targets(tokens_BT, starts_BT)
        if layers.is_last_stage:
            passes.turn(model, received)
            return
        for key in range(size.in_flight):
            if layers.is_first_stage:
                passes.begin(key, model, inputs_BT, tokens_BT)
            else:
                passes.forward(key, model, received)
        for key in range(size.in_flight):
            passes.backward(key, body.pack_hidden(hidden))

    steps: dict[str, int] = {}

    def watch(step: str) -> None:
        steps[step] = max(steps.get(step, 0), peak_bytes() - before)
        forget_peak()

    for round_number in (1, 2):
        forget_peak()
        micro_batches()
        optimizer.step(micro_batches=1, share=1.0)
        micro_batches()
        watch("training")
        offer = outer.offer(model.flat_N.clone(), 1)
        watch("offer")
        name = shelf.put(offer.blob)
        blobs = [view for _ in range(arguments.blobs) if (view := shelf.mapped(name)) is not None]
        micro_batches()  # it is trained while a merge is computed
        watch("training with an offer out")
        _, shift_N = outer.merge(
            blobs, [1] * len(blobs), own=True, round_number=round_number, head=Digest(bytes([round_number]) * 32)
        )
        model.flat_N.add_(shift_N)
        watch("merge")
        del shift_N, blobs, offer
    measured = max(steps.values())
    told = size.host_bytes(checkpointing=arguments.checkpointing) - size.base_bytes
    activations = size.activation_bytes(checkpointing=arguments.checkpointing)
    each = (measured - activations - size.frozen_bytes) / size.parameters
    print(", ".join(f"{step} {value / 1e6:.0f} MB" for step, value in steps.items()), flush=True)
    print(
        f"{arguments.stage or arguments.published.name}, stage {index} of {count}, {size.parameters / 1e6:.2f} M parameters trained, "
        f"{size.frozen_bytes / 1e6:.0f} MB frozen, {arguments.micro_batch} x {arguments.context} tokens, {size.in_flight} under way, "
        f"checkpointing {arguments.checkpointing}, borders {arguments.borders}, moments {arguments.moments}, residual "
        f"{arguments.residual}: measured {measured / 1e6:.0f} MB ({each:.1f} bytes a parameter beside activations and what is frozen), "
        f"told {told / 1e6:.0f} MB ({told / measured - 1:+.1%})",
        flush=True,
    )


CONFIGURATIONS = (
    "",
    "--context 512",
    "--context 512 --checkpointing",
    "--micro-batch 4 --context 256 --borders",
    "--moments bfloat16 --residual bfloat16",
    "--stages 2 --of-stage 0",
    "--stages 2 --of-stage 1",
    "--lora-rank 8 --base-dtype bfloat16",
    "--lora-rank 8 --base-dtype bfloat16 --context 512",
    "--lora-rank 8 --base-dtype float32",
    "--lora-rank 8 --base-dtype bfloat16 --stages 2 --of-stage 0",
    "--lora-rank 8 --base-dtype bfloat16 --stages 2 --of-stage 1",
)


def table(folder: Path) -> None:
    """Every configuration in a process of its own."""
    for each in CONFIGURATIONS:
        command = [sys.executable, "-W", "ignore", __file__, "--published", str(folder), *each.split()]
        found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=1800)
        print(found.stdout.splitlines()[-1], flush=True)


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


def of_forward(arguments: Any) -> None:
    import torch

    from dilocox_peer.model.architecture import build_model, layers_of, prepare

    manifest = manifest_of(arguments)
    prepare(manifest)
    layers = layers_of(manifest, arguments.of_stage)
    count, tokens = layers.last - layers.first + 1, arguments.micro_batch * arguments.context
    found: dict[bool, int] = {}
    for checkpointing in (True, False):
        model = build_model(manifest.model, layers, checkpointing=checkpointing)
        x: Any = torch.randint(0, 256, (arguments.micro_batch, arguments.context))
        if not layers.is_first_stage:
            x = torch.randn(arguments.micro_batch, arguments.context, manifest.model.hidden_size, requires_grad=True)
        model.hidden(x)  # the first makes what stays
        with torch.profiler.profile(profile_memory=True) as profiler:
            hidden_BTD = model.hidden(x)
        kept = found[checkpointing] = sum(each.self_cpu_memory_usage for each in profiler.key_averages())
        print(
            f"checkpointing {checkpointing}: {kept / 1e6:.1f} MB kept, {kept / count / tokens / 1e3:.2f} KB a token and layer of {count}",
            flush=True,
        )
        del hidden_BTD, model
        gc.collect()
    print(f"{found[False] / found[True]:.1f} times less")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="certified before the peers are measured")
    parser.add_argument("--stage", help="of this preset, alone")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--blobs", type=int, default=2, help="contributions that are merged")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--loss", type=int, help="vocabulary")
    parser.add_argument("--published", type=Path, help="folder of a published model: a stage of it, alone")
    parser.add_argument("--kept", action="store_true", help="between a forward and its backward")
    parser.add_argument("--table", type=Path, help="folder of a published model: it in many configurations")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--of-stage", type=int, default=0)
    parser.add_argument("--lora-rank", type=int)
    parser.add_argument("--base-dtype")
    parser.add_argument("--accumulate", type=int, help="micro-batches a step, which bounds those under way")
    parser.add_argument("--borders", action="store_true", help="documents packed that see nothing of each other")
    parser.add_argument("--moments", default="float32")
    parser.add_argument("--residual", default="float32")
    arguments = parser.parse_args()
    print(header())
    if arguments.table:
        return table(arguments.table)
    if arguments.kept:
        return of_forward(arguments)
    if arguments.stage or arguments.published or arguments.loss:
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
