"""The outer loop of one peer: when a round is closed, when what was certified is merged, when local steps wait. Pure.

`handle(input, now, seen)` gives the actions that follow (outer_contract.py). What the table of pace.py says of the situation
is done one piece of work at a time, so the order of closes and merges is the order of this object. What has to come from other
peers arrives as certificates; the round machine is read, never told anything but what happened here.

Phases: idle; closing and withdrawing an offer; loading and merging a certificate; over. MOVES is the table of them.
"""

import math
from collections import deque
from collections.abc import Mapping
from enum import Enum
from typing import assert_never

from dilocox_peer.compression.aggregate import median_norm_of
from dilocox_peer.compression.ladder import LOW_RANK
from dilocox_peer.events import Failed, PlanChanged, RoundCertified, RoundClosed
from dilocox_peer.events_of_rounds import ContributionClipped, RoundsFetched
from dilocox_peer.manifest import Manifest
from dilocox_peer.peer.planning.measured import Measured
from dilocox_peer.peer.planning.timetable import Timetable
from dilocox_peer.peer.planning.worked import Worked
from dilocox_peer.peer.rounds.contract import Apply, BlobLost, Closed, RoundProgress, StateComputed
from dilocox_peer.peer.rounds.timing import stretch
from dilocox_peer.peer.training.clock import RoundClock, follows
from dilocox_peer.peer.training.outer_contract import (
    AdoptionBegun,
    AdoptionOver,
    AgreedRounds,
    AnchorMoved,
    BranchDropped,
    CloseRound,
    ContributionsLoaded,
    EndRun,
    Glance,
    HoldTraining,
    KeepState,
    LoadContributions,
    MergeRound,
    OfferBack,
    OuterAction,
    OuterInput,
    Pulse,
    Readings,
    RoundEncoded,
    StateAdopted,
    ToListener,
    ToRounds,
    WithdrawOffer,
)
from dilocox_peer.peer.training.pace import Duty, Situation, next_step
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.chain import Certificate, Entry

PULSE_S = 0.1  # how often progress is read and the clock asked
LOAD_AGAIN_S = 1.0  # after contributions that are here could not be read
FETCHED_EVERY_S = 10.0  # between two lines of rounds that are caught up with
TELL_EVERY_S = 0.25  # as a round comes to its end the others are told of our micro-batches, at most so often; where they are many, as heartbeats


class OuterPhase(Enum):
    IDLE = "idle"
    CLOSING = "closing"
    WITHDRAWING = "withdrawing"
    LOADING = "loading"
    MERGING = "merging"
    OVER = "over"


MOVES: Mapping[OuterPhase, frozenset[OuterPhase]] = {
    OuterPhase.IDLE: frozenset({OuterPhase.CLOSING, OuterPhase.LOADING, OuterPhase.OVER}),
    # Answered, it may at once go on to the next piece of work.
    OuterPhase.CLOSING: frozenset({OuterPhase.IDLE, OuterPhase.WITHDRAWING, OuterPhase.LOADING, OuterPhase.CLOSING}),
    OuterPhase.WITHDRAWING: frozenset({OuterPhase.IDLE, OuterPhase.LOADING, OuterPhase.CLOSING, OuterPhase.OVER}),
    OuterPhase.LOADING: frozenset(
        {OuterPhase.IDLE, OuterPhase.MERGING, OuterPhase.LOADING, OuterPhase.CLOSING, OuterPhase.OVER}
    ),
    OuterPhase.MERGING: frozenset({OuterPhase.IDLE, OuterPhase.LOADING, OuterPhase.CLOSING, OuterPhase.OVER}),
    OuterPhase.OVER: frozenset(),
}
"""From each phase, the phases that one input may lead to."""


