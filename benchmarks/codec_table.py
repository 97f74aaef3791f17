"""Speed, size, error and memory of every codec on one thread, beside the machine's copy bandwidth in the same run.

    python benchmarks/codec_table.py [--elements 10000000] [--repeats 7] [--codec int2 ...]
    python benchmarks/codec_table.py --large            # 100M floats
    python benchmarks/codec_table.py --outer-step       # one outer step of 24 matrices of 4096 x 1024, lowrank-int4 at rank 64
    python benchmarks/codec_table.py --hivemind         # hivemind's codecs and its PowerSGD on the same tensors

--hivemind runs whole only in an environment with `numpy<2.4` (hivemind 1.1.12 decodes with calls that newer ones refuse) and
bitsandbytes (its blockwise codec): python -m venv there && there/bin/pip install . 'numpy<2.4' bitsandbytes.

GB/s are of the float32 side (4 bytes an element), encoding and decoding alike, by CPU time: others on the machine then cost
only cache and memory bandwidth, which the copy in the same run shows. The input is normal and then scaled column by
column, as pseudo-gradients are. error: |x - decoded| / |x| of one encoding, without error feedback. memory: highest
resident size during an encode over that before it, per byte of the tensor, payload included (Linux only).
Expected beforehand: elementwise passes over pieces that stay in cache take 0.05 to 0.1 ns an element each; int4 encodes in
8 passes (5 GB/s at best), int2 in 12 (3 GB/s), each decodes in 5 to 9. topk sorts: 10 ns an element, 0.4 GB/s.
lowrank-int4 (rank 64, the input's rows as they are) encodes in 2 matrix products of 128 operations an element, 3 more or
less from a cold start, and decodes in one: at 85 GFLOP/s 1.5 ns each, so 1.3 GB/s warm, 0.6 cold, 2.7 decoding.
--outer-step, for 100M: pseudo-gradient, feedback and residual 0.1 s, encode 0.4, decode 0.15; merging 0.15 for each contribution.
"""

import argparse
import ctypes
import gc
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from dilocox_peer.compression.codec import CODECS, RememberingCodec, TensorCodec
from dilocox_peer.compression.contribution import ContributionEncoder, open_contribution
from dilocox_peer.compression.feedback import decay_by_codec, residual_after, with_feedback
from dilocox_peer.compression.lowrank import LowRankCodec
from dilocox_peer.compression.reader import PIECE
from dilocox_peer.compression.topk import position_bits
from dilocox_peer.peer.training.anchor_state import AnchorState
from dilocox_peer.peer.training.outer import OuterOptimizer, OuterSettings
from dilocox_peer.types import Digest, Layout

COLUMNS = 4096


def timed(step: Callable[[], object], repeats: int) -> list[float]:
    step()
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        step()
        seconds.append(time.process_time() - start)
    return seconds


def rates(num_bytes: int, seconds: list[float]) -> str:
    """min / median / max in GB/s."""
    ordered = sorted(num_bytes / 1e9 / each for each in seconds)
    return f"{ordered[0]:5.2f} / {ordered[len(ordered) // 2]:5.2f} / {ordered[-1]:5.2f}"


def extra_memory(step: Callable[[], object]) -> int | None:
    """Bytes of resident memory that step takes at its worst, beyond what was there; None where it cannot be told."""
    try:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # or memory that was freed, and not given back, hides what is taken
        Path("/proc/self/clear_refs").write_text("5")
        before = _status_kib("VmRSS")
        kept = step()
        after = _status_kib("VmHWM")
        del kept
    except (OSError, AttributeError):
        return None
    return 1024 * (after - before)


def _status_kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field + ":")).split()[1])


def measure(codec: TensorCodec, x: torch.Tensor, repeats: int) -> str:
    out = torch.empty_like(x)
    num_bytes = 4 * x.numel()
    payload = codec.encode(x)  # before memory is measured: libraries load themselves and keep buffers
    memory = extra_memory(lambda: codec.encode(x))
    encoder = codec.encoder() if isinstance(codec, RememberingCodec) else codec
    encode = timed(lambda: encoder.encode(x), repeats)  # warm, where the codec remembers
    decode = timed(lambda: codec.decode(memoryview(payload), out), repeats)
    lost = torch.linalg.vector_norm(out.sub_(x)) / torch.linalg.vector_norm(x)
    shown = "     ?" if memory is None else f"{memory / num_bytes:6.2f}"
    bits = 8 * len(payload) / x.numel()
    return f"{codec.name:12} {rates(num_bytes, encode)}   {rates(num_bytes, decode)}  {float(lost):7.4f}  {bits:7.4f} {32 / bits:6.1f}  {shown}"


