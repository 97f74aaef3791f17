"""At which relays a peer has itself passed on to by those who cannot dial it, and when it asks them. Pure: what happened and the
time in, whom to ask and what to announce out.

A reservation is asked for again every RENEW_S, long before it expires: a relay that was started anew knows nothing of us, and
nobody tells. Relays whose circuits carry a whole contribution are kept, WANTED of them. One of them is to be a relay that the run's link
names: any other may be nobody's but a stranger's, who says that it has us and passes nobody on. So as long as no named one has us they
are asked, though nothing else is lacking, and one that has us comes before all others.

Leases cost nothing, and who was met before may be gone: of more candidates than are kept those come first, after the named ones, that have waited
longest since they were asked in vain, or were offered first: so all have their turn, and new names do not come before who waits.

Invariants: (1) at most one request to a relay is out; (2) while a relay has us, or had us last, its circuits are announced, so
that an outage of the only relay does not empty the lease; (3) requests to one relay are at least FIRST_RETRY_S apart.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from dilocox_peer.network.relay_protocol import RelayLimit
from dilocox_peer.types import PeerId

WANTED = 2  # so that one may go
RENEW_S = 8.0
FIRST_RETRY_S, MAX_RETRY_S = 1.0, 3.0
REFUSED_RETRY_S = 20.0  # of those that have no room, or do not want to, or do not know yet whether they are dialable
# At most, of a named one that does not answer while others have us: its address may be somebody else's by now.
GONE_RETRY_S = 80.0
MAX_CANDIDATES = 16
ADDRESSES_EACH = 2  # of a relay, announced
ENOUGH_BYTES = 64 << 20  # a circuit that carries less breaks off in the middle of a contribution
NEVER = float("-inf")


@dataclass(slots=True)
class _Relay:
    addresses: tuple[str, ...]
    limit: RelayLimit | None = None  # it has us
    is_asked: bool = False
    due_at: float = NEVER
    failures: int = 0

    @property
    def is_large(self) -> bool:
        return self.limit is not None and (self.limit.num_bytes == 0 or self.limit.num_bytes >= ENOUGH_BYTES)


@dataclass
class RelayChoice:
    """See the module."""

    me: PeerId
    _relays: dict[PeerId, _Relay] = field(default_factory=dict)  # best first, as they were offered
    _announced: tuple[str, ...] = ()
    _is_needed: bool = True
    is_told: bool = True  # whether others are to know
    _named: frozenset[PeerId] = frozenset()
    _queue: dict[PeerId, None] = field(default_factory=dict)  # all that are offered; one that was asked in vain is last

    def need(self, is_needed: bool) -> bool:
        """Whether others need a relay to dial us; else nobody is asked and nothing announced. Gives back whether that is news."""
        was_needed, self._is_needed = self._is_needed, is_needed
        return is_needed != was_needed

    def offer(self, candidates: Mapping[PeerId, Sequence[str]], named: Collection[PeerId] = ()) -> None:
        """Peers that may be relays, best first, and where they are dialled: all of them. What is known of them stays. named: by the run's link."""
        self._named = frozenset(named)
        known, self._relays = self._relays, {}
        offered = {peer: tuple(found) for peer, found in candidates.items() if peer != self.me and found}
        kept = {peer: each.addresses for peer, each in known.items() if each.limit is not None or each.is_asked}
        self._queue = dict.fromkeys((*(peer for peer in self._queue if peer in offered), *offered))
        if len(kept.keys() | offered) > MAX_CANDIDATES:
            first = sorted(self._queue, key=lambda peer: peer not in named)
            offered = {peer: offered[peer] for peer in first}
        for peer, addresses in [*({**kept, **offered}).items()][:MAX_CANDIDATES]:
            relay = known.get(peer, _Relay(addresses))
            if relay.addresses != addresses:
                relay.addresses, relay.due_at = addresses, NEVER
            self._relays[peer] = relay

    def due(self, now: float) -> list[tuple[PeerId, tuple[str, ...]]]:
        """Whom to ask now, each to be followed by `reserved`, `refused` or `failed`."""
        asking = [peer for peer, relay in self._relays.items() if relay.is_asked and relay.limit is None]
        room, is_named_free = self._lacking - len(asking), self._lacks_named and self._named.isdisjoint(asking)
        asked = []
        for peer in self._wanted():
            relay = self._relays[peer]
            has_place = relay.limit is not None or room > 0 or (is_named_free and peer in self._named)
            if relay.is_asked or relay.due_at > now or not has_place:
                continue
            room -= relay.limit is None
            is_named_free = is_named_free and peer not in self._named
            relay.is_asked = True
            asked.append((peer, relay.addresses))
        return asked

    def wait_s(self, now: float) -> float:
        """Until `due` may have somebody, at most RENEW_S."""
        waits = [self._relays[peer].due_at - now for peer in self._wanted() if not self._relays[peer].is_asked]
        return min(max(min(waits, default=RENEW_S), FIRST_RETRY_S / 4), RENEW_S)

    def reserved(self, peer: PeerId, limit: RelayLimit, now: float) -> None:
        if (relay := self._relays.get(peer)) is not None:
            relay.is_asked, relay.limit, relay.failures, relay.due_at = False, limit, 0, now + RENEW_S
            self._announce()

    def refused(self, peer: PeerId, now: float) -> None:
        """It is there, and has no place for us."""
        if (relay := self._relays.get(peer)) is not None:
            relay.is_asked, relay.limit, relay.due_at = False, None, now + REFUSED_RETRY_S
            self._to_the_end(peer)
            self._hurry(now)
            self._announce()

    def failed(self, peer: PeerId, now: float) -> None:
        """It did not answer."""
        if (relay := self._relays.get(peer)) is not None:
            relay.is_asked, relay.limit = False, None
            self._to_the_end(peer)
            most_s = MAX_RETRY_S if self._lacking > 0 else GONE_RETRY_S
            relay.due_at = now + min(FIRST_RETRY_S * 2**relay.failures, most_s)
            relay.failures = min(relay.failures + 1, 16)
            self._hurry(now)
            self._announce()

    def _to_the_end(self, peer: PeerId) -> None:
        self._queue.pop(peer, None)
        self._queue[peer] = None

    def _hurry(self, now: float) -> None:
        """Where too few have us, those that were asked ever more seldom are asked soon."""
        if self._lacking > 0:
            for relay in self._relays.values():
                if relay.due_at > now + REFUSED_RETRY_S:
                    relay.due_at = now + MAX_RETRY_S

    def lost(self, peer: PeerId, now: float) -> None:
        """The connection with it is: it is asked at once, if it has us."""
        if (relay := self._relays.get(peer)) is not None and relay.limit is not None:
            relay.due_at = min(relay.due_at, now)

    @property
    def held(self) -> tuple[PeerId, ...]:
        """The relays that pass on to us, those to announce first."""
        return tuple(self._kept())

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where those dial us who cannot do so directly."""
        return self._announced if self._is_needed and self.is_told else ()

    def _announce(self) -> None:
        held = [text for peer in self._kept() for text in self._relays[peer].addresses[:ADDRESSES_EACH]]
        if held:
            self._announced = tuple(f"{text}/p2p-circuit/p2p/{self.me}" for text in held)

    @property
    def _lacking(self) -> int:
        return WANTED - sum(self._relays[peer].is_large for peer in self._kept())

    @property
    def _lacks_named(self) -> bool:
        return self._named.isdisjoint(self._kept())

    def _wanted(self) -> list[PeerId]:
        """Those that have us, and while they are too few the others, those that failed least first; named ones also while none of them has us."""
        if not self._is_needed:
            return []
        kept = self._kept()
        others = [peer for peer in self._relays if peer not in kept]
        if self._lacking <= 0:
            others = [peer for peer in others if self._lacks_named and peer in self._named]
        return [*kept, *sorted(others, key=lambda peer: self._relays[peer].failures)]

    def _kept(self) -> list[PeerId]:
        """Those that have us and are worth it: large ones, or the best of the small ones where there is none. Named ones come first."""
        held = [peer for peer, relay in self._relays.items() if relay.limit is not None]
        held.sort(key=lambda peer: peer not in self._named)
        large = [peer for peer in held if self._relays[peer].is_large]
        return large[:WANTED] if large else held[:1]
