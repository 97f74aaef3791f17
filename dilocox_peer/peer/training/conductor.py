"""Couples the trainer with the rounds: carries out what pace.py decides, one thing at a time.

It alone calls the trainer's close and merge, so their order is the order of this task. It waits for the trainer and the
disk, never for another peer: what has to come from others arrives as certificates in `on_apply`.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor

from dilocox_peer.compression.aggregate import median_norm_of
from dilocox_peer.compression.ladder import LOW_RANK
from dilocox_peer.events import ContributionClipped, Failed, Listener, PlanChanged, RoundCertified, RoundClosed
from dilocox_peer.manifest import Manifest
from dilocox_peer.peer.planning.measured import Measured
from dilocox_peer.peer.planning.timetable import Timetable
from dilocox_peer.peer.rounds.blobs import BlobStore
from dilocox_peer.peer.rounds.contract import Apply, BlobLost, Closed, Input, Progress, StateComputed
from dilocox_peer.peer.rounds.machine import RoundMachine
from dilocox_peer.peer.training.book import Progress as TrainerProgress
from dilocox_peer.peer.training.clock import RoundClock
from dilocox_peer.peer.training.pace import Situation, Step, next_step
from dilocox_peer.peer.training.trainer import Merged, Trainer
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.chain import Certificate, Entry

TICK_S = 0.1  # how often progress is read and the clock asked


class Conductor:
    """`run` returns when the run's last round is merged."""

    def __init__(
        self,
        *,
        me: PeerId,
        incarnation: int,
        manifest: Manifest,
        machine: RoundMachine,
        trainer: Trainer,
        blobs: BlobStore,
        disk: Executor,
        raw_bytes: int,
        post: Callable[[Input], None],
        bytes_sent: Callable[[], int],
        uplink_bps: Callable[[], float],
        timetable: Timetable,
        on_merged: Callable[[], None],
        listener: Listener,
        is_due: Callable[[TrainerProgress], bool] | None = None,
        is_paused: Callable[[], bool] = lambda: False,
    ) -> None:
        """uplink_bps: of contributions served lately, 0 while it is not known. timetable: the trainer's, kept here.
        is_due: when the round in training is to be closed; without it stage 0's own clock says so. is_paused: the
        volunteer's wish; who has paused merges what the others certify, and closes what it had trained before."""
        self._me = me
        self._incarnation = incarnation
        self._manifest = manifest
        self._machine = machine
        self._clock = RoundClock(timetable.share)
        self._trainer = trainer
        self._blobs = blobs
        self._disk = disk
        self._raw_bytes = raw_bytes
        self._post = post
        self._bytes_sent = bytes_sent
        self._uplink_bps = uplink_bps
        self._timetable = timetable
        self._on_merged = on_merged
        self._listener = listener
        self._is_paused = is_paused
        self._is_due = is_due if is_due is not None else self._is_due_by_count
        self._waiting: deque[Apply] = deque()
        self._lost: Digest | None = None  # a contribution to be merged that is gone from our disk
        self._changed = asyncio.Event()
        self._offered_at: Digest | None = None
        self._close_loss = math.nan
        self._closed_at_s: float | None = None
        inner = manifest.inner
        self._measured = Measured(inner.accumulate * inner.micro_batch * manifest.model.context)
        self._told_halves = (0, 0)
        self._sent_before = 0
        self._held = True  # the session starts the trainer held, until the rounds are at its head
        self._last_merge_s = time.monotonic()
        self._known_head = machine.head  # the machine's, as of the last action that reached us
        self.merged_head: Digest = machine.head
        self.merged_round = machine.round
        self.state_fetches = 0  # running; while one is, nothing is closed or merged

    def on_apply(self, action: Apply) -> None:
        """A certificate whose blobs are all here, in chain order."""
        self._waiting.append(action)
        self._known_head = action.certificate.head
        self._changed.set()

    def on_change(self) -> None:
        """Something that a decision may depend on has changed."""
        self._changed.set()

    def drop_waiting(self) -> bool:
        """The anchor becomes another one whole, and what waits is in it or of a branch given up. Whether a contribution of
        ours was in what waited: then our pseudo-gradient is no longer all unsettled."""
        settles_ours = any(action.own is not None for action in self._waiting)
        self._waiting.clear()
        self._lost = None
        return settles_ours

    def on_state_installed(self, head: Digest, round_number: int) -> None:
        self.merged_head, self.merged_round = head, round_number
        self._known_head = head
        self._offered_at = self._closed_at_s = None
        self._changed.set()

    async def run(self) -> None:
        """Works until the last round is merged. Cancelled: the trainer keeps its last merged state."""
        while True:
            if self._is_paused() or not self._machine.may_train:
                self._measured.on_idle(time.monotonic(), tokens=self._trainer.progress().tokens)
            self._learn_plans(self._machine.round)
            situation = self._situation()
            match next_step(situation):
                case Step.FINISH:
                    self._hold(True)
                    return
                case Step.MERGE:
                    await self._merge(self._waiting[0])
                case Step.CLOSE:
                    await self._close()
                case Step.HOLD:
                    self._hold(True)
                    await self._wait()
                case Step.TRAIN:
                    self._hold(not self._machine.may_train)
                    await self._wait()

    async def _wait(self) -> None:
        self._changed.clear()
        try:
            async with asyncio.timeout(TICK_S):
                await self._changed.wait()
        except TimeoutError:
            self._tell_progress()

    def _tell_progress(self) -> None:
        """Every tick to the machine; at every half share it tells the others at once, as their clocks wait for it."""
        progress = self._trainer.progress()
        halves = (progress.round, 2 * progress.micro_batches // self._timetable.share(progress.round))
        self._post(Progress(progress.micro_batches, tell_now=halves > self._told_halves, paused=self._is_paused()))
        self._told_halves = max(self._told_halves, halves)

    def _situation(self) -> Situation:
        progress = self._trainer.progress()
        closed_here = self._offered_at == self._machine.head  # and the machine may not have looked at it yet
        return Situation(
            # A peer that trains nothing has no end of a round to merge at.
            overlap="arrival" if self._is_paused() else self._manifest.outer.overlap,
            # The machine is at a new head before its actions are carried out (the journal is flushed first): until the
            # certificate has reached us, what we would close belongs to the old one.
            ready=self._machine.may_train
            and self._machine.head == self._known_head
            and (self._lost is None or self._lost in self._blobs.held),
            busy=self.state_fetches > 0,
            due=self._is_due(progress),
            may_offer=self._machine.may_offer and not closed_here,
            offered=self._machine.has_offered or closed_here,
            waiting=len(self._waiting),
            training_round=progress.round,
            merged_round=self.merged_round,
            last_round=self._machine.last_round,
        )

    def _is_due_by_count(self, progress: TrainerProgress) -> bool:
        now = asyncio.get_running_loop().time()
        return self._clock.is_over(
            progress.round,
            me=self._me,
            own=progress.micro_batches,
            roster=[peer for peer in self._machine.roster if peer != self._me or not self._is_paused()],
            alive=self._machine.working(now),
            reports=self._machine.reports,
            now=now,
        )

    def _hold(self, hold: bool) -> None:
        if hold != self._held:
            self._held = hold
            if hold:
                self._trainer.hold()
            else:
                self._trainer.resume()

    async def _close(self) -> None:
        base, state_digest = self._machine.head, self._machine.state_digest
        progress, started_s = self._trainer.progress(), time.monotonic()
        closing = await asyncio.wrap_future(self._trainer.close())
        loop = asyncio.get_running_loop()
        digest = await loop.run_in_executor(self._disk, self._blobs.put, closing.blob)
        if self._machine.head != base:
            # A certificate came in while we encoded: the pseudo-gradient stays and goes with the next contribution.
            await asyncio.wrap_future(self._trainer.withdraw())
            if closing.micro_batches:  # what idle peers send is alike to the byte: it may be another's, and needed
                await loop.run_in_executor(self._disk, self._blobs.forget, digest)
            return
        report = self._measured.on_close(
            started_s, tokens=progress.tokens, lost=closing.lost, uplink_bps=self._uplink_bps()
        )
        self._close_loss, self._closed_at_s = closing.train_loss, started_s
        entry = Entry(
            self._me, self._incarnation, digest, len(closing.blob), closing.micro_batches, state_digest, report
        )
        self._offered_at = base
        self._post(Closed(base, entry))
        self._listener(
            RoundClosed(progress.round, closing.micro_batches, closing.train_loss, len(closing.blob), closing.raw_bytes)
        )

    async def _merge(self, action: Apply) -> None:
        certificate = action.certificate
        blobs = await asyncio.get_running_loop().run_in_executor(self._disk, self._read, certificate)
        if not self._waiting or self._waiting[0] is not action:
            return  # another state was installed meanwhile
        if isinstance(blobs, Entry):
            self._lose(blobs, certificate)
            return
        self._waiting.popleft()
        self._lost = None
        value = certificate.value
        self._learn_plans(value.round)
        merged = await asyncio.wrap_future(
            self._trainer.merge(
                blobs,
                [entry.micro_batches for entry in value.entries],
                own=action.own is not None,
                round_number=value.round,
                head=certificate.head,
            )
        )
        self.merged_head, self.merged_round = certificate.head, value.round
        exchange_s = None if self._closed_at_s is None else time.monotonic() - self._closed_at_s
        self._offered_at = self._closed_at_s = None
        self._post(StateComputed(certificate.head, merged.state_digest))
        if value.kind == "round":
            self._measured.on_merge(exchange_s, needed_rank=merged.needed_rank)
            self._tell(action, merged, exchange_s)
        self._on_merged()

    def _read(self, certificate: Certificate) -> list[bytes] | Entry:
        """The blobs, in order, or the entry whose blob is not there any more."""
        blobs = []
        for entry in certificate.value.entries:
            blob = self._blobs.get(entry.blob)
            if blob is None:
                return entry
            blobs.append(blob)
        return blobs

    def _lose(self, entry: Entry, certificate: Certificate) -> None:
        """Has a contribution fetched once more; it is merged when it is here, and training goes on until then."""
        self._lost = entry.blob
        self._post(BlobLost(entry.blob, certificate))
        name, number = entry.blob.hex()[:12], certificate.value.round
        self._listener(Failed("merge", f"contribution {name} of round {number} is gone from disk; it is fetched again"))

    def _learn_plans(self, certified: int) -> None:
        """What training may be in at this head: the round after it, and the one after that while an offer is out."""
        self._timetable.learn({number: self._machine.plan_for(number) for number in (certified + 1, certified + 2)})

    def _tell_plan(self, round_number: int) -> None:
        """When a certificate planned another round than the ones before it."""
        before, plan = self._machine.plan_for(round_number + 1), self._machine.plan_for(round_number + 2)
        is_same = (before.codec, before.rank, before.inner_steps) == (plan.codec, plan.rank, plan.inner_steps)
        if not is_same and before.end == plan.first_step:
            self._listener(
                PlanChanged(
                    round_number + 2,
                    plan.codec,
                    plan.rank if plan.codec == LOW_RANK else 0,
                    plan.inner_steps,
                    self._machine.plan_reason,
                )
            )

    def _tell(self, action: Apply, merged: Merged, exchange_s: float | None) -> None:
        value = action.certificate.value
        now, sent = time.monotonic(), self._bytes_sent()
        plan = self._machine.plan_for(value.round)
        self._listener(
            RoundCertified(
                round=value.round,
                head=action.certificate.head.hex(),
                view=action.certificate.view,
                ballot=action.certificate.ballot,
                contributors=tuple(entry.peer for entry in value.entries),
                roster=value.roster,
                micro_batches=sum(entry.micro_batches for entry in value.entries),
                own_included=action.own is not None,
                wait_s=round(now - self._last_merge_s, 3),
                bytes_sent=sent - self._sent_before,
                raw_bytes=self._raw_bytes,
                train_loss=self._close_loss,
                anchor_digest=merged.state_digest.hex(),
                codec=plan.codec,
                rank=plan.rank if plan.codec == LOW_RANK else 0,
                inner_steps=plan.inner_steps,
                delay_s=None if exchange_s is None else round(exchange_s, 3),
                expected_rounds=self._machine.expected_rounds or 0,
                norms=merged.norms,
                clip_factors=merged.clip_factors,
            )
        )
        median_norm = median_norm_of(merged.norms)
        for entry, norm, factor in zip(value.entries, merged.norms, merged.clip_factors, strict=True):
            if factor < 1.0:
                self._listener(ContributionClipped(entry.peer, value.round, norm, median_norm, factor))
        self._tell_plan(value.round)
        self._last_merge_s, self._sent_before = now, sent
        self._close_loss = math.nan  # of this round; who does not close the next one has no loss to tell of it
