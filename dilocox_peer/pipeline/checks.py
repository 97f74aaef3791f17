"""Whether callees compute what they are asked for: of some micro-batches the gradient of a second callee is compared with the first one's. Pure.

A gradient's size, that it is finite and how strong it is say nothing of whether the model computes it (likeness.py). Another replica of the
stage says that: its weights differ by no more than a round of local steps, so what both send back for the same activations is much
alike. One in SHARE of a callee's micro-batches, times the hops of the pipeline (what is checked goes through all stages behind, and is checked
there again), goes to a second one too. Which answers are checked is drawn when they are here, so nobody knows it beforehand; that a call is a check
the second callee may guess. Nothing waits for it, the first gradient is used either way, and the second replica trains on the micro-batch as well.

Two that disagree are both doubted, and more of their micro-batches are compared, with one callee after the other. One that more than half of all
disagree with lies: it gets nothing for OUT_S, and is checked from its first micro-batch on when it is back. One that can no longer come to
that is believed; should it disagree again within SUSPECT_S, it is the same doubt. Neither a lost link nor a while of honesty ends it. When two callees disagree nobody can
say which of them lies; that they do is told.

A callee that is not of the last stage may be deceived by those behind it. It finds that out as we do, so it is left its time for it.
"""

import random
from collections import OrderedDict, deque
from collections.abc import Collection, Mapping
from typing import Any

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
PATIENCE = 256  # answers of a doubted callee with one stage behind it, times the hops: meanwhile it finds out who there deceives it
OUT_S = 600.0
SUSPECT_S = 3600.0
TOLD_EVERY_S = 600.0  # that two disagree of whom neither is proven wrong
REMEMBERED = 4  # comparisons of a pair
MAX_REMEMBERED = 512  # pairs, and callees