def outer_step(repeats: int, rank: int = 64) -> None:
    """Seconds for 100M parameters: pseudo-gradient + residual, encode, decode the own, new residual; as OuterOptimizer.offer does."""
    layout = Layout.of([(f"matrix{index}", (4096, 1024)) for index in range(24)])
    codec = LowRankCodec(rank)
    encoder = ContributionEncoder(layout, lambda _spec: codec)
    decay = decay_by_codec(layout, lambda _spec: codec)[0]  # one codec, one decay
    generator = torch.Generator().manual_seed(0)
    pseudo_gradient, residual = torch.randn(layout.num_elements, generator=generator), torch.zeros(layout.num_elements)
    sent, scratch, blob = torch.zeros(layout.num_elements), torch.empty(PIECE), b""
    seconds: dict[str, list[float]] = {"feedback": [], "encode": [], "decode, residual": [], "all": []}
    for repeat in range(repeats + 1):
        marks = [time.process_time()]
        with_feedback(pseudo_gradient, residual, decay, out=sent)
        marks.append(time.process_time())
        blob = encoder.encode(sent)
        marks.append(time.process_time())
        for start, stop, values in open_contribution(blob, layout).decode_into(scratch):
            residual_after(sent[start:stop], values)
        residual, sent = sent, residual
        marks.append(time.process_time())
        if repeat:  # the first is a cold start
            for name, began, ended in zip(seconds, marks, marks[1:], strict=False):
                seconds[name].append(ended - began)
            seconds["all"].append(marks[-1] - marks[0])
    print(f"# one outer step, {layout.num_elements:,} parameters, rank {rank}: {len(blob) / 1e6:.1f} MB on the wire")
    print("step             seconds of CPU, min / median / max")
    for name, each in seconds.items():
        print(f"{name:16} {spread(each)}" + ("   (goal: 0.7)" if name == "all" else ""))
    print(f"copy             {spread(timed(lambda: sent.copy_(pseudo_gradient), repeats))}")
    print(
        f"OuterOptimizer.offer  {spread(real_offers(layout, codec, pseudo_gradient, repeats))}   (all that, and what it measures)"
    )


def real_offers(layout: Layout, codec: TensorCodec, pseudo_gradient: torch.Tensor, repeats: int) -> list[float]:
    """CPU seconds of the peer's own call, the snapshot ready."""
    zeros = bytes(4 * layout.num_elements)
    state = AnchorState.of(layout, head=Digest(bytes(32)), round_number=0, anchor=zeros, momentum=zeros)
    outer = OuterOptimizer(OuterSettings(0.7, 0.6, lambda _spec: codec), state)
    seconds = []
    for _ in range(repeats + 1):
        snapshot = pseudo_gradient.clone()
        started = time.process_time()
        outer.offer(snapshot, 1)
        seconds.append(time.process_time() - started)
        outer.withdraw()
    return seconds[1:]


def spread(values: list[float]) -> str:
    ordered = sorted(values)
    return f"{ordered[0]:.3f} / {ordered[len(ordered) // 2]:.3f} / {ordered[-1]:.3f}"


def compare_hivemind(x: torch.Tensor, repeats: int) -> None:
    """hivemind's codecs on the same tensor, then its PowerSGD basis on an exactly rank-deficient matrix beside QR."""
    from hivemind import compression as theirs  # slow to import, and needed by nobody else
    from hivemind.optim.power_sgd_averager import orthogonalize_
    from hivemind.utils.tensor_descr import TensorDescriptor

    info = theirs.CompressionInfo(0, TensorDescriptor.from_tensor(x))
    for name in ("Float16Compression", "Uniform8BitQuantization", "Quantile8BitQuantization", "BlockwiseQuantization"):
        try:
            codec = getattr(theirs, name)()
            packed = codec.compress(x, info)
            lost = torch.linalg.vector_norm(codec.extract(packed) - x) / torch.linalg.vector_norm(x)
            encode = timed(partial(codec.compress, x, info), repeats)
            decode = timed(partial(codec.extract, packed), repeats)
        except (TypeError, ImportError) as error:
            print(f"{name:26} fails: {str(error).splitlines()[0]}")
            continue
        bits = 8 * len(packed.buffer) / x.numel()
        print(
            f"{name:26} {rates(4 * x.numel(), encode)}   {rates(4 * x.numel(), decode)}  {float(lost):7.4f}  {bits:7.4f}"
        )
    matrix = torch.randn(4096, 8) @ torch.randn(8, 64)  # rank 8 of 64: what unused embeddings or zero rows give
    for name, basis in (("PowerSGD orthogonalize_", matrix.clone()), ("torch.linalg.qr", torch.linalg.qr(matrix).Q)):
        if name.startswith("PowerSGD"):
            orthogonalize_(basis)
            milliseconds = [1000 * each for each in timed(lambda: orthogonalize_(matrix.clone()), repeats)]
        else:
            milliseconds = [1000 * each for each in timed(lambda: torch.linalg.qr(matrix), repeats)]
        farthest = float((basis.t() @ basis - torch.eye(64)).abs().max())
        print(f"{name:26} |P'P - I| = {farthest:.1e}, ms {spread(milliseconds)}")
    compare_power_sgd(x, repeats, orthogonalize_)


