"""What averaging costs the training, and what training costs the event loop: paired swarms on this machine.

    python benchmarks/overhead.py [--pairs 3] [--seconds 40] [--replicas 2] [--inner-steps 128]

"off": the same peers, processes and heartbeats, and a round that never ends. "on": rounds as the preset has them. The
two take turns (off on, on off, ...), so that a drift of the machine hits both. steps/s: micro-batches of all peers over
the steady part of a run. Expected beforehand: a round costs a peer of the tiny model about 45 ms of CPU beside its
training (messages 15, encode and merge 10, network daemon 10, disk 10), whatever its length, and 128 steps are about
2 s: 0.98 where all cores are busy with training, as they are with two peers on two cores. The demo's rounds of 32 steps
are 0.5 s: 0.92.
"""

import argparse
import asyncio
from typing import Any

from swarm import WatchedSwarm, header, spread

from dilocox_peer.config import preset
from dilocox_peer.manifest import Manifest

WARM_S = 6.0  # from the first step on: compilation of kernels, the first rounds' learned deadlines


async def steps_per_second(manifest: Manifest, replicas: int, seconds: float) -> tuple[float, float, int]:
    """(micro-batches a second of all peers, worst p99 of the event loop's lag in ms, rounds certified)."""
    batch_tokens = manifest.inner.micro_batch * manifest.model.context
    async with WatchedSwarm(manifest) as swarm:
        await swarm.start_bootstrap()
        labels = [f"peer{index}" for index in range(replicas)]
        peers = [await swarm.start_peer(label) for label in labels]
        await swarm.until(lambda: all(_training(swarm, label) for label in labels), peers, 60)
        start = max(_training(swarm, label)[0]["time"] for label in labels) + WARM_S
        end = start + seconds
        await swarm.until(lambda: all(_training(swarm, label)[-1]["time"] > end for label in labels), peers, 600)
        rate, lag, rounds = 0.0, 0.0, 0
        for label in labels:
            steady = [record for record in _training(swarm, label) if start <= record["time"] <= end]
            first, last = steady[0], steady[-1]
            rate += (last["tokens"] - first["tokens"]) / batch_tokens / (last["time"] - first["time"])
            lag = max(lag, last["lag_ms_p99"])
            rounds = max(rounds, len(swarm.of(label, "RoundCertified")))
    return rate, lag, rounds


def _training(swarm: WatchedSwarm, label: str) -> list[dict[str, Any]]:
    return [record for record in swarm.of(label, "TrainingProgress") if record["tokens"] > 0]


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--inner-steps", type=int, default=128, help="of a round with averaging on")
    arguments = parser.parse_args()
    rounds = {"total": 100_000, "start_peers": arguments.replicas}
    manifests = {
        "off": preset("tiny", rounds={**rounds, "inner_steps": 10_000_000}),
        "on": preset("tiny", rounds={**rounds, "inner_steps": arguments.inner_steps}),
    }
    print(header())
    print(
        f"# tiny preset, H={arguments.inner_steps}, {arguments.replicas} peers, {arguments.seconds:.0f} s steady a run",
        flush=True,
    )
    rates: dict[str, list[float]] = {"off": [], "on": []}
    lags: list[float] = []
    for pair in range(arguments.pairs):
        for mode in ("off", "on") if pair % 2 == 0 else ("on", "off"):
            rate, lag, certified = await steps_per_second(manifests[mode], arguments.replicas, arguments.seconds)
            assert (certified > 0) == (mode == "on"), f"{certified} rounds with averaging {mode}"
            rates[mode].append(rate)
            if mode == "on":
                lags.append(lag)
            print(
                f"pair {pair + 1} {mode:>3}: {rate:7.2f} steps/s, lag p99 {lag:5.1f} ms, {certified} rounds", flush=True
            )
    ratios = [on / off for on, off in zip(rates["on"], rates["off"], strict=True)]
    print("figure                         min / median / max")
    print(f"steps/s, averaging off         {spread(rates['off'], '.2f')}")
    print(f"steps/s, averaging on          {spread(rates['on'], '.2f')}")
    print(f"on over off, pair by pair      {spread(ratios)}   (goal: 0.97)")
    print(f"event-loop lag p99, ms, on     {spread(lags, '.1f')}   (goal: under 100)")


if __name__ == "__main__":
    asyncio.run(main())
