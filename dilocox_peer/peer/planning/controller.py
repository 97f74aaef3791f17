"""What a stage sends and how often: (codec, rank, H) such that communication takes at most a quarter of a round. Pure.

Every round the controller takes in what was measured (links, time of an inner step, fixed delay, the codec's loss) and
says what the coming plans should be: codec, rank, inner_steps. One peer proposes, all use what was certified
(peer/planning/adaptive_planner.py); what is in flight keeps its shape.

    seconds of communication  = delay + 8 * blob bytes * copies / uplink          copies: peers - 1; in slices fewer (sent.py)
    seconds of a round        = H * seconds of an inner step
    times fewer bytes         = ring AllReduce of float32 in H steps / (blob bytes * copies)
    of all (codec, H) with communication <= budget * round and at least `times_fewer`, the one with the least expected loss

Expected loss is in points (percent of loss) against exact averaging after every step: a rise with log2 H and a price of
the codec, both measured (benchmarks/BENCHMARKS.md). The budget was meant to be a quarter:
a merge that late costs next to nothing. But on a link where sparse rounds of 8 steps take 0.6 of their time, longer rounds that
take a quarter cost 4 % more loss than that delay does (3 seeds, benchmarks/learning_link.py): runs use manifest's 0.7.

Why it does not oscillate
1. It sees medians over WINDOW rounds, and rounds planned before its last change do not count.
2. H moves by a factor of 2 at a time.
3. A plan is left for a leaner one only when it takes more than TOLERANCE of the budget, and then for one that would fit with
   the link at SPARE of what is measured; for a better one only if that fits with the link at RESERVE and gains MIN_GAIN
   points. Between the two it stays.
4. Better plans are taken `dwell` rounds after the last change at the earliest. One that has to be left again soon (within
   REMEMBERED_ROUNDS and four dwells) doubles the dwell, up to MAX_DWELL; one that holds for so long resets it.

One slow peer among many does not decide: the plan is for the link above the slowest quarter (told.py), and who misses twice takes
the next leaner codec for its own blobs (`OwnCodec`); blobs describe themselves, so a round may mix them.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dilocox_peer.compression.ladder import LADDER, LOW_RANK
from dilocox_peer.compression.names import codec_names
from dilocox_peer.compression.sizes import (
    blob_limits,
    largest_rank,
    low_rank_bytes,
    matrix_shape,
    payload_limits,
    raw_bytes,
)
from dilocox_peer.peer.planning.adaptive import EFFECT_AFTER, AdaptiveRank, Observation, RankSettings
from dilocox_peer.peer.planning.plan import TOLERANCE
from dilocox_peer.peer.planning.sent import contributions_sent
from dilocox_peer.peer.planning.told import slow_link
from dilocox_peer.types import Layout

BUDGET = 0.25  # where nothing else is said
SPARE = 0.85
RESERVE = 0.6
MIN_GAIN = 0.25
WINDOW = 5
REMEMBERED_ROUNDS = 24
MAX_DWELL = 48
MISSES_UNTIL_LEANER, HITS_UNTIL_RICHER = 2, 16

CODEC_POINTS: Mapping[str, float] = {
    "none": 0.0, "fp16": 0.0, "int8": 0.0, "int4": 0.05, "int2": 0.4, "sign": 0.9, "topk": 1.6, "lowrank-int4": 2.0,
}  # fmt: skip
"""Price of each codec beside float32 at the same H. Of low rank it depends on the matrices: up to 3.3 on small ones, so it
comes last."""

POINTS_PER_DOUBLING = 1.0
"""Of H. Measured 0.75 from 8 to 16 and from 16 to 32, 1.2 from 32 to 64."""


@dataclass(frozen=True, slots=True)
class Limits:
    """codecs: that may be chosen. times_fewer: bytes than AllReduce, at least; 0: no bound. budget: share of a round that
    communication may take. is_sliced: contributions are averaged in slices."""

    smallest_inner_steps: int = 8
    largest_inner_steps: int = 256
    codecs: tuple[str, ...] = (*LADDER, LOW_RANK)
    times_fewer: float = 0.0
    budget: float = BUDGET
    is_sliced: bool = False

    def __post_init__(self) -> None:
        assert self.smallest_inner_steps <= self.largest_inner_steps, self


@dataclass(frozen=True, slots=True)
class Setting:
    """The three fields of chain.Plan that are decided here."""

    codec: str
    rank: int
    inner_steps: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """Of one round. uplinks_bps: of every contributor, as it measured it. step_s: of an inner step, by the speeds of
    all peers (told.py).

    delay_s: what a round's averaging takes beside the transfer (messages, encode, decode). residual: |e|**2 / |sent|**2 of
    the codec in use; needed_rank: adaptive.Observation's, None where the codec is not low rank.
    """

    round: int
    uplinks_bps: tuple[float, ...]
    step_s: float
    delay_s: float = 0.0
    residual: float = 0.0
    needed_rank: int | None = None


class Controller:
    """One stage's. `setting` is what it wants the plans to come to be."""

    def __init__(self, layout: Layout, start: Setting, limits: Limits) -> None:
        self._limits = limits
        self._raw_bytes = raw_bytes(layout)
        self.bytes_of = _blob_bytes(layout)
        self._ranks = AdaptiveRank(RankSettings.of(layout, start.rank))
        self._low_rank_pays = _low_rank_pays(layout)
        self.setting = start
        self._effective_round = 0
        self._window: deque[Measurement] = deque(maxlen=WINDOW)
        self._dwell = WINDOW
        self._improved_at: int | None = None  # round of the last change to a better plan
        self._lossy_until: dict[str, int] = {}

    def adopt(self, setting: Setting, effective_round: int) -> None:
        """A certificate has planned setting from effective_round on: nothing happens if that is what we want too, or
        what we wanted until our own last decision, which no certificate can have heeded yet."""
        if setting == self.setting or effective_round < self._effective_round:
            return
        self.setting = setting
        self._ranks.adopt(setting.rank, effective_round)
        self._effective_round = effective_round
        self._window.clear()

    def observe(self, measured: Measurement) -> tuple[Setting, str]:
        """Takes in a round, in order of rounds. Returns (what the plans to come should be, why that changed or "")."""
        assert measured.step_s > 0, measured
        assert measured.uplinks_bps, measured
        if measured.round < self._effective_round:
            return self.setting, ""
        self._window.append(measured)
        self._watch_rank(measured)
        if len(self._window) < WINDOW:
            return self.setting, ""
        setting, reason = self._decide(measured.round)
        if setting == self.setting:
            return setting, ""
        self._change(setting, measured.round)
        return setting, reason

    def share(self, setting: Setting, *, link_factor: float = 1.0) -> float:
        """Communication over round time that setting would have, by the medians of the window."""
        uplink = statistics.median(slow_link(each.uplinks_bps) for each in self._window)
        delay = statistics.median(each.delay_s for each in self._window)
        step = statistics.median(each.step_s for each in self._window)
        blob = self.bytes_of(setting.codec, setting.rank)
        return (delay + 8 * blob * self._copies(setting) / (uplink * link_factor)) / (setting.inner_steps * step)

    def _peers(self) -> int:
        """Contributors, by the median of the window. A peer that is alone plans for two: the next to come must not find contributions of
        full size, which cost nothing while nobody fetched them."""
        return max(2, round(statistics.median(len(each.uplinks_bps) for each in self._window)))

    def contribution_bytes(self, setting: Setting) -> int:
        """The largest contribution."""
        return self.bytes_of(setting.codec, setting.rank)

    def times_fewer(self, setting: Setting) -> float:
        """Bytes of a ring AllReduce of float32 gradients over what a peer sends, by the median of the window."""
        peers = self._peers()
        all_reduce = 2 * (peers - 1) / peers * self._raw_bytes * setting.inner_steps
        return all_reduce / (self.bytes_of(setting.codec, setting.rank) * self._copies(setting))

    def _copies(self, setting: Setting) -> float:
        return contributions_sent(self._peers(), setting.codec, is_sliced=self._limits.is_sliced)

    def excess(self, setting: Setting, *, link_factor: float = 1.0) -> float:
        """How much of what is allowed a setting takes, of time or of bytes: above 1 it should be left."""
        of_bytes = self._limits.times_fewer / self.times_fewer(setting)
        return max(self.share(setting, link_factor=link_factor) / self._limits.budget, of_bytes)

    def points(self, setting: Setting) -> float:
        """Expected loss of a setting, in points."""
        now = max((each.round for each in self._window), default=0)
        codec = setting.codec
        lossy = 2.0 if self._lossy_until.get(codec, -1) > now else 0.0
        return POINTS_PER_DOUBLING * math.log2(setting.inner_steps) + CODEC_POINTS[codec] + lossy

    def _watch_rank(self, measured: Measurement) -> None:
        if self.setting.codec == LOW_RANK and measured.needed_rank is not None:
            self._ranks.observe(Observation(measured.round, measured.needed_rank, measured.residual))
        if measured.residual > 0.95 and self.setting.codec != LOW_RANK:
            self._lossy_until[self.setting.codec] = measured.round + 8 * MAX_DWELL

    def _decide(self, now: int) -> tuple[Setting, str]:
        current = self.setting
        if current.codec == LOW_RANK and self._ranks.rank != current.rank:
            return Setting(
                LOW_RANK, self._ranks.rank, current.inner_steps
            ), f"rank {current.rank} to {self._ranks.rank}"
        if self.excess(current) > TOLERANCE:
            share, fewer = self.share(current), self.times_fewer(current)
            reason = f"averaging took {share:.0%} of a round"
            return self._best(
                link_factor=SPARE
            ), reason if share > self._limits.budget else f"only {fewer:.0f} times fewer bytes"
        if now < self._effective_round + self._dwell:
            return current, ""
        best = self._best(link_factor=RESERVE)
        gain = self.points(current) - self.points(best)
        if gain < MIN_GAIN or self.excess(best, link_factor=RESERVE) > 1.0:
            return current, ""
        return best, f"the link has room for it, {gain:.1f} % less loss is expected"

    def _best(self, *, link_factor: float) -> Setting:
        """The least expected loss within what is allowed, H within a factor of 2; where nothing is, the least excess."""
        now, limits = self.setting.inner_steps, self._limits
        lengths = sorted(
            {
                min(max(each, limits.smallest_inner_steps), limits.largest_inner_steps)
                for each in (now // 2, now, 2 * now)
            }
        )
        candidates = [
            Setting(codec, self._ranks.rank if codec == LOW_RANK else self.setting.rank, length)
            for codec in limits.codecs
            if codec != LOW_RANK or self._low_rank_pays
            for length in lengths
        ]
        excess = {each: self.excess(each, link_factor=link_factor) for each in candidates}
        within = [each for each in candidates if excess[each] <= 1.0]
        if not within:
            return min(candidates, key=lambda each: (excess[each], self.points(each)))
        return min(within, key=lambda each: (self.points(each), excess[each]))

    def _change(self, setting: Setting, now: int) -> None:
        remembered = REMEMBERED_ROUNDS + 4 * self._dwell
        is_recent = self._improved_at is not None and now - self._improved_at <= remembered
        if self.points(setting) < self.points(self.setting):
            self._dwell = self._dwell if is_recent or self._improved_at is None else WINDOW
            self._improved_at = now
        elif is_recent and setting.codec != LOW_RANK:
            self._dwell = min(2 * self._dwell, MAX_DWELL)
            self._improved_at = None
        self.setting = setting
        self._effective_round = now + EFFECT_AFTER
        self._window.clear()


class OwnCodec:
    """The codec of one peer's own blobs: the stage's, or a leaner one while its uplink misses rounds."""

    def __init__(self) -> None:
        self._steps = 0
        self._missed, self._made = 0, 0

    def codec(self, of_stage: str) -> str:
        """What this peer encodes with, given the stage's codec."""
        if of_stage not in LADDER:
            return of_stage if not self._steps else LADDER[-1]
        return LADDER[min(LADDER.index(of_stage) + self._steps, len(LADDER) - 1)]

    def settled(self, *, in_certificate: bool) -> None:
        """A round ended with or without our contribution. Two misses in a row: one codec leaner; many rounds made in a
        row: one richer, after twice as many the next time."""
        if in_certificate:
            self._missed, self._made = 0, self._made + 1
            if self._steps and self._made >= HITS_UNTIL_RICHER << self._steps:
                self._steps, self._made = self._steps - 1, 0
            return
        self._missed, self._made = self._missed + 1, 0
        if self._missed >= MISSES_UNTIL_LEANER:
            self._missed, self._steps = 0, min(self._steps + 1, len(LADDER) - 1)


def _blob_bytes(layout: Layout) -> Callable[[str, int], int]:
    """(codec, rank) -> the largest contribution of this layout, each computed once."""
    known: dict[tuple[str, int], int] = {}

    def bytes_of(codec: str, rank: int) -> int:
        key = (codec, rank if codec == LOW_RANK else 0)
        if key not in known:
            name_of = codec_names(codec, rank=max(rank, 1))
            spare = sum(
                payload_limits(LOW_RANK, spec.shape)[1]
                - low_rank_bytes(*matrix_shape(spec.shape), min(rank, largest_rank(spec.shape)))
                for spec in layout.tensors
                if name_of(spec) == LOW_RANK
            )  # blob_limits knows the codec's largest rank, not the one in use
            known[key] = blob_limits(layout, name_of)[1] - spare
        return known[key]

    return bytes_of


def _low_rank_pays(layout: Layout) -> bool:
    name_of = codec_names(LOW_RANK, rank=1)
    return any(name_of(spec) == LOW_RANK for spec in layout.tensors)
