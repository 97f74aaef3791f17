"""A peer that joins where the copy of a state takes many rounds: how long until it is in the roster, and what that took."""

from dataclasses import dataclass, replace
from functools import partial

from dilocox_peer.contract import Note
from dilocox_peer.events_of_states import LinkTooSlow
from dilocox_peer.peer.rounds.contract import Action, FetchState, PeerFound
from dilocox_peer.types import PeerId

from .world import ROUND_S, TIMING, Anchor, Network, Node, World

JOINER = PeerId("p99")
WARM_UP_ROUNDS = 100
CONTRIBUTION_BYTES = 50  # of this world, about
STATE_ROUNDS = 57
"""So many rounds' contributions are as large as a state. Where a plan lets an exchange take 0.7 of a round, its copy takes 40 rounds."""


@dataclass(frozen=True, slots=True)
class Joined:
    """What became of a joiner. after_s: of its start, in seconds; None: it was not in the roster in time. states: how many it
    fetched from others. rounds: of the members since its start. needs: downlinks it was told to need, as shares of what it has."""

    after_s: float | None
    states: int
    rounds: int
    needs: tuple[float, ...]


class Joiner(Node):
    """Counts the states that came, and what it is told."""

    states = 0
    needs: tuple[float, ...] = ()

    def carry_out(self, action: Action) -> None:
        if isinstance(action, Note) and isinstance(action.event, LinkTooSlow):
            self.needs += (action.event.needed_bps / action.event.had_bps,)
        super().carry_out(action)

    def fetched_state(self, action: FetchState, anchor: Anchor | None) -> None:
        self.states += anchor is not None
        super().fetched_state(action, anchor)


class EvenWorld(World):
    """Copies take as long as they say."""

    def fetch_s(self, typical_s: float) -> float:
        return typical_s


def join(
    seed: int,
    *,
    members: int,
    state_rounds: float,
    pace: float = 1.0,
    within_rounds: int,
    as_large_as: int = STATE_ROUNDS,
) -> Joined:
    """One peer joins members that train. state_rounds: how many of their rounds the copy of a state takes. pace: of a round of 4 s,
    also of the joiner's. as_large_as: a state, so many rounds' contributions."""
    world = EvenWorld(seed, members)
    round_s = ROUND_S * pace
    world.timing = replace(TIMING, state_patience_s=900.0)
    world.network = Network(blob_s=0.1, state_s=state_rounds * round_s, latency_s=0.02, spread_s=0.02)
    world.state_bytes = as_large_as * members * CONTRIBUTION_BYTES
    for node in world.nodes.values():
        node.slowness = pace
        node.start(world.nodes)
    first = world.nodes[PeerId("p00")]
    world.run(2000.0, lambda: first.machine is not None and first.machine.round >= WARM_UP_ROUNDS)
    began_s, machine = world.now, first.machine
    assert machine is not None
    began_round = machine.round
    joiner = world.nodes[JOINER] = Joiner(world, JOINER, pace)
    joiner.start(world.nodes)
    for node in world.up():
        if node is not joiner:
            node.later(world.rng.random(), partial(node.feed, PeerFound(JOINER)))
    is_in = world.run(
        began_s + within_rounds * round_s,
        lambda: JOINER in machine.roster and joiner.machine is not None and joiner.machine.head == machine.head,
    )
    return Joined(world.now - began_s if is_in else None, joiner.states, machine.round - began_round, joiner.needs)
