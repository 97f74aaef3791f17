"""The threads that train: one torch thread, sole owner of parameters and optimizer, and one thread for the outer loop.

The session (asyncio) calls; every call returns at once with a value or a Future. Bytes and frozen dataclasses go to the
caller, never a tensor. Between the two threads a vector is handed over whole: whoever gave it does not touch it again.

Order. Every call takes its place in both threads' queues under one lock, so both carry calls out in the order in which
they were made, whatever the timing:
    close:  the torch thread takes the snapshot between two micro-batches; the outer thread waits for it and encodes.
    merge:  the outer thread decodes and steps; the torch thread trains on meanwhile, then applies the shift before any
            later call. So a close after a merge always has its shift in the snapshot.
The torch thread never waits for the outer thread to train on, except where a call says so (overlap none, hold); the
outer thread waits for the torch thread at most one micro-batch. There is no cycle.

Rounds. Training is in round `certified + 1`, or `certified + 2` while an offer is out. A call that puts training into a
higher round starts its count of micro-batches anew; one that puts it back lets the closed round go on.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from dilocox_peer.compression.codec import CodecPolicy
from dilocox_peer.compression.contribution import Blob
from dilocox_peer.compression.ladder import LOW_RANK
from dilocox_peer.compression.lengths import Squares
from dilocox_peer.data.batches import BatchSource
from dilocox_peer.manifest import Manifest
from dilocox_peer.peer.planning.controller import OwnCodec
from dilocox_peer.peer.planning.timetable import Timetable
from dilocox_peer.peer.training.anchor_state import AnchorState
from dilocox_peer.peer.training.book import HoldReason, Progress, Snapshot, TrainingLoop
from dilocox_peer.peer.training.crew import Crew
from dilocox_peer.peer.training.given_back import give_back
from dilocox_peer.peer.training.outer import Grow, OuterOptimizer, OuterSettings, OwnContribution, stage_policy
from dilocox_peer.peer.training.outer_contract import AnchorMoved
from dilocox_peer.peer.training.stage_loop import StageLoop, WorkBench
from dilocox_peer.peer.training.whole_loop import WholeLoop
from dilocox_peer.peer.training.worker import MAX_CALLS, Worker
from dilocox_peer.types import Digest, PeerId

if TYPE_CHECKING:
    from dilocox_peer.model.frozen import FrozenBase

NICENESS = 5  # of the thread that trains: where processors are few, what others wait for (messages, contributions, averages) goes first

T = TypeVar("T")
U = TypeVar("U")


class Trainer:
    """See the module. Methods may be called from any one thread, except that none may be called from on_failure."""

    def __init__(
        self,
        manifest: Manifest,
        *,
        peer: PeerId,
        incarnation: int,
        corpus: BatchSource | None,
        stage: int = 0,
        bench: WorkBench | None = None,
        devices: Sequence[str] = ("cpu",),
        threads: int = 1,
        clock: Callable[[], float] = time.monotonic,
        on_failure: Callable[[str], None] = lambda reason: None,
        micro_batch_limit: int | None = None,
        timetable: Timetable | None = None,
        checkpointing: bool = False,
        base: "FrozenBase | None" = None,
        precision: str = "float32",
        compiled: bool = False,
    ) -> None:
        """timetable: the plans of the rounds, which somebody else keeps; None: all as the manifest says.
        checkpointing: activations are computed twice and kept once (model/architecture.py).
        base: of a run of adapters, the weights that stay as they are. precision: of forwards and backwards (model/precision.py). compiled: layers by
        torch.compile (model/architecture.py).
        devices: of a whole model all that compute; of a stage the one. corpus: where stage 0 takes its data from. bench: where a stage of several finds its work.

        on_failure: called once, from the thread that failed; both threads are useless afterwards.
        micro_batch_limit: train at most so many in a round, then wait for its end; None trains on without bound.
        Tests that must repeat to the bit set it.
        """
        assert (corpus is not None) == (stage == 0), "stage 0, and it alone, reads training data"
        assert (bench is not None) == (manifest.stages.count > 1), "a bench is for a stage of several"
        if corpus is not None:
            corpus.require_context(manifest.model.context)
        self._timetable = timetable = timetable or Timetable(manifest)
        self._watches_rank = manifest.compression.adapt != "off"
        self._own_codec = OwnCodec() if manifest.compression.adapt == "link" else None
        self._policies: dict[tuple[str, int], CodecPolicy] = {}
        self._outer_settings = OuterSettings.of(manifest)
        self._outer: OuterOptimizer | None = None
        self._state: AnchorState | None = None
        self._on_failure = on_failure
        self._clock = clock
        self._failed: str | None = None
        self._lock = threading.Lock()
        self.loop: TrainingLoop
        if bench is not None:
            self.loop = StageLoop(
                manifest, stage, bench, peer=peer, incarnation=incarnation, corpus=corpus, device=devices[0], clock=clock,
                micro_batch_limit=micro_batch_limit, timetable=timetable, checkpointing=checkpointing, base=base, precision=precision,
                compiled=compiled,
            )  # fmt: skip
        else:
            assert corpus is not None
            self.loop = WholeLoop(
                manifest, peer=peer, incarnation=incarnation, corpus=corpus, devices=devices, clock=clock,
                micro_batch_limit=micro_batch_limit, timetable=timetable, checkpointing=checkpointing, base=base, precision=precision,
                compiled=compiled,
            )  # fmt: skip
        self._torch = Worker(
            "dilocox-torch", self._fail, num_threads=threads, niceness=NICENESS, idle=self.loop.train_on
        )
        self._crew = Crew(threads)
        self._executor = Worker("dilocox-outer", self._fail, num_threads=1)

    def start(self, state: AnchorState, *, grow: Grow | None = None) -> None:
        """Begins to train round state.round + 1 on top of state. grow: where the states after it grow; None: in memory. Once."""
        assert self._outer is None, "already started"
        outer = self._outer = OuterOptimizer(self._outer_settings, state, crew=self._crew, grow=grow)
        self._state = state
        self.loop.begin(outer.state)
        state.let_go()
        self._torch.start()
        self._executor.start()

    def nudge(self) -> None:
        """There may be work on the bench again; any thread."""
        self._torch.nudge()

    def progress(self) -> Progress:
        """The latest figures, the speed as of now; cheap, any thread."""
        return self.loop.progress.at(self._clock())

    def state(self) -> AnchorState:
        """The agreed state after the last merge; immutable, so it can be served while training goes on."""
        assert self._state is not None, "not started"
        return self._state

    @property
    def failure(self) -> str | None:
        """Why a thread gave up, or None."""
        return self._failed

    def close(self, *, sliced: bool = False) -> "Future[tuple[OwnContribution, float]]":
        """Ends the round being trained and encodes its contribution, in slices or whole; with it comes the mean loss of this round's micro-batches,
        nan if there were none. The next round begins at once, or with overlap `none` after the merge. The Future fails with RuntimeError if an offer is out: merge or withdraw it first."""
        outer = self._started()
        with self._lock:
            self._require_room()
            snapshot = self._torch.submit(self.loop.close)
            return self._executor.submit(lambda: self._encode(outer, snapshot.result(), sliced), after=snapshot)

    def merge(
        self,
        blobs: Sequence[Blob],
        weights: Sequence[int],
        *,
        own: bool,
        round_number: int,
        head: Digest,
        inner_steps: int = 0,
        squares: Sequence[Squares | None] = (),
        are_results: bool = False,
    ) -> "Future[AnchorMoved]":
        """Applies a certificate: its blobs and their micro-batches in its order; own: whether our offer is among them. squares: those
        of the blobs that are known (aggregate.py). inner_steps, are_results: see OuterOptimizer.merge.

        No blobs: a void round, or a certificate that only moves the head. Done when anchor and local parameters are
        (`state` is new a little earlier, `progress` not later). If the round was not closed here yet, it is over now
        and its pseudo-gradient goes with the next. Fails with MalformedBlob or RuntimeError, and nothing has changed
        then; with OSError half way, and then the trainer has to begin anew.
        """
        outer = self._started()
        blobs, weights = tuple(blobs), tuple(weights)

        def step() -> tuple[AnchorMoved, Tensor]:
            if blobs and outer.has_offer and self._own_codec is not None:
                self._own_codec.settled(in_certificate=own)
            plan = self._timetable.plan(round_number)
            rank = plan.rank if self._watches_rank and plan.codec == LOW_RANK else 0
            moved = outer.merge(
                blobs, weights, own=own, round_number=round_number, head=head, rank_in_use=rank, squares=squares,
                inner_steps=inner_steps, are_results=are_results,
            )  # fmt: skip
            self._state = outer.state
            return moved

        return self._outer_then_torch(step, lambda shift_N: self.loop.shift(shift_N, certified=round_number))

    def withdraw(self) -> "Future[None]":
        """The head moved under our offer: its pseudo-gradient is pending again, and its round goes on."""
        outer = self._started()

        def step() -> tuple[None, None]:
            outer.withdraw()
            return None, None

        return self._outer_then_torch(step, lambda _: self.loop.withdraw())

    def install(self, state: AnchorState, *, keep_pseudo_gradient: bool) -> "Future[None]":
        """Adopts another state. keep_pseudo_gradient: our unsettled pseudo-gradient stays on top of it; else local parameters become
        its anchor. Optimizer moments stay. An offer that was out is withdrawn."""
        outer = self._started()

        def step() -> tuple[None, Tensor]:
            local_N = outer.install(state, keep_pseudo_gradient=keep_pseudo_gradient)
            self._state = state
            return None, local_N

        def apply(local_N: Tensor) -> None:
            if keep_pseudo_gradient:
                self.loop.shift(local_N, certified=state.round)
            else:
                self.loop.replace(local_N, certified=state.round)

        return self._outer_then_torch(step, apply)

    def hold(self, reason: HoldReason = "rounds") -> "Future[None]":
        """No micro-batch begins from when this is done until `resume` with the same reason; calls are still carried out.
        A pause waits for the piece of work at hand alone, not for calls made before it."""
        return self._on_torch(lambda: self.loop.set_held(True, reason), is_urgent=reason == "pause")

    def resume(self, reason: HoldReason = "rounds") -> "Future[None]":
        """Undoes `hold` for this reason, no other. Does not end the wait of overlap `none` for its certificate."""
        return self._on_torch(lambda: self.loop.set_held(False, reason), is_urgent=reason == "pause")

    def stop(self, timeout_s: float) -> None:
        """Ends both threads after what they are at (one micro-batch, a tensor of an encoding, a piece of a merge, which then leaves nothing behind); calls
        still waiting fail. The memory of a thread that has ended goes back to the system.

        Raises TimeoutError if a thread is not done by then; it still ends by itself after what it is at.
        """
        deadline = time.monotonic() + timeout_s
        for worker in (self._torch, self._executor):
            worker.ask_to_stop("the trainer was stopped")
        self._crew.stop()
        late, unused = list[TimeoutError](), list[Tensor]()
        for worker, owned in ((self._torch, self.loop), (self._executor, self._outer)):
            try:
                worker.join(max(0.0, deadline - time.monotonic()))
            except TimeoutError as error:
                late.append(error)
            else:
                unused += owned.vectors() if owned is not None else []
        give_back(unused)
        if late:
            raise late[0]

    def give_up(self) -> None:
        """After `stop`, once nobody hears of what the torch thread does: the memory of its vectors goes back though it may be at work, with zeros
        from here on. The outer thread's stays, as it may be about to finish a state."""
        give_back(self.loop.vectors())

    def _encode(self, outer: OuterOptimizer, snapshot: Snapshot, sliced: bool) -> tuple[OwnContribution, float]:
        """In the outer thread."""
        plan = self._timetable.plan(snapshot.round)
        codec = plan.codec if self._own_codec is None else self._own_codec.codec(plan.codec)
        policy = self._policy(codec, plan.rank)
        offer = outer.offer(snapshot.flat_N, snapshot.new_micro_batches, codec_of=policy, sliced=sliced)
        return offer, snapshot.train_loss

    def _policy(self, codec: str, rank: int) -> CodecPolicy:
        """One object for each (codec, rank): encoders remember by it."""
        key = (codec, rank if codec == LOW_RANK else 0)
        if key not in self._policies:
            self._policies[key] = stage_policy(codec, rank)
        return self._policies[key]

    def _started(self) -> OuterOptimizer:
        assert self._outer is not None, "not started"
        return self._outer

    def _require_room(self) -> None:
        """Before a call takes its places, so that it gets all of them or none."""
        if self._torch.is_full or self._executor.is_full:
            raise RuntimeError(f"{MAX_CALLS} calls are waiting for the trainer")

    def _on_torch(self, run: Callable[[], None], *, is_urgent: bool) -> "Future[None]":
        self._started()
        with self._lock:
            self._require_room()
            return self._torch.submit(run, is_urgent=is_urgent)

    def _outer_then_torch(self, step: Callable[[], tuple[T, U]], apply: Callable[[U], None]) -> "Future[T]":
        """Runs step in the outer thread, then apply with the second half of its result in the torch thread, before any
        call made later. The Future is done with the first half after both. If step fails, apply is left out."""

        def finish() -> T:
            value, handed = stepped.result()
            apply(handed)
            return value

        with self._lock:
            self._require_room()
            stepped = self._executor.submit(step)
            return self._torch.submit(finish, after=stepped, is_fatal=True)

    def _fail(self, reason: str) -> None:
        with self._lock:
            if self._failed is not None:
                return
            self._failed = reason
        for worker in (self._torch, self._executor):
            worker.ask_to_stop(reason)
        self._on_failure(reason)
