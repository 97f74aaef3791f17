"""Which records a node of the directory stores and believes. Pure, but for the clock it is given.

hivemind asks this for every record it is to store or was sent: key hash, subkey, value, expiration. The rules:
V1 only keys of this run exist (the DHT is no storage for others); V2 a record has a subkey, and it is its writer's PeerID (a
record without one would replace the whole dictionary of everybody's records [m]); V3 the value ends with that peer's
signature over key, subkey, value and expiration; V4 it expires within MAX_TTL_S, a clock skew allowed; V5 the value is what
the key is for, in its schema and size; V6 of a run that is not open, once its manifest is known (`set_gate`): leases and hints are
those of peers that may join, and revocations are the owner's; V7 the owner's word on a stage (a checkpoint) is signed by the run's
owner too, whoever hands it on, and no older than the newest known here; V8 so is a directive; V9 once the manifest is known nothing lies under
stages that the run has not: they would be room for strangers alone. A record that has expired is not refused: readers drop it, and refusing it here
would make one peer's lateness everybody's, because hivemind refuses a dictionary whole.
"""

import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

import msgpack

from dilocox_peer.admission import Gate, Revocations, Right
from dilocox_peer.dht.records import (
    LATEST_S,
    Lease,
    ManifestRecord,
    RevocationsRecord,
    Slot,
    bucket_of,
    decode_word,
    dht_id,
    slots,
)
from dilocox_peer.errors import ManifestMismatch
from dilocox_peer.manifest import MAX_MANIFEST_BYTES, Manifest
from dilocox_peer.signing import SIGNATURE_BYTES, SigningKey, verify
from dilocox_peer.types import PeerId, RunId, canonical, sha256
from dilocox_peer.wire.directives import read_directive, why_not_directive
from dilocox_peer.wire.records import KEEPERS

_MAX_SUBKEY_BYTES = 80
_MAX_VALUE_BYTES = MAX_MANIFEST_BYTES + 8 + SIGNATURE_BYTES  # msgpack's head of a byte string is at most 5
_CACHED_RECORDS = 4096  # a get returns the same records from every holder; a verification is ~0.1 ms, a hash 2 us


class RecordLike(Protocol):
    """hivemind.dht.validation.DHTRecord."""

    @property
    def key(self) -> bytes: ...
    @property
    def subkey(self) -> bytes: ...
    @property
    def value(self) -> bytes: ...
    @property
    def expiration_time(self) -> float: ...


