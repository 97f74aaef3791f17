"""Plays seeds of the outer loop: `python -m tests.sim.replay_outer SEED [--to SEED] [--brief] [--trace]`."""

import argparse
import sys
import time
from collections import Counter
from typing import Any

from .invariants import Violation
from .outer_scenario import run_outer_seed
from .scenario import BRIEF, WHOLE


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.replay_outer", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--to", type=int, help="last seed of a range")
    parser.add_argument("--brief", action="store_true", help="histories as short as most in `make test` are")
    parser.add_argument("--trace", action="store_true", help="print every input and action")
    arguments = parser.parse_args()
    last = arguments.to if arguments.to is not None else arguments.seed
    started, failed, moves, rounds = time.monotonic(), [], Counter[Any](), 0
    for seed in range(arguments.seed, last + 1):
        try:
            length = BRIEF if arguments.brief else WHOLE
            played = run_outer_seed(seed, trace=print if arguments.trace else None, length=length)
            moves.update(played.moves)
            rounds += played.outcome.rounds
        except (Violation, AssertionError) as problem:
            failed.append(seed)
            print(f"seed {seed}: {type(problem).__name__}: {problem}", flush=True)
    print(f"{last - arguments.seed + 1} seeds in {time.monotonic() - started:.1f} s, {rounds} rounds; failed: {failed}")
    for (before, after), count in sorted(moves.items(), key=lambda each: -each[1]):
        print(f"  {before.value:>11} -> {after.value:<11} {count}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
