"""Pipelines in which some peers send back gradients that the model did not compute: who finds out, and is anybody honest named?"""

import random
from collections import Counter
from dataclasses import dataclass, field

from dilocox_peer.events import Event
from dilocox_peer.pipeline.checks import patience_of
from dilocox_peer.pipeline.contract import GradientsFalse
from dilocox_peer.pipeline.scheduler import Scheduler
from dilocox_peer.types import PeerId

from .invariants import Violation
from .pipeline_world import Node, PipelineChecks, PipelineWorld, Settings

BEGIN_S, LENGTH_S = 5.0, 400.0  # a hop of the pipeline: the more hops, the fewer are checked at each
SOON = 256  # false gradients of a liar of the last stage until its caller knows, times the hops
LAYOUTS = ((2, 3), (1, 4), (3, 5), (2, 8), (2, 3, 3), (3, 4, 3), (1, 5, 5), (2, 3, 3, 3))


class LyingNode(Node):
    """Lies from BEGIN_S on if the world has it among its liars, of every share-th micro-batch; those that conspire lie alike."""

    world: "LyingWorld"

    def gradient(self, of: tuple[object, ...], *, is_true: bool = True) -> tuple[object, ...]:
        world = self.world
        if self.peer in world.liars and world.now >= BEGIN_S and world.rng.random() < world.share:
            return ("false", of) if world.they_conspire else ("false", self.peer, of)
        return ("d", of) if is_true else ("deceived", self.peer, of)

    def is_true(self, gradient: tuple[object, ...], of: tuple[object, ...]) -> bool:
        is_true = gradient == ("d", of)
        self.world.taken[self.peer, is_true] += 1
        return is_true


class _Named(PipelineChecks):
    world: "LyingWorld"

    def noted(self, node: Node, event: Event) -> None:
        super().noted(node, event)
        if isinstance(event, GradientsFalse):
            self.world.named.setdefault(event.peer, {})[node.peer] = self.world.now


class LyingWorld(PipelineWorld):
    """named: who was, by whom, and when. taken: gradients, by who took them and whether they were true."""

    node_type = LyingNode

    def __init__(
        self,
        seed: int,
        settings: Settings,
        liars: set[PeerId],
        *,
        they_conspire: bool,
        share: float,
        machine: type[Scheduler],
    ) -> None:
        super().__init__(seed, settings, machine=machine)
        self.liars, self.they_conspire, self.share = liars, they_conspire, share
        self.end_s = LENGTH_S * (len(settings.layout) - 1)
        self.named: dict[PeerId, dict[PeerId, float]] = {}
        self.taken: Counter[tuple[PeerId, bool]] = Counter()
        self.checks = _Named(self)


@dataclass(frozen=True)
class LyingOutcome:
    """found_s: from the first lie until the last caller of a liar had found out. micro_batches: that were completed; checked: twice."""

    found_s: float
    micro_batches: int
    named: dict[PeerId, dict[PeerId, float]] = field(compare=False)


def run_lying_seed(seed: int, *, machine: type[Scheduler] = Scheduler) -> LyingOutcome:
    """Raises Violation where a liar is not found out by all that call it, or somebody honest is named."""
    rng = random.Random(seed * 104_729 + 7)
    layout = rng.choice(LAYOUTS)
    stage = rng.randrange(1, len(layout))
    most = (layout[stage] - 1) // 2  # fewer than half
    number = rng.randint(0, most)
    liars = {PeerId(f"s{stage}r{each:02d}") for each in rng.sample(range(layout[stage]), number)}
    settings = Settings(
        layout, accumulate=rng.choice((4, 16)), max_slots=rng.choice((4, 64)), latency_s=rng.choice((0.0, 0.02, 0.1)), rate_bps=1e8,
        service_s=rng.choice((0.1, 0.3)), jitter=rng.choice((0.0, 0.2)), speeds=tuple(2 ** rng.uniform(-1, 1) for _ in range(sum(layout))),
    )  # fmt: skip
    world = LyingWorld(
        seed, settings, liars, they_conspire=rng.random() < 0.5, share=rng.choice((1.0, 1.0, 0.8)), machine=machine
    )
    try:
        world.start()
        world.run(world.end_s)
        return _judged(world, stage)
    except (Violation, AssertionError) as violation:
        raise Violation(f"lying seed {seed} {layout}, liars {sorted(liars)}: {violation}") from violation


def _judged(world: LyingWorld, stage: int) -> LyingOutcome:
    wrong = {peer: by for peer, by in world.named.items() if peer not in world.liars}
    if wrong:
        raise Violation(f"honest peers were named: {wrong}")
    callers = [node.peer for node in world.stages[stage - 1]]
    found: list[float] = []
    hops = len(world.settings.layout) - 1
    most = len(world.liars) * (2 * patience_of(hops, hops - stage) + hops * SOON)
    for caller in callers:
        false = world.taken[caller, False]
        if false > most:
            raise Violation(f"{caller} took {false} false gradients of {sorted(world.liars)}, at most {most} may be")
    for liar in world.liars:
        found += world.named.get(liar, {}).values()
    return LyingOutcome(max(found, default=BEGIN_S) - BEGIN_S, world.completed(), world.named)
