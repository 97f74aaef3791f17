"""The part of the data that each peer trains on, from what certificates say and nothing else: draws without replacement. Pure.

The units of the training shards (catalogue.py) stand in a row, in an order of their own each epoch. All but the last part of
the row, the commons, are handed out from its beginning: every certificate of the stage that reads data hands each peer
of its roster what it needs for the rounds to come (`Handout.take`), so that it has AHEAD rounds in hand. What was handed
out is nobody else's for that epoch, used or not; a peer works through the last KEPT shares that it was handed. A peer that is
handed nothing yet, as it is not in a roster, takes from the commons, at a place that its name and start choose.

What a peer has in hand is reckoned from its reports, and nobody sees what it really has: it works through more than it reports where
work is lost on the way, where it is killed, or where units hold less than is usual. So too much is reckoned by and by, and that is
put right in two ways (`_Account`): a peer that falls behind its own pace is taken to have nothing, and each is handed AHEAD rounds
more now and then, the sooner the sooner it fell behind. What is handed out so and is not needed, 1 in 16 where nothing is lost,
as AHEAD / MOST_PATIENCE is, waits among the KEPT.

Invariants, on one chain of certificates:
    1. No unit is handed out twice in an epoch, and none of the commons is.
    2. A peer that does what it reports, at most FASTEST times what is usual, has work in hand: it never waits for a certificate. Nor does one that
       works through a sixteenth more than it reports; of a fifth more it lacks some hundredths of its work, of twice as much half.
    3. The next epoch begins only when all but the commons was handed out.
What they do not cover, and its bound: a fork. A branch that begins with a view change hands out from a place of its own (`part`): two
that part at a roster of n hand out nothing twice before one of them has handed out 1 / (n + 1) of what was still free. Beyond
that they meet, as each has to hand out all before it begins an epoch anew; and a branch that parts again may come to where the other is.
Without a view change on either side they hand out the same, as much as their certificates do: a side that can certify
without one is the only one. Two newcomers meet in the commons where their places lie closer than what
they take until they are in a roster: each pair with the chance 2 * (units taken by one) / (units of the commons).
A unit is lost for its epoch when the peer that was handed it goes: AHEAD rounds of work of that peer, or LEAST_UNITS, and what it was handed beyond,
at most KEPT shares; or when it is the oldest of so many.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dilocox_peer.data.catalogue import UNIT_TOKENS
from dilocox_peer.types import PeerId, canonical, sha256

AHEAD = 4
"""Rounds of work that a peer has in hand: it trains up to two rounds beyond the newest certificate, at a changing speed."""

LEAST_UNITS = 8
"""That a peer is handed first, where the row has enough. A unit has the documents that begin in it: where they are long, one in two has nothing, and
a peer whose work of four rounds is one unit would have been handed nothing."""

REMEMBERED = 8
"""Certificates whose reports say how fast a peer is: one report may be missing, and the work be in the next."""

LOOKED_BACK = 4 * REMEMBERED
"""Certificates with whose best a peer's reports are compared."""

MOST_PATIENCE = 64
"""Certificates after which a peer is handed AHEAD rounds more. Fewer after it has fallen behind, more again after each time that it did not."""

KEPT = 64
"""Shares that a peer may take from, the newest. What it is handed too much in so many certificates is not lost, but done later."""

PLANNED_AHEAD = 2
"""Rounds from what a certificate reports to what it plans."""

SLOWEST = 8
"""In one of so many of the expected work a peer is believed that reports less, or nothing: it has something to begin with when it comes back."""

FASTEST = 8
"""Times what is expected, or is usual among three or more, that a peer is believed to do in a round, if few say that they do more."""

COMMONS_SHARE = 32  # of all units, one in so many


@dataclass(frozen=True, slots=True)
class Stretch:
    """Places first..first+count-1 in the row of an epoch."""

    epoch: int
    first: int
    count: int


_ONE = 1 << 16  # a pace: the work that is expected


