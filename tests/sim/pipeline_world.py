"""A seeded world of real schedulers: one heap of (time, event), links with latency and rate, toy compute.

A body is a name and a size. The name of a gradient says of which output it is the gradient, so that a gradient of
another forward, another version or another peer's output shows at once. After every event the invariants of
`PipelineChecks` hold; a seed is a run.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from dilocox_peer.contract import Leaving, Note, Tick
from dilocox_peer.events import Event
from dilocox_peer.pipeline.contract import (
    Backward,
    BackwardDone,
    Compare,
    Compared,
    Forward,
    ForwardDone,
    GradRefused,
    Hold,
    HopAction,
    HopInput,
    HopReceived,
    HopSend,
    HopTiming,
    Linked,
    MicroBatchDone,
    Publish,
    Release,
    Replicas,
    Rounds,
    RoundTrip,
    Shifted,
    StepNow,
    Stepped,
    StepRefused,
    StepSent,
    Turn,
    Unlinked,
    Work,
)
from dilocox_peer.pipeline.scheduler import Scheduler
from dilocox_peer.pipeline.turnstile import Turnstile
from dilocox_peer.token_bucket import TokenBucket
from dilocox_peer.types import PeerId
from dilocox_peer.wire.hops import (
    Cancel,
    Grad,
    HopMessage,
    HopStatus,
    MicroBatchId,
    Refuse,
    Reserve,
    SlotGrant,
    Step,
    decode_hops,
    encode_hops,
)
from tests.sim.clockwork import Clockwork

from .invariants import Violation

Mode = Literal["carry", "flush"]
FORWARD_PART = 1 / 3


@dataclass(frozen=True, slots=True)
class Toy:
    """A body: `name` says what it is, ("y", ...) an output or ("d", name) the gradient of what has that name."""

    name: tuple[object, ...]
    size: int

    def __len__(self) -> int:
        return self.size


@dataclass(frozen=True)
class Settings:
    """What a world is like. service_s: seconds of a micro-batch's forward and backward at a peer of speed 1."""

    layout: tuple[int, ...]
    mode: Mode = "carry"
    accumulate: int = 32
    max_slots: int = 256
    latency_s: float = 0.0
    rate_bps: float = 1e9
    body_bytes: int = 64 * 1024
    service_s: float = 0.1
    jitter: float = 0.0
    step_s: float = 0.001
    download_bps: float = 0.0  # limit of the bodies that each peer grants; 0: none
    refused: float = 0.0  # share of the bodies that are not taken
    speeds: tuple[float, ...] = ()  # of all peers, stage after stage; empty: all 1
    timing: HopTiming = field(default_factory=HopTiming)


