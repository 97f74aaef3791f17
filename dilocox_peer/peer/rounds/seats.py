"""The votes of a roster. In an open run a vote is earned: a function of the chain, the same for everybody. Pure values.

Everybody in the roster contributes. A newcomer votes once `contributions` of its have been counted and `work_us` of the run's
clock have passed since the first. The run's clock is work: of each round its inner steps, times the median of the step
times that its voters report (0 where one reports none); nobody can make it run by signing fast. Within any `window` rounds at most half as many get
a vote as had one when it began, so at most a third of the voters are new.

A vote is kept: a peer that comes back after a crash votes at once. A roster without any voter (all of them have gone) votes
as a whole: a run goes on among who is there. While a stage has fewer than `few` voters the clock is not asked: a quorum of
one or two is lost too easily.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dilocox_peer.manifest import Manifest
from dilocox_peer.types import PeerId

if TYPE_CHECKING:
    from dilocox_peer.wire.chain import Value

MAX_REMEMBERED = 1024  # voters, present and past; the earliest that are absent go
MAX_CANDIDATES = 256


@dataclass(frozen=True, slots=True)
class SeatTerms:
    """contributions: that a newcomer of the run has to have counted before it votes; 0: everybody in the roster votes.
    work_us: of the run's clock since its first. window: rounds."""

    contributions: int = 0
    work_us: int = 0
    window: int = 8
    few: int = 4


@dataclass(frozen=True, slots=True)
class _Candidate:
    """counted: its contributions. since_us: the run's clock at the first."""

    counted: int
    since_us: int


@dataclass(frozen=True, slots=True)
class Seats:
    """What the chain up to a place says of votes. earned: voters by the round since which they vote. promoted: (round, how
    many got a vote in it, how many had one before) of the newest rounds."""

    terms: SeatTerms = SeatTerms()
    clock_us: int = 0
    earned: Mapping[PeerId, int] = field(default_factory=dict)
    candidates: Mapping[PeerId, _Candidate] = field(default_factory=dict)
    promoted: tuple[tuple[int, int, int], ...] = ()

    def voters(self, roster: Iterable[PeerId]) -> tuple[PeerId, ...]:
        """Those of the roster that vote, in its order."""
        members = tuple(roster)
        return tuple(peer for peer in members if peer in self.earned) or members

    def after(self, value: "Value", before: tuple[PeerId, ...]) -> "Seats":
        """What holds after value. before: the voters at the place that it follows."""
        terms = self.terms
        if terms.contributions == 0:
            return self
        if not before or not any(peer in self.earned for peer in value.roster):
            return self._with_voters(
                value.roster, value.round
            )  # a first roster, or one that none of the voters is left in
        if value.kind == "epoch":
            return self
        clock_us = self.clock_us + self._round_us(value, before)
        candidates = {peer: each for peer, each in self.candidates.items() if peer in value.roster}
        for entry in value.entries:
            is_new = entry.peer not in self.earned and entry.peer in value.roster
            if is_new and entry.micro_batches and len(candidates) < MAX_CANDIDATES:
                known = candidates.get(entry.peer, _Candidate(0, self.clock_us))
                candidates[entry.peer] = replace(known, counted=min(known.counted + 1, terms.contributions))
        promoted = tuple(each for each in self.promoted if each[0] > value.round - terms.window)
        had = promoted[0][2] if promoted else len(before)
        room = max(terms.few - len(before), 1, had // 2) - sum(count for _, count, _ in promoted)
        ready = sorted(
            (each.since_us, peer)
            for peer, each in candidates.items()
            if each.counted >= terms.contributions
            and (len(before) < terms.few or clock_us - each.since_us >= terms.work_us)
        )[: max(room, 0)]
        new = [peer for _, peer in ready]
        if new:
            promoted = (*promoted, (value.round, len(new), len(before)))
        left = {peer: each for peer, each in candidates.items() if peer not in new}
        seats = replace(self, clock_us=clock_us, candidates=left, promoted=promoted)
        return seats._with_voters(new, value.round, value.roster) if new else seats

    def _with_voters(self, peers: Iterable[PeerId], number: int, roster: Iterable[PeerId] = ()) -> "Seats":
        earned = {**self.earned, **{peer: number for peer in peers if peer not in self.earned}}
        here = {*roster, *peers}
        while len(earned) > MAX_REMEMBERED:
            absent = [peer for peer in earned if peer not in here]
            del earned[min(absent or list(earned), key=lambda peer: (earned[peer], peer))]
        return replace(self, earned=earned)

    def _round_us(self, value: "Value", before: tuple[PeerId, ...]) -> int:
        """How much of the run's clock the round took. A voter that says nothing counts as one whose steps take no time: a leader that names
        itself alone would be the median."""
        told = {entry.peer: entry.report.step_us for entry in value.entries}
        return value.plan.inner_steps * int(statistics.median_low([told.get(peer, 0) for peer in before]))


def keeps_order(before: Sequence[PeerId], after: Sequence[PeerId]) -> bool:
    """Whether those who stay in a roster come before newcomers, in the order that they had. The first voter is the one whose half is a quorum
    (chain.is_quorum): a leader could else put its own in front, and go on with a half."""
    stay = [peer for peer in before if peer in after]
    return list(after[: len(stay)]) == stay


EVERYBODY = Seats()


def seat_terms(manifest: Manifest) -> SeatTerms:
    """How newcomers of this run earn a vote: invited and listed peers have one at once."""
    admission = manifest.admission
    if admission.mode != "open":
        return SeatTerms()
    work_us = round(admission.votes_after_hours * 3.6e9)
    return SeatTerms(admission.votes_after, work_us, manifest.rounds.checkpoint_every)
