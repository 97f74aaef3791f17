"""Whether activations keep to --max-upload and --max-download: two stages in real processes, one of them with a limit.

    python benchmarks/limits.py [--mbit 1 2 4] [--seconds 24]

Payload: activations and gradients with the headers of their messages, as the peer counts them. Link: what TCP carries for
them, TLS and yamux included, as linkd counts it. Each stage has one peer, so rounds send no contributions. Expected
beforehand: the limit counts bodies (50 KB here), so the payload is at the limit and the link 1 % above it, of which TLS is
22 bytes in 16 KB and the rest are messages and pings; where the processors allow less than the limit, less.
"""

import argparse
import asyncio

from swarm import WatchedSwarm, header

from dilocox_peer.config import preset
from dilocox_peer.manifest import Manifest
from dilocox_peer.model.partition import with_cut

WARM_UP_S = 10.0
COLUMNS = ("bytes_sent", "bytes_received", "wire_bytes_sent", "wire_bytes_received")


def manifest() -> Manifest:
    return with_cut(
        preset(
            "tiny",
            stages={"count": 2},
            inner={"accumulate": 4},
            rounds={"total": 100_000, "inner_steps": 32},
        )
    )


async def rates(flag: str, limited: int, mbit_s: float | None, seconds: float) -> tuple[float, ...]:
    """Mbit/s of each of COLUMNS at the limited peer (of that stage)."""
    async with WatchedSwarm(manifest()) as swarm:
        await swarm.start_bootstrap()
        peers = []
        for stage in (1, 0):
            more = (flag, str(mbit_s)) if stage == limited and mbit_s is not None else ()
            peers.append(await swarm.start_peer(f"stage{stage}", stage=stage, more=more))
        label = f"stage{limited}"

        def told() -> list[dict[str, float]]:
            return [each for each in swarm.of(label, "PipelineProgress") if each["wire_bytes_received"]]

        def span_s() -> float:
            found = told()
            return found[-1]["time"] - found[0]["time"] if found else 0.0

        await swarm.until(lambda: span_s() > WARM_UP_S + seconds, peers, 120.0)
        found = told()
        last = found[-1]
        first = next(each for each in found if each["time"] >= found[0]["time"] + WARM_UP_S)
        return tuple((last[each] - first[each]) * 8e-6 / (last["time"] - first["time"]) for each in COLUMNS)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, nargs="+", default=[1.0, 2.0, 4.0])
    parser.add_argument("--seconds", type=float, default=24.0, help="measured, after a warm-up of 10 s")
    arguments = parser.parse_args()
    print(header())
    print("peer with the limit      limit   payload up, down     link up, down    link / limit   (Mbit/s)")
    cases: list[tuple[str, int, float | None]] = [("none", 1, None)]
    cases += [(flag, stage, mbit) for mbit in arguments.mbit for flag, stage in (("--max-download", 1), ("--max-download", 0), ("--max-upload", 0))]  # fmt: skip
    for flag, stage, mbit in cases:
        up, down, link_up, link_down = await rates(flag, stage, mbit, arguments.seconds)
        limited = link_down if flag == "--max-download" else link_up
        ratio = f"{limited / mbit:.3f}" if mbit is not None else "-"
        print(
            f"stage {stage}, {flag:<15} {mbit or 0:5.1f}   {up:7.3f} {down:7.3f}     {link_up:7.3f} {link_down:7.3f}   {ratio:>8}",
            flush=True,
        )


if __name__ == "__main__":
    asyncio.run(main())
