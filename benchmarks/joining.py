"""A peer joins a run over a line on which a state takes many rounds: `python benchmarks/joining.py [--rounds 2 10] [--times 3]`.

Real processes on loopback: two members train (contributions of one bit an element, so a state is as large as 30 rounds of them at
two members), then a third joins that may download only so fast (--max-download) that the state takes --rounds of their rounds, as
they were measured just before. It has to be in the roster after one state: rounds that were certified meanwhile are replayed.
Printed: rounds that the copy took, and from its start until a round counts its contribution; states fetched; the members' rounds a
minute before and meanwhile.
Expected beforehand: states 1 each time, and until in: copy x (1 + share + share^2 ...) of the line that contributions take.
"""

import argparse
import asyncio
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from swarm import WatchedSwarm, header, of_equal_rounds, spread

from dilocox_peer.model.architecture import layout_of

WARM_UP = 40  # rounds
MEASURED = 10
PATIENCE_S = 600.0


@dataclass
class Joined:
    """copy_rounds, until_in_rounds: of the members, from the start of the joiner's process; None: it never was in."""

    states: int
    copy_rounds: float
    until_in_rounds: float | None
    rounds_a_minute: tuple[float, float]


async def measure(rounds: float) -> Joined:
    manifest = of_equal_rounds(2)
    async with WatchedSwarm(manifest) as swarm:
        await swarm.start_bootstrap()
        started = await asyncio.gather(*(swarm.start_peer(label) for label in ("one", "two")))

        def certified() -> list[dict[str, Any]]:
            return swarm.of("one", "RoundCertified")

        await swarm.until(lambda: len(certified()) >= WARM_UP, started, PATIENCE_S)
        newest = [each["time"] for each in certified()[-MEASURED - 1 :]]
        round_s = (newest[-1] - newest[0]) / MEASURED
        down_bps = 8 * layout_of(manifest).state_bytes / (rounds * round_s)
        began, before = certified()[-1]["round"], certified()[-1]["time"]
        joiner = await swarm.start_peer("joiner", more=("--max-download", f"{down_bps / 1e6:.3f}"))
        name = swarm.of("joiner", "PeerStarted")[0]["peer"]

        def is_in() -> bool:
            return any(name in each["contributors"] for each in certified())

        with suppress(TimeoutError):  # never: it is said
            await swarm.until(is_in, [*started, joiner], max(PATIENCE_S / 2, 8 * rounds * round_s))
        copies = swarm.of("joiner", "StateFetched")
        inside = next((each for each in certified() if name in each["contributors"]), None)
        last = inside or certified()[-1]
        return Joined(
            len(copies),
            copies[0]["seconds"] / round_s if copies else float("nan"),
            None if inside is None else inside["round"] - began,
            (60 / round_s, 60 * (last["round"] - began) / (last["time"] - before)),
        )


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=float, nargs="+", default=[2.0, 10.0])
    parser.add_argument("--times", type=int, default=3)
    arguments = parser.parse_args()
    print(header())
    print(
        "copy takes, rounds: measured; until in; states; the members' rounds a minute before; meanwhile (min / median / max)"
    )
    failed = False
    for rounds in arguments.rounds:
        each = [await measure(rounds) for _ in range(arguments.times)]
        until_in = [one.until_in_rounds for one in each if one.until_in_rounds is not None]
        failed |= len(until_in) < len(each) or any(one.states != 1 for one in each)
        print(
            f"{rounds:5.0f}: {spread([one.copy_rounds for one in each], '.1f')};  "
            f"{spread(until_in, '.0f') if until_in else 'never'};  {[one.states for one in each]};  "
            f"{spread([one.rounds_a_minute[0] for one in each], '.1f')};  {spread([one.rounds_a_minute[1] for one in each], '.1f')}",
            flush=True,
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
