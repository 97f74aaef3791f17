"""What the torch thread takes its micro-batches from: a corpus held here, or a feed of shards."""

from typing import Protocol

from torch import Tensor

from dilocox_peer.types import PeerId


class BatchSource(Protocol):
    @property
    def is_ready(self) -> bool:
        """Whether a micro-batch is here. Where it is not, no new one is begun until `on_ready` was called."""

    def require_context(self, context: int) -> None:
        """Raises ConfigError if it has no sequence of that length."""

    def train_batch(
        self, *, seed: int, peer: PeerId, incarnation: int, round_number: int, index: int, batch: int, context: int
    ) -> tuple[Tensor, Tensor]:
        """(inputs, targets), (batch, context) int64 each, targets one token ahead."""
