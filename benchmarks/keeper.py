"""What a bootstrap takes of its machine: idle, and beside a run of `tiny` that it keeps, with two peers.

    PYTHONPATH=. python benchmarks/keeper.py [--seconds 60]

Memory as PSS (shared pages divided among those who share them), of its own process, its network daemon and the evaluation's; processor
seconds of its own process.
"""

import argparse
import asyncio

import psutil

from dilocox_peer.config import preset
from tests.swarm.watched import Watched


def pss_mb(pid: int) -> dict[str, int]:
    process = psutil.Process(pid)
    found = {"bootstrap": process.memory_full_info().pss}
    for child in process.children(recursive=True):
        found["p2pd" if child.name() == "p2pd" else "evaluation"] = child.memory_full_info().pss
    return {name: round(size / 1e6) for name, size in found.items()}


async def measure(seconds: float, *flags: str) -> None:
    rounds = {"total": 10_000, "inner_steps": 32, "checkpoint_every": 4}
    async with Watched(preset("tiny", rounds=rounds)) as swarm:
        bootstrap = await swarm.start_bootstrap(*flags)
        pid = bootstrap.process.pid
        await asyncio.sleep(5.0)
        print(f"{' '.join(flags) or '(as it is)'}: idle {pss_mb(pid)} MB", flush=True)
        for label in ("a", "b"):
            await swarm.start_peer(label)
        before = psutil.Process(pid).cpu_times()
        await asyncio.sleep(seconds)
        after = psutil.Process(pid).cpu_times()
        cpu_s = after.user + after.system - before.user - before.system
        print(
            f"    beside round {swarm.round_of('a')}: {pss_mb(pid)} MB, {cpu_s:.1f} s of processor in {seconds:.0f} s"
        )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    seconds = parser.parse_args().seconds
    for flags in (("--no-keep",), ("--no-evaluate",), ()):
        await measure(seconds, *flags)


if __name__ == "__main__":
    asyncio.run(main())
