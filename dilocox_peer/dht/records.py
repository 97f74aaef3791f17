"""The records of a run's directory: what they say, their bytes, and the keys they lie under. Pure values.

A record's writer is its subkey and its expiration is the DHT's; both are covered by the signature (validators.py), so
neither is repeated in the bytes. Whatever is decoded here came from a stranger: exact types, caps on everything.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgpack

from dilocox_peer.admission import MAX_GRANT_BYTES, MAX_REVOCATIONS_BYTES
from dilocox_peer.checkpoints import Checkpoint
from dilocox_peer.errors import ConfigError
from dilocox_peer.invitation import parse_multiaddr
from dilocox_peer.manifest import MAX_MANIFEST_BYTES
from dilocox_peer.signing import SIGNATURE_BYTES, public_key_of
from dilocox_peer.types import DIGEST_BYTES, Digest, PeerId, RunId, canonical, sha256

LEASE_TTL_S = 90.0
MAX_TTL_S = 120.0  # no record of ours may live longer
CLOCK_SKEW_S = 30.0  # by so much a writer's clock may be ahead of or behind a reader's

MAX_STAGES = 256
# A get returns the whole dictionary under a key from every holder, so a stage's peers are spread over several keys; with
# up to 64 of them (manifest limits.max_peers) each key has about 16.
BUCKETS = 4
MAX_LEASE_BYTES = 4096
MAX_WORD_BYTES = 256
MAX_ADDRESSES = 8
MAX_COUNT = 2**53  # counters and sizes above it are nonsense, and no longer exact as JSON numbers
MAX_PROTOCOL = 2**16

_FORMAT: Final = 1

Reachability = Literal["direct", "relayed"]
RecordKind = Literal["lease", "manifest", "revocations", "word"]


@dataclass(frozen=True, slots=True)
class Lease:
    """A peer's announcement that it serves a stage, or with has_left that it no longer does.

    incarnation: wall-clock milliseconds at its start; the newest is the peer. tokens_per_s: of its own training, 0 if
    unknown. link, link_addresses: the identity and addresses of its data plane, of a run with several stages; that they
    are its own is what the record's signature says. admission: its pass, of a run that takes the invited (admission.py).
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
    expires_s: float = 0.0

    def to_bytes(self) -> bytes:
        fields = [
            "lease", _FORMAT, self.stage, self.incarnation, list(self.addresses), self.protocol, float(self.tokens_per_s),
            self.memory_bytes, self.reachability, self.round, self.link or "", list(self.link_addresses), self.has_left,
            self.admission,
        ]  # fmt: skip
        return canonical(fields)

    @classmethod
    def from_bytes(cls, raw: bytes, *, peer: PeerId, expires_s: float) -> "Lease":
        """peer's lease. Raises ValueError with what is wrong."""
        fields = _unpack(raw, "lease", num_fields=12, max_bytes=MAX_LEASE_BYTES)
        stage, incarnation, addresses, protocol, tokens_per_s, memory_bytes, reachability, round_, *rest = fields
        link, link_addresses, has_left, admission = rest
        if type(addresses) is not list or len(addresses) > MAX_ADDRESSES:
            raise ValueError(f"addresses are no list of at most {MAX_ADDRESSES}")
        if type(link_addresses) is not list or len(link_addresses) > MAX_ADDRESSES:
            raise ValueError(f"link_addresses are no list of at most {MAX_ADDRESSES}")
        if type(tokens_per_s) is not float or not 0 <= tokens_per_s < math.inf:
            raise ValueError(f"tokens_per_s is {tokens_per_s!r}")
        if reachability not in ("direct", "relayed"):
            raise ValueError(f"reachability is {reachability!r}")
        if type(link) is not str or (link and not _is_peer_id(link)):
            raise ValueError(f"link is {link!r}")
        if type(has_left) is not bool:
            raise ValueError(f"has_left is {has_left!r}")
        if type(admission) is not bytes or len(admission) > MAX_GRANT_BYTES:
            raise ValueError(f"admission is no pass of at most {MAX_GRANT_BYTES} bytes")
        return cls(
            peer=peer,
            stage=_count("stage", stage, MAX_STAGES - 1),
            incarnation=_count("incarnation", incarnation),
            addresses=tuple(_address(address, peer) for address in addresses),
            protocol=_count("protocol", protocol, MAX_PROTOCOL),
            tokens_per_s=tokens_per_s,
            memory_bytes=_count("memory_bytes", memory_bytes),
            reachability=reachability,
            round=_count("round", round_),
            link=PeerId(link) if link else None,
            link_addresses=tuple(_address(address, PeerId(link)) for address in link_addresses),
            has_left=has_left,
            admission=admission,
            expires_s=expires_s,
        )


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
    return canonical(
        [
            "word", _FORMAT, word.stage, word.genesis, word.height, word.round, word.head, word.sequence, word.is_last,
            word.signature,
        ]
    )  # fmt: skip


