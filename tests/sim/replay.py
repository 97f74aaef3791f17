"""Plays one seed, or a range of them: `python -m tests.sim.replay SEED [--to SEED] [--fault NAME] [--slices [--peers N | --wide]] [--brief] [--crowded] [--trace] [--jobs N]`."""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from dilocox_peer.peer.rounds.machine import RoundMachine

from .hostile_scenario import run_hostile_seed
from .invariants import Violation
from .scenario import BRIEF, WHOLE, Outcome, run_seed
from .slicing import run_seed as run_sliced_seed
from .slicing import wide_size

TOLD_EVERY_S = 60.0  # how far a range has come


@dataclass(frozen=True, slots=True)
class Played:
    """One seed. problem: what an invariant says of it, where one broke; told: what there is to say of a hostile one."""

    seed: int
    size: int = 0
    sliced: int = 0
    outcome: Outcome | None = None
    problem: str = ""
    told: str = ""


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
    parser.add_argument("--jobs", type=int, default=1, help="processes that play a range (default 1)")
    arguments = parser.parse_args()
    started, failed, events = time.monotonic(), list[int](), 0
    outcomes, sliced, sizes = list[Outcome](), 0, Counter[int]()
    last = arguments.to if arguments.to is not None else arguments.seed
    told, num_played = started, 0
    for played in _all_played(arguments, range(arguments.seed, last + 1)):
        num_played += 1
        if time.monotonic() - told > TOLD_EVERY_S:
            told = time.monotonic()
            print(f"... {num_played} seeds after {told - started:.0f} s, failed: {failed}", file=sys.stderr, flush=True)
        if played.told:
            print(played.told, flush=True)
        if played.problem:
            failed.append(played.seed)
            print(f"seed {played.seed}: {played.problem}", flush=True)
        sizes[played.size] += arguments.slices
        if (outcome := played.outcome) is not None:
            outcomes.append(outcome)
            events += outcome.num_events
            sliced += played.sliced
            if last == arguments.seed:
                print(outcome)
    seconds = time.monotonic() - started
    print(
        f"{num_played} seeds in {seconds:.1f} s, {events} events, {sliced} rounds in slices; until all share one head "
        f"{_spread([each.share_s for each in outcomes])}; most ballots of a round in quiet "
        f"{max((each.max_quiet_ballots for each in outcomes), default=0)}; failed: {sorted(failed)}"
    )
    if arguments.wide:
        print(
            f"of more than 12 peers {sum(sizes[size] for size in sizes if size > 12)}, of more than 32 {sum(sizes[size] for size in sizes if size > 32)}, of 64 {sizes[64]}"
        )
    return 1 if failed else 0


def _all_played(arguments: argparse.Namespace, seeds: Sequence[int]) -> Iterator[Played]:
    """In order; with several jobs each takes the next seed when it is done with one."""
    if arguments.jobs <= 1:
        yield from (_play(arguments, seed) for seed in seeds)
        return
    with ProcessPoolExecutor(arguments.jobs) as pool:
        yield from pool.map(_play, [arguments] * len(seeds), seeds)


def _play(arguments: argparse.Namespace, seed: int) -> Played:
    machine: type[RoundMachine] = RoundMachine
    if arguments.fault:
        from .faults import FAULTS

        machine = FAULTS[arguments.fault]
    tracer, length = (print if arguments.trace else None), (BRIEF if arguments.brief else WHOLE)
    size = (wide_size(seed) if arguments.wide else arguments.peers) if arguments.slices else None
    try:
        if arguments.hostile:
            return Played(seed, told=str(run_hostile_seed(seed, machine=machine, trace=tracer)))
        if not arguments.slices:
            outcome = run_seed(seed, machine=machine, trace=tracer, length=length, crowded=arguments.crowded)
            return Played(seed, outcome=outcome)
        outcome, world = run_sliced_seed(
            seed, machine=machine, trace=tracer, length=length, crowded=arguments.crowded, num_peers=size
        )
        return Played(seed, size or 0, world.checks.sliced, outcome)
    except (Violation, AssertionError) as problem:
        return Played(seed, size or 0, problem=f"{type(problem).__name__}: {problem}")


def _spread(seconds: Sequence[float]) -> str:
    """min/median/99 %/max."""
    if not seconds:
        return "-"
    ordered = sorted(seconds)
    quantiles = (ordered[int(part * (len(ordered) - 1))] for part in (0.0, 0.5, 0.99, 1.0))
    return "/".join(f"{each:.1f}" for each in quantiles) + " s"


if __name__ == "__main__":
    sys.exit(main())
