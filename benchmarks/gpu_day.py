"""Everything that needs an accelerator, in one run that checks itself: for the day when one is at hand.

    python benchmarks/gpu_day.py [--device cuda] [--preset 125m] [--micro-batch 4] [--steps 20] [--only memory ...] [--json FILE]

Needs torch, numpy, pydantic, msgspec, msgpack, cryptography and base58; transformers for the comparison of speed, which is skipped
without. No network, no other process. Ends with 1 if a bar is missed. `--device cpu --preset tiny` tries the script itself.

Bars, said beforehand: losses of the same steps in float32 within 1e-3 of a CPU's, compiled too, in bfloat16 and float16 within 3 %; a matrix in
8 bits within 2 % of itself, in 4 within 12 %; the canary of a CPU holds;
anchors of a CPU and the device equal to the bit after three rounds; memory within 10 % of what is told (model/memory.py), never
more; activations with checkpointing a fifth or less of those without at this depth; loss over 128,256 ids at 4 x 2048 tokens within 1 GB;
tokens a second at least 0.95 of a plain loop of the same model in transformers; two cards at least 1.7 times one.
"""

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dilocox_peer.config import preset
from dilocox_peer.data.corpus import Corpus
from dilocox_peer.data.sources import Document
from dilocox_peer.manifest import Manifest, ModelSection
from dilocox_peer.model.architecture import build_model
from dilocox_peer.model.canary import canary, what_differs
from dilocox_peer.model.loss import train_on
from dilocox_peer.model.memory import CARD_BASE_BYTES, StageSize
from dilocox_peer.model.transformer import initial_parameters
from dilocox_peer.peer.planning.timetable import Timetable
from dilocox_peer.peer.training.outer import initial_state
from dilocox_peer.peer.training.trainer import Trainer
from dilocox_peer.peer.training.whole_loop import WholeLoop
from dilocox_peer.types import PeerId, sha256

FLOAT32_APART, HALF_APART, TOLD_APART, LEAST_SPEED, CARDS_SPEED = 1e-3, 0.03, 0.10, 0.95, 1.7
ACTIVATIONS_LESS, LOSS_BYTES = 5.0, 1e9
BITS_APART = {8: 0.02, 4: 0.12}
CHECKS = ("memory", "numbers", "few_bits", "anchors", "speeds", "cards")
"""In this order: memory is that of a peer alone, and what other checks leave on a card is theirs."""
ROUNDS = 3
DEADLINE_S = 600.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """verdict: ok, missed or skipped."""

    check: str
    verdict: str
    found: str


def judged(check: str, is_kept: bool, found: str) -> Verdict:
    return Verdict(check, "ok" if is_kept else "missed", found)


def spread(values: list[float]) -> str:
    return " / ".join(f"{each:.3f}" for each in (min(values), statistics.median(values), max(values)))


