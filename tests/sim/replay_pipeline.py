"""Plays one seed of the pipeline, or a range: `python -m tests.sim.replay_pipeline SEED [--to SEED] [--fault NAME] [--trace]`."""

import argparse
import sys
import time

from dilocox_peer.pipeline.scheduler import Scheduler

from .invariants import Violation
from .pipeline_scenario import run_pipeline_seed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.replay_pipeline", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--to", type=int, help="last seed of a range")
    parser.add_argument("--fault", help="a planted fault, by its name in pipeline_faults.FAULTS")
    parser.add_argument("--trace", action="store_true", help="print every input, action and work")
    arguments = parser.parse_args()
    machine: type[Scheduler] = Scheduler
    if arguments.fault:
        from .pipeline_faults import FAULTS

        machine = FAULTS[arguments.fault]
    last = arguments.to if arguments.to is not None else arguments.seed
    began, failed, events, slowest = time.monotonic(), [], 0, 0.0
    for seed in range(arguments.seed, last + 1):
        try:
            outcome = run_pipeline_seed(seed, machine=machine, trace=print if arguments.trace else None)
            events += outcome.num_events
            slowest = max(slowest, outcome.drain_s)
            if last == arguments.seed:
                print(outcome)
        except (Violation, AssertionError) as problem:
            failed.append(seed)
            print(f"{type(problem).__name__}: {problem}")
    seconds = time.monotonic() - began
    count = last - arguments.seed + 1
    print(
        f"{count} seeds in {seconds:.1f} s ({count / seconds:.1f}/s), {events} events, slowest drain {slowest:.1f} s; failed: {failed}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
