"""Members that want rounds to stop: what they do, and what it costs the others. `python -m tests.sim.stalling [--seeds N]`.

A hostile peer runs the very machine and turns it against the others once it has taken part for a while: it may send anything
that it can sign. A seed is played twice, with all peers honest and with some hostile; compared are rounds a minute and the
honest peers' contributions a round, in simulated time, from five rounds after they turned. The invariants hold for the
honest; what only a hostile signature under two certificates can do is counted, not forbidden: no quorum can prevent it.
"""

import argparse
import itertools
import random
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dilocox_peer.events import EquivocationProved, MemberDoubted
from dilocox_peer.peer.rounds.contract import FetchBlob
from dilocox_peer.peer.rounds.machine import RoundMachine
from dilocox_peer.types import PeerId
from dilocox_peer.wire.chain import Certificate
from tests.hostile.machines import MODES

from . import scenario
from .invariants import Violation
from .scenario import Outcome
from .world import ROUND_S, Network, Node, World

TURNED_AT_S = 30.0
SETTLED_ROUNDS = 5  # after which the others must have learned whom not to wait for
MEASURED_S = 60 * ROUND_S
STALL_S = 10.0
AT_LEAST = 0.6  # of the rounds that the slowest honest peer would make, right after the faults, with a third hostile


class StallingWorld(World):
    """Some of its peers are hostile, in one way."""

    def __init__(self, seed: int, num_peers: int, mode: str | None, num_hostile: int) -> None:
        super().__init__(seed, num_peers)
        self.mode = mode
        self.turned_at = TURNED_AT_S
        names = sorted(self.nodes)
        self.suspects = frozenset(random.Random(seed).sample(names, num_hostile))  # hostile where the mode says so
        for node in self.nodes.values():
            node.slowness = 1.0

    @property
    def has_turned(self) -> bool:
        return self.now >= self.turned_at

    def is_hostile(self, peer: PeerId) -> bool:
        return self.mode is not None and peer in self.suspects

    def is_honest(self, peer: PeerId) -> bool:
        return not self.is_hostile(peer)

    def machine_type(self, peer: PeerId) -> type[RoundMachine]:
        if not self.is_hostile(peer):
            return super().machine_type(peer)
        assert self.mode is not None
        turned = {"has_turned": property(lambda _machine: self.has_turned), "codec": "topk"}
        return type("Turned", (MODES[self.mode],), turned)

    def hang_s(self, node: Node, action: FetchBlob) -> float:
        """A hostile source is left when it has said nothing for so long."""
        if self.mode != "hangs" or not self.has_turned:
            return 0.0
        asked = 0
        for source in action.sources:
            if not self.is_hostile(source) and action.blob in self.nodes[source].disk.blobs:
                break
            asked += self.is_hostile(source)
        return STALL_S * asked

    def honest_chain(self) -> list[Certificate]:
        honest = [node.machine for node in self.up() if node.peer not in self.suspects]
        chains = [list(machine.chain) for machine in honest if machine is not None]
        return max(chains, key=len)

    def named(self) -> set[PeerId]:
        """By honest peers: the events of hostile ones are not kept."""
        return {event.peer for _, event in self.checks.events if isinstance(event, MemberDoubted | EquivocationProved)}


@dataclass(frozen=True)
class Measured:
    """Of the rounds certified from SETTLED_ROUNDS after the turning, for MEASURED_S. named: by honest peers."""

    rounds_a_minute: float
    contributions_a_round: float
    longest_s: float
    named: frozenset[PeerId]
    suspects: frozenset[PeerId]
    forks: int


