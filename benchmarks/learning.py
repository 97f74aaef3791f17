"""Does compressed, overlapped averaging learn as well as AllReduce? Real training, several seeds, one process.

Trains the tiny preset through the peer's own Stage, InnerOptimizer, codecs and OuterOptimizer (learning_sim.py) and prints, for
every method, validation loss, the gap to both synchronous references (AdamW and Muon at tuned learning rates) and the
bytes a peer sends against a ring AllReduce of float32 gradients. Gaps are taken seed by seed, then averaged: seeds share
initial parameters and data draws. Plots: validation loss over tokens and over bytes.

Each finished run is a line in --out, so the study may be interrupted; --resume leaves out what is there.

    python benchmarks/learning.py --list
    python benchmarks/learning.py --methods gates --seeds 0,1,2 --resume
    python benchmarks/learning.py --methods lr-adamw,lr-muon --seeds 0        learning rates of the references
    python benchmarks/learning.py --methods slices --seeds 0,1,2 --replicas 4 (16, 32)    results in slices
    python benchmarks/learning.py --table                                     from what --out holds
"""

import argparse
import ast
import fnmatch
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from learning_sim import Method, Outcomes, Study, run

from dilocox_peer.data.corpus import load_corpus

SYNC_ADAMW_LR = 4e-3
SYNC_MUON_LR = 2.7e-2
"""The best of --methods lr-adamw and lr-muon on seed 0 of the default text: at 512 steps 4e-2 is the better one for Muon, at 1536 2.7e-2."""

ADAMW = Method("sync-adamw", optimizer="adamw", learning_rate=SYNC_ADAMW_LR, sync=True)
MUON = Method("sync-muon", optimizer="muon", learning_rate=SYNC_MUON_LR, sync=True)
SPARSE = Method("topk-H8", codec="topk", inner_steps=8, learning_rate=3e-2, outer_learning_rate=0.8, outer_momentum=0.4)
DEFAULTS = replace(SPARSE, name="defaults")
MAX = replace(SPARSE, name="max", inner_steps=16)
INT2 = Method("int2-H32", learning_rate=2.7e-2)
SHORT = 0.375  # of the tokens: the share that paired comparisons train


