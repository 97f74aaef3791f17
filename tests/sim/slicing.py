"""Seeds in which a run averages in slices: the scenario of scenario.py, with owners and deputies killed at any step, and liars in the minority.

python -m tests.sim.slicing SEED [--trace]
"""

import sys
from collections.abc import Callable

from dilocox_peer.peer.rounds.machine import RoundMachine

from .invariants import Violation
from .scenario import Outcome, play
from .world import World

SIZES = (4, 4, 5, 6, 7, 8, 9, 10, 12)
COUNTS = (1, 3, 4, 6)


def run_seed(
    seed: int, *, machine: type[RoundMachine] = RoundMachine, trace: Callable[[str], None] | None = None
) -> tuple[Outcome, World]:
    """Plays a seed to its end; raises Violation, with the seed in it, when an invariant breaks."""
    world = build(seed, machine=machine)
    world.tracing = trace
    try:
        return play(world), world
    except Violation as violation:
        raise Violation(
            f"seed {seed} at {world.now:.3f} s: {violation}  (python -m tests.sim.slicing {seed} --trace)"
        ) from violation


def build(seed: int, *, machine: type[RoundMachine] = RoundMachine) -> World:
    world = World(seed, SIZES[seed % len(SIZES)], machine=machine)
    world.encode_messages = seed % 10 == 0
    world.be_sliced(COUNTS[seed // len(SIZES) % len(COUNTS)])
    if seed % 5 == 0:
        world.rng.choice(list(world.nodes.values())).lies = True
    return world


if __name__ == "__main__":
    print(run_seed(int(sys.argv[1]), trace=print if "--trace" in sys.argv else None)[0])
