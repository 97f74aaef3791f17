"""Adaptive rank: the next rank of `lowrank-int4` from what the averaged pseudo-gradient needs, over a window of rounds. Pure.

A round gives one observation: how many directions hold nearly all of the mean's energy, and how much of what was to be
sent stays in the residual. At the end of a window the medians decide:

    residual above GROW_ABOVE               rank up by a quarter: never shrink while most of it is not sent
    needed rank below SHRINK_BELOW * rank   rank down to it
    otherwise                               as it is

Why not the energy threshold alone: inside a sketch of rank r any threshold below 1 finds fewer than r directions, whatever
the true rank is, so it shrinks to its floor while 98 % of the pseudo-gradient stays behind (tests/unit/test_adaptive.py). So
here the spectrum is taken of the mean itself, whose rank is up to that of all contributions together, by a sketch wider
than r and against the mean's whole energy; and the residual has the last word.

Singular values differ in their last bits between machines: this is what one peer proposes, and the certificate carries
the integer that all use, for the round after next. Observations of rounds still under the old rank do not count.

Source: DiLoCoX (arXiv 2506.21263), adaptive gradient compression; the guard and the numbers are ours. Differs
from DiLoCoX: the guard; H follows the rank only in the `faithful` mode (`inner_steps_of`), controller.py is the default.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dilocox_peer.compression.sizes import largest_rank
from dilocox_peer.types import Layout

WINDOW = 5  # rounds whose medians decide
GROW_ABOVE = 0.85  # of |residual|**2 / |sent|**2
SHRINK_BELOW = 0.8  # of the present rank: less is not worth a change of shape
GROWTH = 1.25
EFFECT_AFTER = 4
"""Rounds from an observation to the first that shows what was decided on it: taken in with certificate t it goes into the plan
of certificate t + 1, which is of round t + 3, and the report of round t + 4 is the first with all of that round."""


@dataclass(frozen=True, slots=True)
class RankSettings:
    """smallest, largest: limits of the rank. first: what the run starts with, also the rank that `first_inner_steps`
    belongs to in the faithful mode."""

    first: int
    smallest: int
    largest: int

    def __post_init__(self) -> None:
        assert 1 <= self.smallest <= self.first <= self.largest, self

    @classmethod
    def of(cls, layout: Layout, first: int) -> "RankSettings":
        """Down to a quarter of the first rank, up to what is still below two bits an element of the largest matrix."""
        largest = max((largest_rank(spec.shape) for spec in layout.tensors if len(spec.shape) == 2), default=1)
        first = min(first, largest)
        return cls(first, max(1, first // 4), largest)


@dataclass(frozen=True, slots=True)
class Observation:
    """One round. needed: rank that holds ENERGY of the averaged pseudo-gradient. residual: |e|**2 / |sent|**2 in [0, 1], the
    codec's loss at this peer (1: nothing was sent)."""

    round: int
    needed: int
    residual: float


class AdaptiveRank:
    """The rule of the module, for one stage. `rank` is what it proposes for rounds from `effective_round` on.

    Invariants
    1. smallest <= rank <= largest.
    2. The rank changes at most once in WINDOW observed rounds, and never by observations of rounds before effective_round.
    3. It does not shrink while the median residual is above GROW_ABOVE.
    """

    def __init__(self, settings: RankSettings) -> None:
        self._settings = settings
        self._window: list[Observation] = []
        self.rank = settings.first
        self.effective_round = 0

    def observe(self, observation: Observation) -> int:
        """Takes in a round, in order of rounds; returns the rank for the plans to come."""
        if observation.round < self.effective_round:
            return self.rank
        self._window.append(observation)
        if len(self._window) == WINDOW:
            rank = next_rank(self.rank, self._window, self._settings)
            self._window.clear()
            if rank != self.rank:
                self.rank, self.effective_round = rank, observation.round + EFFECT_AFTER
        return self.rank

    def adopt(self, rank: int, effective_round: int) -> None:
        """A certificate decided otherwise: that is the rank from effective_round on."""
        if rank != self.rank:
            self.rank, self.effective_round = rank, effective_round
            self._window.clear()


def next_rank(rank: int, window: Sequence[Observation], settings: RankSettings) -> int:
    """The rule, on a whole window. An even window's median is its lower one: whole numbers stay whole."""
    residual = statistics.median_low([each.residual for each in window])
    needed = statistics.median_low([each.needed for each in window])
    if residual > GROW_ABOVE:
        rank = math.ceil(GROWTH * rank)
    elif needed < SHRINK_BELOW * rank:
        rank = needed
    return min(max(rank, settings.smallest), settings.largest)


def inner_steps_of(rank: int, *, first_rank: int, first_inner_steps: int, smallest: int = 4) -> int:
    """H of the faithful mode: H_1 * r / r_1, between `smallest` and H_1 (communication then takes the same share)."""
    return min(max(round(first_inner_steps * rank / first_rank), smallest), first_inner_steps)