def _methods() -> dict[str, list[Method]]:
    pair = replace(INT2, steps_share=SHORT)
    warm = replace(pair, warm_steps=192)
    sparse = replace(DEFAULTS, steps_share=SHORT)
    warm_sparse = replace(sparse, warm_steps=192)
    paired = [
        replace(pair, name="pair-fp32-none", codec="none", arrivals=(0.0,)),
        replace(pair, name="pair-int2-none", arrivals=(0.0,)),
        replace(pair, name="pair-int2-quarter"),
        replace(pair, name="pair-int2-unequal", arrivals=(0.0625, 0.125, 0.25, 0.5)),
        replace(pair, name="pair-int2-half-speed", speeds=(1.0, 1.0, 1.0, 0.5)),
        replace(pair, name="pair-int2-carry", stale_share=0.5),
        replace(warm, name="pair-warm-none", arrivals=(0.0,)),
        replace(warm, name="pair-warm-one-step", arrivals=(1.0,)),
        replace(sparse, name="pair-none-defaults", arrivals=(0.0,)),
        replace(sparse, name="pair-quarter-defaults"),
        replace(sparse, name="pair-unequal-defaults", arrivals=(0.125, 0.25, 0.25, 0.5)),
        replace(sparse, name="pair-carry-defaults", stale_share=0.5),
        replace(warm_sparse, name="pair-warm-none-defaults", arrivals=(0.0,)),
        replace(warm_sparse, name="pair-warm-one-step-defaults", arrivals=(1.0,)),
    ]
    adamw = replace(pair, name="pair-adamw-int2", optimizer="adamw", learning_rate=SYNC_ADAMW_LR)
    halved = [
        paired[9],
        replace(paired[9], name="pair-quarter-defaults-halved", moments="bfloat16", residual="bfloat16"),
        adamw,
        replace(adamw, name="pair-adamw-int2-halved", moments="bfloat16", residual="bfloat16"),
    ]
    slices = replace(sparse, name="slices", copies=2)
    groups = {
        "slices": [  # docs/decisions/0022: the exact mean, everybody's contribution to everybody, and results in slices
            replace(sparse, name="exact-H8", codec="none"),
            replace(sparse, name="all-topk-H8"),
            replace(slices, name="slices-topk-sign-H8", owner_codec="sign"),
            replace(slices, name="slices-topk-int2-H8", owner_codec="int2"),
            replace(slices, name="slices-topk-ecsq-H8", owner_codec="ecsq"),
            replace(slices, name="slices-int2-int2-H8", codec="int2", owner_codec="int2"),
            replace(slices, name="slices-int2-int4-H8", codec="int2", owner_codec="int4"),
        ],
        "halved": halved,
        "halved-long": [replace(each, name=each.name.replace("pair", "long"), steps_share=1.0) for each in halved],
        "reference": [ADAMW, MUON],
        "gates": [DEFAULTS, MAX],
        "paired": paired,
        "paired-long": [
            *(replace(each, name=each.name.replace("pair", "long"), steps_share=1.0) for each in paired),
        ],
        "lr-adamw": [
            replace(ADAMW, name=f"sync-adamw-{rate:g}", learning_rate=rate) for rate in (2.5e-3, 4e-3, 6e-3, 1e-2)
        ],
        "lr-muon": [
            replace(MUON, name=f"sync-muon-{rate:g}", learning_rate=rate) for rate in (8e-3, 1.2e-2, 1.8e-2, 2.7e-2, 4e-2, 6e-2)
        ],
        "lr-ours": [
            replace(INT2, name=f"int2-H32-lr-{rate:g}", learning_rate=rate) for rate in (8e-3, 1.8e-2, 2.7e-2, 4e-2)
        ],
        "bytes": [INT2, replace(INT2, name="sign-H16", codec="sign", inner_steps=16), SPARSE],
        "codecs": [
            replace(pair, name=f"{codec}-H32", codec=codec)
            for codec in ("fp16", "int8", "int4", "sign", "topk", "lowrank-int4")
        ],
        "no-feedback": [
            replace(pair, name=f"{codec}-H32-no-feedback", codec=codec, residual_decay=0.0)
            for codec in ("int2", "sign", "topk")
        ],
        "overlap": [
            replace(pair, name="overlap-half", arrivals=(0.5,)),
            replace(pair, name="overlap-one-step", arrivals=(1.0,)),
        ],
        "diloco": [
            Method("diloco-adamw", optimizer="adamw", learning_rate=2e-3, outer_learning_rate=0.9, outer_momentum=0.7,
                   codec="none", arrivals=(0.0,)),
            Method("diloco-muon", learning_rate=2.7e-2, codec="none", arrivals=(0.0,)),
        ],
        "inner-steps": [
            replace(pair, name="int2-H16", inner_steps=16),
            replace(pair, name="int2-H64", inner_steps=64),
        ],
        "adamw": [
            replace(SPARSE, name="topk-H8-adamw", optimizer="adamw", learning_rate=2e-3, outer_learning_rate=0.9,
                    outer_momentum=0.7)
        ],
        "ideas": [
            replace(SPARSE, name="topk-H8-decay-1", residual_decay=1.0),
            replace(SPARSE, name="topk-H8-delayed-nesterov", momentum_every=4),
            replace(SPARSE, name="topk-H4-H8", inner_steps_until=((0.1, 4),)),
            replace(SPARSE, name="topk-4%-H8", codec="topk:164"),
            replace(SPARSE, name="topk-3%-H4", codec="topk:128", inner_steps=4, residual_decay=0.9),
            replace(SPARSE, name="topk-H-grows", inner_steps_until=((0.5, 6), (0.8, 10)), inner_steps=24),
            replace(SPARSE, name="fp32-H8", codec="none"),
            replace(SPARSE, name="owner-H4", owner_codec="topk", inner_steps=4),
            replace(SPARSE, name="owner-sign-H8", codec="sign", owner_codec="sign"),
            replace(SPARSE, name="island2-H4", island=2, inner_steps=4),
            replace(SPARSE, name="topk-H8-momentum", momentum_codec="none"),
            replace(SPARSE, name="per-tensor-codec", codec="*embed*=topk *lm_head*=topk *=sign", inner_steps=16,
                    residual_decay=1.0),
            replace(SPARSE, name="per-tensor-H", skip=("*_proj*", 2), inner_steps=4),
        ],
        "outer": [
            replace(SPARSE, name=f"topk-H8-outer-{rate:g}-{momentum:g}", outer_learning_rate=rate, outer_momentum=momentum)
            for rate, momentum in ((0.8, 0.6), (1.0, 0.4), (1.0, 0.2), (1.2, 0.2), (1.5, 0.0))
        ],
        "pair-settings": [
            *(replace(each, name=f"{each.name}-lr-0.018", learning_rate=1.8e-2) for each in (paired[1], paired[2], paired[5])),
            *(replace(each, name=f"{each.name}-outer-0.8-0.4", outer_learning_rate=0.8, outer_momentum=0.4)
              for each in paired[1:3]),
            *(replace(each, name=f"{each.name}-lr-0.012", learning_rate=1.2e-2) for each in paired[6:8]),
            *(replace(each, name=f"{each.name}-adamw", optimizer="adamw", learning_rate=SYNC_ADAMW_LR) for each in paired[6:8]),
            *(replace(each, name=f"{each.name}-outer-{rate:g}-{momentum:g}", outer_learning_rate=rate, outer_momentum=momentum)
              for rate, momentum in ((0.7, 0.3), (0.8, 0.4), (1.0, 0.2), (1.2, 0.0)) for each in paired[6:8]),
        ],
    }  # fmt: skip
    return groups


