"""One peer's part of the pipeline: what it computes next, and what it tells its neighbours (docs/pipeline.md).

A pure machine: inputs and time in, actions out; the same object runs in the simulator (tests/sim/pipeline_world.py) and
in the peer. It never reads a clock, a socket or a body. Callers are the linked peers of the stage before, callees those
of the stage after. This file is its door, and what is computed here; its parts:

    upstream.py    slots, bodies that come in, answers         wire/hops.py what neighbours say
    downstream.py      our calls downstream; what happens when a   slots.py     who may send us a body; answers not yet
                  callee is late, refuses or dies                          acknowledged
    checks.py     whether callees compute what they are asked for
    neighbourhood.py  what is known of the others and told them:  routes.py    to which callee
                  speeds, plan, window, rounds                versions.py  which parameters a micro-batch uses
    flight.py     a micro-batch here, and its states          contract.py  inputs, works, actions

Invariants:

P1 a body is sent to a callee only after its SlotGrant. P2 slots held never exceed the capacity at the time of the grant.
P3 at most two versions live; a backward uses its forward's. P4 one flight of an id is computed at a time. P5 an origin
counts a micro-batch once. P6 every container is bounded by slots, window or linked peers.
"""

import math
import random
from collections.abc import Callable
from typing import Any

from dilocox_peer.contract import Leaving, Tick
from dilocox_peer.pipeline.contract import (
    Backward,
    BackwardDone,
    Body,
    Compared,
    Forward,
    ForwardDone,
    GradRefused,
    Hold,
    HopAction,
    HopInput,
    HopReceived,
    HopTiming,
    Linked,
    MicroBatchDone,
    MicroBatchTimed,
    PauseWanted,
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
from dilocox_peer.pipeline.downstream import Downstream
from dilocox_peer.pipeline.flight import RECENT, Flight, State, Tray
from dilocox_peer.pipeline.neighbourhood import Neighbourhood, Role
from dilocox_peer.pipeline.routes import RoutePlan
from dilocox_peer.pipeline.slots import Slots
from dilocox_peer.pipeline.turnstile import Turnstile
from dilocox_peer.pipeline.upstream import Upstream
from dilocox_peer.pipeline.versions import Mode, Versions
from dilocox_peer.types import PeerId
from dilocox_peer.wire import hops


class Scheduler:
    """One peer of one stage of a pipeline of at least two."""

    slots_type: type[Slots] = Slots  # the simulator plants faulty ones
    versions_type: type[Versions] = Versions
    callers_type: type[Upstream] = Upstream
    calls_type: type[Downstream] = Downstream

    def __init__(
        self,
        *,
        me: PeerId,
        incarnation: int,
        stage: int,
        num_stages: int,
        mode: Mode,
        accumulate: int,
        max_slots: int,
        rng: random.Random,
        now: float,
        timing: HopTiming = HopTiming(),
        trace: bool = False,
        entry: Turnstile | None = None,
        site: str = "",
        most_under_way: float = math.inf,
    ) -> None:
        """entry: what grants go through, to keep to a download limit; None: there is none. site: where the volunteer says that it is.
        most_under_way: micro-batches that there is memory for, whatever neighbours ask for; bodies that come beyond it wait."""
        assert 0 <= stage < num_stages, (stage, num_stages)
        assert num_stages >= 2, "a single stage needs no pipeline"
        self._me, self._incarnation, self._stage, self._timing = me, incarnation, stage, timing
        role = Role(stage, num_stages, mode, accumulate, max_slots, site)
        self._is_origin, self._is_last = role.is_origin, role.is_last

        self._desk = Tray(timing, now, trace=trace)
        self._slots = self.slots_type(1)
        self._known = Neighbourhood(self._desk, role, self._slots)
        self.callers = self.callers_type(
            self._desk,
            self._known,
            self._slots,
            max_slots=max_slots, abandon=self._abandon, entry=entry if entry is not None else Turnstile(0),
        )  # fmt: skip
        self._calls = self.calls_type(self._desk, self._known, role, rng)
        admit = accumulate if self._is_origin else 2 * accumulate
        self.versions = self.versions_type(mode, accumulate, admit=admit, most=most_under_way)

        self.own: dict[hops.MicroBatchId, Flight] = {}  # at an origin: issued and not back
        self._busy: dict[hops.MicroBatchId, Flight] = {}  # bound to a version: forward begun, backward not finished
        self._running: Work | None = None
        self._runs: Flight | None = None
        self._was_backward = self._is_held = False
        self._next_index = 0
        self._issued = 0  # in this training round
        self._sweep_at = now + timing.sweep_s

        self.completed_total = 0  # at an origin: micro-batches that came back, each once
        self.executed_total = 0  # backwards and turns computed here

        self._inputs: dict[type, Callable[[Any], None]] = {
            Tick: self._tick,
            HopReceived: self._received,
            StepRefused: self.callers.refuse,
            GradRefused: self._calls.refuse,
            StepSent: lambda sent: self._calls.sent(sent.peer, sent.step),
            Linked: self._linked,
            Unlinked: self._unlinked,
            RoundTrip: lambda measured: self._known.round_trip(measured.peer, measured.seconds),
            ForwardDone: self._forward_done,
            BackwardDone: self._backward_done,
            Stepped: self._stepped,
            Rounds: self._set_rounds,
            Replicas: self._set_replicas,
            Hold: self._set_hold,
            PauseWanted: lambda wanted: self.callers.pause(wanted.is_paused),
            Compared: self._calls.compared,
            Shifted: lambda _: self.versions.shifted(),
            Leaving: lambda _: self.callers.leave(),
        }
        self._of_callers: dict[type, Callable[[PeerId, Any, Body | None], None]] = {
            hops.Reserve: self.callers.on_reserve,
            hops.Step: self.callers.on_step,
            hops.GradAck: self.callers.on_ack,
            hops.Cancel: self.callers.on_cancel,
        }
        self._of_callees: dict[type, Callable[[PeerId, Any, Body | None], None]] = {
            hops.SlotGrant: self._calls.on_grant,
            hops.SlotWait: self._calls.on_wait,
            hops.Grad: self._calls.on_grad,
            hops.Refuse: self._calls.on_refuse,
        }

    # ---- what the session reads ----

    @property
    def in_flight(self) -> int:
        """Micro-batches begun here and not answered; at an origin, what its window limits."""
        return len(self.own) if self._is_origin else len(self._busy)

    @property
    def waiting(self) -> int:
        """Micro-batches of callers that wait for a slot."""
        return self._slots.num_waiting

    @property
    def window(self) -> int:
        return self._known.window

    @property
    def slots(self) -> int:
        return self._slots.capacity

    @property
    def slots_in_use(self) -> int:
        return self._slots.in_use

    @property
    def behind(self) -> int:
        return self._known.behind

    @property
    def stage0_certified(self) -> int:
        return self._known.stage0_certified

    @property
    def is_drifting(self) -> bool:
        return self._known.is_drifting

    def recent_origins(self) -> dict[tuple[PeerId, PeerId], tuple[int, int]]:
        """By caller and origin: the latest round, and how many of our last 64 micro-batches were theirs."""
        return self._known.recent_origins()

    def num_origins(self, listed: int) -> int:
        """Origins that we work for, as far as it is plausible; listed: those with a lease."""
        return self._known.num_origins(listed)

    def awaits(self, peer: PeerId, message: hops.Step) -> bool:
        """Whether the body of this message may come."""
        return self.callers.awaits(peer, message)

    def awaited(self, peer: PeerId, message: hops.Grad) -> Body | None:
        """The output that this answers, if its body may come."""
        return self._calls.awaited(peer, message)

    @property
    def plan(self) -> RoutePlan:
        return self._known.plan

    @property
    def resent(self) -> int:
        return self._calls.resent

    @property
    def duplicates(self) -> int:
        """Messages that came a second time, from either side."""
        return self.callers.duplicates + self._calls.duplicates

    @property
    def protocol_errors(self) -> int:
        return self._desk.protocol_errors

    @property
    def is_leaving(self) -> bool:
        return self.callers.is_leaving

    @property
    def is_drained(self) -> bool:
        """Nothing is being computed, nothing waits for an answer."""
        return self._running is None and not self._busy and not self.callers.flights

    def deadline(self) -> float:
        """When Tick is wanted."""
        return min(self._known.status_at, self._sweep_at, self.callers.grant_at)

    # ---- inputs ----

    def handle(self, happened: HopInput, now: float) -> list[HopAction]:
        """What to do about it. After every call, a free torch thread should ask `next_work`."""
        out = self._desk.open(now)
        self._inputs[type(happened)](happened)
        self._calls.give_up(self._lose)
        self._known.tell_news()
        return out

    def _tick(self, _: Tick) -> None:
        now = self._desk.now
        if now >= self._known.status_at:
            self.callers.resize()
            self._known.replan("speed", is_wanted=False)
            self._known.tell_all()
        if now >= self.callers.grant_at:
            self.callers.grant()
        if now >= self._sweep_at:
            self._sweep_at = now + self._timing.sweep_s
            self._calls.sweep()
            self.callers.sweep()

    def _received(self, received: HopReceived) -> None:
        peer, message = received.peer, received.message
        if (callee := self._known.callees.get(peer)) is not None:
            callee.heard_at = self._desk.now
        if isinstance(message, hops.HopStatus):
            self._known.heard(peer, message)
            return
        kind = type(message)
        if peer in self._known.callers:
            on = self._of_callers.get(kind)
        elif peer in self._known.callees:
            on = self._of_callees.get(kind)
        else:
            return  # a stranger, or a message from before the link went down
        if on is None:
            self._desk.blame(peer, f"{kind.__name__} in the wrong direction")
            return
        if received.body is not None:
            self._known.transferred(peer, received.wire_s)
        on(peer, message, received.body)

    def _linked(self, linked: Linked) -> None:
        peer = linked.peer
        if linked.stage == self._stage - 1 and peer not in self._known.callers:
            self.callers.link(peer)
        elif linked.stage == self._stage + 1 and peer not in self._known.callees:
            self._known.add_callee(peer)
            self._calls.linked(peer)
        else:
            return
        self._known.tell(peer)

    def _unlinked(self, unlinked: Unlinked) -> None:
        peer = unlinked.peer
        self._desk.forgive(peer)
        self.callers.unlink(peer)
        callee = self._known.remove_callee(peer)
        if callee is not None:
            self._calls.lost(callee)

    def _set_rounds(self, rounds: Rounds) -> None:
        if rounds.training != self._known.rounds.training:
            self._issued = 0
        self.versions.accumulate = rounds.accumulate or self.versions.accumulate
        self._known.set_rounds(rounds)

    def _set_replicas(self, replicas: Replicas) -> None:
        self._known.replicas = max(1, replicas.count)
        self.callers.resize()

    def _set_hold(self, hold: Hold) -> None:
        self._is_held = hold.is_held

    # ---- the next work ----

    def next_work(self, now: float) -> tuple[Work | None, list[HopAction]]:
        """The most urgent work, marked as running; None when there is none, or one is running."""
        if self._running is not None:
            return None, []
        out = self._desk.open(now)
        work = self._choose_work()
        self._running = work
        return work, out

    def _choose_work(self) -> Work | None:
        versions = self.versions
        if versions.step_is_due:
            return StepNow(versions.take_step())
        if versions.publish_is_due:
            versions.take_publish()
            return Publish()
        # Alternate when both are there, not backward first as one-forward-one-backward has it: that lets waves of forwards
        # and of backwards build up that never decay; 4x4 and 8x4 reached .81-.99 of the ideal, alternating .99-1.00.
        if self._was_backward:
            work = self._start_forward()
            if work is not None:
                self._was_backward = False
                return work
        flight = self._calls.take_returned()
        if flight is not None:
            self._was_backward = True
            return self._start_backward(flight)
        return None if self._was_backward else self._start_forward()

    def _start_forward(self) -> Work | None:
        if not self.versions.may_admit:
            return None
        if self._is_origin:
            return self._issue() if self._may_issue() else None
        return self._start_ready()

    def _start_ready(self) -> Work | None:
        flight = self.callers.take_ready(self._busy)
        if flight is None:
            return None
        body = flight.body
        assert body is not None
        flight.body = None
        self._begin(flight)
        if self._is_last:
            flight.state = State.TURNING
            return Turn(flight.id, flight.version, body, flight.round)
        self._calls.open(flight)
        return Forward(flight.id, flight.version, body, flight.round)

    def _may_issue(self) -> bool:
        known = self._known
        limit = known.rounds.issue_limit
        return (
            not self._is_held
            and not self.callers.is_leaving
            and len(self.own) < known.window
            and (limit is None or self._issued < limit)
            and bool(known.callees)
            and not known.is_drifting
        )

    def _issue(self) -> Work:
        id_ = hops.MicroBatchId(self._me, self._incarnation, self._next_index)
        self._next_index += 1
        self._issued += 1
        flight = Flight(id_, None, 0, self._known.rounds.training, State.READY, self._desk.now)
        self.own[id_] = flight
        self._begin(flight)
        self._calls.open(flight)
        return Forward(id_, flight.version, None, flight.round)

    def _begin(self, flight: Flight) -> None:
        flight.version, flight.state = self.versions.bind(), State.FORWARDING
        self._busy[flight.id] = flight
        self._runs = flight
        self._desk.mark(flight, "forward_start")

    def _start_backward(self, flight: Flight) -> Work:
        body = flight.body
        assert body is not None
        flight.body, flight.state = None, State.BACKWARDING
        self._runs = flight
        self._desk.mark(flight, "backward_start")
        return Backward(flight.id, flight.version, body, flight.loss)

    # ---- work that is done ----

    def _finish_run(self, id_: hops.MicroBatchId) -> Flight:
        flight = self._runs
        assert flight is not None, f"{id_} is done and nothing runs"
        assert flight.id == id_, f"{id_} is done and {flight.id} runs"
        self._running = self._runs = None
        return flight

    def _forward_done(self, done: ForwardDone) -> None:
        flight = self._finish_run(done.id)
        assert flight.state is State.FORWARDING, flight.state
        self._desk.mark(flight, "forward_end")
        self._known.forward_took(done.seconds)
        if flight.is_unwanted:
            self._give_up(flight)
            return
        flight.output, flight.state = done.body, State.CALLING
        if done.body is None:
            self._lose(flight)
        else:
            self._calls.send_granted(flight)

    def _backward_done(self, done: BackwardDone) -> None:
        flight = self._finish_run(done.id)
        assert flight.state in (State.BACKWARDING, State.TURNING), flight.state
        self._desk.mark(flight, "backward_end")
        self._known.backward_took(done.seconds)
        if flight.state is State.TURNING:
            flight.loss = done.loss
        flight.state = State.GONE
        del self._busy[flight.id]
        self.versions.complete(flight.version)
        self.executed_total += 1
        if flight.key is None:
            self._complete(flight)
        else:
            self.callers.answer(flight, flight.key, done.body)
        if flight.moments is not None:
            self._desk.note(MicroBatchTimed(flight.id, tuple(flight.moments.items())))

    def _complete(self, flight: Flight) -> None:
        del self.own[flight.id]
        self.completed_total += 1
        seconds = self._desk.now - flight.since
        self._desk.note(MicroBatchDone(flight.id, flight.round, flight.loss, seconds))

    def _abandon(self, flight: Flight) -> None:
        """Its caller does not wait for it any more: its call downstream ends, what is computed of it is dropped."""
        self._calls.close(flight)
        state = flight.state
        if state in (State.FORWARDING, State.TURNING, State.BACKWARDING):
            flight.is_unwanted = True
        elif state in (State.CALLING, State.RETURNED):
            self._give_up(flight)
        else:
            flight.state = State.GONE
        flight.body = flight.output = None
        self._calls.tidy(at_most=2 * self._slots.capacity + RECENT)

    def _lose(self, flight: Flight) -> None:
        """Nobody comes to anything finite with it: who gave it to us is told, and an origin does without it."""
        if flight.key is not None:
            self.callers.lose(flight)
        elif self.own.pop(flight.id, None) is not None:
            self._issued -= flight.round == self._known.rounds.training
            self._abandon(flight)

    def _give_up(self, flight: Flight) -> None:
        """Its forward was computed and its backward will not be."""
        flight.state = State.GONE
        flight.output = flight.body = None
        del self._busy[flight.id]
        self.versions.release(flight.version)
        self._desk.actions.append(Release(flight.id))

    def _stepped(self, done: Stepped) -> None:
        assert type(self._running) in (StepNow, Publish), self._running
        self._running = None
        self.versions.made()
