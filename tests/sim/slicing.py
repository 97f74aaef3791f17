"""Seeds in which a run averages in slices: the scenario of scenario.py, with owners and deputies killed at any step, and liars in the minority."""

import random
from collections.abc import Callable

from dilocox_peer.peer.rounds.machine import RoundMachine

from .invariants import Violation
from .scenario import BRIEF, WHOLE, Length, Outcome, play
from .world import World

SIZES = (4, 4, 5, 6, 7, 8, 9, 10, 12)
FEW = (4, 4, 5, 4, 6, 5, 4, 5, 7)
COUNTS = (1, 3, 4, 6)
MANY = 16  # slices, of as many peers as is said
WIDE = range(4, 65)


def wide_size(seed: int) -> int:
    """Peers of a seed, of all sizes that a stage may have, the fewer of each the larger it is: a history takes as long as the number to the power of 2.7."""
    return random.Random(f"size {seed}").choices(WIDE, [size**-3 for size in WIDE])[0]


def run_seed(
    seed: int,
    *,
    machine: type[RoundMachine] = RoundMachine,
    trace: Callable[[str], None] | None = None,
    length: Length = WHOLE,
    crowded: bool = False,
    num_peers: int | None = None,
) -> tuple[Outcome, World]:
    """Plays a seed to its end; raises Violation, with the seed in it, when an invariant breaks. num_peers: instead of as few as seeds have."""
    sizes = SIZES if length is WHOLE else FEW
    world = World(seed, num_peers or sizes[seed % len(sizes)], machine=machine)
    world.max_peers = max(world.max_peers, num_peers or 0)
    world.encode_messages = seed % 10 == 0
    few = COUNTS[seed // len(SIZES) % len(COUNTS)]
    world.be_sliced(few if num_peers is None or num_peers <= max(SIZES) else MANY)
    if seed % 5 == 0:
        world.rng.choice(list(world.nodes.values())).lies = True
    world.tracing, world.is_crowded = trace, crowded
    try:
        return play(world, length), world
    except Violation as violation:
        brief = (" --brief" if length is BRIEF else "") + (" --crowded" if crowded else "")
        brief += f" --peers {num_peers}" if num_peers is not None else ""
        raise Violation(
            f"seed {seed} at {world.now:.3f} s: {violation}  (python -m tests.sim.replay {seed} --slices{brief} --trace)"
        ) from violation
