"""Whose turn it is to lead a ballot, and until when. Pure.

Ballot 0 has the time that offers take and its own; each later one that of a ballot, longer for every one that failed. The turn
of a leader that is gone, also along another branch, or that conduct.py puts off or does not wait for, is not waited for: who offers nothing in time would, as a
leader, wait for its own offer to the end.
"""

import itertools

from dilocox_peer.peer.rounds.averages import Slicing
from dilocox_peer.peer.rounds.membership import Members
from dilocox_peer.peer.rounds.seat import Seat
from dilocox_peer.peer.rounds.timing import FOREVER
from dilocox_peer.types import PeerId

BACKOFF = 1.5


class Turns:
    """The turns of one (head, view) at one peer. ballot: whose turn it is; due: when the next one's comes."""

    def __init__(self, seat: Seat, members: Members, slicing: Slicing | None) -> None:
        self._seat = seat
        self._slicing = slicing
        self._members = members
        self._conduct = seat.owner.conduct
        self.ballot = seat.votes.promised
        self.due = FOREVER
        self._under_way = seat.votes.promised  # highest ballot somebody was heard to lead
        self._taken = 0

    @property
    def is_first(self) -> bool:
        """Whether nobody was heard to lead since we sat down here."""
        return self._under_way == self._seat.votes.promised == self.ballot and self._taken == 0

    def begin(self, offers_due: float) -> None:
        """The round has ended."""
        if self.due == FOREVER:
            self.due = offers_due + self._seat.jittered(self._seat.pace.ballot_s)

    def follow(self, ballot: int, now: float) -> None:
        """A ballot is under way: give it its time."""
        if ballot > self._under_way and ballot >= self.ballot:
            if self._slicing is not None:
                self._slicing.taken_over(now)
            self.ballot = self._under_way = ballot
            self._taken += 1
            wait = self._seat.pace.ballot_s * BACKOFF ** min(self._taken, 6)
            self.due = now + self._seat.jittered(min(wait, self._seat.timing.ballot_cap_s))

    def proposed(self, ballot: int, now: float) -> None:
        """We lead it, and have proposed."""
        self.follow(ballot, now)
        if self.due == FOREVER or ballot == 0:
            self.due = now + self._seat.jittered(self._seat.pace.ballot_s)

    def accepted(self, now: float) -> None:
        """Offers are no longer waited for, only the certificate."""
        self.due = min(self.due, now + self._seat.jittered(self._seat.pace.ballot_s))

    def goes_on(self, now: float, longer_s: float) -> None:
        """What is to be proposed is on its way: whoever leads has longer_s, in seconds, for that and then the time of a ballot."""
        if self.due != FOREVER:
            self.due = max(self.due, now + self._seat.jittered(self._seat.pace.ballot_s + longer_s))

    def is_lost(self, waited_s: float, now: float) -> bool:
        """Whether no use is in waiting for the leader of this turn. waited_s: since the round ended."""
        leader = self._seat.leader(self.ballot)
        if leader == self._seat.me or self._is_awaited(leader, now):
            return False
        if self._taken and self.ballot == self._under_way and self._leads(leader):
            return False  # it has asked for it just now: whoever promised it and then asked above it would have nobody lead
        # One that is silent may be heard in a moment; one that is here, and not awaited, leads elsewhere or is not trusted.
        is_silent = not self._members.is_alive(leader, now) and not self._members.is_surely_gone(leader)
        return waited_s > self._seat.timing.alive_s or not is_silent or not self._is_trusted(leader)

    def is_early(self, sender: PeerId, ballot: int, now: float, *, since_end_s: float) -> bool:
        """Whether sender asks for a ballot while who leads first has its time: else who asks at once would lead every round. Our clock is not its
        clock; and once somebody else was promised a ballot, whoever asks above it may be the only one that is left."""
        seat = self._seat
        if (
            seat.votes.promised > 0
            or ballot <= self.ballot
            or sender == seat.leader(0)
            or self.is_lost(since_end_s, now)
        ):
            return False
        return now < self.due - seat.pace.ballot_s / 2

    def _is_awaited(self, leader: PeerId, now: float) -> bool:
        return self._members.takes_part(leader, now) and self._is_trusted(leader)

    def _is_trusted(self, leader: PeerId) -> bool:
        return self._leads(leader) and leader in self._conduct.waited_for(self._seat.place.roster)

    def _leads(self, leader: PeerId) -> bool:
        return leader in self._conduct.trusted(self._seat.place.voters)

    def next(self, now: float) -> int:
        """The next ballot whose leader is here; unless we are that, it is its turn now."""
        seat = self._seat
        ballot = max(self.ballot, seat.votes.promised) + 1
        for _ in range(len(seat.order) - 1):
            if self._is_awaited(seat.leader(ballot), now):
                break
            ballot += 1
        if seat.leader(ballot) != seat.me:
            # Not the whole time of a ballot: its leader may be at another head, or count turns differently after a restart.
            self.ballot = ballot
            self.due = now + seat.jittered(seat.timing.retry_s + seat.pace.ballot_s / 2)
        return ballot

    def ours_above(self, promised: int) -> int:
        """The next ballot of ours above this one."""
        return next(ballot for ballot in itertools.count(promised + 1) if self._seat.leader(ballot) == self._seat.me)
