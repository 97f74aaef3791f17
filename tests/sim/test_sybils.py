"""An open run of six that thirty made-up peers join, which behave for an hour of the run's clock: they contribute, and have no
vote. Every peer is a real round machine; a round takes a few seconds here, and minutes by the run's clock."""

from collections.abc import Callable

import pytest

from dilocox_peer.config import preset
from dilocox_peer.peer.rounds.chain import is_quorum
from dilocox_peer.peer.rounds.machine import RoundMachine
from dilocox_peer.peer.rounds.seats import seat_terms
from dilocox_peer.types import PeerId

from .invariants import Violation
from .world import ROUND_S, Node, World

HOUR_US = 3_600_000_000
STEP_US = 6_000_000
FOUNDERS, SYBILS = 6, 30


def machine_of(node: Node) -> RoundMachine:
    assert node.machine is not None
    return node.machine


def found(world: World) -> list[Node]:
    """Seats all peers of world as the founders of an open run, with its owner, and begins it; until it may be joined they are what it waits for."""
    world.max_peers, world.start_peers, world.step_us, world.faulty = 64, len(world.nodes), STEP_US, False
    world.seat(seat_terms(preset("tiny")))
    world.be_owned()
    assert world.owner is not None
    world.owner.start()
    founders = list(world.nodes.values())
    for node in founders:
        node.start(sorted(world.nodes))
    return founders


class OpenRun:
    """Six founders and the run's owner, and thirty that come when these have certified a round."""

    def __init__(self, seed: int) -> None:
        self.world = world = World(seed, FOUNDERS)
        self.founders = found(world)
        self.until(lambda: machine_of(self.founders[0]).round >= 1, 60.0)
        world.start_peers = 1
        self.sybils = [world.add_node(PeerId(f"s{number:02d}")) for number in range(SYBILS)]
        for node in self.sybils:
            node.start(sorted(world.nodes))

    def until(self, holds: Callable[[], bool], within_s: float) -> None:
        if not self.world.run(self.world.now + within_s, stop=holds):
            raise Violation(f"not within {within_s} s of the simulation")

    @property
    def clock_us(self) -> int:
        """What its rounds took, by the steps that they were planned with."""
        values = [certificate.value for certificate in machine_of(self.founders[0]).chain]
        return sum(value.plan.inner_steps * STEP_US for value in values if value.entries)


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_thirty_that_behave_for_an_hour_have_no_vote_and_cannot_go_on_without_the_six(seed: int) -> None:
    run = OpenRun(seed)
    first = run.founders[0]
    founders, sybils = ({node.peer for node in nodes} for nodes in (run.founders, run.sybils))
    run.until(lambda: set(machine_of(first).roster) == founders | sybils, 120.0)
    began_us = run.clock_us
    run.until(lambda: run.clock_us - began_us >= HOUR_US, 1200.0)
    contributed = {entry.peer for entry in machine_of(first).chain[-1].value.entries}
    assert len(contributed & sybils) > SYBILS // 2
    assert set(machine_of(first).voters) == founders
    assert not is_quorum(sybils, machine_of(first).voters)

    run.world.network.group_of = dict.fromkeys(sybils, 1)  # the thirty leave the six out
    before = machine_of(first).round
    run.world.run(run.world.now + 12 * ROUND_S)
    assert machine_of(first).round > before
    ahead = machine_of(first).head
    run.world.network.group_of.clear()
    run.until(run.world.shares_one_head, 120.0)
    assert ahead in {certificate.head for certificate in machine_of(run.sybils[0]).chain}
    assert set(machine_of(first).voters) <= founders
