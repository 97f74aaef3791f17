"""Micro-batches of a run's shards, made ready ahead by a thread of their own: the torch thread takes them and does not wait.

What to train on is handed out by certificates (allotment.py) and arrives in `hand`; until something does, the peer takes from the
commons. Units whose shards are not here yet are passed over for others whose are, and tried again when `look_again` is called.
"""

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dilocox_peer.data.allotment import Stretch
from dilocox_peer.data.catalogue import UNIT_TOKENS, Shard
from dilocox_peer.data.held_out import inputs_and_targets
from dilocox_peer.data.row import UnitRow, sequences_and_rest
from dilocox_peer.data.shards import OpenShard, ShardFolders
from dilocox_peer.data.taken import Taken
from dilocox_peer.events import Listener
from dilocox_peer.events_of_data import DataTaken, ShardRefused
from dilocox_peer.manifest import Packing
from dilocox_peer.types import PeerId

READY = 32  # micro-batches: seconds of work, over which a disk may be slow
CHUNK_BATCHES = 16  # micro-batches that a chunk is taken for, at least
TRY_AGAIN_S = 1.0
WAIT_S = 600.0  # of the torch thread, for a micro-batch that was promised
AHEAD_SHARDS = 4
MAX_LANES = 64  # units of the commons that one look is at
MAX_PASSED_OVER = 256  # shards looked at for one that is here
COMMONS_AFTER_S = 15.0
"""After the start: in a roster by then, as founders are, a peer needs nothing of the commons, where others may be."""
IN_VAIN_S = 60.0
"""Without anything of what was handed out: its shards are here damaged, and with nobody else. Then the commons are taken from too."""


@dataclass(frozen=True, slots=True)
class Handed:
    """What a peer may take, oldest first, and the epoch that the run is in."""

    epoch: int = 0
    stretches: tuple[Stretch, ...] = ()