class Node:
    """One peer: a scheduler and a toy torch thread. `generation` ends what a dead process had under way."""

    def __init__(self, world: "PipelineWorld", peer: PeerId, stage: int, speed: float) -> None:
        self.world, self.peer, self.stage, self.speed = world, peer, stage, speed
        self.machine: Scheduler | None = None
        self.generation = 0
        self.incarnation = 0
        self.is_busy = False
        self.busy_s = 0.0
        self.ticking_at = float("inf")
        self.links: set[PeerId] = set()
        self.saved: dict[MicroBatchId, tuple[int, tuple[object, ...], tuple[object, ...]]] = {}
        self.version = 0
        self.gone_for_good = False
        self.certified = 0

    @property
    def is_up(self) -> bool:
        return self.machine is not None

    @property
    def service_s(self) -> float:
        return self.world.settings.service_s / self.speed

    def start(self) -> None:
        """A new process, linked to nobody yet."""
        world, settings = self.world, self.world.settings
        self.generation += 1
        self.incarnation += 1
        self.is_busy = False
        self.ticking_at = float("inf")
        self.saved.clear()
        self.version = 0
        self.machine = world.machine_type(
            me=self.peer, incarnation=self.incarnation, stage=self.stage, num_stages=len(settings.layout),
            mode=settings.mode, accumulate=settings.accumulate, max_slots=settings.max_slots,
            rng=random.Random(world.rng.random()), now=world.now, timing=settings.timing, entry=self._entry(),
            site=world.site_names.get(self.peer, ""),
        )  # fmt: skip
        world.checks.started(self)
        self.feed(Replicas(settings.layout[self.stage]))
        if world.rounds:
            self.feed(Rounds(world.rounds + 1, world.rounds))

    def _entry(self) -> Turnstile | None:
        world, settings = self.world, self.world.settings
        if not settings.download_bps:
            return None
        rate = settings.download_bps / 8
        bucket = TokenBucket(rate, burst=rate / 4, now=world.now)
        return Turnstile(settings.body_bytes, lambda num_bytes: bucket.reserve(num_bytes, world.now))

    def kill(self) -> None:
        self.machine = None
        self.generation += 1

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        """act, unless this process has died by then."""
        generation = self.generation

        def alive_act() -> None:
            if self.generation == generation and self.machine is not None:
                act()

        self.world.at(self.world.now + delay_s, alive_act)

    def feed(self, happened: HopInput) -> None:
        world, machine = self.world, self.machine
        assert machine is not None
        if isinstance(happened, Rounds):
            self.certified = happened.certified
        if world.tracing is not None and not isinstance(happened, Tick):
            world.trace(f"{self.peer} <- {happened}")
        self._carry_out(machine.handle(happened, world.now))
        self._compute()
        world.checks.after_event(self)
        deadline = machine.deadline()
        if deadline < self.ticking_at:
            self.ticking_at = deadline
            self.later(max(0.0, deadline - world.now), partial(self._tick, deadline))

    def _tick(self, deadline: float) -> None:
        if self.ticking_at == deadline:
            self.ticking_at = float("inf")
            self.feed(Tick())

    def _carry_out(self, actions: Iterable[HopAction]) -> None:
        for action in actions:
            match action:
                case HopSend(peer, message, body):
                    self.world.checks.sends(self, peer, message, body)
                    self.world.deliver(self, peer, message, body)
                    if isinstance(message, Step) and self.machine is not None:
                        self._carry_out(self.machine.handle(StepSent(peer, message), self.world.now))
                case Release(id_):
                    if self.saved.pop(id_, None) is None:
                        raise Violation(f"{self.peer} releases {id_} that it does not hold")
                case Compare(one, other, of_one, of_other):
                    assert isinstance(of_one, Toy)
                    assert isinstance(of_other, Toy)
                    agreement = 1.0 if of_one.name == of_other.name else 0.0
                    self.later(0.0, partial(self.feed, Compared(one, other, agreement)))
                case Note(event):
                    self.world.checks.noted(self, event)

    def gradient(self, of: tuple[object, ...], *, is_true: bool = True) -> tuple[object, ...]:
        """What it sends back for what has this name. is_true: all that it rests on was true."""
        return ("d", of)

    def is_true(self, gradient: tuple[object, ...], of: tuple[object, ...]) -> bool:
        """Whether it is what it should be; a Violation where nobody lies."""
        if gradient != ("d", of):
            raise Violation(f"{self.peer}: {gradient} is not the gradient of {of}")
        return True

    # ---- the toy torch thread ----

    def _compute(self) -> None:
        machine = self.machine
        if self.is_busy or machine is None:
            return
        work, actions = machine.next_work(self.world.now)
        self._carry_out(actions)
        if work is None:
            return
        if self.world.tracing is not None:
            self.world.trace(f"{self.peer} works {work}")
        self.world.checks.works(self, work)
        self.is_busy = True
        seconds = self._seconds(work)
        self.busy_s += seconds
        self.later(seconds, partial(self._done, work, seconds))

    def _seconds(self, work: Work) -> float:
        settings = self.world.settings
        jitter = 1.0 + settings.jitter * (2 * self.world.rng.random() - 1) if settings.jitter else 1.0
        match work:
            case Forward():
                return self.service_s * FORWARD_PART * jitter
            case Backward():
                return self.service_s * (1 - FORWARD_PART) * jitter
            case Turn():
                return self.service_s * jitter
            case StepNow() | Publish():
                return settings.step_s

    def _done(self, work: Work, seconds: float) -> None:
        self.is_busy = False
        size = self.world.settings.body_bytes
        match work:
            case Forward(id_, version, body, _):
                if (body is None) != (self.stage == 0):
                    raise Violation(f"{self.peer}: a forward of {id_} with the wrong input")
                if id_ in self.saved:
                    raise Violation(f"{self.peer}: a second forward of {id_} while the first is held")
                if version != self.version:
                    raise Violation(f"{self.peer}: forward with version {version}, the newest is {self.version}")
                name = body.name if isinstance(body, Toy) else ("data", id_)
                self.world.serial += 1
                output = ("y", self.peer, self.incarnation, id_.index, self.world.serial)
                self.saved[id_] = (version, name, output)
                self.feed(ForwardDone(id_, Toy(output, size), seconds))
            case Backward(id_, version, body, _):
                saved = self.saved.pop(id_, None)
                if saved is None:
                    raise Violation(f"{self.peer}: backward of {id_} without its forward")
                if saved[0] != version:
                    raise Violation(f"{self.peer}: forward of {id_} with version {saved[0]}, backward with {version}")
                assert isinstance(body, Toy)
                is_true = self.is_true(body.name, saved[2])
                answer = Toy(self.gradient(saved[1], is_true=is_true), size) if self.stage else None
                self.feed(BackwardDone(id_, answer, 1.0, seconds))
            case Turn(id_, version, body, _):
                if version != self.version:
                    raise Violation(f"{self.peer}: turn with version {version}, the newest is {self.version}")
                assert isinstance(body, Toy)
                self.feed(BackwardDone(id_, Toy(self.gradient(body.name), size), 1.0, seconds))
            case StepNow(micro_batches):
                accumulate = self.world.settings.accumulate
                if micro_batches < accumulate:
                    raise Violation(f"{self.peer}: a step of {micro_batches} micro-batches, not of {accumulate}")
                self._make_version()
                self.feed(Stepped(seconds))
            case Publish():
                self._make_version()
                self.feed(Stepped(seconds))

    def _make_version(self) -> None:
        self.version += 1
        oldest = min((version for version, _, _ in self.saved.values()), default=self.version)
        if oldest < self.version - 1:
            raise Violation(f"{self.peer}: version {self.version} while a forward of {oldest} is held")


