"""A micro-batch at one peer ("flight"), and the desk that the parts of a scheduler share. Pure records: who moves them is
scheduler.py (its computing), upstream.py (up to READY) and downstream.py (its call downstream).

The life of a flight, a later stage's from WAITING, an origin's from FORWARDING on:

    WAITING -> GRANTED -> READY -> FORWARDING -> CALLING -> RETURNED -> BACKWARDING -> answered
    (last stage: READY -> TURNING -> answered)

A check of an answer (checks.py) is a flight of its own: CALLING until the second gradient is here.

Meanwhile its call downstream goes PARKED -> RESERVED -> GRANTED -> SENT, and back to RESERVED elsewhere when its callee
is overdue or gone.
"""

import math
from dataclasses import dataclass, field
from enum import Enum, auto

from dilocox_peer.contract import Note
from dilocox_peer.events import Event
from dilocox_peer.pipeline.contract import Body, HopAction, HopRefused, HopSend, HopTiming
from dilocox_peer.pipeline.slots import CallKey
from dilocox_peer.types import PeerId
from dilocox_peer.wire.hops import MAX_WINDOW, HopMessage, MicroBatchId

RECENT = 64  # micro-batches whose origins vote on the round; also what a heap may hold in vain
NOT_FINITE = "not finite"  # a Refuse says: nothing came of it, here or behind
MOSTLY_NOTHING = "most of it came to nothing"  # of its caller's micro-batches
NOT_TAKEN = "not taken"  # a Refuse says: its body is not what a stage can have computed
MAX_BLAMED = 512
BLAME_EVERY_S = 1.0  # what one peer does wrong is noted at most so often


class State(Enum):
    WAITING = auto()
    GRANTED = auto()
    READY = auto()
    FORWARDING = auto()
    TURNING = auto()
    CALLING = auto()
    RETURNED = auto()
    BACKWARDING = auto()
    GONE = auto()


class CallPhase(Enum):
    """State of the call downstream."""

    PARKED = auto()
    RESERVED = auto()
    GRANTED = auto()
    SENT = auto()


@dataclass(slots=True, eq=False)
class Flight:
    """A micro-batch at this peer. key: its caller and the caller's number, None at its origin. call: our number for it."""

    id: MicroBatchId
    key: CallKey | None
    call: int
    round: int
    state: State
    since: float
    version: int = 0
    body: Body | None = None  # input, then the gradient of the output
    output: Body | None = None
    loss: float = 0.0
    is_unwanted: bool = False  # cancelled while being computed: the result is dropped
    phase: CallPhase = CallPhase.PARKED
    callee: PeerId | None = None
    asked: set[PeerId] = field(default_factory=set)  # had the output, and may answer
    due: float = 0.0
    phase_since: float = 0.0
    kept_since: float = 0.0  # its callee was asked for a slot, or has had the output, since then
    is_first: bool = True  # the output goes to that callee for the first time
    moves: int = 0  # to other callees because it was overdue; each doubles the patience
    probes: int = 0  # of its callee since it moved up in the line
    is_probed: bool = False  # asked whether it is still known, and not answered yet
    probed_at: float = 0.0
    position: int = MAX_WINDOW  # in the callee's line, as last told
    moments: dict[str, float] | None = None
    failed_at: set[PeerId] = field(
        default_factory=set
    )  # callees that came to nothing with it, or did not take it, or whose answer we did not
    failed_since: float = math.inf  # the first of them
    failures: int = 0
    is_doubted: bool = False  # most of its caller's come to nothing
    checked: tuple[PeerId, Body] | None = None  # it asks a second callee: who answered first, and what


class Tray:
    """What the parts of a scheduler share: the time, and the tray of actions that answer the input at hand."""

    def __init__(self, timing: HopTiming, now: float, *, trace: bool) -> None:
        self.timing = timing
        self.now = now
        self.actions: list[HopAction] = []
        self.protocol_errors = 0
        self._trace = trace
        self._blamed_at: dict[PeerId, float] = {}

    def open(self, now: float) -> list[HopAction]:
        """An empty tray, which fills until the next one."""
        self.now = now
        self.actions = []
        return self.actions

    def send(self, peer: PeerId, message: HopMessage, body: Body | None = None) -> None:
        self.actions.append(HopSend(peer, message, body))

    def note(self, event: Event) -> None:
        self.actions.append(Note(event))

    def blame(self, peer: PeerId, reason: str) -> None:
        """Counts what a neighbour did wrong, and notes it unless it has just been noted."""
        self.protocol_errors += 1
        if self.now >= self._blamed_at.get(peer, float("-inf")) + BLAME_EVERY_S:
            self._blamed_at[peer] = self.now
            if len(self._blamed_at) > MAX_BLAMED:  # who is gone is blamed too, for what came of its work
                self._blamed_at.pop(next(iter(self._blamed_at)))
            self.note(HopRefused(peer, reason))

    def forgive(self, peer: PeerId) -> None:
        """Its link is down."""
        self._blamed_at.pop(peer, None)

    def mark(self, flight: Flight, moment: str) -> None:
        """Remembers when it was, if moments are traced."""
        if self._trace:
            if flight.moments is None:
                flight.moments = {}
            flight.moments[moment] = self.now
