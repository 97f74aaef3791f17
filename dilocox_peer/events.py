"""What happens at a peer, as values. Log lines, dashboard, JSONL and reports are projections of these.

A pure core returns them in `Note` actions; the session stamps them with wall time and hands them to whoever listens.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from dilocox_peer.types import PeerId


@dataclass(frozen=True, slots=True)
class Event:
    """Root. `line()`: one line for a person."""

    LEVEL: ClassVar[str] = "info"

    @property
    def level(self) -> str:
        """What a log shows it as: debug, info, warning or error; by its kind, but for the few that overrule it."""
        return self.LEVEL

    def line(self) -> str:
        return " ".join([type(self).__name__, *(f"{key}={value}" for key, value in asdict(self).items())])

    def record(self, wall_time_s: float) -> dict[str, Any]:
        """The JSONL form."""
        return {"time": round(wall_time_s, 3), "event": type(self).__name__, **asdict(self)}


Listener = Callable[[Event], None]


def short(peer: PeerId) -> str:
    """A PeerID as people tell it from others: its end (all Ed25519 ones begin alike)."""
    return f"…{peer[-8:]}"


@dataclass(frozen=True, slots=True)
class PeerStarted(Event):
    peer: PeerId
    run: str
    stage: int
    addresses: tuple[str, ...]

    def line(self) -> str:
        return f"started as {self.peer} on stage {self.stage} of run {self.run[:12]}"


@dataclass(frozen=True, slots=True)
class RunJoined(Event):
    """What this peer and its run are; told once the manifest is known, before PeerStarted. share: micro-batches a peer is expected to
    do in a round. micro_batch_tokens: of one. num_parameters: that the peer's stage trains; num_frozen: that it has beside those, in a
    run of adapters. rank 0: of no use to the codec."""

    run: str
    run_name: str
    peer: PeerId
    stage: int
    stages: int
    total_rounds: int
    inner_steps: int
    share: int
    micro_batch_tokens: int
    num_parameters: int
    codec: str
    rank: int
    overlap: str
    device: str
    threads: int
    num_frozen: int = 0

    def line(self) -> str:
        return (
            f"run {self.run_name} ({self.run[:12]}): {self.stages} stage{'' if self.stages == 1 else 's'}, "
            f"{self.total_rounds} rounds of {self.inner_steps} steps, {self.codec}, on {self.device}"
        )


@dataclass(frozen=True, slots=True)
class SeenPeer:
    """A peer as its lease in the directory describes it. reachability: how we are connected with it: direct, punched (directly, through routers that let nobody in), relayed, passed on (by other members, for want of a path), cut off
    (it is of our stage, and no connection comes about) or unknown; of ourselves: what others found."""

    peer: PeerId
    stage: int
    tokens_per_s: float
    round: int
    reachability: str


@dataclass(frozen=True, slots=True)
class SwarmSeen(Event):
    """The leases of these stages were read: who is in `peers`, and nobody else, announces to hold one of them."""

    stages: tuple[int, ...]
    peers: tuple[SeenPeer, ...]
    LEVEL = "debug"


@dataclass(frozen=True, slots=True)
class StageSeen(Event):
    """The peers that average with us, as their heartbeats say; told when it changes. here: heard lately; paused: of them."""

    stage: int
    roster: tuple[PeerId, ...]
    here: tuple[PeerId, ...]
    paused: tuple[PeerId, ...]
    leader: PeerId | None
    LEVEL = "debug"


@dataclass(frozen=True, slots=True)
class Paused(Event):
    """Training is held by the volunteer's wish, or everybody's by the owner's; the peer stays, votes and merges."""

    reason: str
    is_everybody: bool = False

    def line(self) -> str:
        goes_on = "nobody trains until it goes on" if self.is_everybody else "this peer votes and merges on"
        return f"paused: {self.reason}; {goes_on}"


@dataclass(frozen=True, slots=True)
class Resumed(Event):
    reason: str

    def line(self) -> str:
        return f"training again: {self.reason}"


@dataclass(frozen=True, slots=True)
class BootstrapReady(Event):
    """A bootstrap node serves the run's manifest and DHT; link is what others paste, of a run that is not open those on its list alone.
    admission: the run's mode."""

    peer: PeerId
    run: str
    link: str
    addresses: tuple[str, ...]
    admission: str = "open"

    def line(self) -> str:
        up = f"bootstrap of run {self.run[:12]} is up"
        if self.admission == "open":
            return f"{up}; others join with:\n\n    dilocox-peer join {self.link}\n"
        invited = "`dilocox-peer invite run.toml` prints a link for each"
        if self.admission == "list":
            return f"{up}; others join by invitation ({invited}), those on its list with:\n\n    dilocox-peer join {self.link}\n"
        return f"{up}; it takes whom its owner invites: {invited}. Its link, which lets nobody in without:\n\n    {self.link}\n"


