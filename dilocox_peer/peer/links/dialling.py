"""Whom linkd is to dial, at which addresses, and when again after a link was hung up. Pure.

linkd keeps what it was told to dial linked, with pauses of its own, until it is told to hang up: that ends the link and the
dialling. So whatever hangs up says here until when, and the wanted are dialled again then; forgotten, they would stay
unlinked until the other side dials.

Of too many those are dialled that come first by a rank of ours. Leases cost who writes them nothing: those whose links never came up, or stay down, make room a
few minutes after they were dialled, for who waits longest: so new names do not come before who was away for a while.

Leases are claims: a peer may name a link that is another's. A link that several leases name is dialled at the addresses of
all of them, one of each in turn as far as an order to linkd holds them, of more by others at each look, and whose it is its greeting proves.

What is announced on this network is nobody's word at all: a few of it come before what leases say, and push none of that out.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from dilocox_peer.types import LinkId, PeerId

MAX_DIALLED = 48
IN_VAIN_S = 180.0  # dialled for so long and not linked; linkd tries at least every minute
MAX_ADDRESSES = 64  # of a link, of 512 characters each: more do not go into one order (frames.MAX_HEADER_BYTES)
MAX_NEARER = 8  # of these, that were announced on this network last; each holds up those behind it by half a second


@dataclass(frozen=True, slots=True)
class LinkAddress:
    """Where the link of a peer of a neighbouring stage is, as its lease says."""

    peer: PeerId
    link: LinkId
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Dial:
    """Keep this link from now on, at any of these addresses."""

    link: LinkId
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HangUp:
    """End the link, if there is one, and dial it no more."""

    link: LinkId


@dataclass(frozen=True, slots=True)
class _Claimed:
    """What leases say of a link."""

    peers: frozenset[PeerId]
    addresses: tuple[str, ...]


class Dialling:
    """`want` says whom, `due` what to order of linkd for it. Every HangUp that comes from elsewhere is told by `left`."""

    def __init__(self, rank: Callable[[PeerId], str] = str) -> None:
        """rank: by which those are chosen that are dialled, where there are too many."""
        self._rank = rank
        self._looks = 0  # at the leases
        self._claims: dict[LinkId, _Claimed] = {}  # all that leases say, by rank
        self._wanted: dict[LinkId, _Claimed] = {}
        self._queue: dict[LinkId, None] = {}  # all links of leases; one that made room for others is last
        self._dialled_at: dict[LinkId, float] = {}  # of those that are not up
        self._dialled: dict[LinkId, tuple[str, ...]] = {}  # as linkd was told
        self._again_at: dict[LinkId, float] = {}  # of the wanted that are not to be dialled before
        self.deadline = float("inf")  # when `due` has something to say, as far as only time is wanting

    @property
    def dialled(self) -> dict[LinkId, tuple[str, ...]]:
        """What linkd is told to dial now."""
        return dict(self._dialled)

    def want(self, leases: Iterable[LinkAddress]) -> None:
        """From now on these, and no others; of too many those that wait longest, of these those of the lowest rank."""
        claims: dict[LinkId, list[LinkAddress]] = {}
        for lease in sorted(leases, key=lambda lease: self._rank(lease.peer)):
            claims.setdefault(lease.link, []).append(lease)
        self._claims = {link: _claimed(of_link, self._looks) for link, of_link in claims.items()}
        self._looks += 1
        self._queue = dict.fromkeys((*(link for link in self._queue if link in self._claims), *self._claims))
        self._choose()

    def _choose(self) -> None:
        self._wanted = {link: self._claims[link] for link in [*self._queue][:MAX_DIALLED]}
        self._again_at = {link: at for link, at in self._again_at.items() if link in self._wanted}
        self._dialled_at = {link: at for link, at in self._dialled_at.items() if link in self._wanted}
        self.deadline = float("-inf")

    def claimed_by(self, link: LinkId) -> frozenset[PeerId]:
        """The peers whose leases name it."""
        return self._wanted[link].peers if link in self._wanted else frozenset()

    def left(self, link: LinkId, until: float) -> None:
        """It was hung up, and is not to be dialled before then."""
        self._dialled.pop(link, None)
        if link in self._wanted:
            self._again_at[link] = until
            self.deadline = min(self.deadline, until)

    def lost(self, link: LinkId) -> None:
        """The link has ended; linkd dials again. It need not if nobody wants it any more."""
        if link in self._dialled and link not in self._wanted:
            self.deadline = float("-inf")

    def nearer(self, link: LinkId, addresses: tuple[str, ...]) -> list[Dial]:
        """A link on this network: its addresses here come first. One that is not dialled is none of ours."""
        known = self._dialled.get(link)
        if known is None or set(addresses) <= set(known):
            return []
        claimed = self._wanted[link].addresses if link in self._wanted else ()
        near = dict.fromkeys((*addresses, *(text for text in known if text not in claimed)))
        self._dialled[link] = tuple(dict.fromkeys((*[*near][:MAX_NEARER], *claimed)))
        return [Dial(link, self._dialled[link])]

    def due(self, now: float, up: Collection[LinkId]) -> list[Dial | HangUp]:
        """What to order of linkd now. up: the links there are; one that is not wanted any more stays until it ends."""
        orders: list[Dial | HangUp] = []
        room_at = self._make_room(now, up)
        for link in [link for link in self._dialled if link not in self._wanted and link not in up]:
            del self._dialled[link]
            orders.append(HangUp(link))
        self.deadline = room_at
        for link, claimed in self._wanted.items():
            again_at = self._again_at.get(link, now)
            if again_at > now:
                self.deadline = min(self.deadline, again_at)
                continue
            self._again_at.pop(link, None)
            known = self._dialled.get(link)
            if known is None or not set(claimed.addresses) <= set(known):
                self._dialled[link] = claimed.addresses
                orders.append(Dial(link, claimed.addresses))
        return orders

    def _make_room(self, now: float, up: Collection[LinkId]) -> float:
        """Has those that were dialled in vain make room for who waits; when that is to be looked at again."""
        for link in up:
            self._dialled_at.pop(link, None)
        down = {link: self._dialled_at.setdefault(link, now) for link in self._wanted if link not in up}
        if len(self._claims) <= len(self._wanted):
            return float("inf")
        if vain := [link for link, since in down.items() if now >= since + IN_VAIN_S]:
            for link in vain:
                self._queue[link] = self._queue.pop(link)
                del self._dialled_at[link]
            self._choose()
            down = {link: self._dialled_at.setdefault(link, now) for link in self._wanted if link not in up}
        return min(down.values(), default=float("inf")) + IN_VAIN_S


def _claimed(leases: Sequence[LinkAddress], look: int) -> _Claimed:
    turns = zip_longest(*(lease.addresses for lease in leases))
    addresses = [*dict.fromkeys(text for turn in turns for text in turn if text is not None)]
    most = MAX_ADDRESSES - MAX_NEARER
    if len(addresses) > most:
        first = look * most % len(addresses)
        addresses = [*addresses[first:], *addresses[:first]][:most]
    return _Claimed(frozenset(lease.peer for lease in leases), tuple(addresses))
