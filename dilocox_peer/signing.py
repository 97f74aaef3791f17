"""Ed25519 signatures and the PeerID that contains its own public key.

Pure functions over bytes; the key file and its lock are peer/identity.py. PeerID form: libp2p's identity multihash of
the protobuf {type: Ed25519, data: public key}, i.e. 00 24 08 01 12 20 + 32 bytes, in base58 ("12D3Koo...").
"""

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from dilocox_peer.types import PeerId

SEED_BYTES = 32
PUBLIC_KEY_BYTES = 32
SIGNATURE_BYTES = 64
_PEER_ID_PREFIX = bytes.fromhex("002408011220")
_PEER_ID_MAX_CHARS = 64  # base58 of 38 bytes is 52 characters; refuse long strings before decoding them (quadratic)


class SigningKey:
    """An Ed25519 private key from its 32-byte seed. Never printed, never pickled."""

    def __init__(self, seed: bytes) -> None:
        if len(seed) != SEED_BYTES:
            raise ValueError(f"an Ed25519 seed has {SEED_BYTES} bytes, not {len(seed)}")
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.public_key = self._key.public_key().public_bytes(
            serialization.Encoding.Raw, serialization.PublicFormat.Raw
        )
        self.peer_id = peer_id_of(self.public_key)

    def sign(self, message: bytes) -> bytes:
        """64-byte signature of message."""
        return self._key.sign(message)


def peer_id_of(public_key: bytes) -> PeerId:
    """The PeerID that contains this 32-byte Ed25519 public key."""
    assert len(public_key) == PUBLIC_KEY_BYTES, len(public_key)
    return PeerId(base58.b58encode(_PEER_ID_PREFIX + public_key).decode())


def public_key_of(peer: PeerId) -> bytes:
    """The 32-byte public key inside a PeerID. Raises ValueError for anything but an Ed25519 PeerID."""
    if len(peer) > _PEER_ID_MAX_CHARS:
        raise ValueError(f"a PeerID has at most {_PEER_ID_MAX_CHARS} characters, not {len(peer)}")
    raw: bytes = base58.b58decode(peer)  # which passes over white space at the end: one key would have many names
    if (
        peer[-1:].isspace()
        or len(raw) != len(_PEER_ID_PREFIX) + PUBLIC_KEY_BYTES
        or not raw.startswith(_PEER_ID_PREFIX)
    ):
        raise ValueError(f"{peer} is not the PeerID of an Ed25519 key")
    return raw[len(_PEER_ID_PREFIX) :]


def public_key_in(peer_id: bytes) -> bytes | None:
    """The public key inside a PeerID's binary form; None for anything but an Ed25519 PeerID."""
    if len(peer_id) != len(_PEER_ID_PREFIX) + PUBLIC_KEY_BYTES or not peer_id.startswith(_PEER_ID_PREFIX):
        return None
    return peer_id[len(_PEER_ID_PREFIX) :]


def verify_key(public_key: bytes, message: bytes, signature: bytes) -> bool:
    """Whether signature is public_key's signature of message. Never raises for wrong bytes."""
    if len(public_key) != PUBLIC_KEY_BYTES or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def verify(peer: PeerId, message: bytes, signature: bytes) -> bool:
    """Whether signature is peer's signature of message. Never raises for wrong bytes."""
    try:
        public_key = public_key_of(peer)
    except ValueError:
        return False
    return verify_key(public_key, message, signature)
