"""The running average of a stage's anchors: free, local, and nobody else's business. Pure.

Measured (benchmarks/BENCHMARKS.md): 0.03 % better than the last
anchor with 192 rounds, worse with 18; so it is offered beside the anchor and never in its place.
"""

from torch import Tensor

from dilocox_peer.peer.training.anchor_state import AnchorState


class AnchorAverage:
    """mean = decay * mean + (1 - decay) * anchor, a round at a time.

    Rounds that were passed over count as if their anchors had been the one that follows them, so how often one looks does
    not change how far back the average reaches. What came before the first anchor weighs nothing.
    """

    def __init__(self, decay: float) -> None:
        assert 0.0 <= decay < 1.0, decay
        self._decay = decay
        self._sum_N: Tensor | None = None
        self._weight = 0.0
        self._round = -1

    def take(self, state: AnchorState) -> None:
        """The next anchor; one of a round that was taken before changes nothing."""
        if state.round <= self._round:
            return
        kept = self._decay ** (state.round - self._round) if self._sum_N is not None else 0.0
        anchor_N = state.anchor_N()
        added = 1.0 - kept if self._sum_N is not None else 1.0 - self._decay
        self._sum_N = (
            anchor_N.mul_(added) if self._sum_N is None else self._sum_N.mul_(kept).add_(anchor_N, alpha=added)
        )
        self._weight = self._weight * kept + added
        self._round = state.round

    def mean_N(self) -> Tensor:
        """The average, as a new float32 vector. At least one anchor was taken."""
        assert self._sum_N is not None, "no anchor was taken"
        return self._sum_N / self._weight
