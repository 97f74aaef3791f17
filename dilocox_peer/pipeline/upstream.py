"""What a peer does for its callers, the linked peers of the stage before: slots, bodies that come in, answers.

A caller reserves (Reserve), is told where it is in the line (SlotWait), is granted a slot (SlotGrant), sends the body (Step),
gets the gradient (Grad), and says that it has it (GradAck) or that it wants none (Cancel). Until then the answer is kept, so
that asking again does nothing twice. What is computed of a flight between READY and its answer is scheduler.py's. Pure.
"""

from collections import OrderedDict
from collections.abc import Callable, Container
from dataclasses import dataclass

from dilocox_peer.pipeline.contract import Body, HopRefused, StepRefused
from dilocox_peer.pipeline.flight import MOSTLY_NOTHING, NOT_FINITE, NOT_TAKEN, RECENT, Flight, State, Tray
from dilocox_peer.pipeline.neighbourhood import Neighbourhood
from dilocox_peer.pipeline.outcomes import Outcomes
from dilocox_peer.pipeline.slots import AnswerCache, CallKey, Slots
from dilocox_peer.pipeline.turnstile import Turnstile
from dilocox_peer.types import PeerId
from dilocox_peer.wire.hops import (
    Cancel,
    Grad,
    GradAck,
    MicroBatchId,
    Refuse,
    Reserve,
    SlotGrant,
    SlotWait,
    Step,
    tellable,
)

MAX_OUTSTANDING = 256  # calls of one caller that hold or await a slot, without bodies about 100 KB; more are refused
MAX_REMEMBERED = 512  # callers that left slots unused, linked or not
SENT_AGAIN_AFTER_S = 15.0  # after so long without a word a link is lost, and with it what was on its way
MOST_PATIENCE = (
    5  # times unused_grant_s, while other bodies of the caller come: it may have many slots, and a slow line
)
MOST_DOUBLED = 8  # times, with each time that it is sent: it may be our upload limit that it waits for


@dataclass(slots=True)
class _Answer:
    caller: PeerId
    id: MicroBatchId
    body: Body
    loss: float
    times: int = 0  # sent
    again_at: float = float("-inf")


