"""What a peer leaves to others: the processor time of a program in a session of its own, beside a peer that trains.

    python benchmarks/giving_way.py [--seconds 10] [--repeats 3]

The program is a loop on every core. The peer is a real one with a thread a core; --nice 19 is as a volunteer passes it, "niceness
alone" the same peer with its sessions' groups put back to 0, as it was before (Linux with sched_autogroup; elsewhere both are
equal). Expected beforehand: the kernel halves the machine between two sessions, whatever is nice in them; a group at 19
weighs 15 of 1024.
"""

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path

import psutil
from swarm import WatchedSwarm, header, spread

from dilocox_peer.config import preset
from dilocox_peer.network.autogroup import group_niceness

LOOP = "while True: pass"


def share(seconds: float) -> float:
    """Of all cores, that the loops get."""
    cores = os.cpu_count() or 1
    program = f"import os\nfor _ in range({cores - 1}):\n    if not os.fork():\n        break\n{LOOP}"
    first = psutil.Popen([sys.executable, "-c", program], start_new_session=True)
    try:
        time.sleep(seconds)
        return sum(sum(each.cpu_times()[:2]) for each in (first, *first.children())) / seconds / cores
    finally:
        for each in (*first.children(), first):
            each.kill()
        first.wait()


def put_back(pid: int) -> None:
    """The groups of this peer's sessions, at 0."""
    process = psutil.Process(pid)
    for each in (process, *process.children(recursive=True)):
        Path(f"/proc/{each.pid}/autogroup").write_text("0")


async def beside(nice: int, seconds: float, repeats: int, *, alone: bool = False) -> list[float]:
    manifest = preset("small", rounds={"total": 100_000})
    async with WatchedSwarm(manifest) as swarm:
        await swarm.start_bootstrap()
        peer = await swarm.start_peer("peer", more=("--nice", str(nice), "--threads", str(os.cpu_count() or 1)))
        await swarm.until(lambda: len(swarm.of("peer", "TrainingProgress")) > 5, [peer], 120.0)
        if alone:
            put_back(peer.process.pid)
        return [await asyncio.to_thread(share, seconds) for _ in range(repeats)]


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    print(header())
    rows = {"no peer": [share(arguments.seconds) for _ in range(arguments.repeats)]}
    rows["--nice 0"] = await beside(0, arguments.seconds, arguments.repeats)
    if group_niceness() is not None:
        rows["niceness alone"] = await beside(19, arguments.seconds, arguments.repeats, alone=True)
    rows["--nice 19"] = await beside(19, arguments.seconds, arguments.repeats)
    print("peer             share of all cores that the program gets, min / median / max")
    for name, values in rows.items():
        print(f"{name:16} {spread(values, '.2f')}")


if __name__ == "__main__":
    asyncio.run(main())