class Day:
    """One device, one model."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.device, self.steps = arguments.device, arguments.steps
        self.is_accelerator = not self.device.startswith("cpu")
        changes = {
            "inner": {"micro_batch": arguments.micro_batch, "accumulate": 1, "optimizer": "adamw", "warmup": 0.0}
        }
        self.manifest = preset(arguments.preset, **changes)
        assert isinstance(self.manifest.model, ModelSection), "of our own model"
        self.section = self.manifest.model
        text = np.frombuffer(np.random.default_rng(0).bytes(4_000_000), dtype=np.uint8) % 64  # something to learn
        self.corpus = Corpus([Document("made", text)], name="made", validation=0.01)

    def loop(
        self, *devices: str, precision: str = "float32", manifest: Manifest | None = None, compiled: bool = False
    ) -> WholeLoop:
        manifest = manifest or self.manifest
        loop = WholeLoop(
            manifest, peer=PeerId("p"), incarnation=1, corpus=self.corpus, devices=devices, clock=time.monotonic,
            micro_batch_limit=None, timetable=Timetable(manifest), precision=precision,
            compiled=compiled,
        )  # fmt: skip
        loop.begin(initial_state(manifest))
        return loop

    def losses(self, device: str, precision: str = "float32", *, compiled: bool = False) -> list[float]:
        """The mean so far, after each of the first steps."""
        loop = self.loop(device, precision=precision, compiled=compiled)
        found = []
        for _ in range(min(self.steps, 8)):
            loop.train_on()
            found.append(loop.progress.train_loss)
        return found

    def wait(self) -> None:
        if self.is_accelerator:
            getattr(torch, torch.device(self.device).type).synchronize()

    def speed(self, step: Callable[[], Any], tokens: int) -> float:
        """Tokens a second, of one step."""
        self.wait()
        started = time.perf_counter()
        step()
        self.wait()
        return tokens / (time.perf_counter() - started)

    @property
    def step_tokens(self) -> int:
        return self.manifest.inner.micro_batch * self.section.context

    # ---- what is checked ----

    def numbers(self) -> Iterator[Verdict]:
        """The same steps give the same losses, and the canary sings."""
        expected = self.losses("cpu")
        kinds = [("float32", FLOAT32_APART, False), ("bfloat16", HALF_APART, False), ("float16", HALF_APART, False)]
        if self.is_accelerator:  # of a processor it takes minutes
            kinds.append(("float32", FLOAT32_APART, True))
        for precision, bound, compiled in kinds:
            found = self.losses(self.device, precision, compiled=compiled)
            apart = max(abs(here / there - 1) for here, there in zip(found, expected, strict=True))
            yield judged(
                f"losses in {precision}{', compiled' if compiled else ''}",
                apart <= bound,
                f"{apart:.2e} apart at most (bar {bound}), last {found[-1]:.4f}",
            )
        models = [build_model(self.section, device=device) for device in ("cpu", self.device)]
        for model in models:
            model.flat_N.copy_(initial_parameters(model.layout, self.section, self.manifest.run.seed))
        differs = what_differs(models[1], self.section.hidden_size, canary(models[0], self.section.hidden_size))
        yield judged("canary of a CPU", not differs, differs or "holds")

    def few_bits(self) -> Iterator[Verdict]:
        """What --base-bits makes of a matrix."""
        from dilocox_peer.errors import ConfigError
        from dilocox_peer.model.quantized import QuantizedMatrix, library

        try:
            library()
        except ConfigError as error:
            yield Verdict("a matrix in few bits", "skipped", str(error))
            return
        matrix_OI = torch.randn(2048, 1024, generator=torch.Generator().manual_seed(0)).to(self.device) * 0.02
        for bits, bound in BITS_APART.items():
            widened_OI = QuantizedMatrix(matrix_OI, bits).to(torch.float32)
            apart = float((widened_OI - matrix_OI).norm() / matrix_OI.norm())
            yield judged(f"a matrix in {bits} bits", apart <= bound, f"{apart:.3f} off (bar {bound})")

    def anchors(self) -> Iterator[Verdict]:
        """A peer on the CPU and one on the device merge each other's contributions."""
        peers = [
            Trainer(
                self.manifest,
                peer=PeerId(name),
                incarnation=1,
                corpus=self.corpus,
                devices=(device,),
                micro_batch_limit=2,
            )
            for name, device in (("a", "cpu"), ("b", self.device))
        ]
        stalls: list[float] = []
        try:
            for each in peers:
                each.start(initial_state(self.manifest))
            for number in range(1, ROUNDS + 1):
                closings = []
                for each in peers:
                    self._until_trained(each)
                    started = time.perf_counter()
                    closings.append(each.close().result(DEADLINE_S)[0])
                    stalls.append(time.perf_counter() - started)
                blobs, weights = [each.blob for each in closings], [each.micro_batches for each in closings]
                head = sha256(number.to_bytes(8, "big"))
                merged = [
                    each.merge(blobs, weights, own=True, round_number=number, head=head).result(DEADLINE_S)
                    for each in peers
                ]
                digests = {each.state_digest for each in merged}
                yield judged(f"anchors after round {number}", len(digests) == 1, f"{len(digests)} digest of 2 peers")
        finally:
            for each in peers:
                each.stop(DEADLINE_S)
        yield Verdict("closing a round, on both", "ok", f"{spread(stalls)} s (min / median / max), encoding and all")

    @staticmethod
    def _until_trained(trainer: Trainer) -> None:
        until = time.monotonic() + DEADLINE_S
        while trainer.progress().micro_batches < 2:
            if trainer.failure or time.monotonic() > until:
                raise RuntimeError(trainer.failure or "a round takes too long")
            time.sleep(0.01)

    def memory(self) -> Iterator[Verdict]:
        """What is told, beside what is taken."""
        if not self.device.startswith("cuda"):
            yield Verdict("memory", "skipped", "measured on cuda alone; benchmarks/memory.py is for the machine's own")
            return
        yield from self._taken_by_a_peer(is_compiled=False)
        yield from self._taken_by_a_peer(is_compiled=True)
        kept = {}
        for checkpointing in (False, True):
            _let_go_of_all()
            model = build_model(self.section, device=self.device, checkpointing=checkpointing)
            x = torch.randint(0, 256, (self.manifest.inner.micro_batch, self.section.context), device=self.device)
            before = torch.cuda.memory_allocated()
            hidden = model.hidden(x)
            kept[checkpointing] = torch.cuda.memory_allocated() - before
            del hidden, model, x
        less = kept[False] / kept[True]
        yield judged(
            "activations with checkpointing", less >= ACTIVATIONS_LESS,
            f"{less:.1f} times less: {kept[False] / 1e6:.0f} and {kept[True] / 1e6:.0f} MB, {self.section.layers} layers",
        )  # fmt: skip
        _let_go_of_all()
        section = ModelSection(
            layers=1, hidden_size=64, heads=2, kv_heads=1, mlp_size=64, context=2048, vocab_size=128_256
        )
        model = build_model(section, device=self.device)
        model.flat_N.normal_(std=0.02)
        x = torch.randint(0, section.vocab_size, (4, 2048), device=self.device)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        train_on(model, x, x)
        extra = torch.cuda.max_memory_allocated() - before
        yield judged("loss over 128,256 ids", extra <= LOSS_BYTES, f"{extra / 1e9:.2f} GB beside the weights")

    def _taken_by_a_peer(self, *, is_compiled: bool) -> Iterator[Verdict]:
        _let_go_of_all()
        told, how = StageSize.of(self.manifest, 0), " with --compile" if is_compiled else ""
        left = torch.cuda.memory_allocated()
        loop = self.loop(self.device, compiled=is_compiled)
        for _ in range(4):
            loop.train_on()
        taken = torch.cuda.max_memory_allocated()
        need = told.device_bytes() - CARD_BASE_BYTES
        if not is_compiled:  # which keeps less of a micro-batch, and is told nothing of its own
            yield judged(
                "memory told", abs(need / taken - 1) <= TOLD_APART,
                f"told {need / 1e9:.3f} GB beside what does not grow, taken {taken / 1e9:.3f} ({need / taken - 1:+.1%}), "
                f"{left / 1e9:.3f} of it what was there before",
            )  # fmt: skip
        free, total = torch.cuda.mem_get_info()
        cached = torch.cuda.max_memory_reserved()
        context = total - free - torch.cuda.memory_reserved()
        whole = context + cached
        yield judged(
            f"all that the card lost to us{how}", whole <= told.device_bytes(),
            f"{whole / 1e9:.3f} GB: context {context / 1e9:.3f}, the allocator's {cached / 1e9:.3f}; told {told.device_bytes() / 1e9:.3f}",
        )  # fmt: skip

    def speeds(self) -> Iterator[Verdict]:
        """A peer's loop beside a plain one, step by step in turn."""
        ours = {precision: self.loop(self.device, precision=precision) for precision in ("float32", "bfloat16")}
        try:
            theirs = self._plain()
        except ImportError as error:
            theirs = None
            yield Verdict("beside transformers", "skipped", str(error))
        found: dict[str, list[float]] = {"float32": [], "bfloat16": [], "plain": []}
        for number in range(self.steps + 2):
            pair: list[tuple[str, Callable[[], Any]]] = [(name, loop.train_on) for name, loop in ours.items()]
            pair += [] if theirs is None else [("plain", theirs)]
            for name, step in pair if number % 2 else pair[::-1]:
                rate = self.speed(step, self.step_tokens)
                if number >= 2:  # the first choose kernels
                    found[name].append(rate)
        for name in ("float32", "bfloat16"):
            yield Verdict(f"tokens a second in {name}", "ok", spread(found[name]))
        if theirs is not None:
            ratio = statistics.median(
                ours / plain for ours, plain in zip(found["float32"], found["plain"], strict=True)
            )
            yield judged("beside transformers", ratio >= LEAST_SPEED, f"{ratio:.3f} of a plain loop's, float32 both")

    def _plain(self) -> Callable[[], None]:
        import transformers

        from dilocox_peer.model.huggingface import config_of

        config = transformers.LlamaConfig(**config_of(self.section))
        model: Any = (
            transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa").to(self.device).train()
        )
        inner = self.manifest.inner
        optimizer = torch.optim.AdamW(model.parameters(), lr=inner.learning_rate, fused=True)

        def step() -> None:
            ids = torch.randint(0, 64, (inner.micro_batch, self.section.context)).to(self.device)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            float(loss.detach())
            torch.nn.utils.clip_grad_norm_(model.parameters(), inner.clip_norm)
            optimizer.step()
            optimizer.zero_grad()

        return step

    def cards(self) -> Iterator[Verdict]:
        """Two cards of one peer."""
        if torch.cuda.device_count() < 2:
            yield Verdict("two cards", "skipped", f"{torch.cuda.device_count()} here")
            return
        manifest = self.manifest.model_copy(update={"inner": self.manifest.inner.model_copy(update={"accumulate": 8})})
        one, two = self.loop("cuda:0", manifest=manifest), self.loop("cuda:0", "cuda:1", manifest=manifest)
        ratios = []
        for _ in range(self.steps):
            single = self.speed(lambda: [one.train_on() for _ in range(8)], 8 * self.step_tokens)
            ratios.append(self.speed(lambda: [two.train_on() for _ in range(4)], 8 * self.step_tokens) / single)
        ratio = statistics.median(ratios[1:] or ratios)
        yield judged("two cards", ratio >= CARDS_SPEED, f"{ratio:.2f} times one")
        apart = float((one.close().flat_N - two.close().flat_N).abs().max())
        yield judged("two cards compute what one does", apart <= 1e-3, f"{apart:.1e} apart at most")


def _let_go_of_all() -> None:
    """What earlier checks took: loops refer to themselves, as a session's do that a peer leaves (peer/session.py collects them too)."""
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--preset", default="125m")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=CHECKS)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    day = Day(arguments)
    card = torch.cuda.get_device_name(arguments.device) if arguments.device.startswith("cuda") else arguments.device
    print(
        f"# {card}, torch {torch.__version__}, Python {platform.python_version()}\n# command: python {' '.join(sys.argv)}"
    )
    found: list[Verdict] = []
    for name in arguments.only:
        try:
            for verdict in getattr(day, name)():
                found.append(verdict)
                print(f"{verdict.verdict:8}{verdict.check}: {verdict.found}", flush=True)
        except Exception as error:  # the other checks are worth their time all the same
            found.append(Verdict(name, "missed", f"{type(error).__name__}: {error}"))
            print(f"{'missed':8}{name}: {type(error).__name__}: {error}", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(each) for each in found], indent=1))
    missed = sum(each.verdict == "missed" for each in found)
    print(f"{len(found)} checks, {missed} missed, {sum(each.verdict == 'skipped' for each in found)} skipped")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
