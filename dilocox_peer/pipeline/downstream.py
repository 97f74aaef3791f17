"""A peer's calls downstream, to the linked peers of the stage after: to whom, by when, and to whom else.

A call is opened when the forward begins: a slot is reserved at the callee that routes.py chooses, or the call is parked
until there is one. With the slot granted and the output there, the body is sent; the first gradient ends the call.

When a callee

    is late            it is asked whether it still knows (`_overdue`); silent, or late again and again: elsewhere, and it is left alone (lateness.py)
    refuses            it is left alone for a while, the longer the longer it kept the call, and that goes elsewhere (`on_refuse`)
    lies               what it answers cannot be: the same (`refuse`)
    dies               its link goes down: all its calls go elsewhere, what it had is sent again (`lost`); left alone when it is back, if it kept them long
    forgot the call    it grants again when asked, and gets the body again (`on_grant`)

Some answers are checked (checks.py): the same output goes to a second callee, by a call that nothing waits for; when anything is the matter
with that call it is given up.

"Elsewhere" is `_move`: another callee, or PARKED until one is linked (`unpark`) or may be asked again (`sweep`). The
output is kept until the gradient is here, so nothing is computed twice on our side. Pure.
"""

import heapq
import math
import random
from collections.abc import Callable

from dilocox_peer.pipeline.checks import Checks
from dilocox_peer.pipeline.contract import (
    Body,
    Compare,
    Compared,
    GradientsCompared,
    GradientsFalse,
    GradRefused,
    MicroBatchResent,
)
from dilocox_peer.pipeline.flight import MOSTLY_NOTHING, NOT_FINITE, NOT_TAKEN, CallPhase, Flight, State, Tray
from dilocox_peer.pipeline.lateness import Lateness
from dilocox_peer.pipeline.neighbourhood import Neighbourhood, Role
from dilocox_peer.pipeline.outcomes import Outcomes
from dilocox_peer.pipeline.routes import AnswerTimes, Callee, choose
from dilocox_peer.types import PeerId
from dilocox_peer.wire.hops import (
    MAX_WINDOW,
    CallMessage,
    Cancel,
    Grad,
    GradAck,
    Refuse,
    Reserve,
    SlotGrant,
    SlotWait,
    Step,
)

MAX_CHECKS = 2  # under way: each holds an output and a gradient
HOPELESS = 2  # callees that come to nothing with a micro-batch
HOPELESS_ALONE = 3  # answers of the only callee that cannot be one
WAITS = 8  # times refused_s, for a callee that takes what has come to nothing elsewhere
LONGEST = 8  # times as long as another callee has for the same, and overdue_start_s more: whatever it says meanwhile