def patience_of(hops: int, stages_behind: int) -> int:
    """Answers that a doubted callee has. With two stages behind it, those that it calls have as much time to find out about theirs, and answer it
    a part of what it answers us."""
    return int(PATIENCE * hops * (4**stages_behind - 1) // 3)


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


class _Suspect:
    """A callee that disagreed with another: since when, how often it answered since then, and until when it is out."""

    def __init__(self, now: float) -> None:
        self.since = self.latest = now
        self.answers = 0
        self.is_doubted = True
        self.out_until = float("-inf")


class Checks:
    """Those of one peer, of its callees."""

    def __init__(self, rng: random.Random, *, hops: int, stages_behind: int) -> None:
        """rng: nobody else knows what it draws. hops: of the pipeline, from stage to stage. stages_behind: those behind the callees' own."""
        self._rng = rng
        self._hops = hops
        self._patience = patience_of(hops, stages_behind)
        self._compared: OrderedDict[frozenset[PeerId], _Comparisons] = OrderedDict()
        self._asked: OrderedDict[frozenset[PeerId], float] = OrderedDict()  # when a pair was last to be compared
        self._suspects: OrderedDict[PeerId, _Suspect] = OrderedDict()
        self._told_at = float("-inf")

    @property
    def doubted(self) -> set[PeerId]:
        return {peer for peer, suspect in self._suspects.items() if suspect.is_doubted}

    @property
    def num_remembered(self) -> int:
        return len(self._compared) + len(self._asked) + len(self._suspects)

    def out_until(self, peer: PeerId) -> float:
        """Until when it gets nothing; -inf for one that is not known to lie."""
        suspect = self._suspects.get(peer)
        return float("-inf") if suspect is None else suspect.out_until

    # ---- what is checked ----

    def answered(self, peer: PeerId) -> None:
        """It has; once for each answer, whether it is checked or not."""
        suspect = self._suspects.get(peer)
        if suspect is not None and suspect.is_doubted:
            suspect.answers += 1

    def second(
        self, first: PeerId, callees: Mapping[PeerId, Callee], now: float, *, had: Collection[PeerId] = ()
    ) -> PeerId | None:
        """The one that is to compute as well what first has just answered; None: it is not checked. had: others that had it already."""
        suspect = self._suspects.get(first)
        usable = [peer for peer, each in callees.items() if peer != first and each.is_open(now) and peer not in had]
        if not usable:
            return None
        near = [peer for peer in usable if not callees[peer].is_far]
        open_ = [peer for peer in usable if self._is_open(peer, first)]
        if open_ or (suspect is not None and suspect.is_doubted):
            # Not always those: one that never answers would be asked by all.
            share, others = DOUBTED_SHARE, open_ if open_ and self._rng.random() < 0.5 else usable
        elif all(frozenset((first, other)) not in self._asked for other in usable):
            share, others = 1, near or usable
        else:
            share, others = (SHARE * self._hops, near) if near else (FAR_SHARE * self._hops, usable)
        if self._rng.randrange(share):
            return None
        # By chance where none was asked: names cost nothing.
        second = min(others, key=lambda other: (self._last_asked(first, other), self._rng.random()))
        pair = frozenset((first, second))
        self._asked[pair] = now
        self._asked.move_to_end(pair)
        _keep_newest(self._asked)
        return second

    def _is_open(self, peer: PeerId, first: PeerId) -> bool:
        """Whether a peer that is doubted is to be compared with first yet."""
        suspect, known = self._suspects.get(peer), self._compared.get(frozenset((peer, first)))
        if suspect is None or not suspect.is_doubted:
            return False
        return known is None or not known.has_any(suspect.since)

    def _last_asked(self, one: PeerId, other: PeerId) -> float:
        return self._asked.get(frozenset((one, other)), float("-inf"))

    # ---- what came of it ----

    def compared(
        self, one: PeerId, other: PeerId, agreement: float, callees: Collection[PeerId], now: float
    ) -> list[Event]:
        """Takes a comparison in; what is to be told. Of those that it proves wrong `out_until` says so from now on."""
        pair, is_bad = frozenset((one, other)), not agreement >= LEAST_AGREEMENT
        self._compared.setdefault(pair, _Comparisons()).add(agreement, now)
        self._compared.move_to_end(pair)
        _keep_newest(self._compared)
        if is_bad:
            for peer in pair.intersection(callees):
                self._doubt(peer, now)
        events: list[Event] = []
        for peer in sorted(pair):  # only what was compared can have changed
            events += self._judge(peer, callees, now, is_bad=is_bad)
        if is_bad and not events and len(callees) == 2 and now >= self._told_at + TOLD_EVERY_S:
            self._told_at = now
            events.append(CalleesDisagree(one, other, agreement))
        return events

    def _doubt(self, peer: PeerId, now: float) -> None:
        suspect = self._suspects.get(peer)
        if suspect is None or suspect.latest + SUSPECT_S < now:
            suspect = self._suspects[peer] = _Suspect(now)
        elif suspect.out_until > now:
            return  # what was under way when it was found out
        suspect.latest, suspect.is_doubted = now, True
        self._suspects.move_to_end(peer)
        _keep_newest(self._suspects)

    def _judge(self, peer: PeerId, callees: Collection[PeerId], now: float, *, is_bad: bool) -> list[Event]:
        suspect = self._suspects.get(peer)
        if suspect is None or not suspect.is_doubted:
            return []
        others = [other for other in callees if other != peer and self.out_until(other) <= now]
        known = {other: self._compared.get(frozenset((peer, other))) for other in others}
        since = suspect.since
        worst = {other: pair.worst(since) for other, pair in known.items() if pair is not None and pair.has_any(since)}
        against = {other: each for other, each in worst.items() if not each >= LEAST_AGREEMENT}
        half = (len(others) + 1) // 2
        if len(against) + len(others) - len(worst) <= half:
            suspect.is_doubted = False
            return []
        if len(against) <= half or not is_bad or suspect.answers < self._patience:
            return []
        suspect.out_until, suspect.is_doubted = now + OUT_S, False
        self._forget(peer)
        return [GradientsFalse(peer, tuple(sorted(against)), max(against.values()), OUT_S)]

    def _forget(self, liar: PeerId) -> None:
        """What it was compared with says nothing against the others, and it is compared anew when it is back."""
        for pairs in (self._compared, self._asked):
            for pair in [pair for pair in pairs if liar in pair]:
                del pairs[pair]
        for peer, suspect in self._suspects.items():
            worst = (pair.worst(suspect.since) for peers, pair in self._compared.items() if peer in peers)
            if all(each >= LEAST_AGREEMENT for each in worst):
                suspect.is_doubted = False


def _keep_newest(known: OrderedDict[Any, Any]) -> None:
    while len(known) > MAX_REMEMBERED:
        known.popitem(last=False)
