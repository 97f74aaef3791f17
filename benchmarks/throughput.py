"""Tokens a second of one peer's training loop beside a plain loop of the same model in transformers, on the same threads.

    python benchmarks/throughput.py [--model FOLDER] [--context 128] [--micro-batch 1] [--accumulate 4] [--steps 8] [--threads 1]
    python benchmarks/throughput.py --own        # this project's own model beside transformers' Llama of the same sizes

Both draw the same tokens, compute in float32 and step fused AdamW after `accumulate` micro-batches. Inner steps alternate, ours and
theirs in turn, who goes first changing too, and what is compared is each pair: other work on the machine then meets both alike. Processor time says what is left of that. Ours is
the loop that the torch thread of a peer runs (peer/training/whole_loop.py) with its data, clipping and book-keeping; theirs is
forward with labels, backward, clip_grad_norm_, step, zero_grad.
"""

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from swarm import header, spread

from dilocox_peer.cli.flags import InitFlags
from dilocox_peer.cli.published import published_manifest
from dilocox_peer.config import preset
from dilocox_peer.data.corpus import load_corpus
from dilocox_peer.data.tokenizer import BYTE_TOKENIZER, JsonTokenizer, Tokenizer
from dilocox_peer.manifest import Manifest, ModelSection
from dilocox_peer.model.huggingface import config_of
from dilocox_peer.model.weights import open_folder
from dilocox_peer.peer.planning.timetable import Timetable
from dilocox_peer.peer.training.outer import initial_state
from dilocox_peer.peer.training.whole_loop import WholeLoop
from dilocox_peer.types import PeerId

PEER = PeerId("12D3KooWbenchmark")


def with_settings(manifest: Manifest, arguments: Any) -> Manifest:
    inner = manifest.inner.model_copy(
        update={"micro_batch": arguments.micro_batch, "accumulate": arguments.accumulate, "optimizer": "adamw"}
    )
    rounds = manifest.rounds.model_copy(update={"inner_steps": 10_000, "max_inner_steps": 10_000})
    return manifest.model_copy(update={"inner": inner, "rounds": rounds})


class Ours:
    def __init__(self, manifest: Manifest, folder: Any, tokenizer: Tokenizer, text: Path) -> None:
        self.manifest = manifest
        self.corpus = load_corpus("files", [text], validation=0.01, tokenizer=tokenizer)
        self.loop = WholeLoop(
            manifest, peer=PEER, incarnation=1, corpus=self.corpus, devices=("cpu",), clock=time.monotonic,
            micro_batch_limit=None, timetable=Timetable(manifest),
        )  # fmt: skip
        self.loop.begin(initial_state(manifest, folder=folder))

    def step(self) -> None:
        for _ in range(self.manifest.inner.accumulate):
            assert self.loop.train_on(), "the loop waits for something"


class Theirs:
    def __init__(self, manifest: Manifest, model: Any, corpus: Any) -> None:
        self.manifest, self.model, self.corpus = manifest, model.train(), corpus
        inner = manifest.inner
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=inner.learning_rate, betas=(inner.beta1, inner.beta2), weight_decay=inner.weight_decay,
            fused=True,
        )  # fmt: skip
        self.index = 0

    def step(self) -> None:
        inner = self.manifest.inner
        for _ in range(inner.accumulate):
            inputs_BT, _ = self.corpus.train_batch(
                seed=0, peer=PEER, incarnation=1, round_number=1, index=self.index, batch=inner.micro_batch,
                context=self.manifest.model.context,
            )  # fmt: skip
            self.index += 1
            loss = self.model(input_ids=inputs_BT, labels=inputs_BT, use_cache=False).loss / inner.accumulate
            loss.backward()
            float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), inner.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()


def seconds(step: Any) -> tuple[float, float]:
    """(on the wall, of all processors)"""
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--own", action="store_true")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8, help="of each, after one that does not count")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(header())
    import transformers

    if arguments.own:
        manifest = with_settings(preset("small", model={"context": arguments.context}), arguments)
        folder: Any = None
        tokenizer: Tokenizer = BYTE_TOKENIZER
        assert isinstance(manifest.model, ModelSection)
        config = transformers.LlamaConfig(**config_of(manifest.model))
        theirs_model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    else:
        if arguments.model is None:
            parser.error("pass --model with the folder of a published model, or --own")
        manifest = with_settings(
            published_manifest(InitFlags(published=arguments.model, context=arguments.context), arguments.model),
            arguments,
        )
        folder = open_folder(arguments.model)
        tokenizer = JsonTokenizer(folder.read_small("tokenizer.json"))
        theirs_model = transformers.AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    ours = Ours(manifest, folder, tokenizer, Path(argparse.__file__))
    theirs = Theirs(manifest, theirs_model, ours.corpus)
    ours.step()
    theirs.step()
    taken: dict[str, list[tuple[float, float]]] = {"ours": [], "theirs": []}
    for number in range(arguments.steps):
        pair = [("ours", ours.step), ("theirs", theirs.step)]
        for name, step in pair if number % 2 else pair[::-1]:
            taken[name].append(seconds(step))
    tokens = arguments.micro_batch * arguments.context * arguments.accumulate
    for index, clock in enumerate(("on the wall", "of processor time")):
        of = {name: [each[index] for each in found] for name, found in taken.items()}
        for name, found in of.items():
            print(
                f"{name}: {spread([tokens / each for each in found], '.1f')} tokens a second {clock} (min / median / max)"
            )
        ratios = [theirs_s / ours_s for ours_s, theirs_s in zip(of["ours"], of["theirs"], strict=True)]
        print(
            f"  ours / theirs, pair by pair: {spread(ratios)}; of the medians {median(of['theirs']) / median(of['ours']):.3f}"
        )


if __name__ == "__main__":
    main()
