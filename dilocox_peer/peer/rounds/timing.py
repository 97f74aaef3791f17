"""How long things may take: the fixed bounds of the round protocol, and what it learns between them. Pure."""

import statistics
from collections import deque
from dataclasses import dataclass

from dilocox_peer.peer.planning.plan import KEPT_ROUNDS, TOLERANCE

NEVER, FOREVER = float("-inf"), float("inf")  # as moments
MAX_REPLAYED = 512  # rounds: each is an outer step of the whole stage
CLOSE_BEHIND = 2  # certificates: a newcomer that is no further behind is taken in; rounds wait for it from then on
AWAY_S = 600.0  # of no voter heard, after which newcomers are the run: five times what a lease lives, and a router takes to restart
FEW, MOST_STRETCHED = (
    4,
    3.0,
)  # members that hear each other every heartbeat_s; how much more seldom many do, at most (stretch)
MAX_DOUBLED = 3  # times that the wait before something is told again doubles
WANTED_S = 1.0  # between two looks whether a state that is being fetched still leads to the best chain known
LEARNED_FROM = 32  # newest samples a learned time looks at: enough for a median, short enough to follow a changed link


@dataclass(frozen=True, slots=True)
class Timing:
    """All times in seconds. Floors keep a quiet network from making us hasty, caps a slow one from stopping us."""

    heartbeat_s: float = 1.0  # among few; see beat_s
    stranger_every: int = 4  # heartbeats between two to a peer that is neither in the roster nor at our head
    alive_heartbeats: float = 3.0  # of beat_s: silence after which a peer counts as absent
    retry_s: float = 1.0  # a proposal, question or answer unanswered for so long is sent again; offers see again_s
    settle_s: float = 3.0  # peers that start together are all waited for; counted from the newest of them
    genesis_patience_s: float = 10.0  # a peer that knows of others and hears none starts alone after this
    offer_wait_floor_s: float = 1.0  # first offer to a proposal without the contributions that are not here yet
    offer_wait_start_s: float = 30.0  # before anything is measured
    offer_wait_cap_s: float = 600.0  # also at most half a round, once rounds are known
    ballot_floor_s: float = 3.0  # proposal to certificate, before the next leader asks
    ballot_start_s: float = 10.0
    ballot_cap_s: float = 120.0
    mad_factor: float = 4.0
    degrade_refused_s: float = 3.0  # no quorum, and all the absent refuse connections or said they leave
    degrade_s: float = 25.0  # no quorum otherwise, or a quorum and no progress; also at least two rounds
    first_degrade_s: float = (
        AWAY_S  # no quorum of the first roster before its first round: they may never have met, and each
    )
    # would go on alone with a run of its own
    view_wait_s: float = 3.0  # answers to a call, then signatures
    view_turn_s: float = 3.0  # the next peer in rank calls so much later
    blob_retry_s: float = 2.0
    blob_tries: int = 3  # then a certified blob is given up for a whole state
    overlaps: bool = True  # whether training goes on while contributions are exchanged
    exchange_share: float = 0.7  # of a round, that plans let an exchange take (the run's compression.exchange_share)
    exchange_floor_s: float = 20.0  # an offered contribution on its way for so long, or two rounds, is given up
    state_retry_s: float = 2.0
    state_tries: int = 4  # then a better chain is left alone for a while, and we go on with our own
    state_patience_s: float = (
        4000.0  # a FetchState unanswered for so long counts as failed: longer than a fetch may take
    )
    shun_s: float = 20.0
    sync_wait_s: float = 4.0  # for a page of a chain
    keep_rounds: int = KEPT_ROUNDS  # blobs and certificates of so many rounds stay servable
    replay_limit: int = 8  # further behind than this: a whole state instead of so many rounds' blobs

    def again_s(self, num_told: int, num_members: int) -> float:
        """Until what was told so many times, once or more, to all of so large a roster is told again, as messages are lost: retry_s, and twice,
        four and eight times that."""
        return self.retry_s * stretch(num_members) * (1 << min(num_told - 1, MAX_DOUBLED))

    def beat_s(self, num_members: int) -> float:
        """Between two heartbeats of a member of so large a roster. A process that has ended is noticed sooner, by its connections."""
        return self.heartbeat_s * stretch(num_members)

    def absent_s(self, num_members: int) -> float:
        """Silence after which a member of so large a roster counts as absent."""
        return self.alive_heartbeats * self.beat_s(num_members)

    @property
    def alive_s(self) -> float:
        """Silence after which a peer counts as absent, where they are few."""
        return self.heartbeat_s * self.alive_heartbeats