class Downstream:
    """Calls by our number for them, from the forward's start to the gradient; then the flight waits for its backward."""

    checks_type: type[Checks] = Checks  # the simulator plants faulty ones

    def __init__(self, desk: Tray, known: Neighbourhood, role: Role, rng: random.Random) -> None:
        self._desk, self._known = desk, known
        # Before the first call's; random, so that another life of this peer has other numbers.
        self._number = rng.getrandbits(48)
        hops = role.num_stages - 1
        behind = max(0, hops - role.stage - 1)  # our callees
        self._checks = self.checks_type(random.Random(rng.getrandbits(48)), hops=hops, stages_behind=behind)
        self._num_checks = 0
        self._calls: dict[int, Flight] = {}
        self._returned: list[tuple[int, Flight]] = []  # heap, oldest forward first
        self._lateness = Lateness(desk.timing)
        self._hopeless: list[Flight] = []  # two callees, or the only one that takes work, came to nothing with them
        self._outcomes = Outcomes()  # of callees
        self.resent = 0
        self.duplicates = 0

    # ---- from open to close ----

    def open(self, flight: Flight) -> None:
        """Its forward begins: a slot is looked for meanwhile."""
        self._number += 1
        flight.call = self._number
        self._calls[flight.call] = flight
        self._reserve(flight, exclude=())

    def _reserve(self, flight: Flight, *, exclude: tuple[PeerId, ...]) -> None:
        desk, known = self._desk, self._known
        if len(known.callees) >= HOPELESS:
            exclude = (*exclude, *flight.failed_at)
        peer, _ = choose(known.callees, known.plan, now=desk.now, window=known.window, exclude=exclude)
        flight.phase_since = desk.now
        if peer is None:
            flight.phase, flight.callee = CallPhase.PARKED, None
            flight.due = desk.now + desk.timing.refused_s
            if self._is_left_over(flight):
                self._hopeless.append(flight)
            return
        self._ask(flight, peer)

    def _is_left_over(self, flight: Flight) -> bool:
        """Whether it came to nothing at a callee a while ago, and all others refuse whatever they are asked for: no better than the only one."""
        if self._desk.now < flight.failed_since + WAITS * self._desk.timing.refused_s:
            return False
        return len(self._known.callees) >= HOPELESS and not self._untried(flight)

    def _ask(self, flight: Flight, peer: PeerId) -> None:
        """For a slot."""
        desk, callee = self._desk, self._known.callees[peer]
        callee.outstanding += 1
        callee.calls.add(flight.call)
        flight.phase, flight.callee, flight.is_probed, flight.position = CallPhase.RESERVED, peer, False, MAX_WINDOW
        flight.kept_since = desk.now
        flight.due = self._due(callee.grants, flight)
        desk.mark(flight, "reserve")
        desk.send(peer, Reserve(*flight.id, flight.call, flight.round))

    def _patience(self, times: AnswerTimes, flight: Flight) -> float:
        """Doubled with every attempt, so that a slow network is not taken for a broken one again and again."""
        cap_s = self._desk.timing.overdue_cap_s
        return min(times.patience_s * (1 << min(flight.moves + flight.probes, 8)), cap_s)

    def _due(self, times: AnswerTimes, flight: Flight) -> float:
        return min(self._desk.now + self._patience(times, flight), self._end_of_patience(flight))

    def _end_of_patience(self, flight: Flight) -> float:
        """When it goes elsewhere whatever its callee says. What a micro-batch is bound to stays until it is back: by words alone one callee
        could keep a caller from stepping."""
        others = self._others(flight.callee)
        if not others:
            return math.inf
        is_sent = flight.phase is CallPhase.SENT
        longest_s = LONGEST * min((each.answers if is_sent else each.grants).patience_s for each in others)
        return flight.kept_since + self._desk.timing.overdue_start_s + longest_s

    def _others(self, peer: PeerId | None) -> list[Callee]:
        """Those that may be asked now, but for peer."""
        now = self._desk.now
        return [each for other, each in self._known.callees.items() if other != peer and each.is_open(now)]

    def _untried(self, flight: Flight) -> list[Callee]:
        """Those of the others at which it has not come to nothing."""
        return [each for each in self._others(flight.callee) if each.peer not in flight.failed_at]

    def send_granted(self, flight: Flight) -> None:
        """Its forward is done: the output goes out, if there is a slot for it."""
        if flight.phase is CallPhase.GRANTED:
            self.send_step(flight)

    def send_step(self, flight: Flight) -> None:
        """Its output goes to the callee that granted it a slot."""
        peer, output = flight.callee, flight.output
        assert peer is not None
        assert output is not None
        desk, known = self._desk, self._known
        if flight.phase is not CallPhase.SENT:
            flight.kept_since = desk.now  # a callee that says that it forgot it begins no new patience
        flight.phase, flight.phase_since, flight.is_first = CallPhase.SENT, desk.now, flight.phase is not CallPhase.SENT
        flight.asked.add(peer)
        flight.is_probed = False
        flight.due = math.inf  # it is not the callee that is late while the body waits for our upload limit
        desk.mark(flight, "step_sent")
        desk.send(peer, Step(*flight.id, flight.call, flight.round, known.window), output)

    def sent(self, peer: PeerId, step: Step) -> None:
        """The body has left: from here on the callee's time counts."""
        flight = self._called(peer, step)
        if flight is not None and flight.phase is CallPhase.SENT:
            waited_s = self._desk.now - flight.phase_since  # for our upload limit
            flight.phase_since = self._desk.now
            flight.kept_since = self._desk.now if flight.is_first else flight.kept_since + waited_s
            flight.due = self._due(self._known.callees[peer].answers, flight)

    def take_returned(self) -> Flight | None:
        """The flight begun first whose gradient is here."""
        while self._returned:
            flight = heapq.heappop(self._returned)[1]
            if flight.state is State.RETURNED:
                return flight
        return None

    def close(self, flight: Flight) -> None:
        """Its answer is not wanted."""
        if self._calls.get(flight.call) is not flight:
            return
        self._end(flight)
        callee = self._leave_callee(flight)
        if callee is not None:
            self._desk.send(callee.peer, Cancel(*flight.id, flight.call))

    def tidy(self, *, at_most: int) -> None:
        """P6: returned ones that were dropped are skipped, and do not pile up."""
        if len(self._returned) > at_most:
            self._returned = [entry for entry in self._returned if entry[1].state is State.RETURNED]
            heapq.heapify(self._returned)

    def _end(self, flight: Flight) -> None:
        """Its call is over."""
        del self._calls[flight.call]
        self._num_checks -= flight.checked is not None

    # ---- checks ----

    def _check(self, flight: Flight, first: PeerId, output: Body, gradient: Body) -> None:
        """Has a second callee compute what first has just answered, if it is to be checked. It has the time of one grant and of one answer for it."""
        self._checks.answered(first)
        if self._num_checks >= MAX_CHECKS:
            return
        desk, known = self._desk, self._known
        second = self._checks.second(first, known.callees, desk.now, had=flight.asked)
        if second is None:
            return
        self._number += 1
        check = Flight(flight.id, None, self._number, flight.round, State.CALLING, desk.now)
        check.output, check.checked, check.phase_since = output, (first, gradient), desk.now
        self._calls[check.call] = check
        self._num_checks += 1
        self._ask(check, second)

    def linked(self, peer: PeerId) -> None:
        """One more callee: it may be a known liar, or one that was late before its link went."""
        callee = self._known.callees[peer]
        callee.avoid_until, callee.late_until = self._checks.out_until(peer), self._lateness.until(peer)
        self.unpark()

    def compared(self, compared: Compared) -> None:
        """Two answers for one output, and how much they agree."""
        desk, one, other = self._desk, compared.one, compared.other
        desk.note(GradientsCompared(one, other, compared.agreement))
        for event in self._checks.compared(one, other, compared.agreement, self._known.callees, desk.now):
            desk.note(event)
            if isinstance(event, GradientsFalse):
                self._expel(event.peer)

    def _expel(self, peer: PeerId) -> None:
        """What it has goes elsewhere, and it gets nothing more while it is out."""
        callee = self._known.callees.get(peer)
        if callee is None:
            return
        callee.avoid_until = max(callee.avoid_until, self._checks.out_until(peer))
        for flight in self._calls.values():
            flight.asked.discard(peer)  # nothing more is taken of it
        for call in sorted(callee.calls):
            flight = self._calls[call]
            self._desk.send(peer, Cancel(*flight.id, call))
            self._move(flight, "not believed")

    # ---- to another callee ----

    def lost(self, callee: Callee) -> None:
        """The link to a callee is down, and it is off the books: what it had goes elsewhere. One that keeps what it has for longer than others take, and
        then is gone, would never be found late. Counted is the time in which others were heard: where our own line is down, all links are lost."""
        until, flights = self._heard_others(callee.peer), [self._calls[call] for call in callee.calls]
        kept_s = max((until - flight.kept_since for flight in flights if self._has_it(flight)), default=0.0)
        if kept_s > min((each.answers.patience_s for each in self._others(callee.peer)), default=math.inf):
            self._shun(callee)
        for call in sorted(callee.calls):
            self._move(self._calls[call], "unlinked")

    def _heard_others(self, peer: PeerId) -> float:
        """When the newest message of another callee came: until then our own line was up, and we were not stopped."""
        return max((each.heard_at for other, each in self._known.callees.items() if other != peer), default=-math.inf)

    def unpark(self) -> None:
        """Another callee is linked, or may be asked now."""
        for flight in list(self._calls.values()):
            if flight.phase is CallPhase.PARKED:
                self._reserve(flight, exclude=())

    def sweep(self) -> None:
        """Looks for what is overdue."""
        now = self._desk.now
        for flight in list(self._calls.values()):
            if flight.due <= now and flight.phase is not CallPhase.GRANTED:
                self._overdue(flight)

    def _overdue(self, flight: Flight) -> None:
        """Asks its callee whether it still knows of it: who works on it says so, who forgot it grants again. No answer,
        or the same answer too often: Cancel, and to another callee if there is one.

        Not cancelled at once, as was tried: under load everything is late at the same time; what is cancelled then
        loses its place in the line and its work, and a few unlucky ones never came back.
        """
        peer = flight.callee
        if peer is None:
            self._reserve(flight, exclude=())
            return
        if flight.checked is not None:
            self.close(flight)
            return
        desk, callees = self._desk, self._known.callees
        is_at_end = desk.now >= self._end_of_patience(flight)
        if is_at_end:
            self._shun(callees[peer])
        has_had_its_time = flight.is_probed or flight.probes >= desk.timing.patient_probes
        if is_at_end or (has_had_its_time and self._untried(flight)):
            if flight.is_probed and self._heard_others(peer) > flight.probed_at:
                callees[peer].late_until = self._lateness.was_silent(peer, desk.now)
            flight.moves += 1
            flight.probes = 0
            desk.send(peer, Cancel(*flight.id, flight.call))
            self._move(flight, "overdue")
            return
        callee = callees[peer]
        times = callee.answers if flight.phase is CallPhase.SENT else callee.grants
        times.observe(desk.now - flight.phase_since)
        flight.probes += 1
        flight.is_probed, flight.probed_at = True, desk.now
        floor_s = desk.timing.overdue_floor_s
        flight.due = desk.now + callee.rtt_s + floor_s * (1 << min(flight.moves + flight.probes, 5))
        desk.send(peer, Reserve(*flight.id, flight.call, flight.round))

    def _shun(self, callee: Callee) -> None:
        """It kept something for far too long: it gets nothing for a while."""
        callee.late_until = self._lateness.kept(callee.peer, self._desk.now)

    def _move(self, flight: Flight, reason: str) -> None:
        """To another callee, or parked until there is one. A linked old callee has been told."""
        old, was_sent = flight.callee, flight.phase is CallPhase.SENT
        self._leave_callee(flight)
        if flight.checked is not None:
            self._end(flight)
            return
        self._reserve(flight, exclude=(old,) if old is not None else ())
        if was_sent and old is not None:
            self.resent += 1
            self._desk.note(MicroBatchResent(flight.id, old, flight.callee, reason))

    def _leave_callee(self, flight: Flight) -> Callee | None:
        """The books no longer say that its callee has it; the callee, if it is linked."""
        callee = self._known.callees.get(flight.callee) if flight.callee is not None else None
        if callee is not None:
            callee.outstanding -= 1
            callee.calls.discard(flight.call)
        flight.callee = None
        return callee

    # ---- messages ----

    def _called(self, peer: PeerId, message: CallMessage) -> Flight | None:
        """The flight that this message of a callee is about, if peer is who has it now."""
        flight = self._calls.get(message.call)
        if flight is None or flight.id != message.id or flight.callee != peer:
            return None
        return flight

    def on_grant(self, peer: PeerId, message: SlotGrant, _: Body | None) -> None:
        flight = self._called(peer, message)
        if flight is None:
            return  # cancelled meanwhile
        flight.failed_since = max(flight.failed_since, self._desk.now)  # somebody else takes it; never: inf stays
        if flight.phase is CallPhase.RESERVED:
            self._known.callees[peer].grants.observe(self._desk.now - flight.phase_since)
            flight.phase = CallPhase.GRANTED
            self._desk.mark(flight, "grant")
            if flight.state is State.CALLING:
                self.send_step(flight)
        elif flight.phase is CallPhase.SENT and flight.is_probed:  # asked whether it still knows it: it does not
            self.resent += 1
            self._desk.note(MicroBatchResent(flight.id, peer, peer, "forgotten"))
            self.send_step(flight)

    def on_wait(self, peer: PeerId, message: SlotWait, _: Body | None) -> None:
        """It is alive and knows of it. One that moves up in the line is not overdue, however slow the line is."""
        flight = self._called(peer, message)
        if flight is None or flight.checked is not None:  # a check that has to wait is given up
            return
        flight.failed_since = max(flight.failed_since, self._desk.now)  # somebody else takes it; never: inf stays
        callee = self._known.callees[peer]
        if flight.phase is CallPhase.RESERVED:
            if message.position < flight.position:
                flight.probes = 0
            flight.position = message.position
            flight.due = self._due(callee.grants, flight)
        elif flight.phase is CallPhase.SENT and flight.is_probed:
            flight.due = self._due(callee.answers, flight)
        flight.is_probed = False

    def on_refuse(self, peer: PeerId, message: Refuse, _: Body | None) -> None:
        flight = self._called(peer, message)
        if flight is None:
            return
        flight.asked.discard(peer)  # what it refused it has no answer to
        # Before its body has left, that nothing comes of it is a word of 80 bytes.
        is_nothing = message.reason in (NOT_FINITE, NOT_TAKEN) and self._has_body(flight)
        if not is_nothing or self._failed(flight, peer):
            self._pause(peer, flight, message.reason)
        self._move(flight, "refused")

    def _pause(self, peer: PeerId, flight: Flight, reason: str) -> None:
        """It refused this."""
        timing, callee, now = self._desk.timing, self._known.callees[peer], self._desk.now
        is_for_us = reason == MOSTLY_NOTHING  # it says nothing of the callee, which takes ours again after so long
        pause_s = timing.leaving_s if is_for_us or reason == "leaving" else timing.refused_s
        kept_s = now - flight.kept_since if self._has_it(flight) else 0.0
        if self._others(peer):  # or it could keep each up to the end of our patience, and be asked again
            if not is_for_us:
                pause_s = min(max(pause_s, LONGEST * kept_s), timing.overdue_cap_s)
            if kept_s > timing.overdue_start_s and callee.is_open(now):  # of several at once the first counts
                self._shun(callee)
        callee.avoid_until = max(callee.avoid_until, now + pause_s)

    def _failed(self, flight: Flight, peer: PeerId, *, tries: int = 1) -> bool:
        """Nothing came of it there, or nothing that we take: whether that is so of most that peer has of us. Else it is the micro-batch, of which
        nothing will come elsewhere either. tries: that the only callee has."""
        is_usual = not flight.is_doubted and self._outcomes.fruitless(peer)
        if flight.checked is None:
            flight.failed_at.add(peer)
            flight.failed_since = min(flight.failed_since, self._desk.now)
            flight.failures += 1
            is_everywhere = len(self._known.callees) < HOPELESS and flight.failures >= tries
            # More at one callee are of a second that comes and goes meanwhile.
            if is_everywhere or len(flight.failed_at) >= HOPELESS or flight.failures >= HOPELESS_ALONE:
                self._hopeless.append(flight)
        return is_usual

    @staticmethod
    def _has_it(flight: Flight) -> bool:
        """Whether we wait for its callee, and not it for us: for our forward, or for our upload limit."""
        return flight.phase is CallPhase.RESERVED or Downstream._has_body(flight)

    @staticmethod
    def _has_body(flight: Flight) -> bool:
        """Whether its body has left for its callee."""
        return flight.phase is CallPhase.SENT and flight.due < math.inf

    def give_up(self, lose: Callable[[Flight], None]) -> None:
        """Those that are hopeless: else each would be tried at every callee for ever, and hold the version that it is bound to."""
        while self._hopeless:
            lose(self._hopeless.pop())

    def refuse(self, refused: GradRefused) -> None:
        """Its answer is wanted no more: another callee has it to do."""
        peer, grad = refused.peer, refused.message
        flight, callee = self._calls.get(grad.call), self._known.callees.get(peer)
        if flight is None or not self._is_answer(flight, peer, grad):
            return
        flight.asked.discard(peer)
        is_usual = self._failed(flight, peer, tries=1 if refused.is_unlike else HOPELESS_ALONE)
        if callee is None or flight.callee != peer:
            return
        if is_usual or not refused.is_unlike:
            callee.avoid_until = max(callee.avoid_until, self._desk.now + self._desk.timing.refused_s)
        self._desk.send(peer, Cancel(*flight.id, flight.call))
        self._move(flight, NOT_TAKEN)

    def awaited(self, peer: PeerId, message: Grad) -> Body | None:
        """The output that it had of us and that this answers; None if there is none."""
        flight = self._calls.get(message.call)
        return flight.output if flight is not None and self._is_answer(flight, peer, message) else None

    def on_grad(self, peer: PeerId, message: Grad, body: Body | None) -> None:
        desk = self._desk
        self._known.heard_behind(self._known.callees[peer], message.behind)
        flight = self._calls.get(message.call)
        if not self._is_answer(flight, peer, message):
            self.duplicates += 1
            desk.send(peer, GradAck(*message.id, message.call))
            return
        assert flight is not None
        if body is None:
            desk.blame(peer, "a gradient without a body")
            return
        desk.send(peer, GradAck(*message.id, message.call))
        self._take_answer(flight, peer)
        self.unpark()  # the way to this callee is measured
        if flight.checked is not None:
            first, of_first = flight.checked
            desk.actions.append(Compare(first, peer, of_first, body, flight.id))
            return
        if flight.output is not None:
            self._check(flight, peer, flight.output, body)
        flight.state = State.RETURNED
        flight.body, flight.output, flight.loss = body, None, self._known.told_loss(peer, message.loss)
        desk.mark(flight, "grad")
        heapq.heappush(self._returned, (flight.call, flight))

    def _is_answer(self, flight: Flight | None, peer: PeerId, message: Grad) -> bool:
        return flight is not None and flight.id == message.id and peer in flight.asked

    def _take_answer(self, flight: Flight, peer: PeerId) -> None:
        """The first gradient wins; whoever else has the call is told to leave it."""
        self._end(flight)
        self._outcomes.fruitful(peer)
        self._lateness.answered(peer, self._desk.now)
        if flight.phase is CallPhase.SENT and flight.callee == peer:
            self._known.callees[peer].answers.observe(self._desk.now - flight.phase_since)
        current = self._leave_callee(flight)
        if current is not None and current.peer != peer:
            self._desk.send(current.peer, Cancel(*flight.id, flight.call))
