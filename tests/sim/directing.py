"""Seeds in which the run's owner speaks: two directives race, one of them in each part of a partition, old ones are replayed,
strangers forge some, and two are signed with one number. Beside the invariants of every seed:

I10: no chain has a directive that the owner has not signed, nor one with a number that is not higher than the one before; and
when the faults have stopped everybody goes by the newest that was said to anybody who is still there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from dilocox_peer.peer.rounds.contract import OwnerSpoke
from dilocox_peer.types import PeerId
from dilocox_peer.wire.declared import replaced
from dilocox_peer.wire.directives import Directive, sign_directive

from .invariants import Violation
from .scenario import SIZES, play
from .world import OWNER, RUN, Node, World, sign_as

FORGER = PeerId("forger")
LAST_WORD_S = 24.0  # before the faults stop, at the earliest after 25 s


def said(number: int, *, rate: int = 500, by: PeerId = OWNER) -> Directive:
    return sign_directive(Directive(RUN, number, rate_permille=rate), sign_as(by))


@dataclass(frozen=True)
class DirectedOutcome:
    """What a seed came to. applied: the number that everybody goes by; two_tongues: whether two had one number."""

    seed: int
    applied: int
    two_tongues: bool


def run_directed(seed: int) -> DirectedOutcome:
    """Plays a seed; raises Violation, with the seed in it."""
    world = World(seed, SIZES[seed % len(SIZES)])
    world.encode_messages = seed % 10 == 0
    world.be_directed()
    rng = world.rng
    numbers = range(1, 2 + rng.randrange(4))
    told: dict[int, set[PeerId]] = {number: set() for number in numbers}
    two_tongues = rng.random() < 0.3

    def tell(node: Node, directive: Directive) -> None:
        if node.is_up:
            node.feed(OwnerSpoke(directive))
            if node.machine is not None and node.machine.directive == directive:
                told.setdefault(directive.number, set()).add(node.peer)

    def at(moment: float, node: Node, directive: Directive) -> None:
        world.at(moment, lambda: tell(node, directive))

    nodes = list(world.nodes.values())
    for number in numbers:
        moment = rng.uniform(1.0, LAST_WORD_S)
        for node in rng.sample(nodes, rng.randint(1, len(nodes))):
            # Of two with one number each peer hears one, in any order.
            rate = 500 + (rng.randrange(2) if two_tongues else 0)
            at(moment + rng.random() * 3.0, node, said(number, rate=rate))
        at(rng.uniform(moment, LAST_WORD_S + 5.0), rng.choice(nodes), said(number))  # replayed
    for _ in range(3):
        forged = replaced(said(1 + rng.randrange(50), by=FORGER), rate_permille=1)
        at(rng.uniform(1.0, LAST_WORD_S), rng.choice(nodes), forged)
    final = max(numbers) + 1
    # The last word is the directory's to keep: who is there at the end reads it, whoever was told before is gone.
    world.at(LAST_WORD_S, partial(_tell_all, world, said(final)))
    try:
        play(world)
        _check(world, final, told)
    except Violation as violation:
        raise Violation(f"directed seed {seed} at {world.now:.3f} s: {violation}") from violation
    return DirectedOutcome(seed, final, two_tongues)


def _tell_all(world: World, directive: Directive) -> None:
    """What the directory does: everybody who is there reads it, now or when it comes back."""

    def act(node: Node) -> Callable[[], None]:
        def look() -> None:
            if node.is_up:
                node.feed(OwnerSpoke(directive))
            world.at(world.now + 2.0, look)

        return look

    for node in world.nodes.values():
        world.at(world.now + world.rng.random(), act(node))


def _check(world: World, final: int, told: dict[int, set[PeerId]]) -> None:
    genuine = {said(number, rate=rate) for number in (*told, final) for rate in (500, 501)}
    for node in world.up():
        machine = node.machine
        assert machine is not None
        number = 0
        for certificate in machine.chain:
            directive = certificate.value.directive
            if directive is None:
                continue
            if directive not in genuine:
                raise Violation(f"I10: {node.peer} goes by what the owner has not said: {directive}")
            if directive.number <= number:
                raise Violation(f"I10: directive {directive.number} after {number} in the chain of {node.peer}")
            number = directive.number
        is_over = machine.schedule.is_over
        if machine.roster and machine.round > 0 and not is_over and number != final:
            raise Violation(f"I10: {node.peer} goes by directive {number}, the newest is {final}")
