"""What goes into the pipeline's scheduler and what comes out of it: inputs, work, actions, and its events, as frozen values.

The same contract holds in the simulator (tests/sim/pipeline_world.py) and in the peer (peer/links/conveyor.py). The machine itself
is scheduler.py.
"""

from dataclasses import dataclass
from typing import Protocol

from dilocox_peer.contract import Leaving, Note, Tick
from dilocox_peer.events import Event, short
from dilocox_peer.types import PeerId
from dilocox_peer.wire.hops import Grad, HopMessage, MicroBatchId, Step


class Body(Protocol):
    """Bytes, as far as this file cares: a memoryview, a tensor's buffer, or a toy in the simulator."""

    def __len__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class HopTiming:
    """All times in seconds. Floors keep a quiet network from making us hasty."""

    status_s: float = 1.0  # between two Statuses when no round field changes
    sweep_s: float = 0.5  # between two looks for what is overdue
    overdue_start_s: float = 30.0  # before a callee has answered once
    overdue_floor_s: float = 2.0
    overdue_cap_s: float = 600.0
    mad_factor: float = 6.0
    patient_probes: int = 3  # a callee says so often that it works on an overdue one; then it goes elsewhere
    refused_s: float = 1.0  # a callee that refused is left alone for so long
    unused_grant_s: float = 120.0  # a slot whose body does not come is taken back
    leaving_s: float = 60.0  # a callee that leaves is left alone for so long


# ---- what happens to it ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HopReceived:
    """A message of a linked peer, and its body if it has one. wire_s: from the body's first byte to its last."""

    peer: PeerId
    message: HopMessage
    body: Body | None = None
    wire_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepRefused:
    """The body of a caller's Step was not taken: it is not what its stage can have computed."""

    peer: PeerId
    message: Step


@dataclass(frozen=True, slots=True)
class GradRefused:
    """The body of a callee's Grad was not taken. is_unlike: for its strength alone, which may be the micro-batch's doing."""

    peer: PeerId
    message: Grad
    is_unlike: bool = False


@dataclass(frozen=True, slots=True)
class StepSent:
    """The body of a Step has left for its peer; until then it waited for its turn under the upload limit, here."""

    peer: PeerId
    step: Step


@dataclass(frozen=True, slots=True)
class Linked:
    """A link to a peer of the stage before or after ours is up, in both directions."""

    peer: PeerId
    stage: int


@dataclass(frozen=True, slots=True)
class Unlinked:
    """The link is down; what was under way on it is lost, in both directions."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """Measured on the link to peer."""

    peer: PeerId
    seconds: float


@dataclass(frozen=True, slots=True)
class ForwardDone:
    """The answer to Forward: its output; None where it is nothing that a callee takes."""

    id: MicroBatchId
    body: Body | None
    seconds: float


@dataclass(frozen=True, slots=True)
class BackwardDone:
    """The answer to Backward and Turn: the gradient of the input (None at an origin, and of a Turn of which nothing finite came), and the loss (of a
    Turn)."""

    id: MicroBatchId
    body: Body | None
    loss: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Stepped:
    """The answer to StepNow and Publish: the next version exists."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Rounds:
    """Our stage trains round `training`; `certified` rounds are certified. issue_limit: micro-batches that an origin may
    issue in this round, None for no limit. accumulate: micro-batches of an inner step in it, 0 as before."""

    training: int
    certified: int
    issue_limit: int | None = None
    accumulate: int = 0


@dataclass(frozen=True, slots=True)
class Replicas:
    """Peers of our own stage, this one included, as known."""

    count: int


@dataclass(frozen=True, slots=True)
class Hold:
    """True: an origin issues nothing new until False."""

    is_held: bool


@dataclass(frozen=True, slots=True)
class PauseWanted:
    """True: the volunteer wants this computer. What callers have here goes back to them, and nothing is taken until False.
    Other than Hold, which is short and keeps callers waiting."""

    is_paused: bool


@dataclass(frozen=True, slots=True)
class Compared:
    """The answer to Compare. agreement: 1 for equal gradients, 0 for such as have nothing to do with each other, down to -1."""

    one: PeerId
    other: PeerId
    agreement: float


@dataclass(frozen=True, slots=True)
class Shifted:
    """The trainer changed the master parameters between two works."""


HopInput = (
    Tick | HopReceived | StepRefused | GradRefused | StepSent | Linked | Unlinked | RoundTrip | ForwardDone | BackwardDone
    | Stepped | Rounds | Replicas | Hold | PauseWanted | Compared | Shifted | Leaving
)  # fmt: skip

# ---- what the torch thread does; each is answered by one input before the next is asked for -------------------------


@dataclass(frozen=True, slots=True)
class Forward:
    """body None: we are its origin, draw the data. Keep the activations until Backward or Release of id. ForwardDone."""

    id: MicroBatchId
    version: int
    body: Body | None
    round: int


