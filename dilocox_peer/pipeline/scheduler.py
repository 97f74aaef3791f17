"""One peer's part of the pipeline: what it computes next, and what it tells its neighbours (DESIGN section 6).

A pure machine: inputs and time in, actions out; the same object runs in the simulator (tests/sim/pipeline_world.py) and
in the peer. It never reads a clock, a socket or a body. Callers are the linked peers of the stage before, callees those
of the stage after. Its parts:

    hop.py       what neighbours say               slots.py     who may send us a body; answers not yet acknowledged
    routes.py    to which callee                   versions.py  which parameters a micro-batch uses

The life of a micro-batch here ("flight"), a later stage's from WAITING, a head's from FORWARDING on:

    WAITING -> GRANTED -> READY -> FORWARDING -> CALLING -> RETURNED -> BACKWARDING -> answered
    (last stage: READY -> TURNING -> answered)

Meanwhile its call downstream goes PARKED -> RESERVED -> GRANTED -> SENT, and back to RESERVED elsewhere when its callee
is overdue or gone. Invariants:

P1 a body is sent to a callee only after its Grant. P2 slots held never exceed the capacity at the time of the grant.
P3 at most two versions live; a backward uses its forward's. P4 one flight of an id is computed at a time. P5 a head
counts a micro-batch once. P6 every container is bounded by slots, window or linked peers.
"""

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from statistics import median
from typing import Any

from dilocox_peer.pipeline.contract import (
    Action,
    Backward,
    BackwardDone,
    Body,
    Forward,
    ForwardDone,
    Hold,
    HopRefused,
    HopTiming,
    Input,
    Leaving,
    Linked,
    MicroBatchDone,
    MicroBatchResent,
    MicroBatchTimed,
    Note,
    Publish,
    Received,
    Release,
    Replicas,
    Rounds,
    RoundTrip,
    RouteChanged,
    Send,
    Shifted,
    StepNow,
    Stepped,
    Tick,
    Turn,
    Unlinked,
    Work,
)
from dilocox_peer.pipeline.hop import (
    MAX_WINDOW,
    Ack,
    CallMessage,
    Cancel,
    Grad,
    Grant,
    HopMessage,
    MicroBatchId,
    Refuse,
    Reserve,
    Status,
    Step,
    Wait,
)
from dilocox_peer.pipeline.routes import AnswerTimes, Callee, Plan, choose, make_plan, places
from dilocox_peer.pipeline.slots import AnswerCache, CallKey, Slots, num_slots
from dilocox_peer.pipeline.versions import Mode, Versions
from dilocox_peer.types import PeerId

RECENT = 64  # micro-batches whose heads vote on the round; also what a heap may hold in vain
MAX_OUTSTANDING = 256  # calls of one caller that hold or await a slot, without bodies about 100 KB; more are refused
SERVICE_FROM = 32  # newest work times that the median looks at


class _State(Enum):
    WAITING = auto()
    GRANTED = auto()
    READY = auto()
    FORWARDING = auto()
    TURNING = auto()
    CALLING = auto()
    RETURNED = auto()
    BACKWARDING = auto()
    GONE = auto()


class _Call(Enum):
    PARKED = auto()
    RESERVED = auto()
    GRANTED = auto()
    SENT = auto()


@dataclass(slots=True, eq=False)
class _Flight:
    """A micro-batch at this peer. key: its caller and the caller's number, None at its head. call: our number for it."""

    id: MicroBatchId
    key: CallKey | None
    call: int
    round: int
    state: _State
    since: float
    version: int = 0
    body: Body | None = None  # input, then the gradient of the output
    output: Body | None = None
    loss: float = 0.0
    is_unwanted: bool = False  # cancelled while being computed: the result is dropped
    phase: _Call = _Call.PARKED
    callee: PeerId | None = None
    asked: set[PeerId] = field(default_factory=set)  # had the output, and may answer
    due: float = 0.0
    phase_since: float = 0.0
    moves: int = 0  # to other callees because it was overdue; each doubles the patience
    probes: int = 0  # of its callee since it moved up in the line
    is_probed: bool = False  # asked whether it is still known, and not answered yet
    position: int = MAX_WINDOW  # in the callee's line, as last told
    moments: dict[str, float] | None = None


@dataclass(slots=True)
class _Caller:
    peer: PeerId
    status: Status | None = None
    window: int = 0


@dataclass(frozen=True, slots=True)
class _Answer:
    id: MicroBatchId
    body: Body
    loss: float


