"""A key has one PeerID, to the byte: whoever counts peers by their names counts no key twice."""

from types import SimpleNamespace

import msgpack
import pytest

from dilocox_peer.config import preset
from dilocox_peer.dht.records import Lease, bucket_of, dht_id, lease_key
from dilocox_peer.dht.validators import RecordValidator, signed_bytes
from dilocox_peer.errors import ConfigError
from dilocox_peer.peer.rounds.chain import Place, vote_for
from dilocox_peer.signing import SigningKey, verify
from dilocox_peer.types import Digest, PeerId, RunId
from dilocox_peer.wire.chain import Certificate, Plan, acceptance

KEY = SigningKey(b"k" * 32)
ALIASES = [PeerId(KEY.peer_id + end) for end in (" ", "  ", "\n", "\t ", "\u2003")]


@pytest.mark.parametrize("alias", [*ALIASES, *(each[-1] + KEY.peer_id for each in ALIASES), "1" + KEY.peer_id])
def test_nobody_signs_under_another_name(alias: str) -> None:
    assert verify(KEY.peer_id, b"m", KEY.sign(b"m"))
    assert not verify(PeerId(alias), b"m", KEY.sign(b"m"))


def test_a_key_writes_under_one_subkey() -> None:
    run, found = RunId("ab" * 32), []
    validator = RecordValidator(run, None, lambda: 1000.0)
    for alias in (KEY.peer_id, *ALIASES):
        key, subkey = dht_id(lease_key(run, 0, bucket_of(alias))), msgpack.packb(alias)
        value = msgpack.packb(Lease(alias, 0, 1, (), 1, 1e9, 0, "direct", 1).to_bytes())
        signature = KEY.sign(signed_bytes(key, subkey, value, 1050.0))
        record = SimpleNamespace(key=key, subkey=subkey, value=value + signature, expiration_time=1050.0)
        if validator.validate(record):
            found.append(alias)
    assert found == [KEY.peer_id]


def test_a_member_is_listed_by_its_name() -> None:
    with pytest.raises(ConfigError):
        preset("tiny", admission={"mode": "list", "members": [KEY.peer_id + " "]})


def test_one_signer_is_no_quorum() -> None:
    roster = (KEY.peer_id, *ALIASES[:2])
    plan = Plan("int4", 0, 8)
    place = Place(0, Digest(b"h" * 32), 1, 1, 1, 1, roster, plan, voters=roster)
    value = place.round_value((), roster)
    vote = acceptance(0, place.head, 1, 0, value)
    votes = tuple((peer, vote_for(vote, number, KEY.sign)) for number, peer in enumerate(roster))
    certificate = Certificate(0, place.head, 1, 0, value, votes)
    assert place.why_not_certificate(certificate, verify, 64) is not None
