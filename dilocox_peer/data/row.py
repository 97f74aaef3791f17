"""A row's places in terms of shards, and the sequences that documents in a stretch of it make. Pure but for reading shards.

Best fit: packing.py. Concatenation: the documents of a chunk of units stand one behind the other, and are cut into sequences of `context` tokens with the
one that follows; each token is a target at most once. What is left of a chunk, less than a sequence, goes before the next chunk
that its peer takes. The sequences of a chunk are then mixed.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dilocox_peer.data.allotment import Row, Stretch, shard_order, unit_order
from dilocox_peer.data.catalogue import Catalogue, Shard
from dilocox_peer.data.packing import packed
from dilocox_peer.data.shards import OpenShard
from dilocox_peer.manifest import Packing
from dilocox_peer.types import canonical, sha256


@dataclass(frozen=True, slots=True)
class Unit:
    """number: of its shard's."""

    shard: Shard
    number: int


class UnitRow:
    """The units of a catalogue's training shards in the order of each epoch."""

    def __init__(self, catalogue: Catalogue, seed: int) -> None:
        # One that an epoch goes over several times stands there as often, each time with an order of its own.
        self._shards = tuple(shard for shard in catalogue.train for _ in range(shard.times))
        self._seed = seed
        self._orders: dict[int, tuple[npt.NDArray[np.int64], list[int]]] = {}
        self._within: dict[tuple[int, int], npt.NDArray[np.int64]] = {}
        self.row = Row(sum(shard.units for shard in self._shards))

    def units(self, stretch: Stretch) -> list[Unit]:
        return [self._unit(stretch.epoch, place) for place in range(stretch.first, stretch.first + stretch.count)]

    def shards(self, stretch: Stretch) -> list[Shard]:
        """Those that its units are of, in order."""
        order, ends = self._order(stretch.epoch)
        first = bisect_right(ends, stretch.first)
        last = bisect_right(ends, stretch.first + stretch.count - 1)
        return [self._shards[order[index]] for index in range(first, last + 1)]

    def shard_end(self, epoch: int, place: int) -> int:
        """Where the units of the next shard begin."""
        _, ends = self._order(epoch)
        return ends[bisect_right(ends, place)]

    def _unit(self, epoch: int, place: int) -> Unit:
        order, ends = self._order(epoch)
        index = bisect_right(ends, place)
        number = int(order[index])
        shard = self._shards[number]
        within = self._within.get((epoch, number))
        if within is None:
            if len(self._within) > 64:
                self._within.clear()
            within = unit_order(shard.units, seed=self._seed, epoch=epoch, shard=number)
            self._within[epoch, number] = within
        return Unit(shard, int(within[place - (ends[index] - shard.units)]))

    def _order(self, epoch: int) -> tuple[npt.NDArray[np.int64], list[int]]:
        """The order of the shards, and where each ends in the row."""
        if epoch not in self._orders:
            if len(self._orders) > 2:
                self._orders.clear()
            order = shard_order(len(self._shards), seed=self._seed, epoch=epoch)
            self._orders[epoch] = order, np.cumsum([self._shards[number].units for number in order]).tolist()
        return self._orders[epoch]


def sequences_of(
    units: Sequence[Unit],
    opened: Callable[[Shard], OpenShard],
    *,
    context: int,
    seed: int,
    stretch: Stretch,
    packing: Packing = "concatenate",
) -> npt.NDArray[np.int64]:
    """(count, context + 1) of the documents of these units, mixed; count may be 0. A token that is not trained on is -1 - token;
    sequences of such alone are left out. A pure function of shards and arguments. Raises OSError."""
    nothing = np.empty(0, np.int64)
    return sequences_and_rest(
        units, opened, context=context, seed=seed, stretch=stretch, packing=packing, before=nothing
    )[0]


def sequences_and_rest(
    units: Sequence[Unit],
    opened: Callable[[Shard], OpenShard],
    *,
    context: int,
    seed: int,
    stretch: Stretch,
    packing: Packing,
    before: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """As `sequences_of`, where documents are concatenated behind what was left before; and what is left now. Raises OSError."""
    rest = before[:0]
    pieces = []
    for unit in units:
        shard = opened(unit.shard)
        pieces += shard.documents(unit.number) if packing == "best-fit" else [shard.signed(*shard.unit(unit.number))]
    if packing == "best-fit":
        sequences = packed(pieces, context + 1)
    else:
        tokens = np.concatenate([before, *pieces])
        count = max(0, (len(tokens) - 1) // context)
        sequences = (
            np.lib.stride_tricks.sliding_window_view(tokens, context + 1)[::context][:count]
            if count
            else np.empty((0, context + 1), np.int64)
        )
        rest = tokens[count * context :].copy()  # its first token was the last target
    key = canonical(["dilocox-mix", seed, stretch.epoch, stretch.first, stretch.count])
    generator = np.random.Philox(key=np.frombuffer(sha256(key)[:16], dtype="<u8"))
    mixed: npt.NDArray[np.int64] = sequences[np.argsort(generator.random_raw(len(sequences)), kind="stable")]
    return mixed[(mixed[:, 1:] >= 0).any(axis=1)], rest
