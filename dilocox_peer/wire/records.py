"""What lies in a run's directory, what comes in a first greeting, and what its owner signs about who may come in.

A lease or word begins with its name and its format; the others with their format alone, as their tag. That addresses, keys
and signatures are what they seem is for who reads them to find out: dht/records.py, admission.py, peer/links/greeting.py.
"""

from typing import Annotated, Literal

from msgspec import Meta

from dilocox_peer.signing import PUBLIC_KEY_BYTES, SIGNATURE_BYTES
from dilocox_peer.types import DIGEST_BYTES
from dilocox_peer.wire import versions
from dilocox_peer.wire.declared import Declared, Hash, Number, Parser, PeerName, Site

MAX_STAGES = 256
KEEPERS = MAX_STAGES  # where leases lie of those who keep the states of all stages and train none
MAX_LEASE_BYTES = 4096
MAX_WORD_BYTES = 256
MAX_ADDRESSES = 8
MAX_PUBLIC_NAME = 40  # characters
MAX_PROTOCOL = 2**16
MAX_SPEED = 1e12  # tokens a second: sums of them are shown, and stay numbers
MAX_GRANT_BYTES = 256
GRANT_ID_BYTES = 16
MAX_USES = 10_000  # of one invitation; a run of more makes several
MAX_REVOKED = 512
MAX_REVOCATIONS_BYTES = 128 + MAX_REVOKED * 48
MAX_HELLO_BYTES = 768

LeasedStage = Annotated[int, Meta(ge=0, le=KEEPERS)]
VouchedStage = Annotated[int, Meta(ge=0, lt=MAX_STAGES)]
Addresses = Annotated[tuple[str, ...], Meta(max_length=MAX_ADDRESSES)]
Ed25519Signature = Annotated[bytes, Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]
RunDigest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


class LeaseForm(Declared, frozen=True, tag="lease"):
    """A lease as it lies in the directory; what the fields mean is dht.records.Lease, whose names they have. link: empty: none. standing: here and
    training, here and holding it, or gone."""

    format: Literal[1]
    stage: LeasedStage
    incarnation: Number
    addresses: Addresses
    protocol: Annotated[int, Meta(ge=0, le=MAX_PROTOCOL)]
    tokens_per_s: Annotated[float, Meta(ge=0, le=MAX_SPEED)]
    memory_bytes: Number
    reachability: Literal["direct", "relayed"]
    round: Number
    link: str
    link_addresses: Addresses
    standing: Literal["here", "paused", "left"]
    admission: Annotated[bytes, Meta(max_length=MAX_GRANT_BYTES)]
    public_name: Annotated[str, Meta(max_length=MAX_PUBLIC_NAME)]
    site: Site


class Word(Declared, frozen=True, tag="word"):
    """The owner's word on a stage: its newest checkpoint (wire/checkpoints.py), field by field."""

    format: Literal[1]
    stage: VouchedStage
    genesis: Hash
    height: Number
    round: Number
    head: Hash
    sequence: Number
    is_last: bool
    signature: Ed25519Signature


class GrantForm(Declared, frozen=True, tag=versions.GRANT):
    """An invitation as it is signed and shown; admission.Grant says what it is worth. key: of the one peer it is for; empty: it
    is for `uses` peers."""

    run: RunDigest
    grant_id: Annotated[bytes, Meta(min_length=GRANT_ID_BYTES, max_length=GRANT_ID_BYTES)]
    rights: Annotated[int, Meta(ge=1, le=3)]
    issued_ms: Number
    expires_s: Number
    key: Annotated[bytes, Meta(max_length=PUBLIC_KEY_BYTES)]
    uses: Annotated[int, Meta(ge=0, le=MAX_USES)]
    signature: Ed25519Signature

    def __post_init__(self) -> None:
        if len(self.key) not in (0, PUBLIC_KEY_BYTES) or bool(self.key) == bool(self.uses):
            raise ValueError("it is for one peer or for a number of them")


class RevocationsForm(Declared, frozen=True, tag=versions.GRANT):
    """What the owner has taken back: ids of invitations and public keys of peers, in order, each with the time (ms)."""

    run: RunDigest
    number: Number
    entries: Annotated[
        tuple[tuple[Annotated[bytes, Meta(min_length=GRANT_ID_BYTES, max_length=PUBLIC_KEY_BYTES)], Number], ...],
        Meta(max_length=MAX_REVOKED),
    ]
    signature: Ed25519Signature

    def __post_init__(self) -> None:
        targets = [target for target, _ in self.entries]
        if any(len(target) not in (GRANT_ID_BYTES, PUBLIC_KEY_BYTES) for target in targets):
            raise ValueError("an entry that is none")
        if targets != sorted(set(targets)):
            raise ValueError("entries that are not in order, each once")


class Greeting(Declared, frozen=True, tag=versions.HELLO):
    """The first frame over a link: who speaks. shown: its pass; left out where it has none to show."""

    peer: PeerName
    stage: int
    incarnation: int
    signature: Ed25519Signature
    shown: Annotated[bytes, Meta(max_length=MAX_GRANT_BYTES)] = b""


LEASE = Parser[LeaseForm](LeaseForm, "a lease", MAX_LEASE_BYTES, version=versions.RECORDS, name="lease")
WORD = Parser[Word](Word, "a word", MAX_WORD_BYTES, version=versions.RECORDS, name="word")
GRANT = Parser[GrantForm](GrantForm, "an invitation", MAX_GRANT_BYTES, version=versions.GRANT)
REVOCATIONS = Parser[RevocationsForm](
    RevocationsForm, "a list of revocations", MAX_REVOCATIONS_BYTES, version=versions.GRANT
)
GREETING = Parser[Greeting](Greeting, "a greeting", MAX_HELLO_BYTES, version=versions.HELLO, is_canonical=False)
