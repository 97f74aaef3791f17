"""Which members may average at this moment, and who steps in for those that lack what most others hold. Pure.

An averager that says it lacks several contributions is slow, or says so of whom it likes: their authors were left out of rounds, and doubted for it.
The next in order averages its slices as well. Of one contribution nobody can tell whether its author keeps it from who lacks it: that is its author's.
"""

from collections.abc import Sequence
from itertools import islice

from dilocox_peer.peer.rounds.gathering import Gathering
from dilocox_peer.peer.rounds.membership import Members
from dilocox_peer.peer.rounds.seat import Seat
from dilocox_peer.peer.rounds.timing import FOREVER, NEVER
from dilocox_peer.types import PeerId
from dilocox_peer.wire.chain import VOUCHING


class Able:
    """The averagers of one (head, view) at one peer, as of the moment that was looked at last. orders: of each slice, in which they are to average it."""

    def __init__(self, seat: Seat, members: Members, gathering: Gathering, orders: Sequence[Sequence[PeerId]]) -> None:
        self._seat = seat
        self._members = members
        self._gathering = gathering
        self._orders = orders
        self._now, self._late_at, self._then = NEVER, FOREVER, NEVER
        self._may: dict[PeerId, bool] = {}
        self._behind: set[PeerId] | None = None

    def look(self, now: float, *, late_at: float, patience_s: float) -> None:
        """late_at: when contributions are waited for no longer. patience_s: for which who is behind is waited for alone."""
        self._now, self._late_at, self._then = now, late_at, now - patience_s
        self._may, self._behind = {}, None

    def may(self, peer: PeerId) -> bool:
        """Whether slices are left to it: when it is late, if it has said that it holds anything."""
        if (may := self._may.get(peer)) is None:
            may = self._may[peer] = peer == self._seat.me or (
                self._members.takes_part(peer, self._now)
                and self._seat.owner.conduct.averages(peer)
                and (self._now < self._late_at or self._gathering.has_spoken(peer))
            )
        return may

    def is_awaited(self, peer: PeerId) -> bool:
        """Whether its word on a slice is worth waiting for: who lacks what is averaged has none."""
        return self.may(peer) and peer not in self.behind

    @property
    def all(self) -> list[PeerId]:
        """Those that may average, whether anything is drawn to them or not."""
        return [peer for peer in self._orders[0] if self.may(peer)]

    @property
    def behind(self) -> set[PeerId]:
        """Those for whom others step in: of the first in order of each slice."""
        if self._behind is None:
            firsts = [self._first(index, VOUCHING + 1) for index in range(len(self._orders))]
            pairs = {peer for first in firsts for peer in first[:VOUCHING]}
            lacking, never = self._gathering.behind(pairs, self._then)
            # A helper says that it holds less than before, until it has those slices as well.
            helpers = {peer for first in firsts if never.intersection(first[:VOUCHING]) for peer in first[VOUCHING:]}
            self._behind = never | (lacking - helpers)
        return self._behind

    def drawn(self, index: int, wanted: int) -> list[PeerId]:
        """So many that are to average a slice, and one more for each of the first of them that is behind."""
        drawn = self._first(index, wanted)
        behind = self.behind.intersection(drawn[:VOUCHING])
        return self._first(index, wanted + len(behind)) if behind else drawn

    def steps_in(self, index: int) -> bool:
        """Whether a slice may be ours for one that is behind alone: that it is not here then is no other case than that one's."""
        first = self._first(index, VOUCHING)
        return self._seat.me not in first and not self.behind.isdisjoint(first)

    def _first(self, index: int, count: int) -> list[PeerId]:
        return list(islice(filter(self.may, self._orders[index]), count))
