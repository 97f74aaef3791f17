"""Rounds whose exchange takes much of them: how many of the contributions count."""

from dataclasses import dataclass

from dilocox_peer.peer.planning.plan import PlanBounds
from dilocox_peer.peer.rounds.contract import BytesCame, FetchBlob
from dilocox_peer.peer.rounds.driver import BYTES_EVERY_S
from dilocox_peer.types import PeerId
from dilocox_peer.wire.rounds import Message

from .outer_world import OuterWorld
from .world import PLAN, Network, Node, certificates_of


@dataclass(frozen=True, slots=True)
class Exchanged:
    """rounds: certified. contributions: of all that could have counted, the share that did."""

    rounds: int
    share: float
    round_s: float


class _Even(OuterWorld):
    """Copies take 0.9 to 1.1 of what they say, and every round is as long. waits_behind: messages of a peer wait until what it
    sends has gone out; tells_bytes: the others' shells tell that bytes of it come."""

    waits_behind = tells_bytes = False

    def __init__(self, seed: int, peers: int) -> None:
        super().__init__(seed, peers)
        self._busy_until: dict[PeerId, float] = {}

    @property
    def plans(self) -> PlanBounds:
        return PlanBounds(("fp16", "int8", "topk"), 255, PLAN.inner_steps, PLAN.inner_steps)

    def fetch_s(self, typical_s: float) -> float:
        return typical_s * (0.9 + 0.2 * self.rng.random())

    def hang_s(self, _node: Node, action: FetchBlob) -> float:
        if not self.waits_behind:
            return 0.0
        source, seconds = action.sources[0], self.network.blob_s
        self._busy_until[source] = max(self._busy_until.get(source, 0.0), self.now + seconds)
        for node in self.nodes.values():
            for number in range(int(seconds / BYTES_EVERY_S) if self.tells_bytes and node.peer != source else 0):
                node.later(number * BYTES_EVERY_S, lambda node=node: node.feed(BytesCame(source)))  # type: ignore[misc]
        return 0.0

    def deliver(self, sender: PeerId, to: PeerId, message: Message) -> None:
        waits_s = self._busy_until.get(sender, 0.0) - self.now
        if waits_s > 0:
            self.at(self.now + waits_s, lambda: super(_Even, self).deliver(sender, to, message))
        else:
            super().deliver(sender, to, message)


def exchange(
    seed: int, *, peers: int, blob_s: float, rounds: int, waits_behind: bool = False, tells_bytes: bool = False
) -> Exchanged:
    """Peers that train while their contributions of the last round are exchanged (overlap arrival), which takes blob_s."""
    world = _Even(4 * seed, peers)
    world.waits_behind, world.tells_bytes = waits_behind, tells_bytes
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
