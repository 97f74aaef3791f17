"""Speed, size, error and memory of every codec on one thread, beside the machine's copy bandwidth in the same run.

    python benchmarks/codecs.py [--elements 10000000] [--repeats 7] [--codec int2 ...]
    python benchmarks/codecs.py --large            # 100M floats

GB/s are of the float32 side (4 bytes an element), encoding and decoding alike, by CPU time: others on the machine then cost
only cache and memory bandwidth, which the copy in the same run shows. The input is normal and then scaled column by
column, as pseudo-gradients are. error: |x - decoded| / |x| of one encoding, without error feedback. memory: highest
resident size during an encode over that before it, per byte of the tensor, payload included (Linux only).
Expected beforehand: elementwise passes over pieces that stay in cache take 0.05 to 0.1 ns an element each; int4 encodes in
8 passes (5 GB/s at best), int2 in 12 (3 GB/s), each decodes in 5 to 9. topk sorts: 10 ns an element, 0.4 GB/s.
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
from pathlib import Path

import numpy as np
import torch

from dilocox_peer.compression.codec import CODECS, TensorCodec
from dilocox_peer.compression.topk import position_bits

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
    memory = extra_memory(lambda: codec.encode(x))
    payload = codec.encode(x)
    encode = timed(lambda: codec.encode(x), repeats)
    decode = timed(lambda: codec.decode(memoryview(payload), out), repeats)
    lost = torch.linalg.vector_norm(out.sub_(x)) / torch.linalg.vector_norm(x)
    shown = "     ?" if memory is None else f"{memory / num_bytes:6.2f}"
    bits = 8 * len(payload) / x.numel()
    return f"{codec.name:6} {rates(num_bytes, encode)}   {rates(num_bytes, decode)}  {float(lost):7.4f}  {bits:7.4f} {32 / bits:6.1f}  {shown}"


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
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--codec", action="append", choices=list(CODECS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = max(1, (100_000_000 if arguments.large else arguments.elements) // COLUMNS)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, COLUMNS, generator=generator) * torch.rand(COLUMNS, generator=generator) * 1e-3
    target = torch.empty_like(x)
    print(header())
    print(f"# {x.numel():,} float32, {4 * x.numel() / 1e6:.0f} MB; GB/s as min / median / max of {arguments.repeats}")
    print(
        f"copy   {rates(4 * x.numel(), timed(lambda: target.copy_(x), arguments.repeats))}   (read once, written once)"
    )
    print("codec  encode GB/s             decode GB/s              error     bits/el  times  memory")
    for name in arguments.codec or CODECS:
        print(measure(CODECS[name], x, arguments.repeats), flush=True)
    bits, entropy = position_bits(tuple(x.shape), bytes(CODECS["topk"].encode(x)))
    print(f"topk: positions take {bits / x.numel():.4f} bits an element, {bits / entropy - 1:+.2%} on their entropy")
    print(f"peak resident size {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