class PipelineChecks:
    """The invariants, checked as things happen."""

    def __init__(self, world: "PipelineWorld") -> None:
        self.world = world
        self._granted: dict[tuple[PeerId, PeerId, int], MicroBatchId] = {}  # callee, caller, call
        self._behind: dict[tuple[PeerId, PeerId], int] = {}  # by who was told and who said it
        self.completed: Counter[tuple[PeerId, int]] = Counter()  # by origin and incarnation
        self._seen: set[MicroBatchId] = set()
        self.done_at: dict[PeerId, deque[float]] = {}
        self.resent = 0
        self.events: Counter[str] = Counter()
        self.max_window = 0

    def started(self, node: Node) -> None:
        for key in [key for key in self._granted if node.peer in key[:2]]:
            del self._granted[key]

    def unlinked(self, one: PeerId, other: PeerId) -> None:
        for key in [key for key in self._granted if set(key[:2]) == {one, other}]:
            del self._granted[key]
        self._behind.pop((one, other), None)
        self._behind.pop((other, one), None)

    def sends(self, node: Node, to: PeerId, message: HopMessage, body: object) -> None:
        if to not in node.links:
            raise Violation(f"{node.peer} sends {type(message).__name__} to {to}, which is not linked")
        if (body is not None) != isinstance(message, Step | Grad):
            raise Violation(f"{node.peer} sends {type(message).__name__} {'with' if body else 'without'} a body")

    def received(self, node: Node, sender: PeerId, message: HopMessage) -> None:
        """At arrival, in the order of the link: grants are the callee's word, bodies need one."""
        match message:
            case SlotGrant():
                self._granted[sender, node.peer, message.call] = message.id
            case Step():
                if self._granted.pop((node.peer, sender, message.call), None) != message.id:
                    raise Violation(f"{sender} sent {message.id} to {node.peer} without a grant")
            case Grad(behind=behind):
                self._behind[node.peer, sender] = behind
            case HopStatus(stage) if stage == node.stage + 1:
                self._behind[node.peer, sender] = message.behind
            case _:
                pass

    def works(self, node: Node, work: Work) -> None:
        """An origin does not begin what would leave the stages behind by more than two rounds, as far as it was told."""
        if node.stage or not isinstance(work, Forward):
            return
        told = [behind for (origin, _), behind in self._behind.items() if origin == node.peer]
        if told and node.certified - min(told) >= 2:
            raise Violation(f"{node.peer} at round {node.certified} issues, a stage behind it is at {min(told)}")

    def noted(self, node: Node, event: Event) -> None:
        self.events[type(event).__name__] += 1
        if isinstance(event, MicroBatchDone):
            if event.id in self._seen:
                raise Violation(f"{event.id} is complete twice")
            if (event.id.origin, event.id.incarnation) != (node.peer, node.incarnation):
                raise Violation(f"{node.peer} completes {event.id}, which is not its")
            self._seen.add(event.id)
            self.completed[node.peer, node.incarnation] += 1
            self.done_at.setdefault(node.peer, deque(maxlen=4096)).append(self.world.now)

    def after_event(self, node: Node) -> None:
        machine = node.machine
        assert machine is not None
        settings = self.world.settings
        if machine.slots_in_use > max(settings.max_slots, 1):
            raise Violation(f"{node.peer} has {machine.slots_in_use} slots in use, of at most {settings.max_slots}")
        if len(machine.versions.live) > 2:
            raise Violation(f"{node.peer}: versions {machine.versions.live} live")
        held = len(node.saved)
        if node.stage == 0:
            if machine.completed_total != self.completed[node.peer, node.incarnation]:
                raise Violation(f"{node.peer} counts {machine.completed_total} micro-batches")
            self.max_window = max(self.max_window, machine.window)
            if settings.mode == "flush" and held > settings.accumulate:
                raise Violation(f"{node.peer} holds {held} micro-batches of {settings.accumulate} a step")
        elif held > machine.slots_in_use + 1:  # one whose caller is gone may be under way
            raise Violation(f"{node.peer} holds {held} micro-batches in {machine.slots_in_use} slots")


