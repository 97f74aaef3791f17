"""What goes into the round machine and what comes out of it: its inputs and its actions, as frozen values.

The same contract holds in the simulator (tests/sim) and in the peer (averaging.py). The machine itself is machine.py.
"""

from dataclasses import dataclass
from typing import Literal

from dilocox_peer.contract import Leaving, Note, Tick
from dilocox_peer.peer.rounds.durable import Durable
from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.chain import Certificate, Entry, SliceOutcome
from dilocox_peer.wire.checkpoints import Checkpoint
from dilocox_peer.wire.directives import Directive
from dilocox_peer.wire.rounds import Message

# ---- what happens to it ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Received:
    """A message; `sender` was authenticated by the transport."""

    sender: PeerId
    message: Message


@dataclass(frozen=True, slots=True)
class PeerFound:
    """Discovery (DHT, or an inbound connection) says this peer works on our stage. range: of addresses that our connection
    leads to, "" if it says nothing (relayed, or within a house)."""

    peer: PeerId
    range: str = ""


@dataclass(frozen=True, slots=True)
class TailLost:
    """Nobody has what follows `head` any more, says the keeper beside the owner's notary: neither a state nor the contributions."""

    head: Digest


@dataclass(frozen=True, slots=True)
class PeerRefused:
    """A send to peer failed at once: its process or host is gone (a frozen peer or a partition gives no such sign). is_out: or it was put out
    of the run."""

    peer: PeerId
    is_out: bool = False


@dataclass(frozen=True, slots=True)
class BytesCame:
    """Bytes of a contribution or a state came from a peer, or it acknowledged some of ours: it is there, although its messages
    may wait behind them."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class RoundProgress:
    """Micro-batches this peer has completed in the round it is training; goes out with heartbeats.

    Which round that is the machine knows: the one after its head's, or after its offer. tell_now: the others' clocks wait
    for it (our share of the round is done, say), so the next heartbeat goes out at once. paused: nothing is trained here
    until further notice.
    """

    micro_batches: int
    tell_now: bool = False
    paused: bool = False


@dataclass(frozen=True, slots=True)
class Closed:
    """Local training of the round is over and its encoded pseudo-gradient is stored as `entry.blob` (held from now on); where it is in
    slices that is its table, parts are theirs, and table is its bytes, which go out with the offer."""

    base: Digest
    entry: Entry
    parts: tuple[Digest, ...] = ()
    table: bytes = b""


@dataclass(frozen=True, slots=True)
class BlobHeld:
    """A fetched blob was verified (hash, shape, finite, norm) and is here, durably if it must last (FetchBlob). size_bytes: as it is,
    whatever its offer said. parts: the slices that a table names. part: as what it was verified."""

    blob: Digest
    size_bytes: int
    parts: tuple[Digest, ...] = ()
    part: "BlobPart | None" = None


@dataclass(frozen=True, slots=True)
class BlobRefused:
    """A fetched blob hashes right and is not acceptable as this part: malformed, not finite, wrong shape. As another it may be good."""

    blob: Digest
    reason: str
    part: "BlobPart | None" = None


@dataclass(frozen=True, slots=True)
class PeerUnreached:
    """A message to it could not be delivered: there is no path that works, for now."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class BlobMissing:
    """None of the sources gave the blob."""

    blob: Digest


@dataclass(frozen=True, slots=True)
class BlobLost:
    """A blob of a certificate whose Apply waits is no longer on our disk, or damaged there: BlobHeld when it is again."""

    blob: Digest
    certificate: Certificate


@dataclass(frozen=True, slots=True)
class SliceAveraged:
    """An AverageSlice is done: the result and what its encoding lost are durable here. outcome: None if what it takes is not here any
    more, or no good (then BlobRefused has said so of the contribution)."""

    inputs: Digest
    slice: int
    outcome: SliceOutcome | None


@dataclass(frozen=True, slots=True)
class StateInstalled:
    """The anchor state at `head`, asked for by FetchState, is in place and durable. From here on it is our anchor."""

    head: Digest
    state_digest: bytes


@dataclass(frozen=True, slots=True)
class StateMissing:
    """No donor gave a state that verifies."""

    head: Digest


