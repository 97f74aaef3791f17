"""Memory of one training peer of the tiny preset, all its processes, and what it is made of.

    python benchmarks/memory.py [--rounds 10]

PSS (proportional set size, from /proc/PID/smaps_rollup): shared pages count in proportion, so the sum over processes is
what the peer really takes. Expected beforehand: the import of torch and hivemind is most of it, the model (252 k
parameters x 32 B = 8 MB) is little.
"""

import argparse
import asyncio
import subprocess
import sys

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


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="certified before the peers are measured")
    arguments = parser.parse_args()
    print(header())
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