def stretch(num_members: int) -> float:
    """How much more seldom than in a small roster something is said now and then: what all say to all by the second grows with the square."""
    return min(max(num_members / FEW, 1.0), MOST_STRETCHED)


class Learned:
    """median + k * MAD of the newest samples, between a floor and a cap; `start` until there are samples."""

    def __init__(self, *, start: float, floor: float, cap: float, mad_factor: float) -> None:
        self._samples: deque[float] = deque(maxlen=LEARNED_FROM)
        self._floor = floor
        self._cap = cap
        self._mad_factor = mad_factor

        self.median: float | None = None
        self.seconds = min(max(start, floor), cap)

    def observe(self, seconds: float) -> None:
        self._samples.append(seconds)
        self.median = statistics.median(self._samples)
        mad = statistics.median(abs(sample - self.median) for sample in self._samples)
        self.seconds = min(max(self.median + self._mad_factor * mad, self._floor), self._cap)


class Pace:
    """What this peer has learned of its stage's times."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._round = Learned(start=0.0, floor=0.0, cap=FOREVER, mad_factor=0.0)
        self._spread = Learned(
            start=timing.offer_wait_start_s, floor=timing.offer_wait_floor_s, cap=timing.offer_wait_cap_s,
            mad_factor=timing.mad_factor,
        )  # fmt: skip
        self._ballot = Learned(
            start=timing.ballot_start_s,
            floor=timing.ballot_floor_s,
            cap=timing.ballot_cap_s,
            mad_factor=timing.mad_factor,
        )

    def observe_round(self, seconds: float) -> None:
        """Time between two heads."""
        self._round.observe(seconds)

    def observe_offer(self, seconds: float) -> None:
        """A contribution's arrival, all of it, after the round's first offer."""
        self._spread.observe(seconds)

    def observe_ballot(self, seconds: float) -> None:
        """Time from a proposal to its certificate."""
        self._ballot.observe(seconds)

    @property
    def round_s(self) -> float | None:
        """Median time of a round, None before the first."""
        return self._round.median

    @property
    def offer_wait_s(self) -> float:
        """How long after the round's first offer a leader waits for the others: at most half a round."""
        half_round = (self.round_s or FOREVER) / 2
        return max(min(self._spread.seconds, half_round), self._timing.offer_wait_floor_s)

    @property
    def exchange_wait_s(self) -> float:
        """How long after the round's first offer a leader waits for contributions that are on their way: as long as a plan lets an
        exchange take before another plan is made. Where training does not go on meanwhile, no longer than for offers."""
        if not self._timing.overlaps:
            return self.offer_wait_s
        return max(self.offer_wait_s, TOLERANCE * self._timing.exchange_share * (self.round_s or 0.0))

    @property
    def ballot_s(self) -> float:
        return self._ballot.seconds

    @property
    def exchange_s(self) -> float:
        """How long an offered contribution may take to get here: the plan lets an exchange take most of a round."""
        return max(self._timing.exchange_floor_s, 2 * self.round_s) if self.round_s else self._timing.offer_wait_cap_s

    @property
    def result_s(self) -> float:
        """How long what a slice came to, or goes on from, may take to get here, which is a small part of what an exchange brings."""
        return max(self._timing.exchange_floor_s / 4, self.round_s) if self.round_s else self.exchange_s

    @property
    def degrade_s(self) -> float:
        """How long a lost quorum, or a quorum without progress, is waited for."""
        return max(self._timing.degrade_s, 2 * (self.round_s or 0.0))
