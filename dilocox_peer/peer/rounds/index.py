"""Where what is in a chain's blocks (past.py) is found: heads by their heights, heights by their heads, and what a block begins with.

It lies beside the blocks in a file without a name, made anew at each start from what they hold: on the disk 32 bytes of each certificate and
the place where each block begins, as a place has the results of all slices. In memory stay a hash table of heights, 5 to 11 bytes a certificate, and
16 bytes a block: a table of whole heads would be ten times as much, and grow with the run.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence

from dilocox_peer.peer.rounds.past import BlockStore
from dilocox_peer.types import DIGEST_BYTES, Digest

LEAST_SLOTS = 1024
MOST_FULL = 0.75  # of the table's slots: fuller ones are looked through for long


class Index:
    """Of blocks in a row, the first of which begins at genesis. One thread adds and cuts; others may ask for what is there to stay. Reading
    may raise OSError."""

    def __init__(self, beside: BlockStore) -> None:
        """beside: where the blocks lie."""
        self._beside = beside
        self._store: BlockStore | None = None
        self._firsts = array("Q")  # of each block the height at which it begins
        self._at = array("Q")  # where it is in the store
        self._count = 0  # heads
        self._slots = array("I", bytes(4 * LEAST_SLOTS))  # 1 + height, 0: free; of heights that were cut some are left
        self._used = 0

    @property
    def size_bytes(self) -> int:
        """In memory."""
        return sum(len(each) * each.itemsize for each in (self._firsts, self._at, self._slots))

    def add(self, heads: Sequence[Digest], start: bytes) -> None:
        """heads: those that the next block's certificates follow. start: what it begins with. Raises OSError: nothing is added."""
        if self._store is None:
            self._store = self._beside.aside()
        if self._used + len(heads) > MOST_FULL * len(self._slots):
            self._rebuild(len(heads))
        at = self._store.append(b"".join([*heads, len(start).to_bytes(4, "big"), start]))
        first = self._count
        self._at.append(at)
        self._firsts.append(first)
        for height, head in enumerate(heads, first):
            _put(self._slots, height, head)
        self._used += len(heads)
        self._count += len(heads)

    def cut(self, blocks: int) -> None:
        """Only so many stay."""
        if blocks < len(self._firsts):
            self._count = self._firsts[blocks]
            del self._firsts[blocks:]
            del self._at[blocks:]

    def start(self, index: int) -> bytes:
        """What the block begins with."""
        at = self._at[index] + DIGEST_BYTES * (self._stop(index) - self._firsts[index])
        return self._read(at + 4, int.from_bytes(self._read(at, 4), "big"))

    def head_at(self, height: int) -> Digest:
        index = bisect_right(self._firsts, height) - 1
        return Digest(self._read(self._at[index] + DIGEST_BYTES * (height - self._firsts[index]), DIGEST_BYTES))

    def height_of(self, head: Digest) -> int | None:
        """None: it is in no block."""
        slots = self._slots
        at = hash(head) % len(slots)
        while found := slots[at]:
            if found <= self._count and self.head_at(found - 1) == head:
                return found - 1
            at = (at + 1) % len(slots)
        return None

    def _stop(self, index: int) -> int:
        return self._firsts[index + 1] if index + 1 < len(self._firsts) else self._count

    def _read(self, at: int, size_bytes: int) -> bytes:
        assert self._store is not None, "an index of no block"
        return self._store.read(at, size_bytes)

    def _rebuild(self, more: int) -> None:
        """With room for more heads than now, and without those that were cut."""
        size = LEAST_SLOTS
        while self._count + more > MOST_FULL * size:
            size *= 2
        slots = array("I", bytes(4 * size))
        for height, head in enumerate(self._heads()):
            _put(slots, height, head)
        self._slots, self._used = slots, self._count

    def _heads(self) -> Iterator[Digest]:
        for index, first in enumerate(self._firsts):
            raw = self._read(self._at[index], DIGEST_BYTES * (self._stop(index) - first))
            for at in range(0, len(raw), DIGEST_BYTES):
                yield Digest(raw[at : at + DIGEST_BYTES])


def _put(slots: "array[int]", height: int, head: Digest) -> None:
    at = hash(head) % len(slots)  # salted by Python, so that nobody makes heads that are slow to find
    while slots[at]:
        at = (at + 1) % len(slots)
    slots[at] = 1 + height