class Upstream:
    """flights: by the caller's key, from its Reserve to our answer."""

    def __init__(
        self,
        desk: Tray,
        known: Neighbourhood,
        slots: Slots,
        *,
        max_slots: int,
        abandon: Callable[[Flight], None],
        entry: Turnstile,
    ) -> None:
        """abandon: ends what is under way of a flight that no caller waits for any more. entry: what grants go through."""
        self._desk, self._known, self._slots = desk, known, slots
        self._entry = entry
        self._most_outstanding = max(max_slots, MAX_OUTSTANDING)
        self._abandon = abandon
        self.flights: dict[CallKey, Flight] = {}
        self.ready: list[tuple[int, Flight]] = []  # with the order of grants
        self._served: dict[PeerId, int] = {}  # when each caller was last
        self._num_served = 0
        self._body_at: dict[PeerId, float] = {}  # when the last of each caller came
        self._unused: OrderedDict[PeerId, tuple[int, float]] = (
            OrderedDict()
        )  # how often slots of a caller expired, and until when it gets none
        self._outcomes = Outcomes()  # of callers
        self._fruitless: OrderedDict[PeerId, float] = (
            OrderedDict()
        )  # callers of which most comes to nothing, and until when they get no slot
        self._answers: AnswerCache[_Answer] = AnswerCache()
        self._serial = 0
        self.is_leaving = False
        self._is_paused = False
        self.duplicates = 0

    # ---- links ----

    def link(self, peer: PeerId) -> None:
        self._known.add_caller(peer)
        self._slots.link(peer)
        self.resize()

    def unlink(self, peer: PeerId) -> None:
        """A caller is gone, and its flights with it, but for those in their last work: it may come back for the answer."""
        if self._known.callers.pop(peer, None) is None:
            return
        for flight in [flight for key, flight in self.flights.items() if key[0] == peer]:
            if flight.state not in (State.TURNING, State.BACKWARDING):
                self._drop(flight)
        for answer in self._answers.values():
            if answer.caller == peer:
                answer.again_at = float("-inf")  # lost with the link
        self._slots.unlink(peer)
        self._served.pop(peer, None)
        self._body_at.pop(peer, None)
        self._known.judge_stage0()
        self.resize()

    def resize(self) -> None:
        """Callers, replicas or windows have changed, and with them the number of slots."""
        self._known.resize()
        self.grant()

    def leave(self) -> None:
        """Refuses what has no body here yet, and all that comes."""
        self.is_leaving = True
        for flight in list(self.flights.values()):
            if flight.state in (State.WAITING, State.GRANTED):
                self._expel(flight, "leaving")

    def pause(self, is_paused: bool) -> None:
        """Gives back what is not being computed at this moment, so that callers need not find out by waiting."""
        self._is_paused = is_paused
        if is_paused:
            for flight in list(self.flights.values()):
                if flight.state not in (State.FORWARDING, State.TURNING, State.BACKWARDING):
                    self._expel(flight, "paused")

    def sweep(self) -> None:
        """Takes slots back whose bodies do not come."""
        now, patience_s = self._desk.now, self._desk.timing.unused_grant_s
        for flight in list(self.flights.values()):
            if flight.state is not State.GRANTED:
                continue
            caller, waited_s = _caller_of(flight), now - flight.since
            is_on_its_way = now - self._body_at.get(caller, float("-inf")) <= patience_s
            if waited_s > (MOST_PATIENCE * patience_s if is_on_its_way else patience_s):
                self._left_unused(caller)
                self._expel(flight, "expired")
        self.grant()

    def _left_unused(self, peer: PeerId) -> None:
        """A slot of its was kept for nothing: it gets none for a while, for four times as long each time, however often it links."""
        timing = self._desk.timing
        times, until = self._unused.pop(peer, (0, float("-inf")))
        self._slots.used(peer, is_used=False)
        if until <= self._desk.now:  # of several at once the first counts
            until = self._desk.now + min(timing.refused_s * 2 ** min(2 * times, 16), timing.overdue_cap_s)
            times += 1
        self._unused[peer] = times, until
        while len(self._unused) > MAX_REMEMBERED:
            self._unused.popitem(last=False)

    def lose(self, flight: Flight) -> None:
        """Nothing comes of it, here or behind us. A caller of which most is so gets no slot for a while, so that what it began with holds nobody up; whoever
        passes on what others begin with gets them as long as it has honest work beside it. What it has here and is not begun goes at once."""
        key = flight.key
        if key is None or key not in self.flights:
            return
        caller = key[0]
        if self._outcomes.fruitless(caller):
            self._desk.note(
                HopRefused(caller, "most of what it sends comes to nothing")
            )  # no fault: others may have begun it
            self._fruitless[caller] = self._desk.now + self._desk.timing.leaving_s
            self._fruitless.move_to_end(caller)
            while len(self._fruitless) > MAX_REMEMBERED:
                self._fruitless.popitem(last=False)
            self._put_out(caller)
        self._expel(flight, NOT_FINITE)
        self.grant()

    def _put_out(self, caller: PeerId) -> None:
        """What of its is not begun goes: granted and sent on, a line of it would cost honest callees their name. What is begun says nothing of them."""
        for flight in [each for key, each in self.flights.items() if key[0] == caller]:
            if flight.state in (State.WAITING, State.GRANTED, State.READY):
                self._expel(flight, MOSTLY_NOTHING)
            else:
                flight.is_doubted = True

    def _is_out(self, caller: PeerId) -> bool:
        return self._desk.now < self._fruitless.get(caller, float("-inf"))

    def is_doubted(self, id_: MicroBatchId) -> bool:
        """Whether it is a caller's of which most comes to nothing: then that this one does says nothing of its callee."""
        return any(flight.is_doubted and flight.id == id_ for flight in self.flights.values())

    def _expel(self, flight: Flight, reason: str) -> None:
        assert flight.key is not None
        self._desk.send(flight.key[0], Refuse(*flight.id, flight.key[1], reason))
        self._drop(flight)

    # ---- messages ----

    def on_reserve(self, peer: PeerId, message: Reserve, _: Body | None) -> None:
        key = (peer, message.call)
        answer = self._answers.get(self._answer_key(key, message.id))
        if answer is not None:
            self._asked_again(key, answer)
            return
        flight = self.flights.get(key)
        if flight is not None:  # asked again: nothing is done twice; position 0 says that it is past the line
            self._desk.send(peer, SlotWait(*message.id, message.call, self._slots.position(key)))
            return
        if not self._known.may_send(peer, message.id):
            self._desk.send(peer, Refuse(*message.id, message.call, "another's micro-batch"))
            self._desk.blame(peer, "a micro-batch that another peer begins")
            return
        if self.is_leaving or self._is_paused:
            self._desk.send(peer, Refuse(*message.id, message.call, "leaving" if self.is_leaving else "paused"))
            return
        if self._desk.now < self._unused.get(peer, (0, float("-inf")))[1]:
            self._desk.send(peer, Refuse(*message.id, message.call, "left its slots unused"))
            return
        if self._is_out(peer):
            self._desk.send(peer, Refuse(*message.id, message.call, MOSTLY_NOTHING))
            return
        if self._slots.outstanding(peer) >= self._most_outstanding:
            self._desk.send(peer, Refuse(*message.id, message.call, "too many"))
            return
        flight = Flight(message.id, key, 0, message.round, State.WAITING, self._desk.now)
        self._desk.mark(flight, "asked")
        self.flights[key] = flight
        self._slots.reserve(key)
        self.grant()
        if flight.state is State.WAITING:
            self._desk.send(peer, SlotWait(*message.id, message.call, self._slots.num_waiting))

    def grant(self) -> None:
        """Tells those whose turn it is. A micro-batch that waits for the download limit stands in the same line as one that waits for a slot."""
        for key in self._slots.grant(lambda: self._entry.passes(self._desk.now)):
            flight = self.flights[key]
            flight.state = State.GRANTED
            self._desk.mark(flight, "granted")
            flight.since = self._desk.now
            self._serial += 1
            flight.call = self._serial  # until the call downstream has its own number: the order of grants
            self._desk.send(key[0], SlotGrant(*flight.id, key[1]))

    @property
    def grant_at(self) -> float:
        """When `grant` is wanted because the download limit lets the next body in; inf if nobody waits for that."""
        return self._entry.opens_at if self._slots.can_grant else float("inf")

    def awaits(self, peer: PeerId, message: Step) -> bool:
        """Whether it has a slot for this body."""
        flight = self.flights.get((peer, message.call))
        return flight is not None and flight.state is State.GRANTED and flight.id == message.id

    def on_step(self, peer: PeerId, message: Step, body: Body | None) -> None:
        key = (peer, message.call)
        flight = self.flights.get(key)
        if flight is None:
            answer = self._answers.get(self._answer_key(key, message.id))
            if answer is not None:
                self._asked_again(key, answer)
                return
        if flight is None or flight.state is State.WAITING or flight.id != message.id or body is None:
            self._desk.send(peer, Refuse(*message.id, message.call, "no slot"))
            # Else it may have been on its way when we took its slot back.
            if not self.is_leaving and not self._is_out(peer):
                self._desk.blame(peer, "a body without a slot")
            return
        if flight.state is not State.GRANTED:
            self.duplicates += 1
            return
        flight.body, flight.round, flight.state = body, message.round, State.READY
        self._body_at[peer] = self._desk.now
        self._slots.used(peer, is_used=True)
        self._unused.pop(peer, None)
        self._desk.mark(flight, "arrived")
        self.ready.append((flight.call, flight))
        self._known.note_origin(peer, message)
        caller = self._known.callers[peer]
        if message.window != caller.window:
            caller.window = message.window
            self.resize()

    def refuse(self, refused: StepRefused) -> None:
        """Its caller is told, who would ask for minutes what became of it, and the slot is free."""
        step = refused.message
        flight = self.flights.get((refused.peer, step.call))
        if flight is not None and flight.state is State.GRANTED and flight.id == step.id:
            self._expel(flight, NOT_TAKEN)
            self.grant()

    def on_ack(self, peer: PeerId, message: GradAck, _: Body | None) -> None:
        self._answers.forget(self._answer_key((peer, message.call), message.id))

    def on_cancel(self, peer: PeerId, message: Cancel, _: Body | None) -> None:
        key = (peer, message.call)
        self._answers.forget(self._answer_key(key, message.id))
        flight = self.flights.get(key)
        if flight is not None and flight.id == message.id:
            self._drop(flight)
            self.grant()

    def _drop(self, flight: Flight) -> None:
        """A flight that nobody waits for any more. The slot it frees is for `grant`, once all that go are gone: or those
        that go next would be granted it."""
        key = flight.key
        assert key is not None
        del self.flights[key]
        self._abandon(flight)
        self._free(key)
        if len(self.ready) > 2 * self._slots.capacity + RECENT:  # P6: dropped ones are skipped, and do not pile up
            self.ready = [entry for entry in self.ready if entry[1].state is State.READY]

    def _free(self, key: CallKey) -> None:
        self._slots.release(key)
        if key[0] not in self._known.callers:
            self._slots.unlink(key[0])

    # ---- what is computed for them ----

    def take_ready(self, busy: Container[MicroBatchId]) -> Flight | None:
        """A flight whose body is here and whose id is not among the busy ones: of the caller that was served longest ago, so that none takes
        more than its part by asking for more; of its flights the one granted first."""
        self.ready = [each for each in self.ready if each[1].state is State.READY]
        # P4: the same id of another caller is being computed.
        free = [each for each in self.ready if each[1].id not in busy]
        if not free:
            return None
        serial, flight = min(free, key=lambda each: (self._served.get(_caller_of(each[1]), 0), each[0]))
        self.ready.remove((serial, flight))
        self._num_served += 1
        self._served[_caller_of(flight)] = self._num_served
        return flight

    def answer(self, flight: Flight, key: CallKey, body: Body | None) -> None:
        """Its backward is done: the gradient goes back and is kept, the slot is free. None: nothing finite came of it, so another may compute it."""
        if flight.is_unwanted:
            return
        if body is None:
            self._desk.blame(key[0], "activations of which nothing finite is computed here")
            self.lose(flight)
            return
        del self.flights[key]
        self._outcomes.fruitful(key[0])
        answer = _Answer(key[0], flight.id, body, flight.loss)
        self._answers.keep(self._answer_key(key, flight.id), answer, at_most=2 * self._slots.capacity)
        self._send_answer(key, answer)
        self._free(key)
        self.grant()

    def _asked_again(self, key: CallKey, answer: _Answer) -> None:
        """A gradient for 80 bytes: as often as links are lost, or one caller has our upload go to it alone."""
        self.duplicates += 1
        caller, call = key
        if self._desk.now < answer.again_at:  # it is on its way, or waits for our upload limit
            self._desk.send(caller, SlotWait(*answer.id, call, 0))
        else:
            self._send_answer(key, answer)

    def _send_answer(self, key: CallKey, answer: _Answer) -> None:
        caller, call = key
        if caller in self._known.callers:
            answer.times += 1
            answer.again_at = self._desk.now + SENT_AGAIN_AFTER_S * (1 << min(answer.times - 1, MOST_DOUBLED))
            self._desk.send(caller, Grad(*answer.id, call, tellable(answer.loss), self._known.behind), answer.body)

    def _answer_key(self, key: CallKey, id_: MicroBatchId) -> object:
        return key, id_


def _caller_of(flight: Flight) -> PeerId:
    assert flight.key is not None, "a caller's flight"
    return flight.key[0]