@dataclass(frozen=True, slots=True)
class Backward:
    """body: the gradient of the forward's output. loss: as the last stage computed it. BackwardDone."""

    id: MicroBatchId
    version: int
    body: Body
    loss: float = 0.0


@dataclass(frozen=True, slots=True)
class Turn:
    """Last stage: forward, loss and backward in one. BackwardDone."""

    id: MicroBatchId
    version: int
    body: Body
    round: int = 0


@dataclass(frozen=True, slots=True)
class StepNow:
    """The mean gradient over the targets of so many micro-batches makes the next version. Stepped."""

    micro_batches: int


@dataclass(frozen=True, slots=True)
class Publish:
    """Copy the master parameters, shifted meanwhile, into the next version. Stepped."""


Work = Forward | Backward | Turn | StepNow | Publish

# ---- what it wants done, in order -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HopSend:
    """To a linked peer, in order; a Step is answered by StepSent. Lost only if the link goes down, or if it has a body that
    waits for its turn when it is cancelled or refused."""

    peer: PeerId
    message: HopMessage
    body: Body | None = None


@dataclass(frozen=True, slots=True)
class Release:
    """Drop the saved activations of a micro-batch whose backward will not come."""

    id: MicroBatchId


@dataclass(frozen=True, slots=True)
class Compare:
    """Say how much the gradients agree that two callees sent back for one output of that micro-batch. Compared."""

    one: PeerId
    other: PeerId
    of_one: Body
    of_other: Body
    id: MicroBatchId


HopAction = HopSend | Release | Compare | Note


@dataclass(frozen=True, slots=True)
class MicroBatchDone(Event):
    """At its origin: round it was issued in, its loss, seconds from forward to backward."""

    id: MicroBatchId
    round: int
    loss: float
    seconds: float

    LEVEL = "debug"


@dataclass(frozen=True, slots=True)
class MicroBatchResent(Event):
    """A micro-batch whose body one callee had goes to another; `to` is None while nobody is linked."""

    id: MicroBatchId
    from_: PeerId
    to: PeerId | None
    reason: str

    LEVEL = "debug"

    def line(self) -> str:
        to = short(self.to) if self.to is not None else "nobody yet"
        return f"micro-batch {self.id.index} of {short(self.id.origin)} goes from {short(self.from_)} to {to}: {self.reason}"


@dataclass(frozen=True, slots=True)
class RouteChanged(Event):
    """The parts of our micro-batches that go to each callee, in hundredths."""

    percent: tuple[tuple[PeerId, int], ...]
    reason: str

    LEVEL = "debug"

    def line(self) -> str:
        shown = ", ".join(f"{part} % {short(peer)}" for peer, part in self.percent)
        return f"micro-batches go to {shown or 'nobody'} ({self.reason})"


@dataclass(frozen=True, slots=True)
class HopRefused(Event):
    """A neighbour broke the protocol; what it sent was dropped."""

    peer: PeerId
    reason: str

    LEVEL = "warning"

    def line(self) -> str:
        return f"micro-batch of {short(self.peer)} refused: {self.reason}"


@dataclass(frozen=True, slots=True)
class GradientsCompared(Event):
    """A micro-batch was computed by two callees."""

    one: PeerId
    other: PeerId
    agreement: float

    LEVEL = "debug"

    def line(self) -> str:
        return (
            f"gradients of {short(self.one)} and {short(self.other)} for one micro-batch agree by {self.agreement:.2f}"
        )


@dataclass(frozen=True, slots=True)
class GradientsFalse(Event):
    """What a callee sends back is not what others send for the same micro-batches. agreement: the most with one of these."""

    peer: PeerId
    others: tuple[PeerId, ...]
    agreement: float
    seconds: float

    LEVEL = "warning"

    def line(self) -> str:
        others = ", ".join(map(short, self.others))
        return (
            f"the gradients of {short(self.peer)} are not those of {others} for the same micro-batches (they agree by at most "
            f"{self.agreement:.2f}): it gets no more for {self.seconds / 60:.0f} minutes"
        )


@dataclass(frozen=True, slots=True)
class CalleesDisagree(Event):
    """The only two callees send back other gradients for one micro-batch."""

    one: PeerId
    other: PeerId
    agreement: float

    LEVEL = "warning"

    def line(self) -> str:
        return (
            f"{short(self.one)} and {short(self.other)} send other gradients back for one micro-batch (they agree by "
            f"{self.agreement:.2f}): one of them computes something else; which, a third peer of their stage would tell"
        )


@dataclass(frozen=True, slots=True)
class MicroBatchTimed(Event):
    """Moments in the life of a micro-batch at this peer, by name, on the scheduler's clock; those it had.

    encode_s: packing and unpacking of bodies, which the scheduler does not see; whoever does adds it."""

    id: MicroBatchId
    moments: tuple[tuple[str, float], ...]
    encode_s: float = 0.0

    LEVEL = "debug"