@dataclass(frozen=True, slots=True)
class StateComputed:
    """The outer step of an Apply is done: digest of the anchor state at `head`. Also welcome once at the start, for
    genesis: its digest is a function of the manifest that the machine cannot compute."""

    head: Digest
    state_digest: bytes


@dataclass(frozen=True, slots=True)
class OwnerVouched:
    """A checkpoint was read that claims to be the owner's (in the directory, or in a message)."""

    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True)
class OwnerSpoke:
    """A directive was read that claims to be the owner's (in the directory)."""

    directive: Directive


Input = (
    Tick | Received | PeerFound | PeerRefused | PeerUnreached | BytesCame | RoundProgress | Closed | BlobHeld | BlobRefused | BlobMissing
    | BlobLost | SliceAveraged | StateInstalled | StateMissing | StateComputed | OwnerVouched | OwnerSpoke | Leaving
)  # fmt: skip

# ---- what it wants done, in order; an action is done only when those before it are ----------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Deliver once, at most; losing it is allowed."""

    to: PeerId
    message: Message


@dataclass(frozen=True, slots=True)
class Persist:
    """Make this durable (fsync) before any later action of the list is carried out."""

    state: Durable


@dataclass(frozen=True, slots=True)
class BlobPart:
    """What a blob is that is no whole contribution. table: whose slice it is."""

    kind: Literal["table", "slice", "result", "residual"]
    slice: int = 0
    table: Digest | None = None


@dataclass(frozen=True, slots=True)
class FetchBlob:
    """Get the blob from our own disk or any of the sources (in this order), verify it; answer BlobHeld, BlobRefused or
    BlobMissing, in the end always one of them.

    within_s: then it is missing; None: no hurry, a certificate needs it. doubted: it comes from one that often does not
    deliver, and must not take the room of others'. part: what it is, if not a whole contribution."""

    blob: Digest
    sources: tuple[PeerId, ...]
    within_s: float | None = None
    doubted: bool = False
    part: BlobPart | None = None

    @property
    def must_last(self) -> bool:
        """Whether it has to outlive a power cut: members sign that they hold whole contributions, or results, and give each other residuals
        back. Tables and slices of contributions go into a mean or are missed in it, and each would cost a flush of the disk."""
        return self.part is None or self.part.kind in ("result", "residual")


@dataclass(frozen=True, slots=True)
class AverageSlice:
    """Average a slice of these contributions, all of whose slices of that number are held, with the residual named base (b"": none), which
    is held; answered by SliceAveraged. codec: of contributions, by the newest plan: all that average here name the same, and the
    mean is encoded by it, whatever its contributions are in. inner_steps: H, by the same plan: so far a contribution may reach."""

    inputs: Digest
    slice: int
    entries: tuple[Entry, ...]
    base: bytes
    codec: str
    inner_steps: int


@dataclass(frozen=True, slots=True)
class Apply:
    """All blobs of certificate are held and it extends our head: decode, mean in certificate order, outer step.

    own: the entry of ours that it settles, or None: then our pseudo-gradient stays and goes with the next contribution.
    All or nothing; answered by StateComputed. `Persist` with the new chain precedes it. A certificate without entries
    (a void round, a view change) leaves the anchor as it is and is answered too.
    """

    certificate: Certificate
    own: Entry | None


@dataclass(frozen=True, slots=True)
class FetchState:
    """We are to adopt `head` and cannot replay to it: get the whole state from one of the donors, verified against
    state_digest when known (b"" otherwise: ask several donors and compare). Answer StateInstalled or StateMissing.

    keep_pseudo_gradient: our unsettled local pseudo-gradient survives on top of the new anchor; otherwise local parameters become
    the anchor (our pseudo-gradient is, in part, already inside it or orphaned). Without donors: from our own disk, after a
    restart. Applies still queued when it is installed are void. Always answered, in the end. leaves: certificates of ours
    that are dropped for it, oldest first: the shell keeps them, and the state they led to, before it installs another.
    """

    head: Digest
    round: int
    state_digest: bytes
    donors: tuple[PeerId, ...]
    keep_pseudo_gradient: bool
    leaves: tuple[Certificate, ...] = ()


@dataclass(frozen=True, slots=True)
class ForgetBlobs:
    """These blobs are no longer needed by anyone we would serve."""

    blobs: tuple[Digest, ...]


Action = Send | Persist | FetchBlob | AverageSlice | Apply | FetchState | ForgetBlobs | Note