def decode_word(raw: bytes) -> Checkpoint:
    """Not verified yet. Raises ValueError with what is wrong."""
    fields = _unpack(raw, "word", num_fields=8, max_bytes=MAX_WORD_BYTES)
    stage, genesis, height, round_, head, sequence, is_last, signature = fields
    for name, digest in (("genesis", genesis), ("head", head)):
        if type(digest) is not bytes or len(digest) != DIGEST_BYTES:
            raise ValueError(f"{name} is no digest of {DIGEST_BYTES} bytes")
    if type(is_last) is not bool:
        raise ValueError(f"is_last is {is_last!r}")
    if type(signature) is not bytes or len(signature) != SIGNATURE_BYTES:
        raise ValueError(f"signature is none of {SIGNATURE_BYTES} bytes")
    return Checkpoint(
        _count("stage", stage, MAX_STAGES - 1),
        Digest(genesis),
        _count("height", height),
        _count("round", round_),
        Digest(head),
        _count("sequence", sequence),
        is_last,
        signature,
    )


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


def slots(run_id: RunId) -> Iterator[Slot]:
    """Every key that exists in a run's directory."""
    yield Slot(manifest_key(run_id), "manifest")
    yield Slot(revocations_key(run_id), "revocations")
    for stage in range(MAX_STAGES):
        yield Slot(word_key(run_id, stage), "word", stage)
        for bucket in range(BUCKETS):
            yield Slot(lease_key(run_id, stage, bucket), "lease", stage, bucket)


def dht_id(key: str) -> bytes:
    """What hivemind shows of a key to those who store under it: SHA-1 of its msgpack, 20 bytes."""
    return hashlib.sha1(msgpack.packb(key, use_bin_type=True), usedforsecurity=False).digest()


def _unpack(raw: bytes, tag: str, *, num_fields: int, max_bytes: int) -> list[Any]:
    if len(raw) > max_bytes:
        raise ValueError(f"{tag} of {len(raw)} bytes, at most {max_bytes}")
    try:
        fields = msgpack.unpackb(raw, strict_map_key=True, max_array_len=16, max_map_len=0, max_ext_len=0)
    except (ValueError, msgpack.UnpackException) as error:
        raise ValueError(f"{tag} is unreadable: {error}") from None
    if type(fields) is not list or len(fields) != num_fields + 2 or fields[0] != tag:
        raise ValueError(f"no {tag} of {num_fields} fields")
    if type(fields[1]) is not int or fields[1] != _FORMAT:
        raise ValueError(f"{tag} of format {fields[1]!r}, this peer reads {_FORMAT}: update the older of the two")
    return fields[2:]


def _count(name: str, value: object, largest: int = MAX_COUNT) -> int:
    if type(value) is not int or not 0 <= value <= largest:
        raise ValueError(f"{name} is {value!r}, not a number from 0 to {largest}")
    return value


def _is_peer_id(text: str) -> bool:
    try:
        public_key_of(PeerId(text))
    except ValueError:
        return False
    return True


def _address(value: object, peer: PeerId) -> str:
    if type(value) is not str:
        raise ValueError(f"address {value!r} is no text")
    try:
        address = parse_multiaddr(value, "lease")
    except ConfigError as error:
        raise ValueError(str(error)) from None
    if address.peer != peer:
        raise ValueError(f"address {value!r} is another peer's")
    return address.text
