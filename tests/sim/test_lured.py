"""A newcomer that meets a stranger before it meets the run: it goes along with what the stranger made up, and comes back."""

from collections.abc import Sequence

import pytest

from dilocox_peer.peer.rounds.chain import place_after
from dilocox_peer.peer.rounds.contract import PeerFound
from dilocox_peer.types import Digest, PeerId, sha256
from dilocox_peer.wire.chain import Certificate, Entry
from dilocox_peer.wire.rounds import Heartbeat

from .hostile import Hostile
from .scenario import starter
from .world import MAX_BACK, Anchor, Network, Node, World

STRANGER, NEWCOMER = PeerId("s00"), PeerId("p99")


class Quiet(Hostile):
    """It shows its chain to who asks, and does nothing else."""

    def _mischief(self) -> None:
        pass

    def make_up(self, chain: Sequence[Certificate], rounds: int) -> None:
        """What it signs alone, in no time: a view change after the run's newest certificate, and rounds."""
        self.forged = list(chain)
        place = place_after(self.world.genesis(), chain)
        value, view = place.view_change([STRANGER]), place.view + 1
        for _ in range(rounds + 1):
            self.forged.append(self._certified(place, value, [STRANGER], view=view))
            place = place.then(self.forged[-1])
            value = place.round_value([Entry(STRANGER, 1, sha256(b"nothing", place.head), 10, 8)], [STRANGER])


@pytest.mark.parametrize("rounds", [5, 2 * MAX_BACK])
def test_a_newcomer_leaves_a_strangers_chain_however_long_it_is_when_the_run_comes(rounds: int) -> None:
    """Of one with more rounds than may be taken back it never came back, and was in no roster."""
    world = World(1, 3)
    world.start_peers, world.faulty, world.total_rounds = 3, False, 500
    world.network = Network(latency_s=0.02, spread_s=0.05, blob_s=0.1, state_s=0.5)
    members = list(world.nodes.values())
    for node in members:
        node.slowness = 1.0
        world.at(world.rng.random(), starter(world, node))
    assert world.run(80.0, stop=lambda: all(node.machine and node.machine.round >= 3 for node in members))
    stranger = Quiet(world, STRANGER, member=False)
    newcomer = Node(world, NEWCOMER, 1.0)
    world.nodes.update({STRANGER: stranger, NEWCOMER: newcomer})
    assert members[0].machine is not None
    stranger.make_up(members[0].machine.chain, rounds)
    place = place_after(world.genesis(), stranger.forged)
    anchor = Anchor(sha256(b"made up", place.head), frozenset())

    def beat() -> None:
        world.deliver(STRANGER, NEWCOMER, Heartbeat(
            0, place.head, place.view, 1, place.height, place.round, place.weight, place.round + 1, 0, True, anchor.digest,
        ))  # fmt: skip
        world.at(world.now + 1.0, beat)

    gaps = {frozenset((NEWCOMER, node.peer)) for node in members}
    world.network.gaps |= gaps
    stranger.start([])
    newcomer.start([STRANGER])
    beat()
    assert world.run(world.now + 20.0, stop=lambda: place.head in heads_of(newcomer))
    world.network.gaps -= gaps
    for node in members:
        newcomer.feed(PeerFound(node.peer))
        node.feed(PeerFound(NEWCOMER))
    assert world.run(world.now + 60.0, stop=lambda: NEWCOMER in roster_of(members[0]) == roster_of(newcomer))


def heads_of(node: Node) -> set[Digest]:
    return set() if node.machine is None else {certificate.head for certificate in node.machine.chain}


def roster_of(node: Node) -> tuple[PeerId, ...]:
    return () if node.machine is None else tuple(node.machine.roster)
