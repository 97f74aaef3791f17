"""What this peer has begun to train on, on disk before it does: killed and started again, it does not begin that anew."""

import json
from collections.abc import Sequence
from pathlib import Path

from dilocox_peer.data.allotment import Stretch, joined
from dilocox_peer.files import replace_file

_EPOCHS = 64
"""Kept; those before are over. Of few data what a peer has in hand is of many, and it takes the oldest first."""


class Taken:
    """Places of the row by epoch, as intervals that do not touch. One thread."""

    def __init__(self, path: Path) -> None:
        """A file that is not there, or damaged, is an empty one: `is_new` then."""
        self._path = path
        self._intervals: dict[int, list[tuple[int, int]]] = {}
        try:
            kept = json.loads(path.read_bytes())
            self._intervals = {int(epoch): [(int(a), int(b)) for a, b in each] for epoch, each in kept.items()}
            self.is_new = False
        except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            self.is_new = True

    def rest_of(self, stretch: Stretch, most: int) -> Stretch | None:
        """The first places of a stretch that were not taken, at most so many in one piece; None: all were, or its epoch is over."""
        if self._intervals and stretch.epoch <= max(self._intervals) - _EPOCHS:
            return None
        first, end = stretch.first, stretch.first + stretch.count
        for begin, stop in self._intervals.get(stretch.epoch, []):
            if stop <= first:
                continue
            if begin > first:
                end = min(end, begin)
                break
            first = stop
        count = min(end - first, most)
        return Stretch(stretch.epoch, first, count) if count > 0 else None

    def give_back(self, stretches: Sequence[Stretch]) -> None:
        """Of what was taken that nothing of it was trained on. Raises OSError: it is given back in memory alone."""
        for stretch in stretches:
            first, end = stretch.first, stretch.first + stretch.count
            kept = []
            for begin, stop in self._intervals.get(stretch.epoch, []):
                kept += [(a, b) for a, b in ((begin, min(stop, first)), (max(begin, end), stop)) if a < b]
            self._intervals[stretch.epoch] = kept
        self._write()

    def take(self, stretch: Stretch) -> None:
        """From here on it is taken, whatever becomes of the file. Raises OSError: it is not on disk, and the same peer started again may take
        it again, unless a later one is written, which has all."""
        merged = joined(self._intervals.get(stretch.epoch, []), stretch.first, stretch.first + stretch.count)
        intervals = {**self._intervals, stretch.epoch: merged}
        # first of all: who goes on in spite of a full disk must not be given the same again and again
        self._intervals = {epoch: intervals[epoch] for epoch in sorted(intervals)[-_EPOCHS:]}
        self._write()

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # not flushed to disk: it outlives the process, and a lost one costs a repetition
        replace_file(self._path, [json.dumps(self._intervals).encode()], mode=0o600, durable=False)
