"""Which peers of our stage are to be dialled, and when: all of them, for as long as the directory lists them. Pure.

A connection that is lost is made anew, at the addresses of the newest lease: a relay that was started again, or a home with another
address, cuts nobody off for longer than it takes to announce it. One that a relay passes on is made anew, ever more seldom, where it may be better
then: soon with who can be dialled by now; by one of the two where p2pd may punch a hole, once routers have forgotten the last try.

Where more are listed than are dialled, those come first that were reached once or are known otherwise; of the others those that were dialled in vain
least often, one of each range of addresses in turn. So leases that are made up push nobody out who is there.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dilocox_peer.dht.records import Lease
from dilocox_peer.dht.turns import by_turns
from dilocox_peer.types import PeerId

FIRST_RETRY_S, MAX_RETRY_S = 4.0, 60.0
UNMET_RETRY_S = 240.0  # at most, of one that was never reached: it may be nothing but a lease
BETTER_S, PUNCH_S, MOST_BETTER_S = (
    15.0,
    150.0,
    1800.0,
)  # from a relayed connection to the first try of a better one; between two
MAX_LISTED = 512
MAX_KNOWN = 384  # of these before others have had their turn: names that answer are had without end, too
NEVER = float("-inf")


@dataclass(slots=True)
class _Listed:
    addresses: tuple[str, ...]
    due_at: float = NEVER
    failures: int = 0
    is_dialled_now: bool = False
    was_dialled: bool = False
    was_reached: bool = False
    is_direct: bool = False  # others can dial it
    better_at: float = NEVER  # when a relayed connection is made anew; NEVER: there is none
    num_tries: int = 0  # of a better one


class DialPlan:
    """See the module."""

    def __init__(self, me: PeerId, rank: Callable[[PeerId], Any] = str) -> None:
        """rank: by which those are chosen that are dialled, where there are too many; one that nobody else knows."""
        self._me = me
        self._rank = rank
        self._listed: dict[PeerId, _Listed] = {}
        self._in_vain: dict[PeerId, int] = {}  # how often those were dialled that made room for others

    def listed(self, leases: Iterable[Lease], known: Collection[PeerId] = ()) -> None:
        """These are in the directory; who is no more is forgotten. known: peers that were heard, or that we are connected with."""
        others = [lease for lease in leases if lease.peer != self._me]
        before, self._listed = self._listed, {}
        in_vain = self._in_vain | {peer: each.failures for peer, each in before.items()}
        reached = {peer for peer, each in before.items() if each.was_reached}.union(known)
        chosen = others if len(others) <= MAX_LISTED else self._chosen(others, reached, in_vain)
        self._in_vain = {lease.peer: in_vain[lease.peer] for lease in others if in_vain.get(lease.peer)}
        for lease in chosen:
            fresh = _Listed(lease.addresses, failures=in_vain.get(lease.peer, 0))
            each = self._listed[lease.peer] = before.get(lease.peer, fresh)
            if each.addresses != lease.addresses:
                each.addresses, each.due_at, each.failures = lease.addresses, NEVER, 0
            if each.is_direct is not (is_direct := lease.reachability == "direct"):
                each.is_direct, each.better_at, each.num_tries = is_direct, NEVER, 0

    def _chosen(
        self, leases: Sequence[Lease], reached: Collection[PeerId], in_vain: Mapping[PeerId, int]
    ) -> list[Lease]:
        known = by_turns((lease for lease in leases if lease.peer in reached), self._rank)
        others = by_turns(
            (lease for lease in leases if lease.peer not in reached),
            lambda peer: (in_vain.get(peer, 0), self._rank(peer)),
        )
        others.sort(key=lambda lease: in_vain.get(lease.peer, 0))
        return [*known[:MAX_KNOWN], *others, *known[MAX_KNOWN:]][:MAX_LISTED]

    def due(
        self, connected: Collection[PeerId], now: float, *, later: Collection[PeerId] = ()
    ) -> list[tuple[PeerId, tuple[str, ...]]]:
        """Whom to dial now, and where; each is to be followed by `dialled`. One we are connected with counts as new once. later: who is not dialled yet."""
        due = []
        for peer, each in self._listed.items():
            if peer in later or each.is_dialled_now or each.due_at > now or (each.was_dialled and peer in connected):
                continue
            each.is_dialled_now = True
            due.append((peer, each.addresses))
        # Of many that wait for room those first that have not failed: made-up leases have soon.
        return sorted(due, key=lambda each: (self._listed[each[0]].failures, self._rank(each[0])))

    def dialled(self, peer: PeerId, now: float, *, is_there: bool) -> bool:
        """Whether it was the first time."""
        if (each := self._listed.get(peer)) is None:
            return False
        is_first, each.was_dialled, each.is_dialled_now = not each.was_dialled, True, False
        each.was_reached = each.was_reached or is_there
        each.failures = 0 if is_there else min(each.failures + 1, 16)
        most_s = MAX_RETRY_S if each.was_reached else UNMET_RETRY_S
        each.due_at = now + min(FIRST_RETRY_S * 2 ** max(0, each.failures - 1), most_s)
        return is_first

    def put_off(self, peer: PeerId, now: float) -> None:
        """It was not dialled: there is no room for it now. That is no failure of its own."""
        if (each := self._listed.get(peer)) is not None:
            each.is_dialled_now, each.due_at = False, now + FIRST_RETRY_S

    def line_is_back(self) -> None:
        """What failed until now was our own line's doing."""
        self._in_vain.clear()
        for each in self._listed.values():
            each.failures, each.due_at = 0, NEVER

    def to_better(
        self, paths: Mapping[PeerId, str], now: float, *, may_punch: bool
    ) -> list[tuple[PeerId, tuple[str, ...]]]:
        """With whom a relayed connection is to be made anew now, and where it is dialled then. may_punch: our p2pd knows where we come
        out; of two such peers the one of the smaller name does it, as routers spoil a hole that both begin."""
        due = []
        for peer, each in self._listed.items():
            if (path := paths.get(peer)) != "relayed":
                each.better_at = NEVER
                if path is not None:  # else a try has just ended the connection
                    each.num_tries = 0
                continue
            first_s = BETTER_S if each.is_direct else PUNCH_S
            if each.better_at == NEVER:
                each.better_at = now + (_pause_s(each.num_tries) if each.num_tries else first_s)
            if now < each.better_at or not (each.is_direct or (may_punch and self._me < peer)):
                continue
            each.num_tries = min(each.num_tries + 1, 16)
            each.better_at = now + _pause_s(each.num_tries)
            direct = tuple(text for text in each.addresses if "/p2p-circuit" not in text)
            due.append((peer, direct if each.is_direct and direct else each.addresses))
        return due

    def missing(self, connected: Collection[PeerId]) -> list[PeerId]:
        """Those in the directory that were dialled, and that we are not connected with."""
        return [peer for peer, each in self._listed.items() if each.was_dialled and peer not in connected]


def to_ask_for_relays(leases: Iterable[Lease], me: PeerId, rank: Callable[[PeerId], Any]) -> list[str]:
    """Where those are that may be relays, in the order in which they are asked: one of each range of addresses in turn. rank: as DialPlan's; names are
    ground in a moment that come first by any order which others know, and two relays are all that a home has."""
    direct = (each for each in leases if not each.is_relayed and each.peer != me)
    return [text for each in by_turns(direct, rank) for text in each.addresses]


def _pause_s(num_tries: int) -> float:
    """After so many tries of a better connection: routers remember each for two minutes, and spoil a direct one from the same port too."""
    return min(PUNCH_S * 2.0 ** (num_tries - 1), MOST_BETTER_S)
