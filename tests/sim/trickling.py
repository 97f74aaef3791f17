"""Members of whom a byte comes now and then, whoever asks them for a thing, beside those that fetch a few things at once.

`python -m tests.sim.trickling [--seeds N] [--slices N] [--peers N] [--hostile N]` prints what that costs the others.
"""

import argparse
import statistics
from dataclasses import dataclass

from dilocox_peer.peer.rounds.contract import FetchBlob
from dilocox_peer.types import PeerId

from .world import Network, Node, World, certificates_of

BESIDE_S = 5.0  # until another source that has it is asked (store/fetch.py)
TURNED_S = 60.0
NEVER_S = 1e6


class TricklingWorld(World):
    """Some turn hostile: of what they alone have nothing whole ever comes, nor is it broken off."""

    def __init__(self, seed: int, num_peers: int, num_hostile: int, num_slices: int) -> None:
        super().__init__(seed, num_peers)
        self.has_slots = True
        if num_slices:
            self.be_sliced(num_slices)
        self.start_peers = num_peers
        self.network = Network(latency_s=0.02, spread_s=0.05, blob_s=0.2)
        self.hostile = frozenset(sorted(self.nodes)[3 : 3 + num_hostile])
        for node in self.nodes.values():
            node.slowness = 1.0

    def trickles(self, peer: PeerId) -> bool:
        return self.now >= TURNED_S and peer in self.hostile

    def hang_s(self, node: Node, action: FetchBlob) -> float:
        if action.blob in node.disk.blobs or not action.sources or not self.trickles(action.sources[0]):
            return 0.0
        others = (source for source in action.sources if not self.trickles(source))
        return BESIDE_S if any(action.blob in self.nodes[source].disk.blobs for source in others) else NEVER_S

    def reachable(self, peer: PeerId, other: PeerId) -> Node | None:
        return None if self.trickles(other) else super().reachable(peer, other)


@dataclass(frozen=True)
class Cost:
    """From the turning on. counted: of the honest peers' contributions, the share that the rounds have which were certified."""

    rounds: int
    view_changes: int
    counted: float
    first_s: float  # until the fifth round


def play(seed: int, num_peers: int, num_hostile: int, num_slices: int, seconds: float) -> Cost:
    world = TricklingWorld(seed, num_peers, num_hostile, num_slices)
    for node in world.nodes.values():
        node.start(sorted(world.nodes))
    world.run(TURNED_S)
    before = max(len(certificates_of(node)) for node in world.up())
    fifth: list[float] = []

    def watch() -> bool:
        if not fifth and max(len(certificates_of(node)) for node in world.up()) >= before + 5:
            fifth.append(world.now - TURNED_S)
        return False

    world.run(TURNED_S + seconds, stop=watch)
    chain = max((certificates_of(node) for node in world.up()), key=len)[before:]
    rounds = [each for each in chain if each.value.kind == "round"]
    honest = [sum(entry.peer not in world.hostile for entry in each.value.entries) for each in rounds]
    counted = statistics.mean(honest or [0]) / (num_peers - num_hostile)
    return Cost(len(rounds), len(chain) - len(rounds), counted, fifth[0] if fifth else seconds)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.trickling", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--hostile", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--slices", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=200.0)
    arguments = parser.parse_args()
    for hostile in arguments.hostile:
        for seed in range(arguments.seeds):
            cost = play(seed, arguments.peers, hostile, arguments.slices, arguments.seconds)
            print(f"{hostile} of {arguments.peers}, seed {seed}: {cost}", flush=True)


if __name__ == "__main__":
    main()