class RecordValidator:
    """hivemind's RecordValidatorBase, by its methods. key: signs our own records; None for a mere reader."""

    priority = 0

    def __init__(self, run_id: RunId, key: SigningKey | None, clock: Callable[[], float]) -> None:
        self._run_id = run_id
        self.key = key
        self._clock = clock
        self._slots = {dht_id(slot.key): slot for slot in slots(run_id)}
        self._verified: OrderedDict[bytes, None] = OrderedDict()
        self._gate: Gate | None = None
        self._manifest: Manifest | None = None
        self._newest_directive = 0
        self._newest_words: dict[int, int] = {}  # sequence of the newest checkpoint of each stage

    def set_gate(self, gate: Gate) -> None:
        """The run is not open: from here on the gate is asked. It learns the passes in the leases."""
        self._gate = gate

    def validate(self, record: RecordLike) -> bool:
        """Whether record may be stored or believed."""
        return self.refusal(record) is None

    def refusal(self, record: RecordLike) -> str | None:
        """Why record is refused, None if it is not. Cheap checks come first."""
        slot = self._slots.get(record.key)
        if slot is None:
            return "the key is none of this run's"
        if self._manifest is not None and slot.stage != KEEPERS and slot.stage >= self._manifest.stages.count:
            return f"the run has no stage {slot.stage}"
        latest = self._clock() + LATEST_S
        if type(record.expiration_time) is not float or not 0 < record.expiration_time <= latest:
            return f"it expires at {record.expiration_time!r}, later than {latest:.0f} or not a time"
        if len(record.subkey) > _MAX_SUBKEY_BYTES or len(record.value) > _MAX_VALUE_BYTES:
            return f"subkey of {len(record.subkey)} bytes, value of {len(record.value)} bytes"
        writer = _writer(record.subkey)
        if writer is None:
            return "the subkey is no PeerID"
        value, signature = record.value[:-SIGNATURE_BYTES], record.value[-SIGNATURE_BYTES:]
        message = signed_bytes(record.key, record.subkey, value, record.expiration_time)
        digest = sha256(b"record", signature, message)  # of all that the rest depends on
        if (
            digest in self._verified and slot.kind not in ("word", "directive") and not self._may_be_out(slot, writer)
        ):  # they grow old
            self._verified.move_to_end(digest)
            return None
        try:
            self._check_value(slot, writer, value, record.expiration_time)
        except ValueError as error:
            return str(error)
        if not verify(writer, message, signature):
            return f"not signed by {writer}"
        self._remember(digest)
        return None

    def sign_value(self, record: RecordLike) -> bytes:
        """The value with our signature; a record that is not ours stays as it is, and is refused by everybody."""
        if self.key is None or _writer(record.subkey) != self.key.peer_id:
            return record.value
        message = signed_bytes(record.key, record.subkey, record.value, record.expiration_time)
        return record.value + self.key.sign(message)

    def strip_value(self, record: RecordLike) -> bytes:
        """The value of a valid record without its signature."""
        return record.value[:-SIGNATURE_BYTES]

    def merge_with(self, other: object) -> bool:
        return False

    def _check_value(self, slot: Slot, writer: PeerId, value: bytes, expires_s: float) -> None:
        payload = unwrap(value)
        match slot.kind:
            case "lease":
                lease = Lease.from_bytes(payload, peer=writer, expires_s=expires_s)
                if lease.stage != slot.stage or bucket_of(writer) != slot.bucket:
                    raise ValueError(f"a lease of stage {lease.stage} does not belong under {slot.key}")
                self._check_admission(writer, lease.admission)
            case "manifest":
                self._check_manifest(payload)
            case "revocations":
                self._check_revocations(payload)
            case "word":
                self.check_word(payload, slot.stage)
            case "directive":
                self._check_directive(payload)

    def _may_be_out(self, slot: Slot, writer: PeerId) -> bool:
        """Whether the gate does not let writer in, by what it has been shown: what was verified once is looked at again."""
        if self._gate is None or slot.kind != "lease":
            return False
        return self._gate.refusal(writer, Right.JOIN, self._clock()) is not None

    def _check_admission(self, writer: PeerId, shown: bytes) -> None:
        if self._gate is None:
            return
        now = self._clock()
        reason = (self._gate.show(writer, shown, now) if shown else None) or self._gate.refusal(writer, Right.JOIN, now)
        if reason is not None:
            raise ValueError(f"{writer} is not admitted: {reason}")

    def _check_manifest(self, payload: bytes) -> None:
        digest = sha256(b"manifest", payload)
        if digest in self._verified:
            return
        try:
            self.know(Manifest.from_bytes(ManifestRecord.from_bytes(payload).manifest, run_id=self._run_id))
        except ManifestMismatch as error:
            raise ValueError(str(error)) from None
        self._remember(digest)

    def _check_revocations(self, payload: bytes) -> None:
        raw = RevocationsRecord.from_bytes(payload).revocations
        if self._gate is None:
            raise ValueError("revocations of a run that is open, or whose manifest is not here yet")
        digest = sha256(b"revocations", payload)
        if digest not in self._verified:
            Revocations.from_bytes(raw, run_id=self._run_id, owner=self._gate.owner)
            self._remember(digest)

    def know(self, manifest: Manifest) -> None:
        """The run's settings, verified: from here on what its owner has signed can be told from what not."""
        self._manifest = manifest

    def check_word(self, payload: bytes, stage: int) -> None:
        """Raises ValueError unless the run's owner has signed it for that stage."""
        word, manifest = decode_word(payload), self._manifest
        if manifest is None or manifest.owner_peer is None:
            raise ValueError("the owner's word, before the run's settings are known here")
        digest = sha256(b"word", payload)
        if digest not in self._verified:
            if reason := word.why_not(
                stage=stage, genesis=manifest.genesis(stage), owner=manifest.owner_peer, verify=verify
            ):
                raise ValueError(reason)
            self._remember(digest)
        if word.sequence < self._newest_words.get(stage, 0):
            raise ValueError("an older word of the owner's than one that is known here")
        self._newest_words[stage] = word.sequence

    def _check_directive(self, payload: bytes) -> None:
        directive, manifest = read_directive(payload), self._manifest
        if manifest is None or manifest.owner_peer is None:
            raise ValueError("a directive, before the run's settings are known here")
        digest = sha256(b"directive", payload)
        if digest not in self._verified:
            if reason := why_not_directive(directive, run=manifest.digest, owner=manifest.owner_peer, verify=verify):
                raise ValueError(reason)
            self._remember(digest)
        if directive.number < self._newest_directive:
            raise ValueError("an older directive of the owner's than one that is known here")
        self._newest_directive = directive.number

    def _remember(self, digest: bytes) -> None:
        self._verified[digest] = None
        while len(self._verified) > _CACHED_RECORDS:
            self._verified.popitem(last=False)


def signed_bytes(key: bytes, subkey: bytes, value: bytes, expires_s: float) -> bytes:
    """What the writer of a record signs."""
    return canonical(["dilocox-record", key, subkey, value, struct.pack(">d", expires_s)])


def unwrap(value: bytes) -> bytes:
    """The bytes in the one msgpack byte string that a value must be (hivemind unpacks it unchecked). Raises ValueError."""
    try:
        payload = msgpack.unpackb(
            value, max_bin_len=MAX_MANIFEST_BYTES, max_str_len=0, max_array_len=0, max_map_len=0, max_ext_len=0
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise ValueError(f"the value is unreadable: {error}") from None
    if type(payload) is not bytes:
        raise ValueError("the value is no byte string")
    return payload


def _writer(subkey: bytes) -> PeerId | None:
    try:
        name = msgpack.unpackb(subkey, max_str_len=64, max_bin_len=0, max_array_len=0, max_map_len=0, max_ext_len=0)
    except (ValueError, msgpack.UnpackException):
        return None
    return PeerId(name) if type(name) is str else None
