"""What happens in a seed of the pipeline: a layout, speeds, links, and faults; then quiet, in which all must go on."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from dilocox_peer.contract import Leaving
from dilocox_peer.pipeline.contract import Hold, HopTiming, Replicas, Rounds, Shifted
from dilocox_peer.pipeline.scheduler import Scheduler
from dilocox_peer.types import PeerId
from dilocox_peer.wire.hops import MicroBatchId

from .invariants import Violation
from .pipeline_world import Node, PipelineWorld, Settings

LAYOUTS: tuple[tuple[int, ...], ...] = ((2, 2), (4, 4, 4, 4), (3, 2, 4), (6, 2), (1, 5), (2, 1, 2), (1, 1), (3, 3, 3))
FAULTY_S = 12.0
DRAIN_S = (
    60.0  # in which everything issued before must come back, and as long again as it takes at a quarter of the speed
)
TIMING = HopTiming(
    status_s=3.0,
    sweep_s=0.5,
    overdue_start_s=5.0,
    overdue_floor_s=1.0,
    overdue_cap_s=200.0,
    unused_grant_s=10.0,
    leaving_s=3.0,
)


@dataclass(frozen=True)
class PipelineOutcome:
    """What a seed came to."""

    seed: int
    layout: tuple[int, ...]
    completed: int
    resent: int
    duplicates: int
    drain_s: float
    num_events: int


def run_pipeline_seed(
    seed: int,
    *,
    machine: type[Scheduler] = Scheduler,
    trace: Callable[[str], None] | None = None,
    download_bps: float = 0.0,
) -> PipelineOutcome:
    """Plays a seed to its end; raises Violation, with the seed in it, when an invariant breaks."""
    world = build(seed, machine=machine, download_bps=download_bps)
    world.tracing = trace
    try:
        return _play(world)
    except (Violation, AssertionError) as violation:
        raise Violation(
            f"pipeline seed {seed} {world.settings.layout} {world.settings.mode} at {world.now:.3f} s: {violation}  "
            f"(python -m tests.sim.replay_pipeline {seed} --trace)"
        ) from violation


def build(seed: int, *, machine: type[Scheduler] = Scheduler, download_bps: float = 0.0) -> PipelineWorld:
    rng = random.Random(seed * 7919 + 1)
    if rng.random() < 0.6:
        layout = rng.choice(LAYOUTS)
    else:
        layout = tuple(rng.randrange(1, 5) for _ in range(rng.randrange(2, 6)))
    # Slow enough that a world makes some tens of events a second and a thousand of them fit a test.
    speeds = tuple(2 ** rng.uniform(-1, 1) for _ in range(sum(layout)))
    settings = Settings(
        layout, mode=rng.choice(("carry", "carry", "flush")), accumulate=rng.choice((4, 8, 32)),
        max_slots=rng.choice((2, 8, 64)), latency_s=rng.choice((0.0, 0.005, 0.02, 0.2)),
        rate_bps=rng.choice((1e8, 1e7, 4e6)), service_s=rng.choice((0.3, 0.6, 1.0)), jitter=rng.choice((0.0, 0.2)),
        step_s=rng.choice((0.001, 0.05)), speeds=speeds, timing=TIMING, download_bps=download_bps,
        refused=rng.choice((0.0, 0.0, 0.02, 0.2)),
    )  # fmt: skip
    return PipelineWorld(seed, settings, machine=machine, is_encoding=seed % 10 == 0)


def _play(world: PipelineWorld) -> PipelineOutcome:
    world.start()
    _schedule_faults(world)
    _schedule_rounds(world)
    world.run(FAULTY_S)
    return _quiet(world)


def _schedule_faults(world: PipelineWorld) -> None:
    rng, nodes = world.rng, list(world.nodes.values())
    rate = rng.choice((0.0, 0.1, 0.3, 1.0))
    now = 2.0
    while rate and (now := now + rng.expovariate(rate)) < FAULTY_S:
        node = rng.choice(nodes)
        kind = rng.random()
        if kind < 0.35:
            world.at(now, partial(_die, world, node, rng.choice((0.1, 1.0, 5.0))))
        elif kind < 0.65:
            world.at(now, partial(_restart_linkd, world, node, rng.choice((0.01, 0.5, 3.0))))
        elif kind < 0.9:
            other = rng.choice(world.neighbours(node))
            world.at(now, partial(_drop_link, world, node, other, rng.choice((0.01, 0.5, 3.0))))
        elif kind < 0.95:
            world.at(now, partial(_slow_down, world, node, rng.choice((0.1, 4.0))))
        else:
            world.at(now, partial(_leave, world, node, 1.0))


def _schedule_rounds(world: PipelineWorld) -> None:
    """Rounds of all stages, each a little at its own time; shifts with them; an origin held now and then."""
    rng = world.rng
    if rng.random() < 0.4:
        return
    length = rng.choice((2.0, 5.0))  # s
    limit = rng.choice((None, None, 6, 40))
    for number in range(1, int((FAULTY_S + DRAIN_S) / length) + 1):
        for node in world.nodes.values():
            at = number * length + rng.random() * length / 2
            world.at(at, partial(_round, world, node, number, limit if at < FAULTY_S else None))
            if rng.random() < 0.5:
                world.at(at + rng.random(), partial(_feed, node, Shifted()))
    if rng.random() < 0.2:
        node = rng.choice(world.stages[0])
        world.at(3.0, partial(_feed, node, Hold(is_held=True)))
        world.at(9.0, partial(_feed, node, Hold(is_held=False)))


def _round(world: PipelineWorld, node: Node, number: int, limit: int | None) -> None:
    world.rounds = max(world.rounds, number)
    _feed(node, Rounds(number + 1, number, limit))


def _feed(node: Node, happened: Hold | Shifted | Rounds | Leaving) -> None:
    if node.is_up:
        node.feed(happened)


def _die(world: PipelineWorld, node: Node, back_after_s: float) -> None:
    if node.is_up and world.now < FAULTY_S:
        world.kill(node)
        world.at(world.now + back_after_s, partial(world.revive, node))


def _restart_linkd(world: PipelineWorld, node: Node, after_s: float) -> None:
    if node.is_up and world.now < FAULTY_S:
        world.restart_linkd(node, after_s=after_s)


def _drop_link(world: PipelineWorld, node: Node, other: Node, after_s: float) -> None:
    if world.now < FAULTY_S:
        world.unlink(node, other)
        world.at(world.now + after_s, partial(world.link, node, other))


def _slow_down(world: PipelineWorld, node: Node, factor: float) -> None:
    node.speed = min(max(node.speed * factor, 0.2), 4.0)


def _leave(world: PipelineWorld, node: Node, after_s: float) -> None:
    if node.is_up and world.now < FAULTY_S:
        node.feed(Leaving())
        world.at(world.now + after_s, partial(_die, world, node, 1.0))


def _quiet(world: PipelineWorld) -> PipelineOutcome:
    """No more faults, everyone up and linked: what was issued comes back, and every origin goes on completing."""
    world.trace("faults stop")
    world.refused = 0.0
    for node in world.nodes.values():
        if node.is_up and node.machine is not None and node.machine.is_leaving:
            world.kill(node)
        world.revive(node)
    for node in world.nodes.values():
        world.link_all(node)
        _feed(node, Hold(is_held=False))
        node.feed(Replicas(world.settings.layout[node.stage]))
    began = world.now
    due = {node: set(node.machine.own) for node in world.origins() if node.machine is not None}

    def is_drained() -> bool:
        for node, ids in due.items():
            assert node.machine is not None
            if ids:
                ids.intersection_update(node.machine.own)
        return not any(due.values())

    patience_s = DRAIN_S + 4 * _drain_s(world, sum(len(ids) for ids in due.values()))
    if not is_drained() and not world.run(began + patience_s, stop=is_drained):
        raise Violation(f"deadlock: not back {patience_s:.0f} s after the faults: {_left(due)}")
    drained_at = world.now
    counts = {node: world.checks.completed[node.peer, node.incarnation] for node in world.origins()}

    def all_went_on() -> bool:
        return all(world.checks.completed[node.peer, node.incarnation] > count for node, count in counts.items())

    if not world.run(drained_at + patience_s, stop=all_went_on):
        stuck = [
            str(node.peer)
            for node, count in counts.items()
            if world.checks.completed[node.peer, node.incarnation] <= count
        ]
        raise Violation(f"starvation: nothing completed at {stuck} in {patience_s:.0f} s of quiet")
    machines = [node.machine for node in world.nodes.values() if node.machine is not None]
    errors = sum(machine.protocol_errors for machine in machines)
    if errors:
        raise Violation(f"{errors} protocol errors among peers that keep to it")
    return PipelineOutcome(
        seed=world.seed, layout=world.settings.layout, completed=world.completed(),
        resent=sum(machine.resent for machine in machines), duplicates=sum(machine.duplicates for machine in machines),
        drain_s=drained_at - began, num_events=world.num_events,
    )  # fmt: skip


def _drain_s(world: PipelineWorld, count: int) -> float:
    """Time that so many micro-batches take when only slots limit them, or only the slowest stage's compute, or the slowest peer's."""
    settings = world.settings
    hops = len(settings.layout) - 1
    loop_s = sum(max(node.service_s for node in row) for row in world.stages) + 2 * hops * (
        settings.latency_s + settings.body_bytes * 8 / settings.rate_bps
    )
    under_way = settings.max_slots * min(settings.layout[1:])
    bodies_per_s = settings.download_bps / 8 / settings.body_bytes * min(settings.layout[1:])
    limited_s = count / bodies_per_s if bodies_per_s else 0.0
    slowest_s = max(node.service_s for row in world.stages[1:] for node in row)  # what waits there is not taken back
    waiting_s = min(count, settings.max_slots) * slowest_s
    return max(loop_s * -(-count // under_way), count / world.ideal_rate(), limited_s, waiting_s)


def _left(due: dict[Node, set[MicroBatchId]]) -> dict[PeerId, int]:
    return {node.peer: len(ids) for node, ids in due.items() if ids}