class Feed:
    """`start`, then `train_batch` from one thread; `hand` and `look_again` from any."""

    def __init__(
        self,
        row: UnitRow,
        shards: ShardFolders,
        taken: Taken,
        *,
        seed: int,
        peer: PeerId,
        incarnation: int,
        batch: int,
        context: int,
        packing: Packing = "concatenate",
        listener: Listener,
    ) -> None:
        """listener: called from the feed's own thread."""
        self._row, self._shards, self._taken = row, shards, taken
        self._seed, self._peer, self._incarnation = seed, peer, incarnation
        self._batch, self._context, self._packing = batch, context, packing
        self._listener = listener
        self._handed = Handed()
        self._ready: queue.Queue[npt.NDArray[np.int64]] = queue.Queue(READY)
        self._changed = threading.Event()
        self._stopping = False
        self._failure: str | None = None
        self._waiting: deque[npt.NDArray[np.int64]] = deque()  # sequences that are in no micro-batch yet
        self._rest = np.empty(0, np.int64)  # tokens that were too few for a sequence
        self._made = 0  # sequences
        # The newest, each with how many sequences were made before it.
        self._chunks: deque[tuple[int, Stretch]] = deque()
        self._lanes = 0
        self._faults: set[str] = set()
        self._units = max(1, -(-CHUNK_BATCHES * batch * context // UNIT_TOKENS))
        self.on_ready: Callable[[], None] = lambda: None
        self._commons_from = self._in_vain_from = math.inf
        self.waited_s = 0.0  # of the torch thread, in all
        self.wanted: tuple[Shard, ...] = ()  # that are needed next and are not here, in that order
        self._thread = threading.Thread(target=self._work, name="dilocox-data", daemon=False)

    def start(self) -> None:
        self._commons_from = time.monotonic() + COMMONS_AFTER_S
        self._in_vain_from = time.monotonic() + IN_VAIN_S
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        self._stopping = True
        self._changed.set()
        if self._thread.ident is None:
            return
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            with suppress(OSError):  # it stays written down as taken
                self._give_back()

    def _give_back(self) -> None:
        """Chunks of which nothing was drawn. What is taken out of the queue here nobody draws."""
        left = len(self._waiting)
        with suppress(queue.Empty):
            while True:
                left += len(self._ready.get_nowait())
        drawn = self._made - left
        if unused := [chunk for first, chunk in self._chunks if first >= drawn]:
            self._taken.give_back(unused)

    def hand(self, handed: Handed) -> None:
        """What this peer may take from now on; what it has taken before stays taken."""
        if handed != self._handed:
            self._handed = handed
            self._changed.set()

    def look_again(self) -> None:
        """Shards have come."""
        self._changed.set()

    @property
    def is_ready(self) -> bool:
        """Whether `train_batch` gives one at once, or says why there will be none."""
        return not self._ready.empty() or self._failure is not None

    def require_context(self, context: int) -> None:
        """Any shard has sequences of any context; one too short for it is passed over."""

    def train_batch(
        self, *, seed: int, peer: PeerId, incarnation: int, round_number: int, index: int, batch: int, context: int
    ) -> tuple[Tensor, Tensor]:
        """(inputs, targets), (batch, context) int64 each: the next one, whatever its number. Raises RuntimeError after WAIT_S."""
        assert (seed, peer, batch, context) == (self._seed, self._peer, self._batch, self._context)
        started = time.perf_counter()
        deadline = started + WAIT_S
        while True:
            try:
                sequences = self._ready.get(timeout=1.0)
                break
            except queue.Empty:
                if self._failure is not None:
                    raise RuntimeError(self._failure) from None
                if self._stopping or time.perf_counter() > deadline:
                    raise RuntimeError(f"no data came within {WAIT_S:.0f} s") from None
        self.waited_s += time.perf_counter() - started
        return inputs_and_targets(sequences)

    # ---- in the feed's thread ----------------------------------------------------------------------------------------

    def _work(self) -> None:
        torch.set_num_threads(1)
        try:
            self._keep_feeding()
        except Exception as error:  # the boundary of the thread: the trainer is told when it asks for the next batch
            self._failure = f"reading the data failed: {type(error).__name__}: {error}"
            self.on_ready()

    def _keep_feeding(self) -> None:
        waiting = self._waiting
        while not self._stopping:
            while len(waiting) < self._batch and not self._stopping:
                sequences = self._next_chunk()
                waiting.extend(sequences)
                self._made += len(sequences)
                self._forget_drawn()
            if self._stopping:
                return
            batch = np.stack([waiting[number] for number in range(self._batch)])
            while not self._stopping:
                try:
                    self._ready.put(batch, timeout=0.5)
                except queue.Full:
                    continue
                for _ in range(self._batch):
                    waiting.popleft()
                self.on_ready()
                break

    def _forget_drawn(self) -> None:
        at_least_drawn = self._made - len(self._waiting) - READY * self._batch
        while len(self._chunks) > 1 and self._chunks[1][0] < at_least_drawn:
            self._chunks.popleft()

    def _next_chunk(self) -> npt.NDArray[np.int64]:
        """Sequences of what is taken next; none where that and what was left before hold less than one, or there was nothing to take yet."""
        chunk = self._choose()
        if chunk is None:
            self._changed.wait(TRY_AGAIN_S)
            self._changed.clear()
            return self._none()
        units = self._row.units(chunk)
        opened = {unit.shard.sha256: found for unit in units if (found := self._find(unit.shard)) is not None}
        if any(unit.shard.sha256 not in opened for unit in units):
            return self._none()  # it was here a moment ago, and made room for another: the next look finds out
        try:
            sequences, self._rest = sequences_and_rest(
                units,
                lambda shard: opened[shard.sha256],
                context=self._context,
                seed=self._seed,
                stretch=chunk,
                packing=self._packing,
                before=self._rest,
            )
        except OSError:
            for unit in units:
                self._shards.look_again(unit.shard)
            return self._none()
        with suppress(OSError):  # said by what keeps the disk; the same peer started again might train on this twice
            self._taken.take(chunk)
        self._chunks.append((self._made, chunk))
        self._listener(DataTaken(chunk.epoch, chunk.first, chunk.count, len(sequences) * self._context))
        return sequences

    def _choose(self) -> Stretch | None:
        """The oldest piece of what was handed whose shards are here, else of the commons."""
        handed = self._handed
        missing: dict[str, Shard] = {}
        for stretch in handed.stretches:  # of whatever epoch: where a round goes over all data the run's is ahead of it
            if (chunk := self._here(stretch, missing)) is not None:
                self.wanted = self._to_come(chunk, handed.stretches, missing)
                self._in_vain_from = time.monotonic() + IN_VAIN_S
                return chunk
        self.wanted = self._to_come(None, (), missing)
        is_on_its_way = any(self._taken.rest_of(stretch, 1) is not None for stretch in handed.stretches)
        if not self._takes_from_commons(is_on_its_way=is_on_its_way, was_handed=bool(handed.stretches)):
            return None  # it comes, or a certificate names us yet
        first: int | None = None
        for number in range(self._lanes, self._lanes + MAX_LANES):
            lane = self._row.row.lane(handed.epoch, self._peer, self._incarnation, number)
            if self._taken.rest_of(lane, 1) is None:
                continue
            first = number if first is None else first
            if (chunk := self._here(lane, missing)) is not None:
                break
        else:
            chunk = None
        # All taken, by an earlier start perhaps: the next look goes on behind them. They are a ring.
        self._lanes = (self._lanes + MAX_LANES) % max(1, self._row.row.commons) if first is None else first
        self.wanted = self._to_come(chunk, (), missing)
        return chunk

    def _takes_from_commons(self, *, is_on_its_way: bool, was_handed: bool) -> bool:
        """Where nothing of what was handed out is left, the torch thread waits for nobody."""
        if is_on_its_way:
            return time.monotonic() >= self._in_vain_from
        return time.monotonic() >= self._commons_from or (was_handed and self._ready.empty())

    def _here(self, stretch: Stretch, missing: dict[str, Shard]) -> Stretch | None:
        """The first piece of what was not taken of a stretch whose shards are here, at most a chunk. Units of others are passed over and
        looked at again the next time: one shard that nobody has any more must not end the training on what is sound."""
        passed_over, at, end = 0, stretch.first, stretch.first + stretch.count
        while at < end and passed_over < MAX_PASSED_OVER:
            rest = self._taken.rest_of(Stretch(stretch.epoch, at, end - at), self._units)
            if rest is None:
                return None
            count = 0
            for unit in self._row.units(rest):
                if self._find(unit.shard) is None:
                    if len(missing) < AHEAD_SHARDS and not self._shards.is_hopeless(unit.shard):
                        missing.setdefault(unit.shard.sha256, unit.shard)
                    break
                count += 1
            if count:
                return Stretch(rest.epoch, rest.first, count)
            passed_over += 1
            at = self._row.shard_end(rest.epoch, rest.first)
        return None

    def _to_come(
        self, chunk: Stretch | None, stretches: Sequence[Stretch], missing: dict[str, Shard]
    ) -> tuple[Shard, ...]:
        """Those missing, of what comes next too: of so many shards, with those in use, as there is room for. Else each that is fetched would take
        the place of one that is needed sooner, and that one would be fetched again."""
        room, ahead, wanted = self._shards.room, dict[str, Shard](), dict[str, Shard]()
        for shard in self._in_order(chunk, stretches, missing):
            if len(wanted) >= AHEAD_SHARDS or len(ahead) >= room:
                break
            is_missing = shard.sha256 in missing or not (self._shards.has(shard) or self._shards.is_hopeless(shard))
            if is_missing or not self._shards.is_own(shard):
                ahead[shard.sha256] = shard
            if is_missing:
                wanted[shard.sha256] = shard
        if room < math.inf:
            self._shards.keep(tuple(ahead.values()))
        return tuple(wanted.values())

    def _in_order(
        self, chunk: Stretch | None, stretches: Sequence[Stretch], missing: dict[str, Shard]
    ) -> Iterator[Shard]:
        """What is in use, then what is needed, the soonest first."""
        if chunk is not None:
            yield from (unit.shard for unit in self._row.units(chunk))
        yield from missing.values()
        for stretch in stretches:
            if (rest := self._taken.rest_of(stretch, stretch.count)) is not None:
                yield from self._row.shards(rest)

    def _find(self, shard: Shard) -> OpenShard | None:
        found = self._shards.find(shard)
        for path, fault in self._shards.faults.items():
            if path not in self._faults:
                self._faults.add(path)
                self._listener(ShardRefused(path, fault))
        return found

    def _none(self) -> npt.NDArray[np.int64]:
        return np.empty((0, self._context + 1), np.int64)
