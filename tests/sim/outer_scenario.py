"""Seeds of scenario.py with outer loops: the same faults, and volunteers who pause."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dilocox_peer.peer.rounds.machine import RoundMachine
from dilocox_peer.peer.training.outer_loop import OuterLoop, OuterPhase

from .invariants import Violation
from .outer_world import OuterWorld
from .scenario import BRIEF, WHOLE, Length, Outcome, play

SIZES = (1, 2, 2, 3, 3, 4, 5)  # an outer loop meets all that it can meet among few


@dataclass(frozen=True)
class OuterOutcome:
    """What a seed came to. moves: how often each was made."""

    outcome: Outcome
    moves: Mapping[tuple[OuterPhase, OuterPhase], int]


def run_outer_seed(
    seed: int,
    *,
    outer: type[OuterLoop] = OuterLoop,
    machine: type[RoundMachine] = RoundMachine,
    trace: Callable[[str], None] | None = None,
    length: Length = WHOLE,
) -> OuterOutcome:
    """Plays a seed to its end; raises Violation, with the seed in it, when an invariant breaks."""
    world = OuterWorld(seed, SIZES[seed % len(SIZES)], machine=machine, outer=outer)
    world.encode_messages = seed % 10 == 0
    world.tracing = trace
    try:
        return OuterOutcome(play(world, length), Counter(world.moves))
    except Violation as violation:
        brief = " --brief" if length is BRIEF else ""
        replay = f"python -m tests.sim.replay_outer {seed}{brief} --trace"
        raise Violation(f"seed {seed} at {world.now:.3f} s: {violation}  ({replay})") from violation
