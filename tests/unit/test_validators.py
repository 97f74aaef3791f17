from dataclasses import dataclass, replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox_peer.admission import Gate, Grant, Revocations, Right
from dilocox_peer.dht.records import (
    CLOCK_SKEW_S,
    LEASE_TTL_S,
    MAX_TTL_S,
    Lease,
    bucket_of,
    dht_id,
    lease_key,
    manifest_key,
    revocations_key,
    word_key,
)
from dilocox_peer.dht.validators import RecordValidator
from dilocox_peer.manifest import AdmissionSection, Manifest, RunSection
from dilocox_peer.signing import SigningKey
from dilocox_peer.types import PeerId, RunId
from dilocox_peer.wire.records import KEEPERS, MAX_LEASE_BYTES

NOW = 1_795_000_000.0
OWNER, KEY, OTHER = (SigningKey(bytes([n]) * 32) for n in (1, 2, 3))
MANIFEST = Manifest().signed_by(OWNER)
RUN = MANIFEST.run_id


@dataclass(frozen=True)
class Record:
    """As hivemind's DHTRecord."""

    key: bytes
    subkey: bytes
    value: bytes
    expiration_time: float


def validator(key: SigningKey | None = KEY, *, run: RunId = RUN, ahead_s: float = 0.0) -> RecordValidator:
    return RecordValidator(run, key, clock=lambda: NOW + ahead_s)


def lease_of(key: SigningKey, stage: int = 0) -> Lease:
    return Lease(
        peer=key.peer_id, stage=stage, incarnation=1, addresses=(), protocol=1, tokens_per_s=1.0, memory_bytes=1,
        reachability="direct", round=0,
    )  # fmt: skip


def record(
    key: str, value: bytes, writer: SigningKey | None = KEY, *, expires_s: float = NOW + LEASE_TTL_S, signer: Any = None
) -> Record:
    """As hivemind makes it of store(key, value, subkey=writer): value and subkey in msgpack, then signed."""
    subkey = msgpack.packb(writer.peer_id if writer else None)
    unsigned = Record(dht_id(key), subkey, msgpack.packb(value), expires_s)
    return replace(unsigned, value=validator(signer or writer).sign_value(unsigned))


def lease_record(writer: SigningKey = KEY, stage: int = 0, **options: Any) -> Record:
    lease = lease_of(writer, stage)
    return record(lease_key(RUN, stage, bucket_of(lease.peer)), lease.to_bytes(), writer, **options)


def test_own_records_are_valid_to_everybody() -> None:
    for good in (
        lease_record(),
        lease_record(stage=2),
        record(manifest_key(RUN), MANIFEST.to_bytes()),
    ):
        for reader in (validator(KEY), validator(OTHER), validator(None)):
            assert reader.refusal(good) is None
            assert reader.validate(good)  # again, from the cache
            assert msgpack.unpackb(reader.strip_value(good)) is not None


def test_a_record_without_subkey_is_refused() -> None:
    """It would replace everybody's records under the key."""
    key = lease_key(RUN, 0, bucket_of(KEY.peer_id))
    plain = Record(dht_id(key), msgpack.packb(None), msgpack.packb(b"HACK"), NOW + 60)
    assert validator().refusal(plain) == "the subkey is no PeerID"
    signed = replace(plain, value=plain.value + KEY.sign(b"anything"))
    assert not validator().validate(signed)
    assert not validator().validate(replace(lease_record(), subkey=msgpack.packb(None)))
    assert not validator().validate(replace(lease_record(), subkey=b""))


def test_a_foreign_write_is_refused() -> None:
    forged = lease_record(KEY, signer=OTHER)
    assert validator().refusal(forged) is not None
    own = lease_record(KEY)
    under_other = replace(own, subkey=msgpack.packb(OTHER.peer_id))
    assert not validator().validate(under_other)
    message_of_another = replace(own, value=own.value[:-64] + lease_record(OTHER).value[-64:])
    assert "not signed" in str(validator().refusal(message_of_another))


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_changed_byte_anywhere_is_refused(position: int, change: int) -> None:
    good = lease_record()
    raw = bytearray(good.value)
    raw[position % len(raw)] ^= change
    assert not validator().validate(replace(good, value=bytes(raw)))