@dataclass(frozen=True, slots=True)
class NeighbourSeen(Event):
    peer: PeerId

    def line(self) -> str:
        return f"{short(self.peer)} is here"


@dataclass(frozen=True, slots=True)
class NeighbourLost(Event):
    peer: PeerId
    reason: str
    LEVEL = "warning"

    def line(self) -> str:
        return f"{short(self.peer)} is gone ({self.reason}); the round goes on without it"


@dataclass(frozen=True, slots=True)
class StageClaimed(Event):
    stage: int
    reason: str

    def line(self) -> str:
        return f"stage {self.stage}: {self.reason}"


@dataclass(frozen=True, slots=True)
class NeighbourLinked(Event):
    """A peer of a neighbouring stage passes micro-batches to us, or takes them."""

    peer: PeerId
    stage: int

    def line(self) -> str:
        return f"linked with {short(self.peer)} of stage {self.stage}"


@dataclass(frozen=True, slots=True)
class NeighbourUnlinked(Event):
    peer: PeerId
    stage: int
    reason: str
    LEVEL = "warning"

    def line(self) -> str:
        what = f"link with {short(self.peer)} of stage {self.stage}"
        return f"{what} ended ({self.reason}); its micro-batches go elsewhere"


@dataclass(frozen=True, slots=True)
class PipelineProgress(Event):
    """Once a second in a run with several stages; counts are since the start of this process.

    linked: neighbours. busy: share of the last seconds in which the torch thread computed. resent: micro-batches sent
    again to another peer. bytes: of activations and gradients, headers included. wire_bytes: what TCP carries for them,
    encryption and small talk included, by what linkd counts every two seconds; 0 before that.
    """

    linked: int
    busy: float
    in_flight: int
    waiting: int
    window: int
    resent: int
    duplicates: int
    bytes_sent: int
    bytes_received: int
    wire_bytes_sent: int = 0
    wire_bytes_received: int = 0
    LEVEL = "debug"


@dataclass(frozen=True, slots=True)
class RoundClosed(Event):
    """Local training of a round ended and the contribution was offered."""

    round: int
    micro_batches: int
    train_loss: float
    blob_bytes: int
    raw_bytes: int
    LEVEL = "debug"


@dataclass(frozen=True, slots=True)
class RoundCertified(Event):
    """A certificate was applied. round counts from 1; an empty contributor list is a void round.

    codec, rank, inner_steps: the round's plan; rank 0: of no use to the codec. delay_s: from our own close of a round to
    this merge, in which training went on; None when nothing of ours was closed. is_trained: this peer has trained since the round before, for another
    than one that it merges again after a restart.
    is_fetched: it had no part in the round, which is told with others at once (RoundsFetched). expected_rounds: of the run, if rounds stay
    as long as they are; 0: it has no end. norms, clip_factors: of the contributions, in order; none
    of a round in slices, where nobody knows them.
    """

    round: int
    head: str
    view: int
    ballot: int
    contributors: tuple[PeerId, ...]
    roster: tuple[PeerId, ...]
    micro_batches: int
    own_included: bool
    wait_s: float
    bytes_sent: int
    raw_bytes: int
    train_loss: float
    anchor_digest: str
    codec: str = ""
    rank: int = 0
    inner_steps: int = 0
    delay_s: float | None = None
    expected_rounds: int = 0
    norms: tuple[float, ...] = ()
    clip_factors: tuple[float, ...] = ()
    is_trained: bool = True
    is_fetched: bool = False

    @property
    def level(self) -> str:
        return "debug" if self.is_fetched else self.LEVEL

    def line(self) -> str:
        count = len(self.contributors)
        mine = "" if self.own_included or not self.is_trained else ", mine comes with the next"
        loss = f", loss {self.train_loss:.3f}" if self.train_loss == self.train_loss else ""
        return f"round {self.round}: {count} contribution{'' if count == 1 else 's'}{loss}{mine}"


@dataclass(frozen=True, slots=True)
class PlanChanged(Event):
    """A certificate planned that rounds from `round` on are otherwise than before. rank 0: of no use to the codec."""

    round: int
    codec: str
    rank: int
    inner_steps: int
    reason: str

    def line(self) -> str:
        rank = f" rank {self.rank}" if self.rank else ""
        why = f": {self.reason}" if self.reason else ""
        return f"from round {self.round} on {self.inner_steps} inner steps a round, {self.codec}{rank}{why}"


@dataclass(frozen=True, slots=True)
class ViewChanged(Event):
    """The roster lost its quorum and was written anew by who is left."""

    view: int
    roster: tuple[PeerId, ...]
    reason: str
    LEVEL = "warning"

    def line(self) -> str:
        count = len(self.roster)
        return f"view {self.view} with {count} peer{'' if count == 1 else 's'}: {self.reason}"


