"""Votes of an open run are earned: by contributions that were counted, and by work that the whole run has done meanwhile."""

from dilocox_peer.peer.rounds.chain import Place, is_quorum
from dilocox_peer.peer.rounds.seats import Seats, SeatTerms
from dilocox_peer.types import PeerId, sha256
from dilocox_peer.wire.chain import Entry, Plan, Report, Value

FOUNDERS = tuple(PeerId(name) for name in "abcdef")
SYBILS = tuple(PeerId(f"sybil{number:02d}") for number in range(30))
STEP_US = 500_000
HOUR_US = 3_600_000_000
PLAN = Plan("fp16", 0, 64)
ROUND_US = PLAN.inner_steps * STEP_US


class Run:
    """Rounds in which everybody of the roster contributes."""

    def __init__(self, terms: SeatTerms, founders: tuple[PeerId, ...] = FOUNDERS) -> None:
        self.round = 0
        self.seats = Seats(terms)
        self.roster: tuple[PeerId, ...] = ()
        self.take(founders, kind="epoch")

    @property
    def voters(self) -> tuple[PeerId, ...]:
        return self.seats.voters(self.roster)

    def take(
        self, roster: tuple[PeerId, ...], *, kind: str = "round", idle: tuple[PeerId, ...] = (), step_us: int = STEP_US
    ) -> "Run":
        """One certificate, which makes roster the next one."""
        self.round += kind == "round"
        entries = tuple(
            Entry(peer, 1, sha256(peer.encode()), 10, 8, report=Report(step_us=step_us if peer in FOUNDERS else 10**9))
            for peer in sorted(self.roster)
            if kind == "round" and peer not in idle
        )
        value = Value(kind, self.round + 1, self.round, 0, entries, roster, PLAN)  # type: ignore[arg-type]
        before = self.voters if self.roster else ()
        self.seats = self.seats.after(value, before)
        self.roster = roster
        return self

    def rounds(self, count: int, roster: tuple[PeerId, ...]) -> "Run":
        for _ in range(count):
            self.take(roster)
        return self


def test_without_terms_everybody_in_the_roster_votes() -> None:
    assert Seats().voters((*FOUNDERS, SYBILS[0])) == (*FOUNDERS, SYBILS[0])


def test_thirty_that_behave_for_an_hour_of_the_runs_clock_have_no_vote_beside_six() -> None:
    run = Run(SeatTerms(contributions=4, work_us=2 * HOUR_US))
    roster = (*FOUNDERS, *SYBILS)
    run.rounds(HOUR_US // ROUND_US, roster)
    assert run.seats.clock_us >= 0.9 * HOUR_US
    assert run.voters == FOUNDERS
    assert not is_quorum(set(SYBILS), run.voters)


def test_time_alone_brings_few_at_once_and_what_they_report_does_not_make_the_clock_run() -> None:
    """The made-up peers report steps of 1000 seconds; the clock goes by the voters."""
    terms = SeatTerms(contributions=4, work_us=HOUR_US, window=1000)
    run = Run(terms)
    run.rounds(2 * HOUR_US // ROUND_US, (*FOUNDERS, *SYBILS))
    new = set(run.voters) - set(FOUNDERS)
    assert len(new) == 3  # a third of nine
    assert not is_quorum(new, run.voters)


def test_who_contributes_nothing_never_votes() -> None:
    run = Run(SeatTerms(contributions=2))
    lazy = SYBILS[0]
    for _ in range(50):
        run.take((*FOUNDERS, lazy), idle=(lazy,))
    assert run.voters == FOUNDERS


def test_a_small_roster_takes_newcomers_in_without_the_clock() -> None:
    run = Run(SeatTerms(contributions=2, work_us=HOUR_US, window=4), founders=FOUNDERS[:1])
    run.rounds(2, FOUNDERS)
    assert len(run.voters) == 1
    run.rounds(1, FOUNDERS)
    assert len(run.voters) == 4
    run.rounds(20, FOUNDERS)
    assert len(run.voters) == 4


def test_a_vote_is_kept_over_an_absence() -> None:
    run = Run(SeatTerms(contributions=4, work_us=HOUR_US))
    run.rounds(3, FOUNDERS[:5])
    run.rounds(1, FOUNDERS)
    assert run.voters == FOUNDERS


def test_a_roster_without_any_voter_votes_as_a_whole() -> None:
    run = Run(SeatTerms(contributions=4, work_us=HOUR_US))
    newcomers = SYBILS[:2]
    run.take(newcomers, kind="epoch")
    assert run.voters == newcomers
    run.rounds(2, (*newcomers, SYBILS[2]))
    assert run.voters == newcomers


def test_a_round_counts_signatures_of_voters_alone() -> None:
    genesis = Place.genesis(0, sha256(b"genesis"), PLAN, terms=SeatTerms(contributions=4))
    assert genesis.voters == ()
    assert genesis.seats.terms.contributions == 4
