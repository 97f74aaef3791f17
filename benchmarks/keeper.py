"""What a bootstrap takes of its machine: idle, and beside a run of `tiny` that it keeps, with two peers.

    PYTHONPATH=. python benchmarks/keeper.py [--seconds 60]
    PYTHONPATH=. python benchmarks/keeper.py --upload 0.15 --seconds 180      # what two peers on such lines (Mbit/s) send, without it and with it

Memory as PSS (shared pages divided among those who share them), of its own process, its network daemon and the evaluation's; processor
seconds of its own process. --upload: bytes of messages and contributions that both send a round (their own count), micro-batches slept through.
"""

import argparse
import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from statistics import median

import psutil
from headline_worker import Settings

from dilocox_peer.config import preset
from tests.swarm.watched import Watched

WORKER = str(Path(__file__).with_name("headline_worker.py"))


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


def sent_by(swarm: Watched) -> int:
    """Of both peers, since their start."""
    return sum(int(swarm.of(label, "TrainingProgress")[-1]["bytes_sent"]) for label in ("a", "b"))


async def traffic(mbit: float, seconds: float, *flags: str) -> None:
    steps = dict.fromkeys(("inner_steps", "min_inner_steps", "max_inner_steps"), 48)
    rounds = {"total": 10_000, "start_peers": 2, "checkpoint_every": 4, **steps}
    manifest = preset("tiny", rounds=rounds, compression={"codec": "sign", "adapt": "off"})
    async with Watched(manifest) as swarm:
        bootstrap = await swarm.start_bootstrap(*flags)
        settings = json.dumps(asdict(Settings(0.1, 48, "sign", "off", 2, 1, 1, 0)))
        peers = [
            await swarm.start_peer(
                label,
                more=("--max-upload", str(mbit)),
                program=[WORKER, "peer", settings, str(swarm.folder / f"{label}.batches")],
            )
            for label in ("a", "b")
        ]
        await swarm.until(lambda: len(swarm.of("a", "RoundCertified")) >= 3, [bootstrap, *peers], 300.0)
        number, sent = swarm.round_of("a"), sent_by(swarm)
        await asyncio.sleep(seconds)
        rounds_since = max(1, swarm.round_of("a") - number)
        each = (sent_by(swarm) - sent) / rounds_since
        delays = [event["delay_s"] for event in swarm.of("a", "RoundCertified")[3:] if event["delay_s"] is not None]
        print(
            f"{' '.join(flags) or 'kept'}: both send {each / 1000:.1f} kB a round over {rounds_since} rounds; an exchange "
            f"takes {median(delays):.1f} s; kept rounds {[event['round'] for event in swarm.of('bootstrap', 'RunKept')]}",
            flush=True,
        )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--upload", type=float, help="Mbit/s of each of two peers: what they send")
    arguments = parser.parse_args()
    seconds = arguments.seconds
    if arguments.upload:
        for flags in (("--no-keep",), ()):
            await traffic(arguments.upload, seconds, *flags)
        return
    for flags in (("--no-keep",), ("--no-evaluate",), ()):
        await measure(seconds, *flags)


if __name__ == "__main__":
    asyncio.run(main())
