"""Strangers that say they hold the newest state, and of whom a byte comes now and then: what they cost a peer that joins."""

from dataclasses import replace
from functools import partial

import msgspec
import pytest

from dilocox_peer.peer.rounds import anchorage
from dilocox_peer.peer.rounds.contract import FetchState, PeerFound, StateMissing
from dilocox_peer.peer.rounds.timing import WANTED_S
from dilocox_peer.types import PeerId
from dilocox_peer.wire.rounds import ChainPage, Heartbeat, Message

from .scenario import starter
from .world import TIMING, Network, Node, World

HOUR_S = 3600.0  # that a fetch may take
SOON_S = 150.0  # far less than that
RUN = [PeerId(f"p{number:02}") for number in range(3)]
JOINER = PeerId("p99")


class TrickledNode(Node):
    """Of strangers nothing whole ever comes; a member gives its state, also when it comes to a fetch that is under way."""

    num_asked = 0  # times that it asked others for a state

    def fetch_state(self, action: FetchState) -> None:
        self.num_asked += bool(action.donors)
        self.trickled(action, self.world.now)

    def trickled(self, action: FetchState, since: float) -> None:
        if not action.donors or any(donor in self.world.nodes for donor in action.donors):
            super().fetch_state(action)
            return
        assert self.machine is not None
        donors = tuple(self.machine.copying(action.head, 0.0))
        if not donors or self.world.now > since + HOUR_S:
            self.feed(StateMissing(action.head))
            return
        self.later(WANTED_S, partial(self.trickled, replace(action, donors=donors), since))


class StrangersWorld(World):
    """Whatever a member says of itself to anybody the strangers say to the joiner, of themselves, and at once. Their names come first in any order
    of names."""

    def __init__(self, seed: int, count: int) -> None:
        super().__init__(seed, len(RUN))
        self.start_peers, self.faulty = len(RUN), False
        self.timing = replace(TIMING, state_patience_s=HOUR_S + 400.0)
        self.network = Network(latency_s=0.02, spread_s=0.05, blob_s=0.1)
        self.strangers = [PeerId(f"a{number:03}") for number in range(count)]
        for node in self.nodes.values():
            node.slowness = 1.0
            self.at(self.rng.random(), starter(self, node))
        self.run(60.0)

    def deliver(self, sender: PeerId, to: PeerId, message: Message) -> None:
        if sender in RUN and isinstance(message, Heartbeat) and message.ready and JOINER in self.nodes:
            for name in self.strangers:
                super().deliver(name, JOINER, msgspec.structs.replace(message, incarnation=1))
        super().deliver(sender, to, message)

    def join(self, *, seconds: float, unheard: frozenset[PeerId] = frozenset(), unheard_s: float = 0.0) -> TrickledNode:
        """unheard: members that the joiner does not meet for so long."""
        first = self.nodes[RUN[0]].machine
        assert first is not None
        joiner = self.nodes[JOINER] = TrickledNode(self, JOINER, 1.0)
        gaps = {frozenset((JOINER, peer)) for peer in unheard}
        self.network.gaps |= gaps
        joiner.start(RUN)
        for name in self.strangers:
            self.deliver(name, JOINER, ChainPage(0, first.head, first.view, tuple(first.chain), False))

        def meet() -> None:
            self.network.gaps -= gaps
            for peer in unheard:
                joiner.feed(PeerFound(peer))
                self.nodes[peer].feed(PeerFound(JOINER))

        self.at(self.now + unheard_s, meet)
        self.run(self.now + seconds, stop=lambda: JOINER in first.roster)
        return joiner


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("count", [1, 40])
def test_a_crowd_of_strangers_with_low_names_keeps_no_joiner_out(seed: int, count: int) -> None:
    world = StrangersWorld(seed, count)
    joiner = world.join(seconds=SOON_S)
    first = world.nodes[RUN[0]].machine
    assert first is not None
    assert JOINER in first.roster
    assert joiner.num_asked <= 2


@pytest.mark.parametrize("seed", range(3))
def test_a_stranger_that_is_met_first_is_left_for_the_members(seed: int) -> None:
    """What they hold by then is another state."""
    world = StrangersWorld(seed, 1)
    joiner = world.join(seconds=SOON_S, unheard=frozenset(RUN), unheard_s=12.0)
    first = world.nodes[RUN[0]].machine
    assert first is not None
    assert JOINER in first.roster
    assert joiner.num_asked >= 2


def test_of_those_that_come_while_a_state_is_copied_voters_are_asked_beyond_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Names come and go as long as a copy takes; the run's voters are few."""
    monkeypatch.setattr(anchorage, "MAX_DONORS", 0)
    world = StrangersWorld(0, 12)
    joiner = world.join(seconds=SOON_S, unheard=frozenset(RUN), unheard_s=3.0)
    first = world.nodes[RUN[0]].machine
    assert first is not None
    assert JOINER in first.roster
    assert joiner.num_asked >= 1
