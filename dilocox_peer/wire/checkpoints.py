"""What the run's owner vouches for: a stage's chain up to a head, signed with the key that signed the manifest. Pure values.

The owner's process (the bootstrap, which holds the key) signs one every few rounds, unattended. Of two chains the one
that holds the newest checkpoint counts (peer/rounds/forks.py); nobody leaves it for one that does not.
"""

from collections.abc import Callable
from typing import Annotated

from msgspec import Meta

from dilocox_peer.types import Digest, PeerId
from dilocox_peer.wire.declared import (
    MAX_SIGNATURE_BYTES,
    Declared,
    FromOne,
    Hash,
    Number,
    StageNumber,
    encode,
    replaced,
)


class Checkpoint(Declared, frozen=True):
    """The stage's chain has `head` at `height`; `round` outer rounds are done there, and with is_last all of the run's.

    genesis: of the stage, so that it counts in one run only. sequence: of two checkpoints of a stage the higher counts
    (wall-clock milliseconds at the signer).
    """

    stage: StageNumber
    genesis: Hash
    height: FromOne
    round: Number
    head: Hash
    sequence: Number
    is_last: bool
    signature: Annotated[bytes, Meta(min_length=1, max_length=MAX_SIGNATURE_BYTES)] = b""  # none before it is signed

    def signed_bytes(self) -> bytes:
        return encode(
            (
                "dilocox-checkpoint", self.stage, self.genesis, self.height, self.round, self.head, self.sequence,
                self.is_last,
            )
        )  # fmt: skip

    def why_not(
        self, *, stage: int, genesis: Digest, owner: PeerId, verify: Callable[[PeerId, bytes, bytes], bool]
    ) -> str | None:
        """Why it is none of owner's for this stage of this run, or None."""
        if self.stage != stage or self.genesis != genesis:
            return "a checkpoint of another stage or run"
        if not verify(owner, self.signed_bytes(), self.signature):
            return "a checkpoint that the run's owner has not signed"
        return None

    def is_newer(self, other: "Checkpoint | None") -> bool:
        return other is None or self.sequence > other.sequence


def sign_checkpoint(unsigned: Checkpoint, sign: Callable[[bytes], bytes]) -> Checkpoint:
    """The checkpoint with the signature of the owner's key."""
    return replaced(unsigned, signature=sign(unsigned.signed_bytes()))