@dataclass(slots=True)
class _Account:
    """in_hand: tokens, as reckoned. paces: what was reported each time, in parts of what was expected; the newest last, and the expected until there
    is a report. silent: rounds without a report since the last. since: rounds since it was put right."""

    in_hand: int = 0
    paces: deque[int] = field(default_factory=lambda: deque([_ONE] * REMEMBERED, maxlen=LOOKED_BACK))
    has_reported: bool = False
    silent: int = 0
    since: int = 0
    patience: int = MOST_PATIENCE

    def learn(self, done: int, expected: int) -> None:
        """What it reports of a round. Work that comes too late is in its next report: that is of all rounds since the last."""
        if done == 0 and self.silent < REMEMBERED:
            self.silent += 1
            return
        if done == 0:
            self.paces.append(0)
            return
        if not self.has_reported:
            self.paces.clear()
        rounds = self.silent + 1
        self.paces.extend([done * _ONE // (rounds * max(1, expected))] * rounds)
        self.has_reported, self.silent = True, 0

    @property
    def pace(self) -> int:
        return max(*list(self.paces)[-REMEMBERED:], _ONE // SLOWEST)

    @property
    def falls_behind(self) -> bool:
        """Whether the newest reports come to less than two thirds of the best of before, as of a peer that lacks work. To ask too whether they come to
        half of the best among them has peers whose speed changes lose 40 % of what they are handed."""
        paces = list(self.paces)[::-1]
        sums = [sum(paces[at : at + REMEMBERED]) for at in range(0, len(paces), REMEMBERED)]
        return 3 * sums[0] < 2 * max(sums)

    def put_right(self, ahead: int) -> None:
        """Once a round. ahead: what is to be in hand. Nothing is taken to be lost for its age alone, as a share is worked through some time after
        it was handed out: a third of every epoch was handed out for nothing so. To take reports off the oldest share, and forget a
        share that is too old, leaves half of its work to a peer that reports one token in thirty less than it works through."""
        self.since += 1
        if self.since >= REMEMBERED and self.falls_behind:
            self.patience = max(REMEMBERED, self.since // 2)
            self.in_hand = self.since = 0
        elif self.since >= self.patience:
            self.patience = min(MOST_PATIENCE, self.patience * 5 // 4)
            self.in_hand, self.since = self.in_hand - ahead, 0


@dataclass(frozen=True, slots=True)
class Row:
    """num_units: of all training shards together."""

    num_units: int

    @property
    def commons(self) -> int:
        return max(1, self.num_units // COMMONS_SHARE) if self.num_units > 1 else 0

    @property
    def to_hand_out(self) -> int:
        return self.num_units - self.commons

    def lane(self, epoch: int, peer: PeerId, incarnation: int, number: int) -> Stretch:
        """The number-th unit of the commons for a peer that started then: one after another from a place of its own. Another start
        is another place, so a peer that dies and comes back without its disk does not begin there anew."""
        if not self.commons:
            return Stretch(epoch, 0, self.num_units)
        chosen = int.from_bytes(sha256(canonical(["dilocox-lane", epoch, peer, incarnation]))[:8], "big")
        return Stretch(epoch, self.to_hand_out + (chosen + number) % self.commons, 1)


class Handout:
    """A fold over a chain of certificates."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.epoch = 0
        self._next = 0  # place of the row
        self._handed: list[tuple[int, int]] = []  # of this epoch, as intervals that do not touch
        self._accounts: dict[PeerId, _Account] = {}
        # Tokens a round, as the newest certificates have them.
        self._expected: deque[int] = deque(maxlen=PLANNED_AHEAD + 1)

    def part(self, before: Sequence[PeerId], roster: Sequence[PeerId]) -> None:
        """A view change from the roster `before` to this one: from here on hands out from a place that no other branch begins at. A
        branch without a view change goes on where it is; what is still free from there on is cut into as many parts and one more as
        `before` has members, and the rank of the first that stays says whose part is whose: rosters of two branches share nobody."""
        if set(roster) == set(before):
            return
        ranks = [rank for rank, peer in enumerate(before) if peer in roster]
        share = (ranks[0] + 1) / (len(before) + 1) if ranks else _hashed(roster)
        free = self._free_from_here()
        ahead = int(sum(end - first for first, end in free) * share)
        for first, end in free:
            if ahead < end - first:
                self._next = first + ahead
                return
            ahead -= end - first

    def _free_from_here(self) -> list[tuple[int, int]]:
        """What was not handed out, as intervals, from the next place on and then from the beginning."""
        size, ends = self.row.to_hand_out, [0]
        free = []
        for begin, stop in [*self._handed, (size, size)]:
            if begin > ends[-1]:
                free.append((ends[-1], begin))
            ends.append(stop)
        at = self._next
        behind = [(max(first, at), end) for first, end in free if end > at]
        return behind + [(first, min(end, at)) for first, end in free if first < at]

    def take(
        self, roster: Sequence[PeerId], *, tokens_a_round: int, reported: Mapping[PeerId, int]
    ) -> dict[PeerId, tuple[Stretch, ...]]:
        """What one certificate hands out. roster: its own. tokens_a_round: of work expected of a peer in the round that is planned. reported: tokens that its
        contributors say they have worked through, empty where it has none; FASTEST times the upper median is believed at most, or what more than an eighth of them say: what is handed out is lost to all others."""
        said = sorted(each for each in reported.values() if each > 0)
        usual, of_several = (said[len(said) // 2], said[-2 - len(said) // 8]) if len(said) > 2 else (0, 0)
        most = max(FASTEST * max(tokens_a_round, usual), of_several)
        least = UNIT_TOKENS * min(LEAST_UNITS, self.row.to_hand_out // (AHEAD * max(1, len(roster))))
        is_round = bool(reported)  # a view change has no contributions, and says nothing of anybody's pace
        if is_round or not self._expected:
            self._expected.append(tokens_a_round)
        for peer in [peer for peer in self._accounts if peer not in roster and peer not in reported]:
            del self._accounts[peer]
        handed: dict[PeerId, tuple[Stretch, ...]] = {}
        for peer in roster:
            is_new = peer not in self._accounts
            account = self._accounts.setdefault(peer, _Account())
            done = min(reported.get(peer, 0), most)
            account.in_hand = max(0, account.in_hand - done)
            if is_round and not is_new:
                account.learn(done, self._expected[0])
            # What it has worked through since its last report is not in hand any more.
            ahead = max(least if is_new else 0, (AHEAD + account.silent) * tokens_a_round * account.pace // _ONE)
            if is_round:
                account.put_right(ahead)
            wanted = -(-(ahead - account.in_hand) // UNIT_TOKENS)
            if wanted > 0:
                account.in_hand += wanted * UNIT_TOKENS
                handed[peer] = self._cut(wanted)
        return handed

    def _cut(self, count: int) -> tuple[Stretch, ...]:
        """The next count units that were not handed out, in as few pieces as they lie in."""
        stretches = []
        while count:
            first, end = self._free()
            taken = min(count, end - first)
            stretches.append(Stretch(self.epoch, first, taken))
            self._handed = joined(self._handed, first, first + taken)
            self._next = first + taken
            count -= taken
        return tuple(stretches)

    def _free(self) -> tuple[int, int]:
        """What is free from here on, or from the beginning; in the next epoch where nothing is."""
        size = self.row.to_hand_out
        if self._handed == [(0, size)]:
            self.epoch += 1
            self._next, self._handed = 0, []
        at = self._next if self._next < size else 0
        for begin, stop in self._handed:
            if begin <= at < stop:
                at = stop
        if at == size:
            at = self._handed[0][1] if self._handed and self._handed[0][0] == 0 else 0
        return at, min((begin for begin, _ in self._handed if begin > at), default=size)


def _hashed(roster: Sequence[PeerId]) -> float:
    """In [0, 1): of a roster of newcomers alone."""
    return int.from_bytes(sha256(canonical(["dilocox-part", *sorted(roster)]))[:8], "big") / 2**64


def joined(intervals: Sequence[tuple[int, int]], first: int, end: int) -> list[tuple[int, int]]:
    """The intervals with one more, sorted, and those in one that touch."""
    merged: list[tuple[int, int]] = []
    for begin, stop in sorted([*intervals, (first, end)]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((begin, stop))
    return merged


def shard_order(num_shards: int, *, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The order of the training shards in an epoch."""
    return _permuted(num_shards, ["dilocox-shards", seed, epoch])


def unit_order(num_units: int, *, seed: int, epoch: int, shard: int) -> npt.NDArray[np.int64]:
    """The order of a shard's units in an epoch: neighbours in the row are of one shard, which is in one peer's hands then."""
    return _permuted(num_units, ["dilocox-units", seed, epoch, shard])


def _permuted(count: int, key: list[object]) -> npt.NDArray[np.int64]:
    """Equal on every machine: sorted by Philox's own numbers."""
    generator = np.random.Philox(key=np.frombuffer(sha256(canonical(key))[:16], dtype="<u8"))
    return np.argsort(generator.random_raw(count), kind="stable")
