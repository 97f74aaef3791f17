"""Pairs of a stage that find no path to one another: what their rounds come to. `python -m tests.sim.gaps [--share 0.7] [--seeds N]`.

Contributions a round of the longest chain, with messages passed on by members and without.
"""

import argparse
import itertools
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from dilocox_peer.peer.rounds.contract import Action, PeerUnreached
from dilocox_peer.peer.rounds.contract import Input as MachineInput
from dilocox_peer.peer.rounds.machine import RoundMachine
from dilocox_peer.types import PeerId

from .invariants import Violation
from .scenario import crasher
from .world import ROUND_S, Network, World, certificates_of

SETTLED_S, MEASURED_S = 40.0, 160.0


class Unpassed(RoundMachine):
    """Nobody passes anything on: what is cut off stays so."""

    def handle(self, event: MachineInput, now: float, *, more: bool = False) -> list[Action]:
        return [] if isinstance(event, PeerUnreached) else super().handle(event, now, more=more)


@dataclass(frozen=True)
class Measured:
    """pairs: share of them that have a path. chains: that certify at the end."""

    pairs: float
    rounds: int
    contributions_a_round: float
    chains: int


def connected_pairs(peers: list[PeerId], share: float, num_public: int, rng: random.Random) -> set[frozenset[PeerId]]:
    """Those without a path: a pair of homes has one with probability share; who is public is reached by all."""
    homes = peers[num_public:]
    return {frozenset(pair) for pair in itertools.combinations(homes, 2) if rng.random() >= share}


def play(
    seed: int,
    num_peers: int = 8,
    share: float = 0.7,
    *,
    num_public: int = 0,
    slices: int = 0,
    crashes: int = 0,
    machine: type[RoundMachine] = RoundMachine,
    trace: Callable[[str], None] | None = None,
) -> Measured:
    """crashes: so many, each back after some seconds. Raises Violation."""
    world = World(seed, num_peers, machine=machine)
    world.tracing, world.start_peers = trace, num_peers
    world.encode_messages = seed % 2 == 0
    for node in world.nodes.values():
        node.slowness = 1.0
    world.network = Network(latency_s=0.05, spread_s=0.1, blob_s=0.3)
    rng = random.Random(seed)
    world.network.gaps = connected_pairs(sorted(world.nodes), share, num_public, rng)
    if slices:
        world.be_sliced(slices)
    world.be_owned()
    assert world.owner is not None
    world.owner.start()
    for node in world.nodes.values():
        world.at(world.rng.random(), lambda node=node: node.start(sorted(world.nodes)))  # type: ignore[misc]
    for _ in range(crashes):
        node = rng.choice(list(world.nodes.values()))
        world.at(
            SETTLED_S * rng.random() + 5.0, crasher(world, node, back_after=4 * rng.random(), actions=rng.randrange(6))
        )
    try:
        world.run(SETTLED_S)
        world.faulty = False
        began = max((len(certificates_of(node)) for node in world.up()), default=0)
        world.run(SETTLED_S + MEASURED_S)
    except Violation as violation:
        raise Violation(f"seed {seed}, {num_peers} peers, {share:g} of the pairs: {violation}") from violation
    chain = max((certificates_of(node) for node in world.up()), key=len)
    rounds = [each for each in chain[began:] if each.value.kind == "round"]
    given = [len(each.value.entries) for each in rounds]
    heads = {node.machine.head for node in world.up() if node.machine is not None}
    tips = [each.head for each in chain[-3:]]
    total = num_peers * (num_peers - 1) / 2
    return Measured(
        1 - len(world.network.gaps) / total,
        len(rounds),
        statistics.mean(given) if given else 0.0,
        len(heads - set(tips)) + 1,
    )


def most_rounds() -> float:
    """That the time would have, were nothing waited for."""
    return MEASURED_S / ROUND_S


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--peers", type=int, default=8)
    cli.add_argument("--public", type=int, default=0)
    cli.add_argument("--share", type=float, default=0.7)
    cli.add_argument("--slices", type=int, default=0)
    cli.add_argument("--crashes", type=int, default=0)
    cli.add_argument("--seeds", type=int, default=5)
    flags = cli.parse_args()
    for name, machine in (("not passed on", Unpassed), ("passed on", RoundMachine)):
        found = [
            play(
                seed, flags.peers, flags.share, num_public=flags.public, slices=flags.slices, crashes=flags.crashes,
                machine=machine,
            )
            for seed in range(flags.seeds)
        ]  # fmt: skip
        given = sorted(each.contributions_a_round for each in found)
        rounds = sorted(each.rounds for each in found)
        print(
            f"{name:<14} contributions a round {given[0]:.2f} / {statistics.median(given):.2f} / {given[-1]:.2f} of {flags.peers}; "
            f"rounds {rounds[0]} / {statistics.median(rounds):g} / {rounds[-1]} of {most_rounds():.0f}; "
            f"chains {max(each.chains for each in found)}"
        )


if __name__ == "__main__":
    main()
