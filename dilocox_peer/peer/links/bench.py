"""The scheduler under its lock: the torch thread takes its work here and puts results back, the session says what it knows.

Decides nothing: which micro-batch goes where is pipeline/scheduler.py. What the scheduler wants sent is kept, in order, for
the pipeline's thread, which sends all frames.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from dilocox_peer.contract import Leaving, Tick
from dilocox_peer.events import Event
from dilocox_peer.pipeline import contract
from dilocox_peer.pipeline.contract import Work
from dilocox_peer.pipeline.scheduler import Scheduler
from dilocox_peer.types import PeerId
from dilocox_peer.wire.hops import Grad, MicroBatchId, Step

MAX_TRACED = 1024  # micro-batches whose packing times are kept


@dataclass(frozen=True, slots=True)
class MicroBatchCounts:
    """As the scheduler counts them. completed: at an origin, those that came back, each once; executed: computed here."""

    in_flight: int
    waiting: int
    window: int
    resent: int
    duplicates: int
    completed: int
    executed: int


class Bench:
    """The WorkBench of stage_loop.py. Any thread may call any of it."""

    def __init__(self, scheduler: Scheduler, *, stage: int, trace: bool, wake: Callable[[], None]) -> None:
        """wake: the pipeline's thread, which then asks `take_actions`. trace: packing times are kept."""
        self._scheduler = scheduler
        self._stage = stage
        self._wake = wake
        self._on_work: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._actions: deque[contract.HopAction] = deque()  # of the scheduler, in order
        self._released: list[MicroBatchId] = []
        self._num_replicas = 1
        self._listed_origins = 0
        self._packed_s: dict[MicroBatchId, float] | None = {} if trace else None

    def set_on_work(self, on_work: Callable[[], None]) -> None:
        """Called, from any thread, when there may be work; before anything happens."""
        self._on_work = on_work

    def tell(self, happened: contract.HopInput, *, nudge: bool = True) -> None:
        """Lets the scheduler know; any thread but the pipeline's. nudge: there may be work now."""
        with self._lock:
            actions = self._scheduler.handle(happened, time.monotonic())
            self._keep(actions)
        if actions:
            self._wake()
        if nudge:
            self.nudge()

    def nudge(self) -> None:
        """There may be work."""
        self._on_work()

    # ---- the pipeline's thread, which asks for the actions and nudges by itself, after all that it takes in at one time

    def awaits(self, peer: PeerId, message: Step) -> bool:
        """Whether the body of this message may come."""
        with self._lock:
            return self._scheduler.awaits(peer, message)

    def awaited(self, peer: PeerId, message: Grad) -> contract.Body | None:
        """The output that this answers, if its body may come."""
        with self._lock:
            return self._scheduler.awaited(peer, message)

    def is_doubted(self, micro_batch: MicroBatchId) -> bool:
        """Whether it is a caller's of which most comes to nothing."""
        with self._lock:
            return self._scheduler.callers.is_doubted(micro_batch)

    def take_in(self, happened: contract.HopInput) -> None:
        """Lets the scheduler know."""
        with self._lock:
            self._keep(self._scheduler.handle(happened, time.monotonic()))

    def tick(self) -> bool:
        """Whether anything was due."""
        with self._lock:
            now = time.monotonic()
            is_due = self._scheduler.deadline() <= now
            if is_due:
                self._keep(self._scheduler.handle(Tick(), now))
        return is_due

    @property
    def deadline(self) -> float:
        """When the pipeline's thread has something to do here; -inf: now."""
        with self._lock:
            return float("-inf") if self._actions else self._scheduler.deadline()

    def take_actions(self) -> deque[contract.HopAction]:
        """What is to be sent and told since the last call."""
        with self._lock:
            actions, self._actions = self._actions, deque()
        return actions

    def with_packing(self, timed: contract.MicroBatchTimed) -> Event:
        """Its moments, and what packing took of them."""
        assert self._packed_s is not None, "timed without being traced"
        with self._lock:
            seconds = self._packed_s.pop(timed.id, 0.0)
            while len(self._packed_s) > MAX_TRACED:  # of those that never came to their end
                self._packed_s.pop(next(iter(self._packed_s)))
        return replace(timed, encode_s=seconds)

    def _keep(self, actions: Iterable[contract.HopAction]) -> None:
        """Under the lock. What is released the torch thread is told with the next work, which may rest on it (a version
        that is free, an id that comes again); the rest is the pipeline's thread to do."""
        for action in actions:
            if isinstance(action, contract.Release):
                self._released.append(action.id)
            else:
                self._actions.append(action)

    # ---- the torch thread --------------------------------------------------------------------------------------------

    def next_work(self) -> Work | None:
        with self._lock:
            work, actions = self._scheduler.next_work(time.monotonic())
            self._keep(actions)
        if actions:
            self._wake()
        return work

    def released(self) -> list[MicroBatchId]:
        with self._lock:
            released, self._released = self._released, []
        return released

    def packed(self, micro_batch: MicroBatchId, seconds: float) -> None:
        if self._packed_s is not None:
            with self._lock:
                self._packed_s[micro_batch] = self._packed_s.get(micro_batch, 0.0) + seconds

    def forward_done(self, micro_batch: MicroBatchId, body: bytes | None, seconds: float) -> None:
        self.tell(contract.ForwardDone(micro_batch, body, seconds), nudge=False)

    def backward_done(self, micro_batch: MicroBatchId, body: bytes | None, loss: float, seconds: float) -> None:
        self.tell(contract.BackwardDone(micro_batch, body, loss, seconds), nudge=False)

    def stepped(self, seconds: float) -> None:
        self.tell(contract.Stepped(seconds), nudge=False)

    def shifted(self) -> None:
        self.tell(contract.Shifted())

    def rounds(self, training: int, certified: int, issue_limit: int | None, accumulate: int) -> None:
        self.tell(contract.Rounds(training, certified, issue_limit, accumulate))

    def hold(self, is_held: bool) -> None:
        self.tell(contract.Hold(is_held))

    def pause(self, is_paused: bool) -> None:
        self.tell(contract.PauseWanted(is_paused))

    def load_share(self) -> float:
        if self._stage == 0:
            return 1.0
        with self._lock:
            origins = self._scheduler.num_origins(self._listed_origins)
        return max(1, origins) / self._num_replicas

    # ---- the session -------------------------------------------------------------------------------------------------

    def set_replicas(self, count: int) -> None:
        """How many peers our own stage has."""
        if max(1, count) != self._num_replicas:
            self._num_replicas = max(1, count)
            self.tell(contract.Replicas(self._num_replicas))

    def set_listed_origins(self, count: int) -> None:
        """How many peers of stage 0 the directory lists."""
        self._listed_origins = count

    def leave(self) -> None:
        """Callers are told to go elsewhere."""
        self.tell(Leaving())

    def counts(self) -> MicroBatchCounts:
        with self._lock:
            scheduler = self._scheduler
            return MicroBatchCounts(
                in_flight=scheduler.in_flight,
                waiting=scheduler.waiting,
                window=scheduler.window,
                resent=scheduler.resent,
                duplicates=scheduler.duplicates,
                completed=scheduler.completed_total,
                executed=scheduler.executed_total,
            )

    @property
    def recent_origins(self) -> Mapping[tuple[PeerId, PeerId], tuple[int, int]]:
        with self._lock:
            return self._scheduler.recent_origins()

    @property
    def certified_at_stage_0(self) -> int:
        with self._lock:
            return self._scheduler.stage0_certified

    @property
    def behind(self) -> int:
        """The lowest certified round of this stage and those behind it, as far as we know."""
        with self._lock:
            return self._scheduler.behind