class Scheduler:
    """One peer of one stage of a pipeline of at least two."""

    slots_type: type[Slots] = Slots  # the simulator plants faulty ones
    versions_type: type[Versions] = Versions

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
    ) -> None:
        assert 0 <= stage < num_stages, (stage, num_stages)
        assert num_stages >= 2, "a single stage needs no pipeline"
        self._me, self._incarnation = me, incarnation
        self._stage, self._num_stages = stage, num_stages
        self._accumulate, self._max_slots = accumulate, max_slots
        self._timing, self._trace = timing, trace
        self._is_head, self._is_last = stage == 0, stage == num_stages - 1
        self._now = now
        self._out: list[Action] = []

        self.versions = self.versions_type(mode, accumulate, admit=accumulate if self._is_head else 2 * accumulate)
        self._callers: dict[PeerId, _Caller] = {}
        self._callees: dict[PeerId, Callee] = {}
        self._replicas = 1
        self._slots = self.slots_type(self._capacity())
        self._inbound: dict[CallKey, _Flight] = {}
        self._answers: AnswerCache[_Answer] = AnswerCache()
        self._own: dict[MicroBatchId, _Flight] = {}  # at a head
        self._calls: dict[int, _Flight] = {}  # downstream, from the forward's start to its gradient
        self._busy: dict[MicroBatchId, _Flight] = {}  # bound to a version: forward begun, backward not finished
        self._ready: list[tuple[int, _Flight]] = []  # heap, in the order of grants
        self._returned: list[tuple[int, _Flight]] = []  # heap, oldest forward first
        self._running: Work | None = None
        self._was_backward = False
        self._runs: _Flight | None = None
        self._next_index = 0
        self._serial = 0
        self._next_call = rng.getrandbits(48)  # another life of this peer has other numbers

        self._rounds = Rounds(0, 0, None)
        self._issued = 0  # in this training round
        self._is_held = False
        self._is_leaving = False
        self._plan = Plan({}, 0.0)
        self._forward_s: deque[float] = deque(maxlen=SERVICE_FROM)
        self._backward_s: deque[float] = deque(maxlen=SERVICE_FROM)
        self._service_s = 0.0
        self._is_service_stale = False
        self._window = self._compute_window()
        self._recent: deque[PeerId] = deque(maxlen=RECENT)
        self._recent_counts: Counter[PeerId] = Counter()
        self._head_rounds: dict[PeerId, int] = {}
        self._stage0_certified = 0
        self._behind = 0
        self._told: tuple[int, int, int, int] | None = None
        self._status_at = now
        self._sweep_at = now + timing.sweep_s
        self._idle_since: float | None = None
        self._noted_at: dict[PeerId, float] = {}

        self.completed_total = 0  # at a head: micro-batches that came back, each once
        self.loss_total = 0.0  # sum of their losses
        self.executed_total = 0  # backwards and turns computed here
        self.resent = 0
        self.duplicates = 0
        self.protocol_errors = 0
        self.lost_answers = 0

        self._inputs: dict[type, Callable[[Any], None]] = {
            Tick: self._tick,
            Received: self._received,
            Linked: self._linked,
            Unlinked: self._unlinked,
            RoundTrip: self._round_trip,
            ForwardDone: self._forward_done,
            BackwardDone: self._backward_done,
            Stepped: self._stepped,
            Rounds: self._set_rounds,
            Replicas: self._set_replicas,
            Hold: self._set_hold,
            Shifted: self._shifted,
            Leaving: self._leaving,
        }
        self._of_callers: dict[type, Callable[[PeerId, Any, Body | None], None]] = {
            Reserve: self._on_reserve,
            Step: self._on_step,
            Ack: self._on_ack,
            Cancel: self._on_cancel,
        }
        self._of_callees: dict[type, Callable[[PeerId, Any, Body | None], None]] = {
            Grant: self._on_grant,
            Wait: self._on_wait,
            Grad: self._on_grad,
            Refuse: self._on_refuse,
        }

    # ---- what the session reads ----

    @property
    def in_flight(self) -> int:
        """Micro-batches begun here and not answered; at a head, what its window limits."""
        return len(self._own) if self._is_head else len(self._busy)

    @property
    def waiting(self) -> int:
        """Micro-batches of callers that wait for a slot."""
        return self._slots.num_waiting

    @property
    def window(self) -> int:
        """How many micro-batches we may have under way: a head's window, or half of our slots."""
        return self._window

    @property
    def slots(self) -> int:
        return self._slots.capacity

    @property
    def slots_in_use(self) -> int:
        return self._slots.in_use

    @property
    def service_s(self) -> float:
        """Median seconds of own compute a micro-batch, 0 before the first."""
        if self._is_service_stale:
            self._is_service_stale = False
            parts = [median(times) for times in (self._forward_s, self._backward_s) if times]
            if self._is_last or len(parts) == 2:
                self._service_s = sum(parts)
        return self._service_s

    @property
    def behind(self) -> int:
        """The lowest certified round from our stage to the last, as known."""
        return self._behind

    @property
    def stage0_certified(self) -> int:
        """Rounds that stage 0 has certified, as known."""
        return self._rounds.certified if self._is_head else self._stage0_certified

    def recent_heads(self) -> dict[PeerId, tuple[int, int]]:
        """By head: the latest round it sent, and how many of our last 64 micro-batches were its."""
        return {head: (self._head_rounds[head], count) for head, count in sorted(self._recent_counts.items())}

    @property
    def issued_in_round(self) -> int:
        """Micro-batches this head issued in its training round."""
        return self._issued

    @property
    def linked_callees(self) -> tuple[PeerId, ...]:
        return tuple(sorted(self._callees))

    @property
    def linked_callers(self) -> tuple[PeerId, ...]:
        return tuple(sorted(self._callers))

    @property
    def callees(self) -> Mapping[PeerId, Callee]:
        """Per callee: service, load, answer times, outstanding calls. Do not modify."""
        return self._callees

    @property
    def plan(self) -> Plan:
        return self._plan

    @property
    def is_drained(self) -> bool:
        """Nothing is being computed, nothing waits for an answer."""
        return self._running is None and not self._busy and not self._inbound

    def deadline(self) -> float:
        """When Tick is wanted."""
        due = min(self._status_at, self._sweep_at)
        if self._idle_since is not None:
            due = min(due, self._idle_since + self._timing.idle_step_s)
        return due

    # ---- inputs ----

    def handle(self, happened: Input, now: float) -> list[Action]:
        """What to do about it. After every call, a free torch thread should ask `next_work`."""
        self._now = now
        out: list[Action] = []
        self._out = out
        self._inputs[type(happened)](happened)
        told = (self._rounds.training, self._rounds.certified, self.stage0_certified, self._behind)
        if told != self._told:
            self._tell_all()
        return out

    def next_work(self, now: float) -> tuple[Work | None, list[Action]]:
        """The most urgent work, marked as running; None when there is none, or one is running."""
        if self._running is not None:
            return None, []
        self._now = now
        out: list[Action] = []
        self._out = out
        work = self._choose_work()
        self._running = work
        if work is not None:
            self._idle_since = None
        elif self._idle_since is None and self.versions.partial_step_is_possible:
            self._idle_since = now
        return work, out

    def _choose_work(self) -> Work | None:
        versions = self.versions
        if versions.step_is_due or self._partial_step_is_due():
            return StepNow(versions.take_step())
        if versions.publish_is_due:
            versions.take_publish()
            return Publish()
        # Differs from DESIGN 6.3 (backward first): alternate when both are there. Backward first lets waves of forwards
        # and of backwards build up that never decay; 4x4 and 8x4 reached .81-.99 of the ideal, alternating .99-1.00.
        if self._was_backward:
            work = self._start_forward()
            if work is not None:
                self._was_backward = False
                return work
        while self._returned:
            flight = heapq.heappop(self._returned)[1]
            if flight.state is _State.RETURNED:
                self._was_backward = True
                return self._start_backward(flight)
        return None if self._was_backward else self._start_forward()

    def _start_forward(self) -> Work | None:
        if not self.versions.may_admit:
            return None
        if self._is_head:
            return self._issue() if self._may_issue() else None
        return self._start_ready()

    def _partial_step_is_due(self) -> bool:
        """Nothing to do for a while, and something completed. Asked before other work is looked for, so that a
        micro-batch that comes at that very moment goes first."""
        if self._idle_since is None or self._now < self._idle_since + self._timing.idle_step_s:
            return False
        return self.versions.partial_step_is_possible and not self._has_ready()

    def _has_ready(self) -> bool:
        while self._ready and self._ready[0][1].state is not _State.READY:
            heapq.heappop(self._ready)
        return bool(self._ready)

    def _start_ready(self) -> Work | None:
        aside = []
        found = None
        while self._ready:
            serial, flight = heapq.heappop(self._ready)
            if flight.state is not _State.READY:
                continue
            if flight.id in self._busy:  # P4: the same id of another caller is being computed
                aside.append((serial, flight))
                continue
            found = flight
            break
        for entry in aside:
            heapq.heappush(self._ready, entry)
        if found is None:
            return None
        body = found.body
        assert body is not None
        found.body = None
        self._begin(found)
        if self._is_last:
            found.state = _State.TURNING
            return Turn(found.id, found.version, body, found.round)
        self._open_call(found)
        return Forward(found.id, found.version, body, found.round)

    def _may_issue(self) -> bool:
        limit = self._rounds.issue_limit
        return (
            not self._is_held
            and not self._is_leaving
            and len(self._own) < self._window
            and (limit is None or self._issued < limit)
            and bool(self._callees)
            and not self.is_drifting
        )

    @property
    def is_drifting(self) -> bool:
        """Whether the stages behind are two rounds late, so that a head waits for them."""
        return self._rounds.certified - self._behind >= 2

    def _issue(self) -> Work:
        id_ = MicroBatchId(self._me, self._incarnation, self._next_index)
        self._next_index += 1
        self._issued += 1
        flight = _Flight(id_, None, 0, self._rounds.training, _State.READY, self._now)
        self._own[id_] = flight
        self._begin(flight)
        self._open_call(flight)
        return Forward(id_, flight.version, None, flight.round)

    def _begin(self, flight: _Flight) -> None:
        flight.version = self.versions.bind()
        flight.state = _State.FORWARDING
        self._busy[flight.id] = flight
        self._runs = flight
        self._mark(flight, "forward_start")

    def _start_backward(self, flight: _Flight) -> Work:
        body = flight.body
        assert body is not None
        flight.body = None
        flight.state = _State.BACKWARDING
        self._runs = flight
        self._mark(flight, "backward_start")
        return Backward(flight.id, flight.version, body, flight.loss)

    def _forward_done(self, done: ForwardDone) -> None:
        flight = self._finish_run(done.id)
        assert flight.state is _State.FORWARDING, flight.state
        self._mark(flight, "forward_end")
        self._observe_service(self._forward_s, done.seconds)
        if flight.is_unwanted:
            self._give_up(flight)
            return
        flight.output = done.body
        flight.state = _State.CALLING
        if flight.phase is _Call.GRANTED:
            self._send_step(flight)

    def _backward_done(self, done: BackwardDone) -> None:
        flight = self._finish_run(done.id)
        assert flight.state in (_State.BACKWARDING, _State.TURNING), flight.state
        self._mark(flight, "backward_end")
        self._observe_service(self._backward_s, done.seconds)
        if flight.state is _State.TURNING:
            flight.loss = done.loss
        flight.state = _State.GONE
        del self._busy[flight.id]
        self.versions.complete(flight.version)
        self.executed_total += 1
        if flight.key is None:
            self._complete(flight)
        else:
            self._answer(flight, flight.key, done.body)
        if flight.moments is not None:
            self._out.append(Note(MicroBatchTimed(flight.id, tuple(flight.moments.items()))))

    def _complete(self, flight: _Flight) -> None:
        del self._own[flight.id]
        self.completed_total += 1
        self.loss_total += flight.loss
        seconds = self._now - flight.since
        self._out.append(Note(MicroBatchDone(flight.id, flight.round, flight.loss, seconds)))

    def _answer(self, flight: _Flight, key: CallKey, body: Body | None) -> None:
        if flight.is_unwanted:
            return
        assert body is not None, "a later stage's backward gives the gradient of its input"
        del self._inbound[key]
        answer = _Answer(flight.id, body, flight.loss)
        self._answers.keep(self._answer_key(key, flight.id), answer, at_most=2 * self._slots.capacity)
        self._send_answer(key, answer)
        self._free(key)
        self._grant()

    def _send_answer(self, key: CallKey, answer: _Answer) -> None:
        caller, call = key
        if caller in self._callers:
            self._send(caller, Grad(answer.id, answer.loss, self._behind, call), answer.body)

    def _answer_key(self, key: CallKey, id_: MicroBatchId) -> object:
        return key, id_

    def _stepped(self, done: Stepped) -> None:
        assert type(self._running) in (StepNow, Publish), self._running
        self._running = None
        self.versions.made()

    def _shifted(self, _: Shifted) -> None:
        self.versions.shifted()

    def _finish_run(self, id_: MicroBatchId) -> _Flight:
        flight = self._runs
        assert flight is not None, f"{id_} is done and nothing runs"
        assert flight.id == id_, f"{id_} is done and {flight.id} runs"
        self._running = self._runs = None
        return flight

    def _observe_service(self, times: deque[float], seconds: float) -> None:
        times.append(seconds)
        self._is_service_stale = True

    def _set_rounds(self, rounds: Rounds) -> None:
        if rounds.training != self._rounds.training:
            self._issued = 0
        is_new = rounds.certified != self._rounds.certified
        self._rounds = rounds
        self._update_behind()
        if is_new:
            self._replan("round", is_wanted=True)

    def _set_replicas(self, replicas: Replicas) -> None:
        self._replicas = max(1, replicas.count)
        self._resize()

    def _set_hold(self, hold: Hold) -> None:
        self._is_held = hold.is_held

    def _leaving(self, _: Leaving) -> None:
        self._is_leaving = True
        for flight in list(self._inbound.values()):
            if flight.state in (_State.WAITING, _State.GRANTED):
                assert flight.key is not None
                self._send(flight.key[0], Refuse(flight.id, "leaving", flight.key[1]))
                self._drop(flight)

    # ---- links ----

    def _linked(self, linked: Linked) -> None:
        peer = linked.peer
        if linked.stage == self._stage - 1 and peer not in self._callers:
            self._callers[peer] = _Caller(peer)
            self._slots.link(peer)
            self._resize()
        elif linked.stage == self._stage + 1 and peer not in self._callees:
            timing = self._timing
            self._callees[peer] = Callee(
                peer, self._times(timing.overdue_start_s), self._times(timing.overdue_start_s), known_outstanding=0
            )
            self._update_behind()
            self._replan("linked", is_wanted=True)
            self._unpark()
        else:
            return
        self._send(peer, self._status_for(peer))

    def _times(self, start_s: float) -> AnswerTimes:
        timing = self._timing
        return AnswerTimes(
            start_s=start_s, floor_s=timing.overdue_floor_s, cap_s=timing.overdue_cap_s, mad_factor=timing.mad_factor
        )

    def _unlinked(self, unlinked: Unlinked) -> None:
        peer = unlinked.peer
        self._noted_at.pop(peer, None)
        if self._callers.pop(peer, None) is not None:
            for flight in [flight for key, flight in self._inbound.items() if key[0] == peer]:
                if flight.state not in (_State.TURNING, _State.BACKWARDING):
                    self._drop(flight)
            self._slots.unlink(peer)
            self._resize()
        callee = self._callees.pop(peer, None)
        if callee is not None:
            self._update_behind()
            self._replan("unlinked", is_wanted=True)
            for call in sorted(callee.calls):
                self._move(self._calls[call], "unlinked")

    def _round_trip(self, measured: RoundTrip) -> None:
        callee = self._callees.get(measured.peer)
        if callee is not None:
            callee.rtt_s = measured.seconds
            self._window = self._compute_window()

    # ---- messages ----

    def _received(self, received: Received) -> None:
        peer, message = received.peer, received.message
        kind = type(message)
        if kind is Status:
            self._on_status(peer, message)
            return
        if peer in self._callers:
            on = self._of_callers.get(kind)
        elif peer in self._callees:
            on = self._of_callees.get(kind)
        else:
            return  # a stranger, or a message from before the link went down
        if on is None:
            self._blame(peer, f"{kind.__name__} in the wrong direction")
            return
        on(peer, message, received.body)

    def _on_status(self, peer: PeerId, status: Any) -> None:
        caller = self._callers.get(peer)
        if caller is not None and status.stage == self._stage - 1:
            caller.status = status
            claims = sorted(each.status.stage0_certified for each in self._callers.values() if each.status is not None)
            # What more than half of them say at least: one that lies cannot end our rounds.
            self._stage0_certified = max(self._stage0_certified, claims[(len(claims) - 1) // 2])
            if status.stage == 0 and peer in self._recent_counts:
                self._head_rounds[peer] = max(self._head_rounds[peer], status.training_round)
            return
        callee = self._callees.get(peer)
        if callee is None or status.stage != self._stage + 1:
            return
        is_first = callee.status is None
        callee.status = status
        callee.known_outstanding = callee.outstanding
        callee.behind = status.behind
        self._update_behind()
        self._replan("speed", is_wanted=is_first)

    # ---- messages of callers ----

    def _on_reserve(self, peer: PeerId, message: Reserve, _: Body | None) -> None:
        key = (peer, message.call)
        answer = self._answers.get(self._answer_key(key, message.id))
        if answer is not None:
            self.duplicates += 1
            self._send_answer(key, answer)
            return
        flight = self._inbound.get(key)
        if flight is not None:  # asked again: nothing is done twice; position 0 says that it is past the line
            self._send(peer, Wait(message.id, self._slots.position(key), message.call))
            return
        if self._is_leaving:
            self._send(peer, Refuse(message.id, "leaving", message.call))
            return
        if self._slots.outstanding(peer) >= max(self._max_slots, MAX_OUTSTANDING):
            self._send(peer, Refuse(message.id, "too many", message.call))
            return
        flight = _Flight(message.id, key, 0, message.round, _State.WAITING, self._now)
        self._mark(flight, "asked")
        self._inbound[key] = flight
        self._slots.reserve(key)
        self._grant()
        if flight.state is _State.WAITING:
            self._send(peer, Wait(message.id, self._slots.num_waiting, message.call))

    def _grant(self) -> None:
        for key in self._slots.grant():
            flight = self._inbound[key]
            flight.state = _State.GRANTED
            self._mark(flight, "granted")
            flight.since = self._now
            self._serial += 1
            flight.call = self._serial  # until the call downstream has its own number: the order of grants
            self._send(key[0], Grant(flight.id, key[1]))

    def _on_step(self, peer: PeerId, message: Step, body: Body | None) -> None:
        key = (peer, message.call)
        flight = self._inbound.get(key)
        if flight is None:
            answer = self._answers.get(self._answer_key(key, message.id))
            if answer is not None:
                self.duplicates += 1
                self._send_answer(key, answer)
                return
        if flight is None or flight.state is _State.WAITING or flight.id != message.id or body is None:
            self._send(peer, Refuse(message.id, "no slot", message.call))
            self._blame(peer, "a body without a slot")
            return
        if flight.state is not _State.GRANTED:
            self.duplicates += 1
            return
        flight.body, flight.round, flight.state = body, message.round, _State.READY
        self._mark(flight, "arrived")
        heapq.heappush(self._ready, (flight.call, flight))
        self._note_head(message)
        caller = self._callers[peer]
        if message.window != caller.window:
            caller.window = message.window
            self._resize()

    def _note_head(self, message: Step) -> None:
        head, counts = message.id.head, self._recent_counts
        if len(self._recent) == RECENT:
            oldest = self._recent[0]
            counts[oldest] -= 1
            if not counts[oldest]:
                del counts[oldest], self._head_rounds[oldest]
        self._recent.append(head)
        counts[head] += 1
        self._head_rounds[head] = max(self._head_rounds.get(head, 0), message.round)

    def _on_ack(self, peer: PeerId, message: Ack, _: Body | None) -> None:
        self._answers.forget(self._answer_key((peer, message.call), message.id))

    def _on_cancel(self, peer: PeerId, message: Cancel, _: Body | None) -> None:
        key = (peer, message.call)
        self._answers.forget(self._answer_key(key, message.id))
        flight = self._inbound.get(key)
        if flight is not None and flight.id == message.id:
            self._drop(flight)
            self._grant()

    def _drop(self, flight: _Flight) -> None:
        """A caller's flight that nobody waits for any more. The slot it frees is for `_grant`, once all that go are
        gone: or those that go next would be granted it."""
        key = flight.key
        assert key is not None
        del self._inbound[key]
        self._close_call(flight)
        state = flight.state
        if state in (_State.FORWARDING, _State.TURNING, _State.BACKWARDING):
            flight.is_unwanted = True
        elif state in (_State.CALLING, _State.RETURNED):
            self._give_up(flight)
        else:
            flight.state = _State.GONE
        flight.body = flight.output = None
        self._free(key)
        if len(self._ready) > 2 * self._slots.capacity + RECENT:  # P6: dropped ones are skipped, and do not pile up
            self._ready = [entry for entry in self._ready if entry[1].state is _State.READY]
            heapq.heapify(self._ready)
        if len(self._returned) > 2 * self._slots.capacity + RECENT:
            self._returned = [entry for entry in self._returned if entry[1].state is _State.RETURNED]
            heapq.heapify(self._returned)

    def _give_up(self, flight: _Flight) -> None:
        """Its forward was computed and its backward will not be."""
        flight.state = _State.GONE
        flight.output = flight.body = None
        del self._busy[flight.id]
        self.versions.release(flight.version)
        self._out.append(Release(flight.id))

    def _free(self, key: CallKey) -> None:
        self._slots.release(key)
        if key[0] not in self._callers:
            self._slots.unlink(key[0])

    # ---- the call downstream ----

    def _open_call(self, flight: _Flight) -> None:
        self._next_call += 1
        flight.call = self._next_call
        self._calls[flight.call] = flight
        self._reserve(flight, exclude=())

    def _reserve(self, flight: _Flight, *, exclude: tuple[PeerId, ...]) -> None:
        peer, _ = choose(self._callees, self._plan, now=self._now, window=self._window, exclude=exclude)
        flight.phase_since = self._now
        if peer is None:
            flight.phase, flight.callee = _Call.PARKED, None
            flight.due = self._now + self._timing.refused_s
            return
        callee = self._callees[peer]
        callee.outstanding += 1
        callee.calls.add(flight.call)
        flight.phase, flight.callee, flight.is_probed, flight.position = _Call.RESERVED, peer, False, MAX_WINDOW
        flight.due = self._now + self._patience(callee.grants, flight)
        self._mark(flight, "reserve")
        self._send(peer, Reserve(flight.id, flight.round, flight.call))

    def _patience(self, times: AnswerTimes, flight: _Flight) -> float:
        """Doubled with every attempt, so that a slow network is not taken for a broken one again and again."""
        return min(times.patience_s * (1 << min(flight.moves + flight.probes, 8)), self._timing.overdue_cap_s)

    def _send_step(self, flight: _Flight) -> None:
        peer, output = flight.callee, flight.output
        assert peer is not None
        assert output is not None
        flight.phase, flight.phase_since = _Call.SENT, self._now
        flight.asked.add(peer)
        flight.is_probed = False
        flight.due = self._now + self._patience(self._callees[peer].answers, flight)
        self._mark(flight, "step_sent")
        self._send(peer, Step(flight.id, flight.round, self._window, flight.call), output)

    def _leave_callee(self, flight: _Flight) -> Callee | None:
        """The books no longer say that its callee has it; the callee, if it is linked."""
        callee = self._callees.get(flight.callee) if flight.callee is not None else None
        if callee is not None:
            callee.outstanding -= 1
            callee.calls.discard(flight.call)
        flight.callee = None
        return callee

    def _close_call(self, flight: _Flight) -> None:
        """Its answer is not wanted."""
        if self._calls.get(flight.call) is not flight:
            return
        del self._calls[flight.call]
        callee = self._leave_callee(flight)
        if callee is not None:
            self._send(callee.peer, Cancel(flight.id, flight.call))

    def _move(self, flight: _Flight, reason: str) -> None:
        """To another callee, or parked until there is one. A linked old callee has been told."""
        old, was_sent = flight.callee, flight.phase is _Call.SENT
        self._leave_callee(flight)
        self._reserve(flight, exclude=(old,) if old is not None else ())
        if was_sent and old is not None:
            self.resent += 1
            self._out.append(Note(MicroBatchResent(flight.id, old, flight.callee, reason)))

    def _unpark(self) -> None:
        for flight in list(self._calls.values()):
            if flight.phase is _Call.PARKED:
                self._reserve(flight, exclude=())

    def _called(self, peer: PeerId, message: CallMessage) -> _Flight | None:
        """The flight that this message of a callee is about, if peer is who has it now."""
        flight = self._calls.get(message.call)
        if flight is None or flight.id != message.id or flight.callee != peer:
            return None
        return flight

    def _on_grant(self, peer: PeerId, message: Grant, _: Body | None) -> None:
        flight = self._called(peer, message)
        if flight is None:
            return  # cancelled meanwhile
        if flight.phase is _Call.RESERVED:
            self._callees[peer].grants.observe(self._now - flight.phase_since)
            flight.phase = _Call.GRANTED
            self._mark(flight, "grant")
            if flight.state is _State.CALLING:
                self._send_step(flight)
        elif flight.phase is _Call.SENT and flight.is_probed:  # asked whether it still knows it: it does not
            self.resent += 1
            self._out.append(Note(MicroBatchResent(flight.id, peer, peer, "forgotten")))
            self._send_step(flight)

    def _on_wait(self, peer: PeerId, message: Wait, _: Body | None) -> None:
        """It is alive and knows of it. One that moves up in the line is not overdue, however slow the line is."""
        flight = self._called(peer, message)
        if flight is None:
            return
        if flight.phase is _Call.RESERVED:
            if message.position < flight.position:
                flight.probes = 0
            flight.position = message.position
            flight.due = self._now + self._patience(self._callees[peer].grants, flight)
        elif flight.phase is _Call.SENT and flight.is_probed:
            flight.due = self._now + self._patience(self._callees[peer].answers, flight)
        flight.is_probed = False

    def _on_refuse(self, peer: PeerId, message: Refuse, _: Body | None) -> None:
        is_leaving = message.reason == "leaving"
        pause_s = self._timing.leaving_s if is_leaving else self._timing.refused_s
        callee = self._callees[peer]
        flight = self._called(peer, message)
        if flight is None:
            return
        callee.avoid_until = max(callee.avoid_until, self._now + pause_s)
        self._move(flight, "refused")

    def _on_grad(self, peer: PeerId, message: Grad, body: Body | None) -> None:
        callee = self._callees[peer]
        if callee.behind != message.behind:
            callee.behind = message.behind
            self._update_behind()
        flight = self._calls.get(message.call)
        if not self._is_answer(flight, peer, message):
            self.duplicates += 1
            self._send(peer, Ack(message.id, message.call))
            return
        assert flight is not None
        if body is None:
            self._blame(peer, "a gradient without a body")
            return
        self._send(peer, Ack(message.id, message.call))
        self._take_answer(flight, peer)
        flight.state = _State.RETURNED
        flight.body, flight.output, flight.loss = body, None, message.loss
        self._mark(flight, "grad")
        heapq.heappush(self._returned, (flight.call, flight))

    def _is_answer(self, flight: _Flight | None, peer: PeerId, message: Grad) -> bool:
        return flight is not None and flight.id == message.id and peer in flight.asked

    def _take_answer(self, flight: _Flight, peer: PeerId) -> None:
        """The first gradient wins; whoever else has the call is told to leave it."""
        del self._calls[flight.call]
        if flight.phase is _Call.SENT and flight.callee == peer:
            self._callees[peer].answers.observe(self._now - flight.phase_since)
        current = self._leave_callee(flight)
        if current is not None and current.peer != peer:
            self._send(current.peer, Cancel(flight.id, flight.call))

    # ---- time ----

    def _tick(self, _: Tick) -> None:
        if self._now >= self._status_at:
            self._resize()
            self._replan("speed", is_wanted=False)
            self._tell_all()
        if self._now >= self._sweep_at:
            self._sweep_at = self._now + self._timing.sweep_s
            self._sweep()

    def _sweep(self) -> None:
        for flight in list(self._calls.values()):
            if flight.due <= self._now and flight.phase is not _Call.GRANTED:
                self._overdue(flight)
        for flight in list(self._inbound.values()):
            if flight.state is _State.GRANTED and self._now - flight.since > self._timing.unused_grant_s:
                assert flight.key is not None
                self._send(flight.key[0], Refuse(flight.id, "expired", flight.key[1]))
                self._drop(flight)
        self._grant()

    def _overdue(self, flight: _Flight) -> None:
        """Asks its callee whether it still knows of it: who works on it says so, who forgot it grants again. No answer,
        or the same answer too often: Cancel, and to another callee if there is one.

        Differs from DESIGN 6.7 (cancel at once): under load everything is late at the same time; what is cancelled then
        loses its place in the line and its work, and a few unlucky ones never came back.
        """
        peer = flight.callee
        if peer is None:
            self._reserve(flight, exclude=())
            return
        if flight.is_probed or flight.probes >= self._timing.patient_probes:
            others = any(other != peer and each.avoid_until <= self._now for other, each in self._callees.items())
            if others:
                flight.moves += 1
                flight.probes = 0
                self._send(peer, Cancel(flight.id, flight.call))
                self._move(flight, "overdue")
                return
        callee = self._callees[peer]
        times = callee.answers if flight.phase is _Call.SENT else callee.grants
        times.observe(self._now - flight.phase_since)
        flight.probes += 1
        flight.is_probed = True
        flight.due = (
            self._now + callee.rtt_s + self._timing.overdue_floor_s * (1 << min(flight.moves + flight.probes, 5))
        )
        self._send(peer, Reserve(flight.id, flight.round, flight.call))

    # ---- what we know and tell ----

    def _update_behind(self) -> None:
        known = sorted(callee.behind for callee in self._callees.values() if callee.behind is not None)
        # They have one chain, so the lowest is only the slowest to tell; and one that lies cannot hold the heads for ever.
        self._behind = min([self._rounds.certified, *known[len(known) // 2 :][:1]])

    def _replan(self, reason: str, *, is_wanted: bool) -> None:
        """A new plan when it differs; is_wanted: also when it hardly does."""
        plan = make_plan(self._callees)
        if is_wanted or not plan.is_near(self._plan):
            is_same = plan.is_near(self._plan)
            self._plan = plan
            if not is_same:
                percent = tuple((peer, round(100 * part)) for peer, part in sorted(plan.weights.items()))
                self._out.append(Note(RouteChanged(percent, reason)))
        self._window = self._compute_window()

    @property
    def path_s(self) -> float:
        """Round trips from here to the last stage, the longest way that the plan takes."""
        ways = [
            callee.rtt_s + (callee.status.path_s if callee.status is not None else 0.0)
            for callee in self._planned_callees()
        ]
        return max(ways, default=0.0)

    @property
    def slowest_s(self) -> float:
        """The largest service time from here to the last stage."""
        behind = [callee.status.slowest_s for callee in self._planned_callees() if callee.status is not None]
        return max([self.service_s, *behind])

    def _planned_callees(self) -> list[Callee]:
        return [self._callees[peer] for peer in self._plan.weights if peer in self._callees]

    def _compute_window(self) -> int:
        if not self._is_head:
            return min(max(1, self._slots.capacity // 2), MAX_WINDOW)
        if self.versions.mode == "flush":
            return min(self._accumulate, MAX_WINDOW)
        # Differs from DESIGN 6.2, 2 (S + round trips / slowest): a head counts all peers that work for it, which with
        # few heads or slow callees are more than the stages; and one on the way even where round trips take no time
        # (without that one, a 4x4 of mixed speeds took 100 s to come from .95 to 1.00 of the ideal).
        slowest_s = self.slowest_s
        on_the_way = max(1, int(-(-self.path_s // slowest_s))) if slowest_s > 0 else 0
        stations = max(float(self._num_stages), 1.0 + self._plan.width)
        return max(1, min(int(-(-2 * (stations + on_the_way) // 1)), self._accumulate, MAX_WINDOW))

    def _capacity(self) -> int:
        if self._is_head:
            return 1
        announced = max((caller.window for caller in self._callers.values()), default=0)
        return num_slots(
            window=announced or 2 * self._num_stages, callers=len(self._callers), replicas=self._replicas,
            max_slots=self._max_slots,
        )  # fmt: skip

    def _resize(self) -> None:
        self._slots.capacity = self._capacity()
        if not self._is_head:
            self._window = self._compute_window()
        self._grant()

    def _tell_all(self) -> None:
        self._status_at = self._now + self._timing.status_s
        self._told = (self._rounds.training, self._rounds.certified, self.stage0_certified, self._behind)
        if not self._callers and not self._callees:
            return
        status = self._status((0.0, 1.0))
        for peer in self._callees:
            self._send(peer, status)
        if self._callers:
            where = self._caller_places()
            for peer in self._callers:
                self._send(peer, self._status(where[peer]))

    def _status_for(self, peer: PeerId) -> Status:
        return self._status(self._caller_places()[peer] if peer in self._callers else (0.0, 1.0))

    def _caller_places(self) -> dict[PeerId, tuple[float, float]]:
        return places(
            {
                peer: caller.status.service_s if caller.status is not None else 0.0
                for peer, caller in self._callers.items()
            }
        )

    def _status(self, place: tuple[float, float]) -> Status:
        return Status(
            stage=self._stage, training_round=self._rounds.training, certified=self._rounds.certified,
            stage0_certified=self.stage0_certified, behind=self._behind, service_s=self.service_s,
            load=self._slots.in_use + self._slots.num_waiting, path_s=self.path_s, slowest_s=self.slowest_s,
            width=self._plan.width, place=place,
        )  # fmt: skip

    def _send(self, peer: PeerId, message: HopMessage, body: Body | None = None) -> None:
        self._out.append(Send(peer, message, body))

    def _blame(self, peer: PeerId, reason: str) -> None:
        self.protocol_errors += 1
        if self._now >= self._noted_at.get(peer, float("-inf")) + 1.0:
            self._noted_at[peer] = self._now
            self._out.append(Note(HopRefused(peer, reason)))

    def _mark(self, flight: _Flight, moment: str) -> None:
        if self._trace:
            if flight.moments is None:
                flight.moments = {}
            flight.moments[moment] = self._now