def compare_power_sgd(x: torch.Tensor, repeats: int, orthogonalize_: Callable[[torch.Tensor], object]) -> None:
    """hivemind's PowerSGDGradientAverager as a group of one computes it, factors in float32, beside lowrank-int4.

    Error of the first encoding and of the fourth of the same input, each starting where the last ended; seconds of one more
    encoding, the decoding included.
    """
    rank, (rows, columns) = 64, x.shape
    generator = torch.Generator().manual_seed(1)

    def of_rank(count: int, spectrum: torch.Tensor) -> torch.Tensor:
        left, right = (torch.randn(size, count, generator=generator) / size**0.5 for size in (rows, columns))
        product: torch.Tensor = (left * spectrum) @ right.t()
        return product

    inputs = {
        "x of above": x,
        "singular values ~ 1/k": of_rank(1024, 1 / torch.arange(1, 1025)),
        f"rank {rank // 2}": of_rank(rank // 2, torch.ones(rank // 2)),
    }
    print(f"rank {rank}: PowerSGD {32 * rank * (rows + columns) / x.numel():.3f} bits an element, lowrank-int4 "
          f"{8 * len(LowRankCodec(rank).encode(x)) / x.numel():.3f}")  # fmt: skip
    print("                                                error, 1st   4th      seconds, min / median / max")
    for name, each in inputs.items():
        q = torch.rand(columns, rank, generator=generator)

        def theirs(q: torch.Tensor = q, each: torch.Tensor = each) -> torch.Tensor:
            p = each @ q
            orthogonalize_(p)
            torch.matmul(each.t(), p, out=q)
            return p @ q.t()

        encoder, out = LowRankCodec(rank).encoder(), torch.empty_like(each)

        def ours(encoder=encoder, each: torch.Tensor = each, out: torch.Tensor = out) -> torch.Tensor:
            LowRankCodec(rank).decode(memoryview(encoder.encode(each)), out)
            return out

        for system, step in (("PowerSGD", theirs), ("lowrank-int4", ours)):
            norm = torch.linalg.vector_norm(each)
            errors = [float(torch.linalg.vector_norm(step() - each) / norm) for _ in range(4)]
            print(f"{name:24} {system:22} {errors[0]:9.4f} {errors[3]:9.4f}      {spread(timed(step, repeats))}")


def header() -> str:
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return (
        f"# {' '.join(sys.argv)}\n"
        f"# {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}, "
        f"numpy {np.__version__}, 1 thread, commit {commit.stdout.strip()}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=10_000_000)
    parser.add_argument("--large", action="store_true", help="100M elements")
    parser.add_argument("--outer-step", action="store_true", help="that alone")
    parser.add_argument("--hivemind", action="store_true", help="hivemind's alone")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--codec", action="append", choices=list(CODECS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.outer_step:
        print(header())
        outer_step(arguments.repeats)
        return
    rows = max(1, (100_000_000 if arguments.large else arguments.elements) // COLUMNS)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, COLUMNS, generator=generator) * torch.rand(COLUMNS, generator=generator) * 1e-3
    target = torch.empty_like(x)
    print(header())
    print(f"# {x.numel():,} float32, {4 * x.numel() / 1e6:.0f} MB; GB/s as min / median / max of {arguments.repeats}")
    print(
        f"copy         {rates(4 * x.numel(), timed(lambda: target.copy_(x), arguments.repeats))}   (read once, written once)"
    )
    if arguments.hivemind:
        compare_hivemind(x, arguments.repeats)
        return
    print("codec        encode GB/s             decode GB/s              error     bits/el  times  memory")
    for name in arguments.codec or CODECS:
        print(measure(CODECS[name], x, arguments.repeats), flush=True)
    if arguments.codec and "topk" not in arguments.codec:
        return
    bits, entropy = position_bits(tuple(x.shape), bytes(CODECS["topk"].encode(x)))
    print(f"topk: positions take {bits / x.numel():.4f} bits an element, {bits / entropy - 1:+.2%} on their entropy")
    print(f"peak resident size {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
