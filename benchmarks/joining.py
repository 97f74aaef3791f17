"""A peer joins a run over a line on which a state takes many rounds: `python benchmarks/joining.py [--rounds 2 10] [--times 3] [--batch-s 0.1]`.

Real processes on loopback: two members train (contributions of one bit an element, so a state is as large as 30 rounds of them at
two members), then a third joins that may download only so fast (--max-download) that the state takes --rounds of their rounds, as
they were measured just before. It has to be in the roster after one state: rounds that were certified meanwhile are replayed.
Printed: rounds that the copy took, and from its start until a round counts its contribution; states fetched; the members' rounds a
minute before and meanwhile, and apart: while the joiner's process starts (it imports torch and reads text on the members'
processors), while it copies, and from then until it is in; the share of the members' contributions that counted meanwhile.
--batch-s: micro-batches of all three are slept through (headline_worker.py), so that they share no processor.
Expected beforehand: states 1 each time, and until in: copy x (1 + share + share^2 ...) of the line that contributions take.
"""

import argparse
import asyncio
import json
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from headline_worker import Settings
from swarm import WatchedSwarm, header, of_equal_rounds, spread

from dilocox_peer.cli.children import Child
from dilocox_peer.model.architecture import layout_of

WORKER = str(Path(__file__).with_name("headline_worker.py"))
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
    by_phase: dict[str, float]
    counted: float


def pace_of(certified: list[dict[str, Any]], start: float, stop: float) -> float:
    """Rounds a minute of those that were certified in between, from the one before on; nan of none."""
    times = [float(each["time"]) for each in certified]
    inside = [index for index, at in enumerate(times) if index and start < at <= stop]
    if not inside:
        return float("nan")
    return 60 * len(inside) / (times[inside[-1]] - times[inside[0] - 1])


async def measure(rounds: float, *, batch_s: float, warm_up: int) -> Joined:
    manifest = of_equal_rounds(2)
    async with WatchedSwarm(manifest) as swarm:
        await swarm.start_bootstrap()
        program: list[str] = ["-m", "dilocox_peer"]

        async def start(label: str, *more: str) -> Child:
            words = program
            if batch_s:
                settings = Settings(batch_s, 48, "sign", "off", 2, 1, 1, 0)
                words = [WORKER, "peer", json.dumps(asdict(settings)), str(swarm.folder / f"{label}.batches")]
            return await swarm.start_peer(label, more=more, program=words)

        started = await asyncio.gather(*(start(label) for label in ("one", "two")))

        def certified() -> list[dict[str, Any]]:
            return swarm.of("one", "RoundCertified")

        await swarm.until(lambda: len(certified()) >= warm_up, started, PATIENCE_S)
        newest = [each["time"] for each in certified()[-min(MEASURED, warm_up // 2) - 1 :]]
        round_s = (newest[-1] - newest[0]) / (len(newest) - 1)
        down_bps = 8 * layout_of(manifest).state_bytes / (rounds * round_s)
        began, before = certified()[-1]["round"], certified()[-1]["time"]
        called_at = time.time()
        joiner = await start("joiner", "--max-download", f"{down_bps / 1e6:.3f}")
        here_at = time.time()
        name = swarm.of("joiner", "PeerStarted")[0]["peer"]

        def is_in() -> bool:
            return any(name in each["contributors"] for each in certified())

        with suppress(TimeoutError):  # never: it is said
            await swarm.until(is_in, [*started, joiner], max(PATIENCE_S / 2, 8 * rounds * round_s))
        copies = swarm.of("joiner", "StateFetched")
        inside = next((each for each in certified() if name in each["contributors"]), None)
        last = inside or certified()[-1]
        fetched_at = copies[0]["time"] if copies else last["time"]
        phases = {
            "starts": (called_at, here_at),
            "copies": (here_at, fetched_at),
            "comes in": (fetched_at, last["time"]),
        }
        members = {swarm.of(label, "PeerStarted")[0]["peer"] for label in ("one", "two")}
        meanwhile = [each["contributors"] for each in certified() if called_at < each["time"] <= last["time"]]
        return Joined(
            len(copies),
            copies[0]["seconds"] / round_s if copies else float("nan"),
            None if inside is None else inside["round"] - began,
            (60 / round_s, 60 * (last["round"] - began) / (last["time"] - before)),
            {name: pace_of(certified(), *phase) for name, phase in phases.items()},
            sum(len(members & set(each)) for each in meanwhile) / (2 * max(1, len(meanwhile))),
        )


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=float, nargs="+", default=[2.0, 10.0])
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument(
        "--batch-s", type=float, default=0.0, help="that a micro-batch is slept through; 0: it is computed"
    )
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="rounds before")
    arguments = parser.parse_args()
    print(header())
    print(
        "copy takes, rounds: measured; until in; states; the members' rounds a minute before; meanwhile (min / median / max)"
    )
    failed = False
    for rounds in arguments.rounds:
        each = [
            await measure(rounds, batch_s=arguments.batch_s, warm_up=arguments.warm_up) for _ in range(arguments.times)
        ]
        until_in = [one.until_in_rounds for one in each if one.until_in_rounds is not None]
        failed |= len(until_in) < len(each) or any(one.states != 1 for one in each)
        print(
            f"{rounds:5.0f}: {spread([one.copy_rounds for one in each], '.1f')};  "
            f"{spread(until_in, '.0f') if until_in else 'never'};  {[one.states for one in each]};  "
            f"{spread([one.rounds_a_minute[0] for one in each], '.1f')};  {spread([one.rounds_a_minute[1] for one in each], '.1f')}",
            flush=True,
        )
        for one in each:
            paces = ", ".join(f"while it {name} {pace:.1f}" for name, pace in one.by_phase.items())
            print(
                f"       rounds a minute {one.rounds_a_minute[0]:.1f} before, {paces}; {one.counted:.3f} counted",
                flush=True,
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