class OuterLoop:
    """See the module. Not to be handled again once it has said EndRun."""

    def __init__(
        self,
        *,
        me: PeerId,
        incarnation: int,
        manifest: Manifest,
        rounds: AgreedRounds,
        timetable: Timetable,
        raw_bytes: int,
        now: float,
    ) -> None:
        """timetable: the trainer's, kept here. raw_bytes: of a contribution as float32. now: monotonic seconds, as in handle."""
        self._me = me
        self._incarnation = incarnation
        self._overlap = manifest.outer.overlap
        self._rounds = rounds
        self._schedule = rounds.schedule
        self._timetable = timetable
        self._worked = Worked()
        self._raw_bytes = raw_bytes
        self._clock = RoundClock(timetable.share)
        inner = manifest.inner
        self._measured = Measured()
        self._micro_batch_tokens = inner.micro_batch * manifest.model.context
        self.phase = OuterPhase.IDLE
        self._waiting: deque[Apply] = deque()
        self._at_work: Apply | None = None  # of the certificate that is loaded or merged
        self.lost: Digest | None = None
        """A contribution to be merged that is gone from our disk."""
        self._load_at = -math.inf  # not before: what is here could not be read
        self._adoptions = 0
        self._is_held = True  # a peer starts with training held, until the rounds are at its head
        self._known_head = rounds.head  # the round machine's, as of the last certificate that reached us
        self.merged_round = rounds.round
        self._base: Digest = rounds.head  # of what is being closed
        self._closing: tuple[int, int, float, float] = (
            0,
            0,
            0.0,
            0.0,
        )  # round, tokens, time and wall clock at its snapshot
        self._base_digest = b""
        self._anchor: tuple[Digest, bytes] | None = None  # the head and the state that we merged last
        self._offered_at: Digest | None = None
        self._closed_at_s: float | None = None
        self._close_loss = math.nan
        self._told_halves = (0, 0)
        self._last_told, self._last_told_s = (0, 0), now  # round and micro-batches, when we last had them told at once
        self._counted_round = 0  # of which all shares were done by our count when we last had that told
        self._sent_before = 0
        self._tokens_before = 0  # of ours, when we merged last
        self._has_come = False  # to a round that was made while we trained
        self._fetched_from: int | None = None  # the first of the rounds that are told as one when we are at their end
        self._fetched_at_s = now
        self._merged_at_s = now

    @property
    def waits_for_ours(self) -> bool:
        """Whether a contribution of ours is in what waits to be merged: then our pseudo-gradient is no longer all unsettled."""
        return any(apply.own is not None for apply in self._waiting)

    @property
    def num_waiting(self) -> int:
        """Certificates that are not merged yet."""
        return len(self._waiting)

    def handle(self, happened: OuterInput, now: float, seen: Readings) -> list[OuterAction]:
        assert self.phase is not OuterPhase.OVER, f"{type(happened).__name__} after the end"
        actions: list[OuterAction] = []
        match happened:
            case Apply(certificate):  # its contributions are all here, in chain order
                self._waiting.append(happened)
                self._known_head = certificate.head
            case RoundEncoded():
                actions += self._encoded(happened, seen)
            case OfferBack():
                self._expect(OuterPhase.WITHDRAWING)
                self.phase = OuterPhase.IDLE
            case ContributionsLoaded():
                actions += self._loaded(happened, now)
            case AnchorMoved():
                actions += self._moved(happened, now, seen)
            case AdoptionBegun():
                self._adoptions += 1
            case BranchDropped():
                self._waiting.clear()
                self.lost = None
            case StateAdopted(head, round_number):
                self.merged_round, self._known_head = round_number, head
                self._offered_at = self._closed_at_s = None
            case AdoptionOver():
                assert self._adoptions > 0, "no state was being fetched"
                self._adoptions -= 1
            case Pulse():
                if self.phase is OuterPhase.IDLE:
                    actions.append(self._progress(now, seen))
            case Glance():
                pass
            case _:
                assert_never(happened)
        if self.phase is OuterPhase.IDLE:
            actions += self._decide(now, seen)
        return actions

    # ---- what to do next ----

    def _decide(self, now: float, seen: Readings) -> list[OuterAction]:
        if seen.is_paused or not self._rounds.may_train:
            self._measured.on_idle(now, tokens=seen.tokens)
        self._learn_plans(self._rounds.round)
        match next_step(self._situation(now, seen)):
            case Duty.FINISH:
                self.phase = OuterPhase.OVER
                return [*self._hold(True), EndRun()]
            case Duty.MERGE:
                self.phase, self._at_work = OuterPhase.LOADING, self._waiting[0]
                return [LoadContributions(self._at_work.certificate)]
            case Duty.CLOSE:
                self.phase = OuterPhase.CLOSING
                self._base = self._rounds.head
                # A close that follows its merge at once is before the round machine has heard of the state.
                is_ours = self._anchor is not None and self._anchor[0] == self._base
                self._base_digest = self._anchor[1] if is_ours and self._anchor else self._rounds.state_digest
                self._closing = (seen.training_round, seen.tokens, now, seen.wall_s)
                return [CloseRound()]
            case Duty.HOLD:
                return self._hold(True)
            case Duty.TRAIN:
                return self._hold(not self._rounds.may_train)

    def _situation(self, now: float, seen: Readings) -> Situation:
        closed_here = self._offered_at == self._rounds.head  # and the round machine may not have looked at it yet
        return Situation(
            # A peer that trains nothing has no end of a round to merge at.
            overlap="arrival" if seen.is_paused else self._overlap,
            # The round machine is at a new head before its actions are carried out (the journal is flushed first): until the
            # certificate has reached us, what we would close belongs to the old one.
            ready=self._rounds.may_train
            and self._rounds.head == self._known_head
            and (self.lost is None or seen.has_lost_back)
            and now >= self._load_at,
            busy=self._adoptions > 0,
            due=self._is_due(now, seen),
            may_offer=self._rounds.may_offer and not closed_here,
            offered=self._rounds.has_offered or closed_here,
            waiting=len(self._waiting),
            training_round=seen.training_round,
            merged_round=self.merged_round,
            last_round=self._schedule.last_round,
            may_end=self._rounds.may_end(now),
        )

    def _is_due(self, now: float, seen: Readings) -> bool:
        """Whether the round in training has run its course: stage 0 counts, later stages follow."""
        if seen.origins is not None:
            return follows(
                seen.training_round,
                own=seen.micro_batches,
                origins=seen.origins.latest,
                certified_at_stage_0=seen.origins.certified,
            )
        return self._clock.is_over(
            seen.training_round,
            me=self._me,
            own=seen.micro_batches,
            roster=[peer for peer in self._rounds.roster if peer != self._me or not seen.is_paused],
            alive=self._rounds.working(now),
            reports=self._rounds.reports,
            now=now,
        )

    def _hold(self, hold: bool) -> list[OuterAction]:
        if hold == self._is_held:
            return []
        self._is_held = hold
        return [HoldTraining(hold)]

    def _progress(self, now: float, seen: Readings) -> OuterAction:
        """Every pulse to the round machine; at every half share, of many members every share, and as the round comes to its end, it tells
        the others at once: their clocks wait for it, and by heartbeats alone four peers' round of 20 steps went on for two more. Once the
        shares are done by our count, and it has told that, they are by the count of all who count the same members: what is trained until the
        round can be closed waits for heartbeats."""
        share = self._timetable.share(seen.training_round)
        many = stretch(len(self._rounds.roster))
        done, halves = seen.micro_batches, (seen.training_round, int(2 / min(many, 2.0) * seen.micro_batches) // share)
        told, self._told_halves = self._told_halves, max(self._told_halves, halves)
        is_news = self._clock.is_near_end_of(seen.training_round) and (seen.training_round, done) > self._last_told
        is_counted = self._counted_round == seen.training_round
        tell_now = not is_counted and (halves > told or (is_news and now >= self._last_told_s + TELL_EVERY_S * many))
        if tell_now:
            self._last_told, self._last_told_s = (seen.training_round, done), now
            if self._clock.is_at_end_of(seen.training_round):
                self._counted_round = seen.training_round
        return ToRounds(RoundProgress(done, tell_now=tell_now, paused=seen.is_paused))

    # ---- closing ----

    def _encoded(self, closed: RoundEncoded, seen: Readings) -> list[OuterAction]:
        self._expect(OuterPhase.CLOSING)
        if self._rounds.head != self._base:
            # A certificate came in while we encoded: the pseudo-gradient stays and goes with the next contribution. What idle
            # peers send is alike to the byte: it may be another's, and needed.
            self.phase = OuterPhase.WITHDRAWING
            return [WithdrawOffer((closed.blob, *closed.parts) if closed.micro_batches else ())]
        self.phase = OuterPhase.IDLE
        round_number, tokens, started_s, wall_s = self._closing
        report = self._measured.on_close(
            started_s, tokens=tokens, lost=closed.lost, uplink_bps=seen.uplink_bps,
            train_loss=closed.train_loss, wall_s=wall_s,
            tokens_a_step=self._timetable.micro_batches_a_step(round_number) * self._micro_batch_tokens,
        )  # fmt: skip
        self._close_loss, self._closed_at_s = closed.train_loss, started_s
        self._offered_at = self._base
        entry = Entry(
            self._me, self._incarnation, closed.blob, closed.size_bytes, closed.micro_batches, self._base_digest, report
        )
        told = RoundClosed(round_number, closed.micro_batches, closed.train_loss, closed.size_bytes, closed.raw_bytes)
        return [ToRounds(Closed(self._base, entry, closed.parts, closed.table)), ToListener(told)]

    # ---- merging ----

    def _loaded(self, loaded: ContributionsLoaded, now: float) -> list[OuterAction]:
        self._expect(OuterPhase.LOADING)
        self.phase, apply = OuterPhase.IDLE, self._at_work
        assert apply is not None
        if not self._waiting or self._waiting[0] is not apply:
            return []  # another state was adopted meanwhile
        if loaded.missing is not None and loaded.for_now:
            self._load_at = now + LOAD_AGAIN_S
            name, number = loaded.missing.hex()[:12], apply.certificate.value.round
            reason = f"contribution {name} of round {number} is here and cannot be read for now; it is tried again"
            return [ToListener(Failed("merge", reason))]
        if loaded.missing is not None:
            return self._lose(loaded.missing, apply.certificate)
        self._waiting.popleft()
        self.lost = None
        self._learn_plans(apply.certificate.value.round)
        self.phase = OuterPhase.MERGING
        return [MergeRound(apply.certificate, apply.own is not None)]

    def _lose(self, blob: Digest, certificate: Certificate) -> list[OuterAction]:
        """Has a contribution fetched once more; it is merged when it is here, and training goes on until then."""
        self.lost = blob
        name, number = blob.hex()[:12], certificate.value.round
        reason = f"contribution {name} of round {number} is gone from disk; it is fetched again"
        return [ToRounds(BlobLost(blob, certificate)), ToListener(Failed("merge", reason))]

    def _moved(self, merged: AnchorMoved, now: float, seen: Readings) -> list[OuterAction]:
        self._expect(OuterPhase.MERGING)
        self.phase, apply = OuterPhase.IDLE, self._at_work
        assert apply is not None
        certificate, value = apply.certificate, apply.certificate.value
        self.merged_round = value.round
        self._anchor = (certificate.head, merged.state_digest)
        exchange_s = None if self._closed_at_s is None else now - self._closed_at_s
        self._offered_at = self._closed_at_s = None
        actions: list[OuterAction] = [ToRounds(StateComputed(certificate.head, merged.state_digest))]
        if value.kind == "round":
            self._measured.on_merge(exchange_s, needed_rank=merged.needed_rank)
            actions += self._told(apply, merged, exchange_s, now, seen)
        return [*actions, KeepState()]

    def _learn_plans(self, certified: int) -> None:
        """What training may be in at this head: the round after it, and the one after that while an offer is out."""
        coming, newest = (certified + 1, certified + 2), self._rounds.directive
        self._timetable.learn({number: self._schedule.plan_for(number) for number in coming})
        if newest is not None:
            directives = {number: self._schedule.directive_for(number) for number in coming}
            total = self._schedule.total_steps
            assert total is not None, "a run of a manifest ends"
            self._timetable.learn_directives(directives, total, is_lifted=not newest.paused)
        if self._timetable.goes_by_tokens:
            self._worked.follow(self._rounds.chain)
            done = self._worked.by(certified)
            self._timetable.learn_work(certified, done, done - self._worked.by(certified - 1))

    def _told(
        self, apply: Apply, merged: AnchorMoved, exchange_s: float | None, now: float, seen: Readings
    ) -> list[OuterAction]:
        certificate, value = apply.certificate, apply.certificate.value
        plan = self._schedule.plan_for(value.round)
        # After a restart: a round that this peer had a part in, merged again from the certificates on its disk.
        is_again = apply.own is None and any(entry.peer == self._me for entry in value.entries)
        is_trained = apply.own is not None or (seen.tokens > self._tokens_before and not is_again)
        is_ours = is_again or apply.own is not None
        is_fetched, fetched = self._fetched(value.round, now, is_ours=is_ours, is_trained=is_trained)
        certified = RoundCertified(
            round=value.round,
            head=certificate.head.hex(),
            view=certificate.view,
            ballot=certificate.ballot,
            contributors=tuple(entry.peer for entry in value.entries),
            roster=value.roster,
            micro_batches=sum(entry.micro_batches for entry in value.entries),
            own_included=apply.own is not None,
            wait_s=round(now - self._merged_at_s, 3),
            bytes_sent=seen.bytes_sent - self._sent_before,
            raw_bytes=self._raw_bytes,
            train_loss=self._close_loss,
            anchor_digest=merged.state_digest.hex(),
            codec=plan.codec,
            rank=plan.rank if plan.codec == LOW_RANK else 0,
            inner_steps=plan.inner_steps,
            delay_s=None if exchange_s is None else round(exchange_s, 3),
            expected_rounds=self._schedule.expected_rounds or 0,
            norms=merged.norms,
            clip_factors=merged.clip_factors,
            is_trained=is_trained,
            is_fetched=is_fetched,
        )
        median_norm = median_norm_of(merged.norms)
        measured = zip(value.entries, merged.norms, merged.clip_factors, strict=True) if merged.norms else ()
        clipped = [
            ToListener(ContributionClipped(entry.peer, value.round, norm, median_norm, factor))
            for entry, norm, factor in measured
            if factor < 1.0
        ]
        self._merged_at_s, self._sent_before, self._tokens_before = now, seen.bytes_sent, seen.tokens
        self._close_loss = math.nan  # of this round; a peer that does not close the next one has no loss to tell of it
        return [*fetched, ToListener(certified), *clipped, *self._plan_told(value.round)]

    def _fetched(self, number: int, now: float, *, is_ours: bool, is_trained: bool) -> tuple[bool, list[OuterAction]]:
        """(Whether the round is one of several that are told together, what is told of these now): those without a contribution of ours,
        while more are known to come. Some local steps may be done between them: these go with a later one."""
        more_come = bool(self._waiting) or number < self._rounds.round or self._rounds.is_behind
        first, is_one = self._fetched_from, not is_ours and (more_come or self._fetched_from is not None)
        if is_one and first is None:
            self._fetched_from, self._fetched_at_s = number, now
            return True, []
        if is_one and more_come and now < self._fetched_at_s + FETCHED_EVERY_S:
            return True, []
        self._fetched_from = None
        has_come, self._has_come = self._has_come, self._has_come or is_ours or (is_trained and not is_one)
        last = number if is_one else number - 1
        return is_one, [] if first is None else [ToListener(RoundsFetched(first, last, has_come))]

    def _plan_told(self, round_number: int) -> list[OuterAction]:
        """When a certificate planned another round than the ones before it."""
        before, plan = self._schedule.plan_for(round_number + 1), self._schedule.plan_for(round_number + 2)
        is_same = (before.codec, before.rank, before.inner_steps) == (plan.codec, plan.rank, plan.inner_steps)
        if is_same or before.end != plan.first_step:
            return []
        rank = plan.rank if plan.codec == LOW_RANK else 0
        reason = self._rounds.plan_reason
        return [ToListener(PlanChanged(round_number + 2, plan.codec, rank, plan.inner_steps, reason))]

    def _expect(self, phase: OuterPhase) -> None:
        assert self.phase is phase, f"an answer in phase {self.phase.value}, which awaits none of {phase.value}"
