"""What a fold over a chain comes to, as the chain grows or becomes another branch. Pure.

Copies of what it came to at earlier places let it go back to the nearest before a fork, so that no fold begins anew at the first of a hundred
thousand certificates, and none keeps something of each.
"""

from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Generic, TypeVar

from dilocox_peer.types import Digest
from dilocox_peer.wire.chain import Certificate

COPIED_EVERY = 64  # certificates
COPIES = 16
READ_AT_ONCE = 8  # certificates, as older ones are read from a disk

T = TypeVar("T")


class Folded(Generic[T]):
    """`value`: of the chain as it was followed last."""

    def __init__(self, begin: Callable[[], T], take: Callable[[T, Certificate, Certificate | None], None]) -> None:
        """take: the next certificate, after the one before it (None: it is the first), into the value."""
        self._begin = begin
        self._take = take
        self._copies: deque[tuple[int, Digest | None, T]] = deque(maxlen=COPIES)
        self.value = begin()
        self.count = 0  # certificates followed
        self._head: Digest | None = None

    def follow(self, chain: Sequence[Certificate], most: int | None = None) -> bool:
        """Whether it is at the chain's end now. most: after certificates with so many entries in their rosters, an empty one counted as one, it
        stops, to be called again."""
        if not _holds(chain, self.count, self._head):
            self._go_back(chain)
        entries, before = 0, chain[self.count - 1] if self.count else None
        while self.count < len(chain):
            for certificate in chain[self.count : self.count + READ_AT_ONCE]:
                if most is not None:
                    if entries >= most:
                        return False
                    entries += max(1, len(certificate.value.roster))
                if self.count % COPIED_EVERY == 0:
                    self._copies.append((self.count, self._head, deepcopy(self.value)))
                self._take(self.value, certificate, before)
                before = certificate
                self.count, self._head = self.count + 1, certificate.head
        return self.count == len(chain)

    def _go_back(self, chain: Sequence[Certificate]) -> None:
        while self._copies:
            count, head, value = self._copies.pop()
            if _holds(chain, count, head):
                self.count, self._head, self.value = count, head, value
                return
        self.count, self._head, self.value = 0, None, self._begin()


def _holds(chain: Sequence[Certificate], count: int, head: Digest | None) -> bool:
    return count == 0 or (count <= len(chain) and chain[count - 1].head == head)
