"""Seeds with hostile peers: members of the roster's minority, and any number of strangers, before, during and after
partitions. Whatever they send, the invariants hold among the honest, I9 with them: nobody leaves a branch that a quorum of
honest peers stands on. Once the network is whole, the honest share one chain, and go on.
"""

from collections.abc import Callable
from dataclasses import dataclass

from dilocox_peer.peer.rounds.machine import RoundMachine
from dilocox_peer.peer.rounds.seats import SeatTerms
from dilocox_peer.types import PeerId

from .hostile import Hostile
from .invariants import Violation
from .scenario import crasher, has_begun, partitioner, round_of, schedule_owner, share_bound_s, shown_heads, starter
from .world import ROUND_S, Network, World

GO_ON_S = 10 * ROUND_S
PATIENCE = 3.0  # times the bound of an honest swarm: hostile members stall a ballot now and then


@dataclass(frozen=True)
class HostileOutcome:
    """What a seed came to. is_captured: chance took honest members away until the others were a quorum; then only what
    nobody can take back was checked."""

    seed: int
    honest: int
    hostile: int
    strangers: int
    rounds: int
    share_s: float
    is_captured: bool


def run_hostile_seed(
    seed: int, *, machine: type[RoundMachine] = RoundMachine, trace: Callable[[str], None] | None = None
) -> HostileOutcome:
    """Plays a seed to its end; raises Violation, with the seed in it, when an invariant breaks."""
    rng_sizes = seed * 7919
    honest = 3 + rng_sizes % 6
    members = 1 + rng_sizes // 6 % max((honest - 1) // 1, 1) if rng_sizes % 5 else 0
    members = min(members, honest - 1)
    strangers = rng_sizes // 30 % 3 if members else 1 + rng_sizes % 3
    world = World(seed, honest, machine=machine)
    world.tracing = trace
    world.encode_messages = seed % 10 == 0
    for number in range(members):
        _add(world, PeerId(f"m{number:02d}"), member=True)
    for number in range(strangers):
        _add(world, PeerId(f"s{number:02d}"), member=False)
    try:
        share_s = _play(world)
    except Violation as violation:
        raise Violation(
            f"hostile seed {seed} at {world.now:.3f} s: {violation}  (python -m tests.sim.replay {seed} --hostile --trace)"
        ) from violation
    return HostileOutcome(seed, honest, members, strangers, world.checks.rounds, share_s, world.checks.is_captured)


def _add(world: World, peer: PeerId, *, member: bool) -> None:
    world.nodes[peer] = Hostile(world, peer, member=member)


def _play(world: World) -> float:
    rng = world.rng
    stop_at = 25.0 + 15.0 * rng.random()
    world.start_peers = rng.choice((1, 2, len(world.up()) or 2))
    world.network = Network(
        loss=rng.choice((0.0, 0.0, 0.02, 0.05)), duplicates=rng.choice((0.0, 0.05)), latency_s=rng.choice((0.01, 0.05)),
        spread_s=rng.choice((0.02, 0.2)), blob_s=rng.choice((0.05, 0.3)), state_s=rng.choice((0.5, 1.5)),
    )  # fmt: skip
    if rng.random() < 0.3:
        world.seat(SeatTerms(contributions=2, window=4))
    if rng.random() < 0.75:
        world.be_owned()
        schedule_owner(world, stop_at)
    honest = [node for node in world.nodes.values() if not node.is_hostile]
    for node in honest:
        world.at(rng.random() * 1.5, starter(world, node))
    for node in world.nodes.values():
        if node.is_hostile:
            world.at(rng.choice((0.0, 3.0, 10.0)) + rng.random(), starter(world, node))
    if rng.random() < 0.5:
        moment = rng.uniform(6.0, stop_at - 5.0)
        world.at(moment, partitioner(world, 2))
        world.at(moment + rng.choice((1.0, 5.0, 12.0)), lambda: world.network.group_of.clear())
    if rng.random() < 0.4:
        moment = rng.uniform(6.0, stop_at - 5.0)
        world.at(moment, crasher(world, rng.choice(honest), back_after=rng.choice((0.2, 3.0, 10.0)), actions=None))
    world.run(stop_at)
    return _heal(world, stop_at)


def _heal(world: World, stop_at: float) -> float:
    """The network is whole; the hostile ones go on."""
    world.trace("faults stop")
    world.faulty = False
    world.network.group_of.clear()
    world.network.loss = min(world.network.loss, 0.02)
    for node in world.nodes.values():
        starter(world, node)()
    if world.owner is not None and not has_begun(world):
        world.owner.crash()
        world.owner.start()
    if world.checks.is_captured:
        world.run(stop_at + GO_ON_S)
        return 0.0
    shared = world.run(stop_at + PATIENCE * share_bound_s(world), stop=world.shares_one_head)
    if world.checks.is_captured:
        return 0.0
    if not shared:
        raise Violation(
            f"I7: the honest share no head {PATIENCE * share_bound_s(world):.1f} s after the faults: {shown_heads(world)}"
        )
    share_s, rounds = world.now - stop_at, round_of(world)
    world.run(world.now + GO_ON_S)
    if not world.checks.is_captured and round_of(world) <= rounds:
        raise Violation(f"I8: no round in {GO_ON_S} s of a whole network: {shown_heads(world)}")
    return share_s