class PipelineWorld(Clockwork):
    """Time, links, peers and checks. Every peer is linked to all of the neighbouring stages unless a link is down."""

    node_type: type[Node] = Node

    def __init__(
        self, seed: int, settings: Settings, *, machine: type[Scheduler] = Scheduler, is_encoding: bool = False
    ) -> None:
        super().__init__()
        self.seed, self.settings = seed, settings
        self.rng = random.Random(seed)
        self.serial = 0
        self.rounds = 0
        self.is_encoding = is_encoding
        self.machine_type = machine
        self.checks = PipelineChecks(self)
        self.nodes: dict[PeerId, Node] = {}
        self.stages: list[list[Node]] = []
        self.link_s: dict[frozenset[PeerId], float] = {}  # one-way latency where it differs
        self.link_bps: dict[frozenset[PeerId], float] = {}  # where it differs
        self.site_names: dict[PeerId, str] = {}  # as volunteers give them
        self.down: set[frozenset[PeerId]] = set()
        self.refused = settings.refused  # until the faults end
        self._luck = random.Random(-seed - 1)
        self._sessions: Counter[frozenset[PeerId]] = Counter()
        self._free_at: dict[tuple[PeerId, PeerId], float] = {}
        self._queued: Counter[tuple[PeerId, PeerId]] = Counter()
        speeds = iter(settings.speeds or [1.0] * sum(settings.layout))
        for stage, replicas in enumerate(settings.layout):
            row = [
                self.node_type(self, PeerId(f"s{stage}r{number:02d}"), stage, next(speeds))
                for number in range(replicas)
            ]
            self.stages.append(row)
            self.nodes.update({node.peer: node for node in row})

    def start(self) -> None:
        for node in self.nodes.values():
            node.start()
        for node in self.nodes.values():
            self.link_all(node)

    # ---- links ----

    def neighbours(self, node: Node) -> list[Node]:
        rows = [self.stages[stage] for stage in (node.stage - 1, node.stage + 1) if 0 <= stage < len(self.stages)]
        return [other for row in rows for other in row]

    def link_all(self, node: Node) -> None:
        for other in self.neighbours(node):
            self.link(node, other)

    def link(self, node: Node, other: Node) -> None:
        pair = frozenset((node.peer, other.peer))
        if not (node.is_up and other.is_up) or pair in self.down or other.peer in node.links:
            return
        self._sessions[pair] += 1
        node.links.add(other.peer)
        other.links.add(node.peer)
        for one, two in ((node, other), (other, node)):
            one.feed(Linked(two.peer, two.stage))
            one.feed(RoundTrip(two.peer, 2 * self.latency_s(pair)))

    def unlink(self, node: Node, other: Node) -> None:
        """What is under way is lost; who is up is told."""
        pair = frozenset((node.peer, other.peer))
        if other.peer not in node.links:
            return
        self._sessions[pair] += 1
        self.trace(f"link {sorted(pair)} down")
        node.links.discard(other.peer)
        other.links.discard(node.peer)
        for ends in ((node.peer, other.peer), (other.peer, node.peer)):
            self._queued[ends] = 0
        self.checks.unlinked(node.peer, other.peer)
        for one, two in ((node, other), (other, node)):
            if one.is_up:
                one.feed(Unlinked(two.peer))

    def kill(self, node: Node) -> None:
        self.trace(f"{node.peer} dies")
        node.kill()
        for peer in sorted(node.links):
            self.unlink(node, self.nodes[peer])

    def revive(self, node: Node) -> None:
        if not node.is_up and not node.gone_for_good:
            self.trace(f"{node.peer} starts")
            node.start()
            self.link_all(node)

    def restart_linkd(self, node: Node, *, after_s: float) -> None:
        for peer in sorted(node.links):
            self.unlink(node, self.nodes[peer])
        for other in self.neighbours(node):
            node.later(after_s * (0.5 + self.rng.random()), partial(self.link, node, other))

    def latency_s(self, pair: frozenset[PeerId]) -> float:
        return self.link_s.get(pair, self.settings.latency_s)

    def rate_bps(self, pair: frozenset[PeerId]) -> float:
        return self.link_bps.get(pair, self.settings.rate_bps)

    def deliver(self, sender: Node, to: PeerId, message: HopMessage, body: object) -> None:
        if self.tracing is not None and not isinstance(message, HopStatus):
            self.trace(f"{sender.peer} -> {to}: {message} {body or ''}")
        if self.is_encoding:
            (message,) = decode_hops(encode_hops([message]), sender.peer)
        pair, ends = frozenset((sender.peer, to)), (sender.peer, to)
        session, node = self._sessions[pair], self.nodes[to]
        size = 64 + (len(body) if isinstance(body, Toy) else 0)
        begins = max(self.now, self._free_at.get(ends, 0.0))
        wire_s = size * 8 / self.rate_bps(pair)
        self._free_at[ends] = begins + wire_s
        if isinstance(body, Toy):
            self._queued[ends] += 1
            most = 4 * self.settings.max_slots
            if self._queued[ends] > most:
                raise Violation(f"{self._queued[ends]} bodies queued from {sender.peer} to {to}")

        def arrive() -> None:
            if self._sessions[pair] != session or node.machine is None:
                return
            if isinstance(body, Toy):
                self._queued[ends] -= 1
            self.checks.received(node, sender.peer, message)
            is_refused = isinstance(message, Step | Grad) and self._luck.random() < self.refused
            match message:
                case Step() if is_refused:
                    node.feed(StepRefused(sender.peer, message))
                case Grad() if is_refused:
                    node.feed(GradRefused(sender.peer, message))
                case _:
                    node.feed(HopReceived(sender.peer, message, body if isinstance(body, Toy) else None, wire_s))

        self.at(self._free_at[ends] + self.latency_s(pair), arrive)

    # ---- what tests look at ----

    def origins(self) -> list[Node]:
        return [node for node in self.stages[0] if node.is_up]

    def completed(self) -> int:
        return sum(self.checks.completed.values())

    def ideal_rate(self) -> float:
        """Micro-batches a second: the slowest stage's total service rate."""
        return min(sum(1 / node.service_s for node in row) for row in self.stages)


def share_of_ideal(world: PipelineWorld, *, warm_up_s: float, measure_s: float) -> float:
    """Throughput in the steady state over the ideal."""
    world.run(warm_up_s)
    before = world.completed()
    world.run(warm_up_s + measure_s)
    return (world.completed() - before) / measure_s / world.ideal_rate()


__all__ = [
    "Cancel",
    "Hold",
    "Leaving",
    "Node",
    "PipelineWorld",
    "Refuse",
    "Reserve",
    "Settings",
    "Shifted",
    "Toy",
    "share_of_ideal",
]
