"""Micro-batches between the scheduler and the links: frames of neighbours in, what the scheduler wants sent out, as frames.

Small messages of one moment go together, before the bodies; those wait for their turn under the limits of bandwidth. What a
neighbour sends is checked here, at the border: the scheduler sees no message or body that the run's format forbids.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Sequence

from dilocox_peer.admission import Admission, Right
from dilocox_peer.contract import Note
from dilocox_peer.errors import ProtocolError
from dilocox_peer.events import Event, Listener
from dilocox_peer.model.activations import BodyFormat, Bytes
from dilocox_peer.peer.links.bench import Bench
from dilocox_peer.peer.links.body_queue import BodyQueue, Rate
from dilocox_peer.peer.links.link_traffic import LinkTraffic
from dilocox_peer.pipeline import contract
from dilocox_peer.pipeline.likeness import Likeness
from dilocox_peer.pipeline.outcomes import Outcomes
from dilocox_peer.pipeline.turnstile import Delay
from dilocox_peer.token_bucket import TokenBucket
from dilocox_peer.types import PeerId
from dilocox_peer.wire.hops import (
    MAX_MESSAGES,
    Cancel,
    Grad,
    HopMessage,
    HopStatus,
    MicroBatchId,
    Refuse,
    Step,
    decode_hops,
    encode_hops,
)

MAX_HEARD = 512  # neighbours remembered
MAX_HALVED = 256  # gradients of which it is remembered how often they were halved
TOLD_EVERY_S = 10.0  # that a peer's body is unlike others
STATUS_RATE = 20.0  # HopStatuses a second of a neighbour; an honest one sends 11 at most (neighbourhood.py)
STATUS_BURST = 200.0  # at once

Deliver = Callable[[PeerId, bytes, Bytes | None], bool]
"""Sends a header and a body to a peer; False: it does not go."""


class Exchange:
    """Used by the pipeline's thread alone."""

    def __init__(
        self,
        bench: Bench,
        body: BodyFormat,
        *,
        pace: Delay,
        pace_in: Delay,
        rate: Rate = lambda: None,
        is_at_home: Callable[[PeerId], bool],
        admission: Admission | None,
        listener: Listener,
    ) -> None:
        """pace, pace_in, rate, admission: as Conveyor has them. is_at_home: whether what goes to a peer stays in the network at home, where pace does
        not hold."""
        self._bench = bench
        self._body = body
        self._bodies = BodyQueue(pace, pace_in, answer_bytes=body.hidden_bytes, rate=rate)
        self._is_at_home = is_at_home
        self._admission = admission
        self.banned: Collection[PeerId] = ()  # by the run's owner
        self._listener = listener
        self._activations = Likeness("activations", refuses_weak=True)
        self._gradients = Likeness("a gradient")
        self._likes = Outcomes()  # whose bodies are mostly refused for their strength breaks the protocol
        self._told_at: OrderedDict[PeerId, float] = OrderedDict()
        self._halvings: OrderedDict[tuple[PeerId, MicroBatchId], int] = OrderedDict()
        self._statuses: dict[PeerId, TokenBucket] = {}
        self._late_statuses: dict[PeerId, int] = {}  # how many more are let in, of while this process stood still
        self.traffic = LinkTraffic()
        self.heard: OrderedDict[PeerId, float] = OrderedDict()  # when the last frame of each came (monotonic)

    @property
    def opens_at(self) -> float:
        """When a body that waits may go; inf when none waits."""
        return self._bodies.opens_at

    def take(self, peer: PeerId, raw: bytes, body: memoryview, wire_s: float) -> None:
        """A frame of a neighbour, which took wire_s to come in. Raises ProtocolError, and takes nothing of it then, but that its body was refused. A body that
        is refused for its strength breaks the protocol only where most of its sender's are, by what most others send: it may have passed on what
        another began with."""
        if peer in self.banned:
            raise ProtocolError(peer, "the run's owner has banned it")
        if self._admission is not None:  # it was let in when it greeted; it may have been put out since
            reason = self._admission.gate.refusal(peer, Right.JOIN, time.time())
            if reason is not None:
                raise ProtocolError(peer, f"it is not admitted any more: {reason}")
        messages = _without_superseded(decode_hops(raw, peer))
        last = messages[-1]
        if any(isinstance(message, HopStatus) for message in messages):
            self._count_status(peer)
        if isinstance(last, Step | Grad):
            reason, halvings, is_unlike = self._body.why_not(body, is_step=isinstance(last, Step)), 0, False
            if reason is None:
                reason, halvings = self._compared(peer, last, body)
                is_unlike = reason is not None
            if reason is not None:
                is_anothers = False  # the doing of whoever began it, as far as anybody can tell
                if isinstance(last, Step):
                    self._bench.take_in(contract.StepRefused(peer, last))
                else:
                    is_anothers = self._bench.is_doubted(last.id)  # before it is given up
                    self._bench.take_in(contract.GradRefused(peer, last, is_unlike))
                if is_unlike and (is_anothers or not self._is_agreed(peer, last) or not self._likes.fruitless(peer)):
                    self._tell_unlike(peer, reason)
                    return
                raise ProtocolError(peer, reason)
            if halvings:
                body = memoryview(self._body.halved(body, halvings))
        elif len(body):
            raise ProtocolError(peer, f"{len(body)} bytes behind a message that has none")
        self.traffic.received += len(raw) + len(body)
        self.heard[peer] = time.monotonic()
        self.heard.move_to_end(peer)
        while len(self.heard) > MAX_HEARD:
            self.heard.popitem(last=False)
        for message in messages:
            if isinstance(message, Cancel | Refuse):
                self._bodies.drop(peer, message.id, message.call)
            carried: Bytes | None = body if message is last and isinstance(message, Step | Grad) else None
            self._bench.take_in(contract.HopReceived(peer, message, carried, wire_s))

    def _count_status(self, peer: PeerId) -> None:
        """One more HopStatus: each may change the plan, and what all others are told. Raises ProtocolError for too many."""
        now = time.monotonic()
        bucket = self._statuses.setdefault(peer, TokenBucket(STATUS_RATE, STATUS_BURST, now))
        if bucket.try_take(1.0, now):
            return
        if not self._late_statuses.get(peer, 0):
            raise ProtocolError(peer, f"more than {STATUS_RATE:.0f} statuses a second")
        self._late_statuses[peer] -= 1

    def _compared(self, peer: PeerId, message: Step | Grad, body: memoryview) -> tuple[str | None, int]:
        """Why the body is too unlike others, if it is, and how often it is to be halved. Only of what is awaited: else anybody could say what is usual."""
        now = time.monotonic()
        if isinstance(message, Step):
            if not self._bench.awaits(peer, message):
                return None, 0
            strength, likeness, about = self._body.strength(body), self._activations, None
        else:
            if (output := self._bench.awaited(peer, message)) is None:
                return None, 0
            assert isinstance(output, bytes | bytearray | memoryview), type(output)
            strength, likeness, about = self._body.strength_for_all(body, output), self._gradients, message.id
        if (reason := likeness.why_not(peer, strength, now, about=about)) is not None:
            return reason, 0
        self._likes.fruitful(peer)
        halvings = likeness.halvings(peer, strength, now)
        if isinstance(message, Grad):
            self._remember_halvings(peer, message.id, halvings)
        return None, halvings

    def _is_agreed(self, peer: PeerId, message: Step | Grad) -> bool:
        """Whether most of those that are heard say what is usual (Likeness.is_agreed): else those that came first may be who lies."""
        likeness = self._activations if isinstance(message, Step) else self._gradients
        return likeness.is_agreed(peer, time.monotonic())

    def _remember_halvings(self, peer: PeerId, micro_batch: MicroBatchId, halvings: int) -> None:
        """Of its last answer that was awaited: it may have answered another call for the same micro-batch before."""
        self._halvings.pop((peer, micro_batch), None)
        if halvings:
            self._halvings[peer, micro_batch] = halvings
            while len(self._halvings) > MAX_HALVED:
                self._halvings.popitem(last=False)

    def _tell_unlike(self, peer: PeerId, reason: str) -> None:
        now = time.monotonic()
        if now - self._told_at.get(peer, float("-inf")) >= TOLD_EVERY_S:
            self._told_at[peer] = now
            self._told_at.move_to_end(peer)
            while len(self._told_at) > MAX_HEARD:
                self._told_at.popitem(last=False)
            self._listener(contract.HopRefused(peer, reason))

    def stood_still(self, seconds: float) -> None:
        """This process was suspended so long, and linkd was not: what neighbours said meanwhile comes at once, and is none too many. So many
        more are let in once; what each may send afterwards is as before."""
        if seconds * STATUS_RATE > STATUS_BURST / 2:
            self._late_statuses = dict.fromkeys(self._statuses, int(seconds * STATUS_RATE))

    def forget(self, peer: PeerId) -> None:
        """It is linked no longer: what it sent does not say any more what is usual."""
        self._statuses.pop(peer, None)
        self._late_statuses.pop(peer, None)
        self._activations.forget(peer)
        self._gradients.forget(peer)

    def flush(self, linked: Container[PeerId], deliver: Deliver) -> None:
        """Sends what the scheduler wants sent: to each neighbour its small messages together, before its bodies."""
        small: dict[PeerId, list[HopMessage]] = {}
        notes: list[Event] = []
        for action in self._bench.take_actions():
            match action:
                case contract.HopSend(peer, message, None):
                    if isinstance(message, Cancel):
                        self._bodies.drop(peer, message.id, message.call)
                    small.setdefault(peer, []).append(message)
                case contract.HopSend(peer, message, body):
                    assert isinstance(body, bytes | memoryview), type(body)
                    assert isinstance(message, Step | Grad), type(message)
                    self._bodies.add(peer, message, body, at_home=self._is_at_home(peer))
                case contract.Compare():
                    self._bench.take_in(contract.Compared(action.one, action.other, self._agreement(action)))
                case Note(contract.MicroBatchDone()):
                    pass  # the training loop counts and shows them
                case Note(contract.MicroBatchTimed() as timed):
                    notes.append(self._bench.with_packing(timed))
                case Note(event):
                    notes.append(event)
        for peer, sent in small.items():
            messages = _without_superseded(sent)
            for first in range(0, len(messages), MAX_MESSAGES):
                self._send(deliver, peer, encode_hops(messages[first : first + MAX_MESSAGES]), None)
        while (next_ := self._bodies.take(time.monotonic(), linked)) is not None:  # those whose time has come
            peer, step_or_grad, body = next_
            self._send(deliver, peer, encode_hops([step_or_grad]), body)
            if isinstance(step_or_grad, Step):
                self._bench.take_in(contract.StepSent(peer, step_or_grad))
        for event in notes:
            self._listener(event)

    def _agreement(self, asked: contract.Compare) -> float:
        """Each was halved by what is usual of others than its sender: they are compared as if both had been, as often as the one that was more often."""
        halvings = [self._halvings.pop((peer, asked.id), 0) for peer in (asked.one, asked.other)]
        bodies = []
        for body, times in zip((asked.of_one, asked.of_other), halvings, strict=True):
            assert isinstance(body, bytes | bytearray | memoryview), type(body)
            more = max(halvings) - times
            bodies.append(self._body.halved(body, more) if more else body)
        return self._body.agreement(*bodies)

    def _send(self, deliver: Deliver, peer: PeerId, header: bytes, body: Bytes | None) -> None:
        if deliver(peer, header, body):
            self.traffic.sent += len(header) + (len(body) if body is not None else 0)


def _without_superseded(messages: Sequence[HopMessage]) -> Sequence[HopMessage]:
    """All of them, of HopStatuses the last alone: what it says holds, whatever those before it said."""
    statuses = [place for place, message in enumerate(messages) if isinstance(message, HopStatus)]
    if len(statuses) < 2:
        return messages
    return [each for place, each in enumerate(messages) if place == statuses[-1] or not isinstance(each, HopStatus)]
