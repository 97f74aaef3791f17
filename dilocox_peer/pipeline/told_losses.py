"""Which callees tell losses that are not those of the others. Pure.

The last stage alone computes a loss, and whoever is before it can only pass on what it is told. It trains nobody, but it is what volunteers see, and what
is certified of a round. Micro-batches of one moment differ, but the medians of what two honest replicas tell hardly do: so one whose median is far from those
of more than half of the others, and of two at least, counts as telling none. Of two callees nobody can say which one lies, and one alone is believed.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Container
from dataclasses import dataclass, field
from statistics import median

from dilocox_peer.types import PeerId

REMEMBERED = 16  # losses of a callee
LEAST_TOLD = 8  # by a callee, before it is compared
FRESH = 128  # losses that all have told since the last of a callee: training goes on, and losses fall
MAX_PEERS = 256
APART, LEAST_APART = 1.5, 0.1  # times, and nats: further apart medians of honest replicas are not
LEAST_AGAINST = 2  # others


@dataclass(slots=True)
class _Said:
    """By one callee."""

    losses: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    latest: int = 0


class ToldLosses:
    """What callees have told."""

    def __init__(self) -> None:
        self._said: OrderedDict[PeerId, _Said] = OrderedDict()
        self._count = 0

    def heard(self, peer: PeerId, loss: float, *, among: Container[PeerId]) -> float:
        """The loss, or NaN if peer is not to be believed. among: the callees that there are."""
        if math.isnan(loss):
            return loss
        self._count += 1
        said = self._said.setdefault(peer, _Said())
        said.losses.append(loss)
        said.latest = self._count
        self._said.move_to_end(peer)
        while len(self._said) > MAX_PEERS:
            self._said.popitem(last=False)
        return math.nan if self._is_unlike(peer, among) else loss

    def _is_unlike(self, peer: PeerId, among: Container[PeerId]) -> bool:
        medians = {
            each: median(said.losses)
            for each, said in self._said.items()
            if each in among and len(said.losses) >= LEAST_TOLD and self._count - said.latest < FRESH
        }
        own = medians.pop(peer, None)
        if own is None:
            return False
        against = sum(_are_apart(own, each) for each in medians.values())
        return against >= LEAST_AGAINST and 2 * against > len(medians)


def _are_apart(one: float, other: float) -> bool:
    low, high = sorted((one, other))
    return high > APART * low and high - low > LEAST_APART