@dataclass(frozen=True, slots=True)
class BranchSwitched(Event):
    """A better chain was met and adopted; own contributions in the dropped certificates are orphaned."""

    ancestor_round: int
    old_round: int
    new_round: int
    orphaned_contributions: int

    @property
    def level(self) -> str:
        return "warning" if self.orphaned_contributions else "info"

    def line(self) -> str:
        return (
            f"caught up from round {self.old_round} to {self.new_round} (common round {self.ancestor_round}); "
            f"{self.orphaned_contributions} own contributions orphaned"
        )


@dataclass(frozen=True, slots=True)
class RoundVouched(Event):
    """The run's owner has signed our stage's chain up to a round. is_ours: that chain is the one we are on. is_ahead: the round is after
    ours, so nobody can say yet."""

    round: int
    is_ours: bool
    is_ahead: bool = False

    @property
    def level(self) -> str:
        return "info" if self.is_ours or self.is_ahead else "warning"

    def line(self) -> str:
        if self.is_ours:
            return f"the run's owner vouches for our chain up to round {self.round}"
        if self.is_ahead:
            return f"the run's owner vouches for round {self.round}, which is not here yet: fetching what is missing"
        return f"the run's owner vouches for another chain at round {self.round}: looking for those who have it"


@dataclass(frozen=True, slots=True)
class FirstRosterSigned(Event):
    """The run's owner has signed the first roster of a stage: its run begins."""

    stage: int
    roster: tuple[PeerId, ...]

    def line(self) -> str:
        peers, count = ", ".join(short(peer) for peer in self.roster), len(self.roster)
        return f"signed the first roster of stage {self.stage}: {count} peer{'' if count == 1 else 's'} ({peers})"


@dataclass(frozen=True, slots=True)
class OwnerAwaited(Event):
    """A stage has no first roster yet, which is the run's owner's to sign."""

    stage: int
    start_peers: int

    def line(self) -> str:
        those = "a peer is" if self.start_peers == 1 else f"{self.start_peers} peers are"
        return (
            f"waiting for the run's owner to sign the first roster of stage {self.stage}: "
            f"its bootstrap does it when {those} here"
        )


@dataclass(frozen=True, slots=True)
class MessageRefused(Event):
    peer: PeerId
    reason: str
    LEVEL = "warning"

    def line(self) -> str:
        return f"message of {short(self.peer)} refused: {self.reason}"


@dataclass(frozen=True, slots=True)
class MemberDoubted(Event):
    """A member of our roster kept rounds from going on. rounds: that its turn is not waited for; 0: until it delivers again."""

    peer: PeerId
    reason: str
    rounds: int
    LEVEL = "warning"

    def line(self) -> str:
        how_long = f"for {self.rounds} rounds" if self.rounds else "until they do"
        return f"{short(self.peer)} is not waited for {how_long}: {self.reason}"


@dataclass(frozen=True, slots=True)
class EquivocationProved(Event):
    """A peer signed two things that no honest peer signs; both signatures are at hand."""

    peer: PeerId
    reason: str
    LEVEL = "warning"

    def line(self) -> str:
        return f"{short(self.peer)} is proven hostile, and out of the rosters we write: {self.reason}"


@dataclass(frozen=True, slots=True)
class TrainingProgress(Event):
    """Once a second. bytes_sent/received: payload of this peer since its start. busy: share of the last seconds spent
    computing. memory_bytes: resident, of this process and its helpers; 0 unknown. is_training: nobody holds it.
    share: micro-batches expected of it in the round. daemon_bytes: over TCP by p2pd, payload of rounds, messages, directory and
    encryption, as of the last two seconds; 0 unknown. lag_ms: how late the event loop ran, over half a minute.
    upload_bps: bits a second of bodies that may leave, 0: no limit; line_bps: that the line was measured to carry, 0: not measured, or the
    limit is the owner's. queueing_ms: how long a packet of others on the line waits behind ours."""

    round: int
    micro_batches: int
    tokens: int
    tokens_per_s: float
    train_loss: float
    bytes_sent: int
    bytes_received: int
    lag_ms_p99: float
    busy: float = 0.0
    memory_bytes: int = 0
    is_training: bool = True
    share: int = 0
    daemon_bytes_sent: int = 0
    daemon_bytes_received: int = 0
    lag_ms_max: float = 0.0
    upload_bps: int = 0
    line_bps: int = 0
    queueing_ms: float = 0.0
    LEVEL = "debug"


@dataclass(frozen=True, slots=True)
class RunComplete(Event):
    round: int
    head: str
    anchor_digest: str

    def line(self) -> str:
        return f"the run is complete after round {self.round}; anchor {self.anchor_digest[:12]}"


@dataclass(frozen=True, slots=True)
class Left(Event):
    reason: str

    def line(self) -> str:
        return f"left: {self.reason}"


@dataclass(frozen=True, slots=True)
class Failed(Event):
    """An error at a task boundary: what was given up and what happens next."""

    where: str
    reason: str
    LEVEL = "error"

    def line(self) -> str:
        return f"{self.where}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Remark(Event):
    """Something an operator may want to read that has no class of its own."""

    text: str

    def line(self) -> str:
        return self.text
