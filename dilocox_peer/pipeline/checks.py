"""Whether callees compute what they are asked for: of some micro-batches the gradient of a second callee is compared with the first one's. Pure.

A gradient's size, that it is finite and how strong it is say nothing of whether the model computes it (likeness.py). Another replica of the
stage says that: its weights differ by no more than a round of local steps, so what both send back for the same activations is much
alike. One in SHARE of a callee's micro-batches, times the hops of the pipeline (what is checked goes through all stages behind, and is checked
there again), goes to a second one too: by the same messages as any other, so that nobody can tell what is checked. Nothing waits for it,
the first gradient is used either way, and the second replica trains on the micro-batch as well.

Two that disagree are both doubted, and more of their micro-batches are compared, with one callee after the other. One that more than half of all
disagree with lies: it gets nothing for OUT_S, and is checked from its first micro-batch on when it is back. One that can no longer come to
that is believed. Of two callees nobody can say which of them lies; that they disagree is told.

A callee that is not of the last stage may be deceived by those behind it. It finds that out as we do, so it is left its time for it.
"""

import random
from collections import OrderedDict, deque
from collections.abc import Collection, Mapping

from dilocox_peer.events import Event
from dilocox_peer.pipeline.contract import CalleesDisagree, GradientsFalse
from dilocox_peer.pipeline.routes import Callee
from dilocox_peer.types import PeerId

SHARE, FAR_SHARE, DOUBTED_SHARE = (
    32,
    256,
    4,
)  # micro-batches of which one is checked; the first two times the hops of the pipeline
LEAST_AGREEMENT = 0.3
MOST_COMPARED = 9  # others that one which is doubted is compared with
# Answers of all callees that a doubted one has for each stage behind it, times the hops: meanwhile it finds out who there deceives it.
PATIENCE = 256
OUT_S = 600.0
SUSPECT_S = 3600.0  # after that: one that disagrees again meanwhile has had its time to find out who deceives it
TOLD_EVERY_S = 600.0  # that two disagree of whom neither is proven wrong
REMEMBERED = 4  # comparisons of a pair
MAX_REMEMBERED = 512  # pairs


class _Comparisons:
    """What the newest comparisons of two callees said, and when."""

    def __init__(self) -> None:
        self._newest: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)  # when, agreement

    def add(self, agreement: float, now: float) -> None:
        self._newest.append((now, agreement))

    @property
    def at(self) -> float:
        return self._newest[-1][0]

    def has_any(self, since: float) -> bool:
        return self.at >= since

    def worst(self, since: float) -> float:
        """One bad comparison tells as much as the good ones beside it: who lies now and then lies."""
        return min((agreement for at, agreement in self._newest if at >= since), default=1.0)