def test_a_signature_is_bound_to_key_subkey_and_expiration() -> None:
    good = lease_record(stage=1)
    of_another_key = record(lease_key(RUN, 2, bucket_of(KEY.peer_id)), lease_of(KEY, stage=1).to_bytes())
    assert validator().validate(good)
    assert "not signed" in str(validator().refusal(replace(of_another_key, key=good.key)))
    assert not validator().validate(replace(good, expiration_time=good.expiration_time + 1))
    assert not validator().validate(replace(good, subkey=msgpack.packb(OTHER.peer_id)))


@pytest.mark.parametrize("ahead_s", [-CLOCK_SKEW_S, 0.0, CLOCK_SKEW_S])
def test_thirty_seconds_of_clock_skew_are_tolerated(ahead_s: float) -> None:
    for ttl_s in (LEASE_TTL_S, MAX_TTL_S):
        written = lease_record(expires_s=NOW + ahead_s + ttl_s)  # by a writer whose clock is so far ahead
        assert validator(OTHER).validate(written)
        written = lease_record(expires_s=NOW + ttl_s)
        assert validator(OTHER, ahead_s=ahead_s).validate(written)


@pytest.mark.parametrize(
    "expires_s", [NOW + MAX_TTL_S + CLOCK_SKEW_S + 1, NOW * 2, float("inf"), float("nan"), 0.0, -1.0]
)
def test_an_expiration_too_late_or_no_time_is_refused(expires_s: float) -> None:
    assert "expires" in str(validator().refusal(lease_record(expires_s=expires_s)))


def test_an_expiration_that_is_no_float_is_refused() -> None:
    for expires in (int(NOW), "soon", None, True):
        assert not validator().validate(replace(lease_record(), expiration_time=expires))  # type: ignore[arg-type]


def test_an_expired_record_is_the_readers_to_drop() -> None:
    assert validator().validate(lease_record(expires_s=NOW - 1))


def test_keys_of_others_do_not_exist() -> None:
    value = lease_of(KEY).to_bytes()
    for key in ("anything", lease_key(RunId("ab" * 32), 0, 0), lease_key(RUN, KEEPERS + 1, 0), lease_key(RUN, 0, 99)):
        assert validator().refusal(record(key, value)) == "the key is none of this run's"


def test_a_lease_belongs_to_its_own_stage_and_bucket() -> None:
    lease = lease_of(KEY, stage=1)
    bucket = bucket_of(KEY.peer_id)
    assert validator().validate(record(lease_key(RUN, 1, bucket), lease.to_bytes()))
    assert not validator().validate(record(lease_key(RUN, 0, bucket), lease.to_bytes()))
    assert not validator().validate(record(lease_key(RUN, 1, (bucket + 1) % 4), lease.to_bytes()))


def test_nothing_is_stored_of_stages_that_the_run_has_not() -> None:
    """They would be room that strangers alone fill."""
    reader, last = validator(None), MANIFEST.stages.count
    assert reader.refusal(lease_record(stage=last)) is None, "how many there are is not known yet"
    reader.know(MANIFEST)
    assert reader.refusal(lease_record(stage=last)) == f"the run has no stage {last}"
    assert "the run has no stage" in str(reader.refusal(record(word_key(RUN, last), b"")))
    assert reader.refusal(lease_record(stage=last - 1)) is None
    assert reader.refusal(lease_record(stage=KEEPERS)) is None


def test_a_value_is_of_the_kind_its_key_is_for() -> None:
    lease = lease_of(KEY).to_bytes()
    key = lease_key(RUN, 0, bucket_of(KEY.peer_id))
    for name, value in ((key, MANIFEST.to_bytes()), (manifest_key(RUN), lease), (word_key(RUN, 0), lease), (key, b"")):
        assert not validator().validate(record(name, value))


@pytest.mark.parametrize("value", [None, 1, "text", [b"x"], {"a": 1}, msgpack.ExtType(0x50, b"x")])
def test_a_value_that_is_no_byte_string_never_reaches_hiveminds_unpacking(value: object) -> None:
    subkey = msgpack.packb(KEY.peer_id)
    unsigned = Record(dht_id(lease_key(RUN, 0, bucket_of(KEY.peer_id))), subkey, msgpack.packb(value), NOW + 1)
    signed = replace(unsigned, value=validator().sign_value(unsigned))
    assert "value" in str(validator().refusal(signed))


