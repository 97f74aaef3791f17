"""Newcomers that come late to a run whose owner has signed: their chain moves to what is signed before they have a state. With this in force
any seed of scenario.py or hostile_scenario.py is played with some of them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

from dilocox_peer.peer.rounds.chain import Chain
from dilocox_peer.peer.rounds.contract import OwnerVouched
from dilocox_peer.peer.rounds.healing import Healing
from dilocox_peer.types import PeerId

from . import world as world_module
from .world import Node

SHORTEST = 2  # certificates that the owner has signed; in a peer hundreds
LATE_S, SPREAD_S = 20.0, 5.0
VOUCHED_EVERY = 1  # rounds between two words of the owner: these runs are short


@dataclass
class Count:
    foundings: int = 0


@contextmanager
def latecomers() -> Iterator[Count]:
    """Every third honest peer starts late, and all read the owner's word at their start, as peers do in the directory."""
    count, start, become = Count(), Node.start, Chain.become

    def starts(node: Node, friends: Iterable[PeerId]) -> None:
        world, number = node.world, sorted(node.world.nodes).index(node.peer)
        late_s = LATE_S + SPREAD_S * (number % 4)
        if number % 3 == 2 and not node.is_hostile and world.now < late_s:
            there = sorted(world.nodes)
            world.at(late_s, lambda: None if node.is_up or node.gone_for_good else node.start(there))
            return
        start(node, friends)
        owner = world.owner
        if owner is not None and owner.notary is not None and (word := owner.notary.checkpoint) is not None:
            node.later(0.0, lambda: node.feed(OwnerVouched(word)))

    def becomes(chain: Chain, other: Chain) -> None:
        count.foundings += 1
        become(chain, other)

    with (
        patch.object(Node, "start", starts),
        patch.object(Chain, "become", becomes),
        patch.object(Healing, "founded_from", SHORTEST),
        patch.object(world_module, "VOUCHED_EVERY", VOUCHED_EVERY),
    ):
        yield count