class Checks:
    """Those of one peer, of its callees."""

    def __init__(self, rng: random.Random, *, hops: int, stages_behind: int) -> None:
        """hops: of the pipeline, from stage to stage. stages_behind: those behind the callees' own."""
        self._rng = rng
        self._hops = hops
        self._patience = stages_behind * hops * PATIENCE
        self._compared: OrderedDict[frozenset[PeerId], _Comparisons] = OrderedDict()
        self._doubted: dict[PeerId, tuple[float, int]] = {}  # since when, and after how many answers of all callees
        self._answers = 0
        self._out: OrderedDict[PeerId, float] = (
            OrderedDict()
        )  # until when; they stay until they have been checked again
        self._told_at = float("-inf")

    @property
    def doubted(self) -> Collection[PeerId]:
        return self._doubted.keys()

    @property
    def num_remembered(self) -> int:
        return len(self._compared) + len(self._out)

    def out_until(self, peer: PeerId) -> float:
        """Until when it gets nothing; -inf for one that is not known to lie."""
        return self._out.get(peer, float("-inf"))

    def gone(self, peer: PeerId) -> None:
        """It is no callee any more. What is known against it stays."""
        self._believe(peer)

    def _believe(self, peer: PeerId) -> None:
        """It is doubted no longer."""
        self._doubted.pop(peer, None)

    # ---- what is checked ----

    def second(self, first: PeerId, callees: Mapping[PeerId, Callee], now: float) -> PeerId | None:
        """The one that is to compute as well what first has just answered; None: it is not checked."""
        self._answers += 1
        others = [peer for peer, callee in callees.items() if peer != first and callee.avoid_until <= now]
        if not others:
            return None
        near = [peer for peer in others if not callees[peer].is_far]
        open_ = [peer for peer in others if self._is_open(peer, first)]
        if first in self._doubted or open_:
            share, others = DOUBTED_SHARE, open_ or others
        elif all(frozenset((first, other)) not in self._compared for other in others):
            share, others = 1, near or others
        else:
            share, others = (SHARE * self._hops, near) if near else (FAR_SHARE * self._hops, others)
        if self._rng.randrange(share):
            return None
        return min(others, key=lambda other: (self._last_compared(first, other), other))

    def _is_open(self, peer: PeerId, first: PeerId) -> bool:
        """Whether a peer that is doubted is to be compared with first yet."""
        known = self._doubted.get(peer)
        return known is not None and self._last_compared(peer, first) < known[0]

    def _last_compared(self, one: PeerId, other: PeerId) -> float:
        known = self._compared.get(frozenset((one, other)))
        return float("-inf") if known is None else known.at

    # ---- what came of it ----

    def compared(
        self, one: PeerId, other: PeerId, agreement: float, callees: Collection[PeerId], now: float
    ) -> list[Event]:
        """Takes a comparison in; what is to be told. Of those that it proves wrong `out_until` says so from now on."""
        pair, is_bad = frozenset((one, other)), not agreement >= LEAST_AGREEMENT
        self._compared.setdefault(pair, _Comparisons()).add(agreement, now)
        self._compared.move_to_end(pair)
        while len(self._compared) > MAX_REMEMBERED:
            self._compared.popitem(last=False)
        for peer in pair:
            if is_bad and peer in callees and self.out_until(peer) <= now:
                self._doubted.setdefault(peer, (now, self._answers))
            elif not is_bad and self._out.get(peer, now) + SUSPECT_S < now:
                del self._out[peer]
        events: list[Event] = []
        for peer in sorted(pair):  # only what was compared can have changed
            events += self._judge(peer, callees, now, is_bad=is_bad)
        if is_bad and not events and len(callees) == 2 and now >= self._told_at + TOLD_EVERY_S:
            self._told_at = now
            events.append(CalleesDisagree(one, other, agreement))
        return events

    def _judge(self, peer: PeerId, callees: Collection[PeerId], now: float, *, is_bad: bool) -> list[Event]:
        if peer not in self._doubted:
            return []
        since, answers = self._doubted[peer]
        others = [other for other in callees if other != peer and self._out.get(other, now) <= now]
        known = {other: self._compared.get(frozenset((peer, other))) for other in others}
        worst = {other: pair.worst(since) for other, pair in known.items() if pair is not None and pair.has_any(since)}
        against = {other: each for other, each in worst.items() if not each >= LEAST_AGREEMENT}
        num_others = max(min(len(others), MOST_COMPARED), len(worst))
        half = (num_others + 1) // 2
        if len(against) + num_others - len(worst) <= half:
            self._believe(peer)
            return []
        patience = 0 if peer in self._out else self._patience  # who was out has had its time
        if len(against) <= half or not is_bad or self._answers < answers + patience:
            return []
        self._out[peer] = now + OUT_S
        self._out.move_to_end(peer)
        while len(self._out) > MAX_REMEMBERED:
            self._out.popitem(last=False)
        self._forget(peer)
        return [GradientsFalse(peer, tuple(sorted(against)), max(against.values()), OUT_S)]

    def _forget(self, liar: PeerId) -> None:
        """What it was compared with says nothing against the others."""
        self._believe(liar)
        for pair in [pair for pair in self._compared if liar in pair]:
            del self._compared[pair]
        for peer, (since, _) in list(self._doubted.items()):
            worst = (pair.worst(since) for peers, pair in self._compared.items() if peer in peers)
            if all(each >= LEAST_AGREEMENT for each in worst):
                self._believe(peer)
