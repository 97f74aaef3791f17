"""What happens with the states that a peer holds, fetches, keeps for others, or cannot get, as values."""

from dataclasses import dataclass

from dilocox_peer.events import Event, short
from dilocox_peer.types import PeerId

MAX_SHOWN = 3


@dataclass(frozen=True, slots=True)
class PeersUnreached(Event):
    """Peers of our stage have leases in the directory, nothing was ever heard of them, and of nobody else: not one connection came
    about. What is trained here meanwhile is trained alone."""

    stage: int
    peers: tuple[PeerId, ...]
    LEVEL = "warning"

    def line(self) -> str:
        named = ", ".join(map(short, self.peers[:MAX_SHOWN])) + (", ..." if len(self.peers) > MAX_SHOWN else "")
        return (
            f"no connection comes about to any peer of stage {self.stage}, though the directory has {named}: this peer is alone. "
            "Of two peers behind routers one has to be reachable: open a port (docs/troubleshooting.md, 3)"
        )


@dataclass(frozen=True, slots=True)
class StageFull(Event):
    """The roster has all the peers that the run allows a stage, and this one is not among them: what it trains is averaged by nobody."""

    stage: int
    max_peers: int
    LEVEL = "warning"

    def line(self) -> str:
        return (
            f"stage {self.stage} has its {self.max_peers} peers, as many as the run allows (limits.max_peers): what is trained here does "
            "not count until one of them leaves; this peer stays next in line, and another run needs it more"
        )


@dataclass(frozen=True, slots=True)
class StateAwaited(Event):
    """The run has begun, and nobody who holds its state is here. vouched_round: what the owner has signed; None: nothing."""

    stage: int
    vouched_round: int | None
    LEVEL = "warning"

    def line(self) -> str:
        vouched = "" if self.vouched_round is None else f" (its owner vouches for round {self.vouched_round})"
        return (
            f"the run has begun{vouched}, and nobody who holds the state of stage {self.stage} is here: "
            "waiting for one who does; it does not begin anew"
        )


@dataclass(frozen=True, slots=True)
class EndAwaited(Event):
    """The last round is certified, by a roster that no quorum of the one before it, nor the owner, has signed."""

    stage: int
    round: int
    LEVEL = "warning"

    def line(self) -> str:
        return (
            f"round {self.round} of stage {self.stage} is the run's last, but those who certified it took over from voters who did "
            "not sign that: waiting for the owner's word, or until none of them was heard for 10 minutes"
        )


@dataclass(frozen=True, slots=True)
class RunIsOver(Event):
    """Its last round is certified. own_round: of the state on our disk. head: of the last certificate, in hex. link: of the run."""

    round: int
    own_round: int
    head: str
    link: str

    def line(self) -> str:
        own = f"; what is here is of round {self.own_round}" if self.own_round else ""
        return f"the run is complete: round {self.round} was its last, at {self.head[:12]}{own}. Its model: dilocox-peer export '{self.link}'"


@dataclass(frozen=True, slots=True)
class BranchKept(Event):
    """Rounds of ours that a better branch does without; they stay on disk."""

    first_round: int
    last_round: int
    tip: str
    LEVEL = "warning"

    def line(self) -> str:
        rounds = f"rounds {self.first_round}-" if self.last_round > self.first_round else "round "
        return (
            f"{rounds}{self.last_round} of our branch are kept: `dilocox-peer recover` goes back to them ({self.tip})"
        )


@dataclass(frozen=True, slots=True)
class StateFetched(Event):
    round: int
    donors: tuple[PeerId, ...]
    size_bytes: int
    seconds: float

    def line(self) -> str:
        return f"state of round {self.round} from {' and '.join(map(short, self.donors))}: {self.size_bytes / 1e6:.1f} MB in {self.seconds:.1f} s, verified"


@dataclass(frozen=True, slots=True)
class StateFetchFailed(Event):
    donor: PeerId
    reason: str
    LEVEL = "warning"

    def line(self) -> str:
        return f"state from {short(self.donor)} not usable: {self.reason}; asking another peer"


@dataclass(frozen=True, slots=True)
class LinkTooSlow(Event):
    """The contributions to the rounds certified while a state came are more to fetch than the state: another one would not help.

    rounds: so many. seconds: that the state took. had_bps, needed_bps: downlink, bits/s, as the state came, and to keep up.
    """

    rounds: int
    seconds: float
    had_bps: float
    needed_bps: float
    LEVEL = "warning"

    def line(self) -> str:
        return (
            f"{self.rounds} rounds were certified in the {self.seconds:.0f} s that the state took, at {self.had_bps / 1e6:.1f} Mbit/s: "
            f"to keep up with this run takes {self.needed_bps / 1e6:.1f} Mbit/s down"
        )


@dataclass(frozen=True, slots=True)
class StageFollowed(Event):
    """Our copy of a stage leads to this round by now; size_bytes: of the contributions that came for it."""

    stage: int
    round: int
    size_bytes: int
    LEVEL = "debug"

    def line(self) -> str:
        return f"our copy of stage {self.stage} leads to round {self.round}, with {self.size_bytes / 1e6:.1f} MB of contributions"


@dataclass(frozen=True, slots=True)
class StageCopied(Event):
    """The state of another stage is kept here. is_first: nothing was before; later ones are not for people."""

    stage: int
    round: int
    donor: PeerId
    size_bytes: int
    seconds: float
    is_first: bool

    @property
    def level(self) -> str:
        return "info" if self.is_first else "debug"

    def line(self) -> str:
        return (
            f"keeps a copy of stage {self.stage} for others, now of round {self.round} ({self.size_bytes / 1e6:.1f} MB)"
        )


@dataclass(frozen=True, slots=True)
class RunKept(Event):
    """The states of all stages after a round are kept here. is_first: nothing was before; is_last: it is the run's last round. The
    others are not for people."""

    run_name: str
    round: int
    size_bytes: int
    seconds: float
    is_first: bool
    is_last: bool

    @property
    def level(self) -> str:
        return "info" if self.is_first or self.is_last else "debug"

    def line(self) -> str:
        if self.is_last:
            return f"run {self.run_name!r} is complete: its final model, of round {self.round}, is kept here and served"
        return f"keeps run {self.run_name!r} for who comes late, now of round {self.round} ({self.size_bytes / 1e6:.1f} MB)"


@dataclass(frozen=True, slots=True)
class KeepingStopped(Event):
    """Newer rounds find no room here. round: that what is kept leads to."""

    run_name: str
    round: int
    why: str
    LEVEL = "warning"

    def line(self) -> str:
        return (
            f"run {self.run_name!r} is kept up to round {self.round} and no further: {self.why}; "
            "make room, or pass a larger --keep-disk"
        )


@dataclass(frozen=True, slots=True)
class StageRestored(Event):
    """Nobody of the stage was left, or nobody who is as far; donor: who had kept a copy, this peer itself perhaps. round: that the
    contributions since the copy lead to."""

    stage: int
    round: int
    donor: PeerId
    size_bytes: int

    def line(self) -> str:
        return (
            f"nobody of stage {self.stage} is left: it goes on from round {self.round}, of which {short(self.donor)} kept a "
            f"copy ({self.size_bytes / 1e6:.1f} MB, verified)"
        )


@dataclass(frozen=True, slots=True)
class CheckpointWritten(Event):
    round: int
    path: str
    size_bytes: int
    seconds: float
    LEVEL = "debug"
