"""Plays one seed, or a range of them: `python -m tests.sim.replay SEED [--to SEED] [--fault NAME] [--slices [--peers N | --wide]] [--brief] [--crowded] [--trace]`."""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence

from dilocox_peer.peer.rounds.machine import RoundMachine

from .hostile_scenario import run_hostile_seed
from .invariants import Violation
from .scenario import BRIEF, WHOLE, run_seed
from .slicing import run_seed as run_sliced_seed
from .slicing import wide_size

TOLD_EVERY_S = 60.0  # how far a range has come


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.replay", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--to", type=int, help="last seed of a range")
    parser.add_argument("--fault", help="a planted fault, by its name in faults.FAULTS")
    parser.add_argument("--hostile", action="store_true", help="with hostile peers")
    parser.add_argument("--slices", action="store_true", help="averaging in slices")
    parser.add_argument("--peers", type=int, help="so many in each seed, with --slices")
    parser.add_argument("--wide", action="store_true", help="of 4 to 64 peers, with --slices")
    parser.add_argument("--brief", action="store_true", help="histories as short as most in `make test` are")
    parser.add_argument("--crowded", action="store_true", help="on busy machines")
    parser.add_argument("--trace", action="store_true", help="print every input and action")
    arguments = parser.parse_args()
    machine: type[RoundMachine] = RoundMachine
    if arguments.fault:
        from .faults import FAULTS

        machine = FAULTS[arguments.fault]
    started, failed, events = time.monotonic(), list[int](), 0
    outcomes, sliced, sizes = [], 0, Counter[int]()
    last = arguments.to if arguments.to is not None else arguments.seed
    told = started
    for seed in range(arguments.seed, last + 1):
        if time.monotonic() - told > TOLD_EVERY_S:
            told = time.monotonic()
            print(f"... seed {seed} after {told - started:.0f} s, failed: {failed}", file=sys.stderr, flush=True)
        try:
            tracer = print if arguments.trace else None
            if arguments.hostile:
                print(run_hostile_seed(seed, machine=machine, trace=tracer), flush=True)
                continue
            length = BRIEF if arguments.brief else WHOLE
            if arguments.slices:
                size = wide_size(seed) if arguments.wide else arguments.peers
                sizes[size or 0] += 1
                outcome, world = run_sliced_seed(
                    seed, machine=machine, trace=tracer, length=length, crowded=arguments.crowded, num_peers=size
                )
                sliced += world.checks.sliced
            else:
                outcome = run_seed(seed, machine=machine, trace=tracer, length=length, crowded=arguments.crowded)
            outcomes.append(outcome)
            events += outcome.num_events
            if last == arguments.seed:
                print(outcome)
        except (Violation, AssertionError) as problem:
            failed.append(seed)
            print(f"seed {seed}: {type(problem).__name__}: {problem}")
    seconds = time.monotonic() - started
    print(
        f"{last - arguments.seed + 1} seeds in {seconds:.1f} s, {events} events, {sliced} rounds in slices; until all share one head "
        f"{_spread([each.share_s for each in outcomes])}; most ballots of a round in quiet "
        f"{max((each.max_quiet_ballots for each in outcomes), default=0)}; failed: {failed}"
    )
    if arguments.wide:
        print(
            f"of more than 12 peers {sum(sizes[size] for size in sizes if size > 12)}, of more than 32 {sum(sizes[size] for size in sizes if size > 32)}, of 64 {sizes[64]}"
        )
    return 1 if failed else 0


def _spread(seconds: Sequence[float]) -> str:
    """min/median/99 %/max."""
    if not seconds:
        return "-"
    ordered = sorted(seconds)
    quantiles = (ordered[int(part * (len(ordered) - 1))] for part in (0.0, 0.5, 0.99, 1.0))
    return "/".join(f"{each:.1f}" for each in quantiles) + " s"


if __name__ == "__main__":
    sys.exit(main())
