"""The records of a run's directory: what they say, their bytes, and the keys they lie under. Pure values.

A record's writer is its subkey and its expiration is the DHT's; both are covered by the signature (validators.py), so
neither is repeated in the bytes. Whatever is decoded here came from a stranger: exact types, caps on everything.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from dilocox_peer.errors import ConfigError
from dilocox_peer.invitation import address_range, parse_multiaddr
from dilocox_peer.manifest import MAX_MANIFEST_BYTES
from dilocox_peer.signing import public_key_of
from dilocox_peer.types import PeerId, RunId, sha256
from dilocox_peer.wire.checkpoints import Checkpoint
from dilocox_peer.wire.declared import astuple, encode
from dilocox_peer.wire.records import KEEPERS, LEASE, MAX_REVOCATIONS_BYTES, MAX_STAGES, WORD, LeaseForm, Word
from dilocox_peer.wire.versions import RECORDS

PROTOCOL_VERSION = 1  # of who announces a lease
LEASE_TTL_S = 90.0
MAX_TTL_S = 120.0  # no record of ours may live longer
CLOCK_SKEW_S = 30.0  # by so much a writer's clock may be ahead of or behind a reader's
LATEST_S = MAX_TTL_S + CLOCK_SKEW_S  # from now; what expires later no node takes

# A get returns the whole dictionary under a key from every holder, so a stage's peers are spread over several keys; with
# up to 64 of them (manifest limits.max_peers) each key has about 16.
BUCKETS = 4


Reachability = Literal["direct", "relayed"]
RecordKind = Literal["lease", "manifest", "revocations", "word", "directive"]


@dataclass(frozen=True, slots=True)
class Lease:
    """A peer's announcement that it serves a stage, or with has_left that it no longer does. stage KEEPERS: it trains none, and keeps
    the states of all.

    incarnation: wall-clock milliseconds at its start; the newest is the peer. tokens_per_s: of its own training, 0 if
    unknown. link, link_addresses: the identity and addresses of its data plane, of a run with several stages; that they
    are its own is what the record's signature says. admission: its pass, of a run that takes the invited (admission.py).
    is_paused: it holds training for now. public_name: what its volunteer calls himself; anybody may take any, with any characters.
    site: where its volunteer says that it is, "" where he says nothing.
    expires_s: wall clock; set by the directory when announced or read.
    """

    peer: PeerId
    stage: int
    incarnation: int
    addresses: tuple[str, ...]
    protocol: int
    tokens_per_s: float
    memory_bytes: int
    reachability: Reachability
    round: int
    link: PeerId | None = None
    link_addresses: tuple[str, ...] = ()
    has_left: bool = False
    admission: bytes = b""
    is_paused: bool = False
    public_name: str = ""
    site: str = ""
    expires_s: float = 0.0

    @property
    def is_relayed(self) -> bool:
        """Nobody can dial it, and relays pass others on to it."""
        return self.reachability == "relayed" and any("/p2p-circuit/" in text for text in self.addresses)

    @property
    def is_link_closed(self) -> bool:
        """Its p2pd may be dialled from outside, and its linkd not."""
        own = [parse_multiaddr(text, "lease") for text in self.addresses]
        is_open = any(not each.is_relayed and address_range(each.host) for each in own)
        links = [parse_multiaddr(text, "lease") for text in self.link_addresses]
        return self.link is not None and is_open and not any(address_range(each.host) for each in links)

    @property
    def is_reachable(self) -> bool:
        """Whether peers that nobody can dial have a way to it."""
        return self.reachability == "direct" or self.is_relayed

    def to_bytes(self) -> bytes:
        form = LeaseForm(
            RECORDS, self.stage, self.incarnation, self.addresses, self.protocol, float(self.tokens_per_s), self.memory_bytes,
            self.reachability, self.round, self.link or "", self.link_addresses, "left" if self.has_left else "paused" if self.is_paused else "here",
            self.admission, self.public_name, self.site,
        )  # fmt: skip
        return encode(form)

    @classmethod
    def from_bytes(cls, raw: bytes, *, peer: PeerId, expires_s: float) -> "Lease":
        """peer's lease. Raises ValueError with what is wrong."""
        form = LEASE.read(raw)
        link = PeerId(form.link)
        if form.link and not _is_peer_id(form.link):
            raise ValueError(f"link is {form.link!r}")
        return cls(
            peer=peer, stage=form.stage, incarnation=form.incarnation,
            addresses=tuple(_address(address, peer) for address in form.addresses), protocol=form.protocol,
            tokens_per_s=form.tokens_per_s, memory_bytes=form.memory_bytes, reachability=form.reachability, round=form.round,
            link=link or None, link_addresses=tuple(_address(address, link) for address in form.link_addresses),
            has_left=form.standing == "left", admission=form.admission, is_paused=form.standing == "paused", public_name=form.public_name,
            site=form.site, expires_s=expires_s,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ManifestRecord:
    """A run's manifest in its wire form. Self-certifying: Manifest.from_bytes checks it against the run id."""

    manifest: bytes

    def to_bytes(self) -> bytes:
        return self.manifest

    @classmethod
    def from_bytes(cls, raw: bytes) -> "ManifestRecord":
        """Raises ValueError when too large; the content is checked by who knows the run id."""
        if len(raw) > MAX_MANIFEST_BYTES:
            raise ValueError(f"manifest of {len(raw)} bytes, at most {MAX_MANIFEST_BYTES}")
        return cls(raw)


def encode_word(word: Checkpoint) -> bytes:
    """The owner's word on a stage: its newest checkpoint. Self-certifying: the key that signed the manifest signed it, so
    anybody may hand it on."""
    return encode(Word(RECORDS, *astuple(word)))


def decode_word(raw: bytes) -> Checkpoint:
    """Not verified yet. Raises ValueError with what is wrong."""
    return Checkpoint(*astuple(WORD.read(raw))[1:])


@dataclass(frozen=True, slots=True)
class RevocationsRecord:
    """What the run's owner has taken back, in its wire form. Self-certifying: Revocations.from_bytes checks the owner's
    signature."""

    revocations: bytes

    def to_bytes(self) -> bytes:
        return self.revocations

    @classmethod
    def from_bytes(cls, raw: bytes) -> "RevocationsRecord":
        """Raises ValueError when too large; the content is checked by who knows the run's owner."""
        if len(raw) > MAX_REVOCATIONS_BYTES:
            raise ValueError(f"revocations of {len(raw)} bytes, at most {MAX_REVOCATIONS_BYTES}")
        return cls(raw)


@dataclass(frozen=True, slots=True)
class Slot:
    """One key of a run's directory and what may lie under it."""

    key: str
    kind: RecordKind
    stage: int = 0
    bucket: int = 0


def bucket_of(peer: PeerId) -> int:
    """The bucket that peer's lease lies in."""
    return sha256(peer.encode())[0] % BUCKETS


def lease_key(run_id: RunId, stage: int, bucket: int) -> str:
    return f"dilocox/{run_id}/lease/{stage}/{bucket}"


def word_key(run_id: RunId, stage: int) -> str:
    return f"dilocox/{run_id}/word/{stage}"


def manifest_key(run_id: RunId) -> str:
    return f"dilocox/{run_id}/manifest"


def revocations_key(run_id: RunId) -> str:
    return f"dilocox/{run_id}/revocations"


def directive_key(run_id: RunId) -> str:
    return f"dilocox/{run_id}/directive"


def slots(run_id: RunId) -> Iterator[Slot]:
    """Every key that exists in a run's directory."""
    yield Slot(manifest_key(run_id), "manifest")
    yield Slot(revocations_key(run_id), "revocations")
    yield Slot(directive_key(run_id), "directive")
    for stage in range(MAX_STAGES):
        yield Slot(word_key(run_id, stage), "word", stage)
    for stage in (*range(MAX_STAGES), KEEPERS):
        for bucket in range(BUCKETS):
            yield Slot(lease_key(run_id, stage, bucket), "lease", stage, bucket)


def dht_id(key: str) -> bytes:
    """What hivemind shows of a key to those who store under it: SHA-1 of its msgpack, 20 bytes."""
    return hashlib.sha1(encode(key), usedforsecurity=False).digest()


def _is_peer_id(text: str) -> bool:
    try:
        public_key_of(PeerId(text))
    except ValueError:
        return False
    return True


def _address(value: str, peer: PeerId) -> str:
    try:
        address = parse_multiaddr(value, "lease")
    except ConfigError as error:
        raise ValueError(str(error)) from None
    if address.peer != peer:
        raise ValueError(f"address {value!r} is another peer's")
    return address.text
