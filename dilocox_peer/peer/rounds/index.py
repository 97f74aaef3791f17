"""Where what is in a chain's blocks (past.py) is found: heads by their heights, heights by their heads, and what a block begins with.

It lies beside the blocks in a file without a name, made anew at each start from what they hold: on the disk 32 bytes of each certificate and
the place where each block begins, as a place has the results of all slices. In memory stay a hash table of heights, 5 to 11 bytes a certificate (half as
much again while it is moved), and 16 bytes a block: a table of whole heads would be ten times as much, and grow with the run. A table that is full is moved to one of twice the size
with the blocks that come, some heights with each: at once, a million took most of a second, in which the event loop stood still.
"""

from array import array
from bisect import bisect_right
from collections.abc import Sequence

from dilocox_peer.peer.rounds.past import BlockStore
from dilocox_peer.types import DIGEST_BYTES, Digest

LEAST_SLOTS = 1024
MOST_FULL = 0.75  # of the table's slots: fuller ones are looked through for long
MOVED = 4  # heights out of a table that was full, for each that is added: more than one, so that it is empty before the next one is full


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
        self._full = array("I")  # the table before, as long as some of its heights are not in the new one
        self._moved = self._to_move = 0  # heights below are in the new one; those from there on always were

    @property
    def size_bytes(self) -> int:
        """In memory."""
        return sum(len(each) * each.itemsize for each in (self._firsts, self._at, self._slots, self._full))

    def add(self, heads: Sequence[Digest], start: bytes) -> None:
        """heads: those that the next block's certificates follow. start: what it begins with. Raises OSError: nothing is added."""
        if self._store is None:
            self._store = self._beside.aside()
        if self._used + len(heads) > MOST_FULL * len(self._slots):
            self._enlarge(len(heads))
        self._move(MOVED * len(heads))
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
            self._to_move = min(self._to_move, self._count)
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
        for slots in (self._slots, self._full):
            if slots and (height := self._sought(slots, head)) is not None:
                return height
        return None

    def _sought(self, slots: "array[int]", head: Digest) -> int | None:
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

    def _enlarge(self, more: int) -> None:
        """A table with room for more heads than now; those that were cut will not be in it."""
        self._move(self._to_move - self._moved)
        size = LEAST_SLOTS
        while self._count + more > MOST_FULL * size:
            size *= 2
        self._full, self._slots = self._slots, array("I", bytes(4 * size))
        self._used = self._count
        self._moved, self._to_move = 0, self._count

    def _move(self, most: int) -> None:
        """So many heights at most out of the full table; the last ones let it go. Raises OSError: some may come twice then, which does no harm."""
        stop = min(self._moved + most, self._to_move)
        while self._moved < stop:
            index = bisect_right(self._firsts, self._moved) - 1
            first, last = self._moved, min(stop, self._stop(index))
            raw = self._read(
                self._at[index] + DIGEST_BYTES * (first - self._firsts[index]), DIGEST_BYTES * (last - first)
            )
            for height, at in enumerate(range(0, len(raw), DIGEST_BYTES), first):
                _put(self._slots, height, Digest(raw[at : at + DIGEST_BYTES]))
            self._moved = last
        if self._moved >= self._to_move:
            self._full = array("I")


def _put(slots: "array[int]", height: int, head: Digest) -> None:
    at = hash(head) % len(slots)  # salted by Python, so that nobody makes heads that are slow to find
    while slots[at]:
        at = (at + 1) % len(slots)
    slots[at] = 1 + height
