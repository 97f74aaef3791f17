"""What forgers get: `PYTHONPATH=. python benchmarks/attacks.py [--only stranger|members]`.

Real processes on loopback, the attacks of tests/hostile/fork_attacks.py, one line each: how long it was watched, how often the attacker
showed its branch, the honest peers' rounds before and after, how many of them gave up certified rounds, how many name the attacker
in their log and status, and the training loss before and after.
"""

import argparse
import asyncio
import tempfile
from pathlib import Path

from swarm import header

from tests.hostile.attacked import Attacked, Outcome
from tests.hostile.fork_attacks import by_a_stranger, by_members, collect, record


def show(swarm: Attacked, outcome: Outcome) -> None:
    forks = swarm.forks(outcome.honest)
    print(outcome.row() + (f"  FORKED at {sorted(forks)}" if forks else ""), flush=True)


async def run(only: str | None, folder: Path) -> None:
    print(header())
    if only != "members":
        recorded = folder / "recorded"
        await record(recorded)
        await collect(by_a_stranger(recorded), show)
    if only != "stranger":
        await collect(by_members(), show)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("stranger", "members"))
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(parser.parse_args().only, Path(folder)))


if __name__ == "__main__":
    main()
