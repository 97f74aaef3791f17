"""Rounds whose exchange takes much of them: how many of the contributions count."""

from dataclasses import dataclass

from dilocox_peer.peer.planning.plan import PlanBounds
from dilocox_peer.types import PeerId

from .outer_world import OuterWorld
from .world import PLAN, Network, certificates_of


@dataclass(frozen=True, slots=True)
class Exchanged:
    """rounds: certified. contributions: of all that could have counted, the share that did."""

    rounds: int
    share: float
    round_s: float


class _Even(OuterWorld):
    """Copies take 0.9 to 1.1 of what they say, and every round is as long."""

    @property
    def plans(self) -> PlanBounds:
        return PlanBounds(("fp16", "int8", "topk"), 255, PLAN.inner_steps, PLAN.inner_steps)

    def fetch_s(self, typical_s: float) -> float:
        return typical_s * (0.9 + 0.2 * self.rng.random())


def exchange(seed: int, *, peers: int, blob_s: float, rounds: int) -> Exchanged:
    """Peers that train while their contributions of the last round are exchanged (overlap arrival), which takes blob_s."""
    world = _Even(4 * seed, peers)
    assert world.overlap == "arrival"
    world.pause_rate, world.faulty = 0.0, False
    world.start_peers = peers
    world.network = Network(blob_s=blob_s, latency_s=0.02, spread_s=0.02)
    for node in world.nodes.values():
        node.slowness = 1.0
        node.start(world.nodes)
    first = world.nodes[PeerId("p00")]
    world.run(3000.0, lambda: first.machine is not None and first.machine.round >= rounds)
    chain = [each for each in certificates_of(first) if each.value.kind == "round"][4:]
    counted = [len(each.value.entries) for each in chain]
    return Exchanged(len(chain), sum(counted) / (peers * len(counted)), world.now / rounds)