def test_an_oversized_value_is_refused() -> None:
    assert not validator().validate(record(lease_key(RUN, 0, bucket_of(KEY.peer_id)), bytes(MAX_LEASE_BYTES + 1)))
    assert not validator().validate(record(manifest_key(RUN), bytes(100_000)))


def test_only_the_manifest_of_the_run_is_stored() -> None:
    other = Manifest(run=RunSection(name="other")).signed_by(OWNER)
    unsigned = (
        Manifest()
        .signed_by(OWNER)
        .model_copy(update={"owner": MANIFEST.owner.model_copy(update={"signature": "00" * 64})})
    )
    for manifest in (other, unsigned):
        assert not validator().validate(record(manifest_key(RUN), manifest.to_bytes()))
    assert validator(OTHER).validate(record(manifest_key(RUN), MANIFEST.to_bytes(), OTHER))  # anybody may hand it on


INVITE_ONLY = Manifest(admission=AdmissionSection(mode="invite")).signed_by(OWNER)
GATED = INVITE_ONLY.run_id


def gated() -> tuple[RecordValidator, Gate]:
    gate = Gate.of(INVITE_ONLY)
    assert gate is not None
    guard = validator(run=GATED)
    guard.set_gate(gate)
    return guard, gate


def pass_of(key: SigningKey, right: Right = Right.JOIN, *, expires_s: float = NOW + 100) -> bytes:
    grant = Grant(GATED, bytes(16), frozenset({right}), int(NOW * 1000) - 1, int(expires_s), key.peer_id, 0)
    return grant.signed_by(OWNER).to_bytes()


def gated_lease(shown: bytes) -> Record:
    lease = replace(lease_of(KEY), admission=shown)
    return record(lease_key(GATED, 0, bucket_of(KEY.peer_id)), lease.to_bytes())


def test_a_run_of_the_invited_stores_their_leases_and_learns_their_passes() -> None:
    guard, gate = gated()
    assert guard.refusal(gated_lease(pass_of(KEY))) is None
    assert gate.refusal(KEY.peer_id, Right.JOIN, NOW) is None


@pytest.mark.parametrize(
    ("shown", "reason"),
    [
        (b"", "shown no invitation"),
        (b"x" * 100, "an invitation: Expected `array`"),
        (pass_of(OTHER), "another peer"),
        (pass_of(KEY, Right.READ), "allows reading"),
        (pass_of(KEY, expires_s=NOW), "expired"),
    ],
)
def test_a_lease_without_a_pass_that_is_good_is_not_stored(shown: bytes, reason: str) -> None:
    assert reason in str(gated()[0].refusal(gated_lease(shown)))


def test_a_lease_of_one_who_was_put_out_is_not_stored_any_more() -> None:
    guard, gate = gated()
    assert guard.validate(gated_lease(pass_of(KEY)))
    gate.take(Revocations(GATED, 1, ((bytes(16), 1),)))
    assert "revoked" in str(guard.refusal(gated_lease(pass_of(KEY))))


def test_only_the_owners_revocations_are_stored_whoever_brings_them() -> None:
    guard, _ = gated()
    key = revocations_key(GATED)
    good = Revocations(GATED, 1, ((bytes(16), 1),))
    assert guard.refusal(record(key, good.signed_by(OWNER).to_bytes())) is None
    assert guard.refusal(record(key, good.signed_by(OWNER).to_bytes(), OTHER)) is None
    for bad in (good.signed_by(OTHER), good, replace(good, run_id=RUN).signed_by(OWNER)):
        assert not guard.validate(record(key, bad.to_bytes()))
    assert not guard.validate(record(key, bytes(100_000)))
    assert not validator().validate(record(revocations_key(RUN), good.signed_by(OWNER).to_bytes())), (
        "an open run has none"
    )


@given(st.binary(max_size=200), st.binary(max_size=100), st.binary(max_size=300), st.floats())
def test_no_record_raises(key: bytes, subkey: bytes, value: bytes, expires_s: float) -> None:
    for known in (key, dht_id(lease_key(RUN, 0, 0)), dht_id(manifest_key(RUN))):
        for name in (subkey, msgpack.packb(KEY.peer_id), msgpack.packb(PeerId("x"))):
            assert not SHARED.validate(Record(known, name, value, expires_s))
            assert not SHARED.validate(Record(known, name, value, NOW))


SHARED = validator()