def chosen(spec: str) -> list[Method]:
    """Methods of the groups and names (with wildcards) in spec, each once."""
    groups = _methods()
    methods: dict[str, Method] = {}
    for word in spec.split(","):
        found = groups.get(word) or [
            each for group in groups.values() for each in group if fnmatch.fnmatch(each.name, word)
        ]
        if word == "all":
            found = [each for name, group in groups.items() if not name.startswith("lr-") for each in group]
        if not found:
            raise SystemExit(f"no method or group {word!r}; --list shows them")
        methods.update({each.name: each for each in found})
    return list(methods.values())


def variant(spec: str) -> Method:
    """name:base:field=value;field=value: the method `base` with other fields."""
    name, base, fields = spec.split(":", 2)
    values = {}
    for assignment in filter(None, fields.split(";")):
        field, value = assignment.split("=", 1)
        try:
            values[field] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            values[field] = value
    return replace(chosen(base)[0], name=name, **values)


def read_records(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    names = first_names()
    records = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return [{**record, "name": names.get(record["key"].split(":")[0], record["name"])} for record in records]


def first_names() -> dict[str, str]:
    """key -> name: equal methods of two groups are one, under its first name."""
    names: dict[str, str] = {}
    for method in (each for group in _methods().values() for each in group):
        names.setdefault(method.key(), method.name)
    return names


def record_key(study: Study, method: Method, text: str) -> str:
    return f"{method.key()}:{study.seed}:{study.tokens}:{study.num_replicas}:{text}"


def text_digest(corpus) -> str:
    inputs, _ = next(iter(corpus.validation_batches(1 << 20, batch=1 << 14, context=64)))
    return hashlib.sha256(inputs.numpy().tobytes() + str(corpus.train_tokens).encode()).hexdigest()[:12]


def table(records: list[dict[str, Any]]) -> str:
    """One row a method: over its seeds, gaps to the references of the same seed and number of steps."""
    of_method: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for record in records:
        of_method.setdefault((record["name"], record["steps"]), []).append(record)
    references = {
        (record["name"], record["seed"], record["steps"]): record["loss"]
        for record in records
        if record["name"] in (ADAMW.name, MUON.name)
    }
    lines = [
        f"references: {ADAMW.name} at {SYNC_ADAMW_LR:g}, {MUON.name} at {SYNC_MUON_LR:g}",
        "method                   steps   n  loss mean (min..max)        EMA    A %            M %            times  bytes/token  H  CPU s",
    ]
    for (name, steps), runs in of_method.items():
        losses = [run["loss"] for run in runs]
        gaps = []
        for reference in (ADAMW.name, MUON.name):
            pairs = [
                100 * (run["loss"] / references[reference, run["seed"], steps] - 1)
                for run in runs
                if (reference, run["seed"], steps) in references
            ]
            gaps.append(f"{statistics.mean(pairs):+5.2f} ({spread(pairs)})" if pairs else "-")
        first = runs[0]
        times = first["all_reduce_bytes"] / first["bytes_sent"]
        lines.append(
            f"{name:24} {steps:5} {len(runs):3}  {statistics.mean(losses):.4f} ({min(losses):.4f}..{max(losses):.4f})"
            f"  {statistics.mean(run['ema_loss'] for run in runs):.4f}  {gaps[0]:14} {gaps[1]:14} {times:6.1f}"
            f"  {first['bytes_sent'] / first['tokens'] * first['replicas']:9.2f}  {'-' if first['method']['sync'] else first['method']['inner_steps']:>3}"
            f"  {statistics.mean(run['seconds'] for run in runs):5.0f}"
        )
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    return f"{min(values):+.1f}..{max(values):+.1f}"


PAIRS = (
    ("int2 against fp32, both undelayed", "pair-int2-none", "pair-fp32-none", 1.0),
    ("arrival at a quarter against none", "pair-int2-quarter", "pair-int2-none", 1.2),
    ("unequal arrival against a quarter", "pair-int2-unequal", "pair-int2-quarter", 0.3),
    ("one-step against none, common checkpoint", "pair-warm-one-step", "pair-warm-none", 3.5),
    ("carry against flush", "pair-int2-carry", "pair-int2-quarter", 0.6),
    ("one replica at half speed", "pair-int2-half-speed", "pair-int2-quarter", None),
    ("arrival at a quarter against none, defaults", "pair-quarter-defaults", "pair-none-defaults", 1.2),
    ("unequal arrival against a quarter, defaults", "pair-unequal-defaults", "pair-quarter-defaults", 0.3),
    ("one-step against none, defaults", "pair-warm-one-step-defaults", "pair-warm-none-defaults", 3.5),
    ("carry against flush, defaults", "pair-carry-defaults", "pair-quarter-defaults", 0.6),
    ("moments and residual in bf16, defaults", "pair-quarter-defaults-halved", "pair-quarter-defaults", 0.3),
    ("moments and residual in bf16, AdamW, int2", "pair-adamw-int2-halved", "pair-adamw-int2", 0.3),
)


def pair_table(records: list[dict[str, Any]]) -> str:
    """The paired comparisons, seed by seed."""
    losses = {(record["name"], record["steps"], record["seed"]): record["loss"] for record in records}
    names = first_names()
    shown_as = {method.name: names[method.key()] for group in _methods().values() for method in group}
    lines = ["pair                                          steps  n   mean %  (min..max)      gate"]
    for title, first, second, gate in PAIRS:
        for prefix in ("pair", "long"):
            one, other = (shown_as[name.replace("pair", prefix)] for name in (first, second))
            gaps: dict[int, list[float]] = {}
            for (name, steps, seed), loss in losses.items():
                if name == one and (other, steps, seed) in losses:
                    gaps.setdefault(steps, []).append(100 * (loss / losses[other, steps, seed] - 1))
            for steps, each in gaps.items():
                shown = "no instability" if gate is None else f"<= {gate} %"
                lines.append(
                    f"{title:44} {steps:6} {len(each):2}   {statistics.mean(each):+5.2f}  ({spread(each)})   {shown}"
                )
    return "\n".join(lines)


def plots(records: list[dict[str, Any]], folder: Path, names: list[str]) -> None:
    """learning-tokens.png and learning-bytes.png: mean over the seeds of each method."""
    try:
        import matplotlib as mpl
    except ImportError:
        print("no plots: pip install matplotlib")
        return
    mpl.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    for column, label, name in (
        (0, "tokens of all replicas", "learning-tokens.png"),
        (1, "bytes sent by a peer", "learning-bytes.png"),
    ):
        figure, axes = pyplot.subplots(figsize=(8, 5))
        for method in names:
            runs = [record for record in records if record["name"] == method]
            if not runs:
                continue
            longest = max(record["steps"] for record in runs)
            curves = [record["curve"] for record in runs if record["steps"] == longest]
            length = min(map(len, curves))
            xs = [curves[0][point][column] for point in range(length)]
            ys = [statistics.mean(curve[point][2] for curve in curves) for point in range(length)]
            axes.plot(xs, ys, marker=".", label=f"{method} (n={len(curves)})")
        axes.set_xlabel(label)
        axes.set_ylabel("validation loss, nats a byte")
        if column:
            axes.set_xscale("log")
        axes.grid(alpha=0.3)
        axes.legend()
        figure.tight_layout()
        figure.savefig(folder / name, dpi=110)
        pyplot.close(figure)


def header(corpus) -> str:
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return (
        f"# {' '.join(sys.argv)}\n# {corpus.train_tokens:,} tokens to train on; {platform.machine()}, torch {torch.__version__}, 1 thread, "
        f"commit {commit.stdout.strip()}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", action="append", default=[], help="a text file or folder; default: Python's library")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1536 * 2048, help="of all replicas together")
    parser.add_argument("--methods", default="reference,gates,paired", help="names, wildcards or groups, by comma")
    parser.add_argument("--variant", action="append", default=[], help=variant.__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/learning.jsonl"))
    parser.add_argument("--plots", type=Path, default=Path("out"))
    parser.add_argument("--plot-methods", default="sync-adamw,sync-muon,diloco-adamw,diloco-muon,defaults,max")
    parser.add_argument("--resume", action="store_true", help="leave out the runs that --out holds")
    parser.add_argument("--table", action="store_true", help="print what --out holds and train nothing")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--wait-while", type=Path, help="before each run, wait until this file is gone")
    arguments = parser.parse_args()
    if arguments.list:
        for group, methods in _methods().items():
            print(f"{group}: {', '.join(each.name for each in methods)}")
        return
    if not arguments.table:
        train(arguments)
    records = read_records(arguments.out)
    print(table(records))
    print(pair_table(records))
    plots(records, arguments.plots, arguments.plot_methods.split(","))


def train(arguments) -> None:
    torch.set_num_threads(1)
    corpus = load_corpus("files" if arguments.data else "stdlib", arguments.data, validation=0.05)
    print(header(corpus), flush=True)
    text = text_digest(corpus)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    done = {record["key"] for record in read_records(arguments.out)} if arguments.resume else set()
    for seed in map(int, arguments.seeds.split(",")):
        study = Study(corpus, arguments.replicas, arguments.tokens, seed)
        methods = chosen(arguments.methods) if arguments.methods else []
        for method in [*methods, *map(variant, arguments.variant)]:
            key = record_key(study, method, text)
            if key in done:
                continue
            while arguments.wait_while and arguments.wait_while.exists():
                time.sleep(2)
            try:
                outcomes = run(study, method)
            except FloatingPointError as error:
                print(f"{method.name} seed {seed}: {error}", flush=True)
                continue
            write(arguments.out, key, study, method, text, outcomes)
            times = outcomes.all_reduce_bytes / outcomes.bytes_sent
            print(
                f"{method.name:24} seed {seed}  {outcomes.steps} steps  {outcomes.loss:.4f}  EMA {outcomes.ema_loss:.4f}"
                f"  {times:.1f}x  jump {outcomes.worst_jump:.3f}  {outcomes.seconds:.0f} s",
                flush=True,
            )


def write(path: Path, key: str, study: Study, method: Method, text: str, outcomes: Outcomes) -> None:
    record = {
        "key": key, "name": method.name, "seed": study.seed, "text": text, "replicas": study.num_replicas // method.island,
        "method": asdict(method), **asdict(outcomes),
    }  # fmt: skip
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())


if __name__ == "__main__":
    main()
