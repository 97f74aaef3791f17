"""Whether what one neighbour sends, or is asked for, comes to nothing for the most part. Pure.

That a micro-batch comes to nothing at one callee says little of that callee, nor of the caller that passed it on: it may be the micro-batch, made so by the peer
it began with. So nobody pays for one. But somebody of whom most come to nothing gets none any more for a while, or a link that ends.
An honest peer that has honest work beside it never has most of it come to nothing; one that has none is of no use to anybody.
"""

from collections import OrderedDict, deque

from dilocox_peer.types import PeerId

REMEMBERED = 16  # micro-batches of a peer
LEAST_FRUITLESS = 4  # of those, before it can be most
MAX_PEERS = 512  # linked or not: a new link forgives nothing


class Outcomes:
    """Which of the last micro-batches of each peer came to nothing."""

    def __init__(self) -> None:
        self._of: OrderedDict[PeerId, deque[bool]] = OrderedDict()

    def fruitful(self, peer: PeerId) -> None:
        """One came to something."""
        self._past(peer).append(False)

    def fruitless(self, peer: PeerId) -> bool:
        """One came to nothing: whether most do."""
        past = self._past(peer)
        past.append(True)
        return sum(past) >= LEAST_FRUITLESS and 2 * sum(past) > len(past)

    def __len__(self) -> int:
        return len(self._of)

    def _past(self, peer: PeerId) -> deque[bool]:
        past = self._of.setdefault(peer, deque(maxlen=REMEMBERED))
        self._of.move_to_end(peer)
        while len(self._of) > MAX_PEERS:
            self._of.popitem(last=False)
        return past
