"""Contributions that count where an exchange takes much of a round: `python benchmarks/exchange.py [--shares 0.3 0.6 0.7] [--peers 2]`.

Real processes on loopback, contributions of one bit an element, H and codec kept. First how long a round takes, unhindered; then for
each share a swarm whose members may upload only so fast (--max-upload) that sending a contribution to all the others takes that share
of a round. Nobody fails. Printed: of the contributions that could have counted, the share that did; rounds a minute; how long an
exchange took, as a share of a round (median), by the members' own word.
Expected beforehand: all count up to 0.875 of a round (0.7 is aimed at, a quarter more tolerated), beyond that they do not.
"""

import argparse
import asyncio
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from swarm import WatchedSwarm, header, of_equal_rounds

WARM_UP = 6  # rounds
PATIENCE_S = 900.0


@dataclass
class Exchanged:
    """share: of the contributions, that count. exchange_s: median delay from a close to the merge."""

    share: float
    round_s: float
    blob_bytes: int
    exchange_s: float


async def measure(peers: int, *, up_bps: float | None, rounds: int) -> Exchanged:
    manifest = of_equal_rounds(peers)
    more = () if up_bps is None else ("--max-upload", f"{up_bps / 1e6:.4f}")
    async with WatchedSwarm(manifest) as swarm:
        await swarm.start_bootstrap()
        labels = [f"peer{index}" for index in range(peers)]
        started = await asyncio.gather(*(swarm.start_peer(label, more=more) for label in labels))
        await swarm.until(lambda: len(swarm.of(labels[0], "RoundCertified")) >= WARM_UP + rounds, started, PATIENCE_S)
        certified = swarm.of(labels[0], "RoundCertified")[WARM_UP:]
        counted = [len(each["contributors"]) for each in certified]
        delays = [each["delay_s"] for each in certified if each["delay_s"] is not None]
        return Exchanged(
            sum(counted) / (peers * len(counted)),
            (certified[-1]["time"] - certified[0]["time"]) / (len(certified) - 1),
            swarm.of(labels[0], "RoundClosed")[-1]["blob_bytes"],
            statistics.median(delays) if delays else float("nan"),
        )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.3, 0.6, 0.7])
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=24)
    arguments = parser.parse_args()
    print(header())
    free = await measure(arguments.peers, up_bps=None, rounds=10)
    print(
        f"unhindered: {free.share:.3f} of the contributions; a round {free.round_s:.2f} s; {free.blob_bytes} bytes each"
    )
    print("exchange aimed at; counted; rounds a minute; a close to its merge, share of a round")
    for share in arguments.shares:
        up_bps = 8 * free.blob_bytes * (arguments.peers - 1) / (share * free.round_s)
        seen = await measure(arguments.peers, up_bps=up_bps, rounds=arguments.rounds)
        print(
            f"{share:.2f}; {seen.share:.3f}; {60 / seen.round_s:.1f}; {seen.exchange_s / seen.round_s:.2f}  ({up_bps / 1e6:.3f} Mbit/s up)",
            flush=True,
        )


if __name__ == "__main__":
    asyncio.run(main())
