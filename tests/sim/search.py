"""Plays many seeds of the simulators, beyond those that `make test` plays; what breaks is printed, with how to replay it, and the search goes on.

    python -m tests.sim.search [--first 10000] [--seeds 10000] [rounds slices outer links pipeline fetches]

Of rounds, slices and outer loops one seed in sixteen is whole, as in `make test`. Exits with 1 where an invariant broke.
"""

import argparse
import sys
import time
from collections.abc import Callable
from itertools import count

from . import slicing
from .fetch_world import run_fetch_seed
from .links_scenario import run_links_seed
from .outer_scenario import run_outer_seed
from .pipeline_scenario import run_pipeline_seed
from .scenario import length_of, run_seed

TELL_EVERY_S = 60.0
MACHINES: dict[str, Callable[[int], object]] = {
    "rounds": lambda seed: run_seed(seed, length=length_of(seed)),
    "slices": lambda seed: slicing.run_seed(seed, length=length_of(seed)),
    "outer": lambda seed: run_outer_seed(seed, length=length_of(seed)),
    "links": run_links_seed,
    "pipeline": run_pipeline_seed,
    "fetches": run_fetch_seed,
}


def search(name: str, seeds: range) -> int:
    """How many broke."""
    play, broken, told = MACHINES[name], 0, time.monotonic()
    began = time.process_time()
    for number, seed in zip(count(1), seeds, strict=False):
        try:
            play(seed)
        except Exception as error:
            broken += 1
            print(f"{name} {seed}: {type(error).__name__}: {error}", flush=True)
        if number == len(seeds) or time.monotonic() - told > TELL_EVERY_S:
            told = time.monotonic()
            took = time.process_time() - began
            print(f"{name}: {number:,} seeds from {seeds.start}, {broken} broke; {took:.0f} s of processor", flush=True)
    return broken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machines", nargs="*", choices=list(MACHINES), default=list(MACHINES))
    parser.add_argument("--first", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, default=10_000, help="of each machine")
    args = parser.parse_args()
    return int(sum([search(name, range(args.first, args.first + args.seeds)) for name in args.machines]) > 0)


if __name__ == "__main__":
    sys.exit(main())