def play(
    seed: int, num_peers: int, num_hostile: int, mode: str | None, trace: Callable[[str], None] | None = None
) -> Measured:
    """Raises Violation, with how to play it again, when an invariant of the honest breaks."""
    world = StallingWorld(seed, num_peers, mode, num_hostile)
    world.tracing = trace
    world.start_peers = num_peers
    rng = random.Random(seed)
    world.network = Network(latency_s=rng.choice((0.01, 0.05)), spread_s=0.1, blob_s=rng.choice((0.05, 0.3)))
    for node in world.nodes.values():
        world.at(world.rng.random(), lambda node=node: node.start(sorted(world.nodes)))  # type: ignore[misc]
    certified: dict[int, float] = {}

    def watch() -> bool:
        certified.setdefault(len(world.honest_chain()), world.now) if world.up() else None
        return False

    try:
        world.run(TURNED_AT_S + 2.0)
        turned = _rounds(world.honest_chain())
        if not world.run(TURNED_AT_S + 300.0, stop=lambda: _rounds(world.honest_chain()) >= turned + SETTLED_ROUNDS):
            raise Violation(f"{_rounds(world.honest_chain()) - turned} rounds in 300 s")
        began, before = world.now, len(world.honest_chain())
        world.run(began + MEASURED_S, stop=watch)
    except Violation as violation:
        raise Violation(
            f"{mode}, seed {seed}, {num_hostile} of {num_peers} at {world.now:.3f} s: {violation}"
        ) from violation
    rounds = [each for each in world.honest_chain()[before:] if each.value.kind == "round"]
    honest = [sum(entry.peer not in world.suspects for entry in each.value.entries) for each in rounds]
    times = sorted(certified.values())
    return Measured(
        rounds_a_minute=60 * len(rounds) / MEASURED_S,
        contributions_a_round=statistics.mean(honest) / (num_peers - num_hostile) if honest else 0.0,
        longest_s=max((later - earlier for earlier, later in itertools.pairwise(times)), default=MEASURED_S),
        named=frozenset(world.named()),
        suspects=world.suspects,
        forks=world.checks.forks,
    )


FAULTY_SIZES = (4, 5, 6, 7, 8, 10, 12)


class FaultyWorld(StallingWorld):
    """Hostile peers among honest ones that crash, lose messages and are cut off: what must heal is the honest ones' world."""

    def __init__(self, seed: int) -> None:
        num_peers = FAULTY_SIZES[seed % len(FAULTY_SIZES)]
        mode = list(MODES)[seed // len(FAULTY_SIZES) % len(MODES)]
        super().__init__(seed, num_peers, mode, (num_peers - 1) // 3)
        self.turned_at = 10.0
        self.at_least = AT_LEAST
        self.hindered_s = 2 * STALL_S if mode == "hangs" else 0.0  # a source that says nothing is left after one
        self.encode_messages = seed % 10 == 0

    def up(self) -> list[Node]:
        up = super().up()
        return [node for node in up if not self.is_hostile(node.peer)] if not self.faulty else up

    def is_whole(self, roster: Iterable[PeerId]) -> bool:
        return {node.peer for node in self.up()} <= set(roster)


def play_faulty(seed: int, trace: Callable[[str], None] | None = None) -> Outcome | None:
    """None: chance took honest voters away until the others were as good as a quorum. Nothing heals then that they do not
    want healed, so only what nobody can take back was checked."""
    world = FaultyWorld(seed)
    world.tracing = trace
    try:
        return scenario.play(world)
    except Violation as violation:
        if world.checks.is_captured and str(violation).startswith(("I7", "I8")):
            return None
        raise Violation(f"{world.mode}, seed {seed} at {world.now:.3f} s: {violation}") from violation


def _rounds(chain: list[Certificate]) -> int:
    return sum(each.value.kind == "round" for each in chain)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.stalling", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--mode", choices=MODES)
    parser.add_argument("--trace", action="store_true", help="print every input and action of the first seed")
    arguments = parser.parse_args()
    print("hostile  mode                rounds a minute, of undisturbed  contributions a round  named  forks")
    for num_peers, num_hostile in ((4, 1), (8, 2)):
        seeds = range(arguments.first, arguments.first + arguments.seeds)
        quiet = [play(seed, num_peers, num_hostile, None) for seed in seeds]
        for mode in [arguments.mode] if arguments.mode else MODES:
            hostile = [play(seed, num_peers, num_hostile, mode, print if arguments.trace else None) for seed in seeds]
            rates = [one.rounds_a_minute / other.rounds_a_minute for one, other in zip(hostile, quiet, strict=True)]
            given = [
                one.contributions_a_round / other.contributions_a_round
                for one, other in zip(hostile, quiet, strict=True)
            ]
            named = sum(len(each.named) for each in hostile) / len(hostile)
            print(
                f"{num_hostile} of {num_peers}   {mode:18}  {_spread(rates)} of {statistics.median(q.rounds_a_minute for q in quiet):.1f}"
                f"     {_spread(given)}   {named:.1f}   {sum(each.forks for each in hostile)}"
            )


def _spread(numbers: list[float]) -> str:
    """min/median/max."""
    return f"{min(numbers):.2f}/{statistics.median(numbers):.2f}/{max(numbers):.2f}"


if __name__ == "__main__":
    main()
