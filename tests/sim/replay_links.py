"""Plays one seed of links, or a range: `python -m tests.sim.replay_links SEED [--to SEED] [--fault NAME] [--trace]`."""

import argparse
import sys
import time
from collections import Counter

from dilocox_peer.peer.links.sessions import Cause, LinkSessions, LinkState

from .invariants import Violation
from .links_faults import FAULTS
from .links_scenario import run_links_seed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.replay_links", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--to", type=int, help="last seed of a range")
    parser.add_argument("--fault", choices=FAULTS, help="a planted fault")
    parser.add_argument("--trace", action="store_true", help="print every action, link and frame")
    arguments = parser.parse_args()
    machine = FAULTS[arguments.fault] if arguments.fault else LinkSessions
    last = arguments.to if arguments.to is not None else arguments.seed
    began, failed, events, slowest = time.monotonic(), [], 0, 0.0
    moves: Counter[tuple[LinkState, Cause]] = Counter()
    for seed in range(arguments.seed, last + 1):
        try:
            outcome = run_links_seed(seed, machine=machine, trace=print if arguments.trace else None)
            events += outcome.num_events
            slowest = max(slowest, outcome.linked_s)
            moves += outcome.moves
        except Violation as problem:
            failed.append(seed)
            print(problem)
    seconds = time.monotonic() - began
    count = last - arguments.seed + 1
    for (state, cause), number in sorted(moves.items(), key=lambda item: -item[1]):
        print(f"{number:9} {state.value}: {cause.value}")
    print(
        f"{count} seeds in {seconds:.1f} s ({count / seconds:.1f}/s), {events} events, linked at last after {slowest:.1f} s of quiet; failed: {failed}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
