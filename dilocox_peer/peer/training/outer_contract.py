"""Inputs and actions of the outer loop (outer_loop.py): what happens to it, and what it wants done.

One piece of work is out at a time, a `CloseRound`, `WithdrawOffer`, `LoadContributions` or `MergeRound`; its answer is the input
that names it. Everything else is carried out at once.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from dilocox_peer.events import Event
from dilocox_peer.peer.rounds.contract import Apply, Input
from dilocox_peer.peer.rounds.schedule import Schedule
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.chain import Certificate
from dilocox_peer.wire.directives import Directive


class AgreedRounds(Protocol):
    """What the outer loop reads of the round machine (peer/rounds/machine.py), at any time."""

    @property
    def head(self) -> Digest: ...
    @property
    def round(self) -> int: ...
    @property
    def state_digest(self) -> bytes: ...
    @property
    def may_train(self) -> bool: ...
    @property
    def is_behind(self) -> bool: ...
    @property
    def may_offer(self) -> bool: ...
    @property
    def has_offered(self) -> bool: ...
    @property
    def is_sliced(self) -> bool: ...
    @property
    def roster(self) -> Sequence[PeerId]: ...
    @property
    def reports(self) -> Mapping[PeerId, tuple[int, int]]: ...
    @property
    def schedule(self) -> Schedule: ...
    @property
    def plan_reason(self) -> str: ...
    @property
    def chain(self) -> Sequence[Certificate]: ...
    @property
    def directive(self) -> Directive | None: ...
    def working(self, now: float) -> Collection[PeerId]: ...
    def may_end(self, now: float) -> bool: ...


@dataclass(frozen=True, slots=True)
class Origins:
    """What a peer of a later stage knows of stage 0. latest: by caller and origin, the latest round that work came of, and how
    many of our recent micro-batches were theirs. certified: the round that stage 0 has certified."""

    latest: Mapping[tuple[PeerId, PeerId], tuple[int, int]]
    certified: int


@dataclass(frozen=True, slots=True)
class Readings:
    """The peer's threads as they are now. training_round, micro_batches: what is trained, and how many are done in it; tokens:
    since the start. uplink_bps: of contributions served lately, 0 while it is not known. origins: of a later stage. has_lost_back:
    whether the contribution that the outer loop lost is on disk again. wall_s: the wall clock, for reports; 0: not known."""

    training_round: int
    micro_batches: int
    tokens: int
    is_paused: bool
    uplink_bps: float
    bytes_sent: int
    origins: Origins | None = None
    has_lost_back: bool = False
    wall_s: float = 0.0


# -- inputs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RoundEncoded:
    """Answers CloseRound: our contribution is on disk. train_loss: nan without a micro-batch. lost: what the codec left out.
    parts: its slices, where it is in slices: then blob is their table, and table its bytes."""

    blob: Digest
    size_bytes: int
    raw_bytes: int
    micro_batches: int
    train_loss: float
    lost: float
    parts: tuple[Digest, ...] = ()
    table: bytes = b""


@dataclass(frozen=True, slots=True)
class OfferBack:
    """Answers WithdrawOffer."""


@dataclass(frozen=True, slots=True)
class ContributionsLoaded:
    """Answers LoadContributions. missing: what is gone from disk; None: all are at hand. for_now: it is here, and cannot be read at this moment."""

    missing: Digest | None
    for_now: bool = False


@dataclass(frozen=True, slots=True)
class AnchorMoved:
    """Answers MergeRound: a certificate is applied to the anchor. norms, clip_factors: of the contributions, in the certificate's
    order; none where they are not known, as in slices. needed_rank: the rank that holds nearly all energy of the mean, 0 where nobody asked."""

    state_digest: Digest
    norms: tuple[float, ...]
    clip_factors: tuple[float, ...]
    needed_rank: int


@dataclass(frozen=True, slots=True)
class AdoptionBegun:
    """Another's state is being fetched: nothing is closed or merged until AdoptionOver; several may be under way."""


@dataclass(frozen=True, slots=True)
class BranchDropped:
    """The anchor becomes another one whole: what waits is in it, or of a branch given up."""


@dataclass(frozen=True, slots=True)
class StateAdopted:
    head: Digest
    round: int


@dataclass(frozen=True, slots=True)
class AdoptionOver:
    pass


@dataclass(frozen=True, slots=True)
class Pulse:
    """Time has passed with nothing to do."""


@dataclass(frozen=True, slots=True)
class Glance:
    """Something that a decision depends on may have changed, in the round machine or the threads."""


OuterInput = (
    Apply
    | RoundEncoded
    | OfferBack
    | ContributionsLoaded
    | AnchorMoved
    | AdoptionBegun
    | BranchDropped
    | StateAdopted
    | AdoptionOver
    | Pulse
    | Glance
)

# -- actions ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HoldTraining:
    """No micro-batch begins, or again some do."""

    hold: bool


@dataclass(frozen=True, slots=True)
class CloseRound:
    """Take the snapshot, encode it, write the contribution. Answered by RoundEncoded."""


@dataclass(frozen=True, slots=True)
class WithdrawOffer:
    """The head moved while we encoded: the pseudo-gradient is pending again. forget: of the contribution, to delete. Answered by
    OfferBack."""

    forget: tuple[Digest, ...]


@dataclass(frozen=True, slots=True)
class LoadContributions:
    """Read the certificate's contributions from disk. Answered by ContributionsLoaded."""

    certificate: Certificate


@dataclass(frozen=True, slots=True)
class MergeRound:
    """Merge what was loaded. own: whether our offer is among it. Answered by AnchorMoved."""

    certificate: Certificate
    own: bool


@dataclass(frozen=True, slots=True)
class KeepState:
    """Write the anchor that was just reached."""


@dataclass(frozen=True, slots=True)
class ToRounds:
    """An input of the round machine."""

    happened: Input


@dataclass(frozen=True, slots=True)
class ToListener:
    event: Event


@dataclass(frozen=True, slots=True)
class EndRun:
    """The run's last round is merged."""


OuterWork = CloseRound | WithdrawOffer | LoadContributions | MergeRound
OuterAction = HoldTraining | OuterWork | KeepState | ToRounds | ToListener | EndRun
