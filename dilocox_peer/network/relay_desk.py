"""Whom a relay passes on, and in which order their bytes go. Pure: requests and the time in, verdicts and grants out.

The owner's budget is a rate for all circuits together. It is shared among those that send, by their ranges of addresses and then among the senders of one: each has
its turn, a piece at a time, however many circuits and names it has, so that a flood delays itself. Places are bounded: for reservations in all and for one
host, for circuits in all, from one peer and between two. Names cost nothing: where all places or all circuits are taken, the range of addresses that has most gives
one up to another that has fewer.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from dilocox_peer.invitation import address_range
from dilocox_peer.network.crowding import to_give_up
from dilocox_peer.network.relay_protocol import RelayStatus
from dilocox_peer.token_bucket import TokenBucket
from dilocox_peer.types import PeerId

K = TypeVar("K")

RESERVED_S = 60.0  # our own peers ask every 8 s
MAX_RESERVED, MAX_RESERVED_PER_HOST = 64, 8
MAX_CIRCUITS, MAX_CIRCUITS_FROM, MAX_CIRCUITS_BETWEEN = 160, 64, 3
MOST_PIECE_BYTES, LEAST_PIECE_BYTES = 16 * 1024, 2 * 1024
TURNS_S = 0.1  # within which everybody that sends should have a turn
BURST_S = 0.05
MAX_REMEMBERED = 512


@dataclass(frozen=True, slots=True, eq=False)
class Circuit:
    """One of those that are passed on."""

    source: PeerId
    target: PeerId


@dataclass(slots=True)
class RelayDesk:
    """Reservations and circuits. is_open: whether anybody is taken who is not there yet."""

    is_open: bool = True
    _reserved: dict[PeerId, tuple[float, str]] = field(default_factory=dict)  # until when, and its host
    _circuits: dict[Circuit, str] = field(
        default_factory=dict
    )  # the oldest first; by which range of addresses, or source
    _given_up: list[Circuit] = field(default_factory=list)

    def reserve(self, peer: PeerId, host: str, now: float) -> RelayStatus:
        """host: where its connection comes from; empty: it is told apart from no other. Where all places are taken, one of the range of addresses
        that has most goes to another's."""
        self._forget(now)
        if ":" in host:
            host = address_range(host) or host  # whoever has one address of IPv6 has many
        if peer not in self._reserved:
            if not self.is_open:
                return RelayStatus.REFUSED
            of_host = sum(other == host for _, other in self._reserved.values()) if host else 0
            if of_host >= MAX_RESERVED_PER_HOST or not self._has_place(peer, host):
                return RelayStatus.FULL
        self._reserved[peer] = (now + RESERVED_S, host)
        return RelayStatus.OK

    def _has_place(self, peer: PeerId, host: str) -> bool:
        if len(self._reserved) < MAX_RESERVED:
            return True
        ranges = {other: address_range(its) or its or str(other) for other, (_, its) in self._reserved.items()}
        if (crowding := to_give_up(ranges, address_range(host) or host or str(peer))) is None:
            return False
        del self._reserved[crowding]
        return True

    def connect(self, source: PeerId, target: PeerId, now: float, place: str = "") -> Circuit | RelayStatus:
        """A circuit, which counts until `ended`, or why not. place: the range of addresses that the source comes from. Another's may have to end
        for it: see take_given_up."""
        self._forget(now)
        if target not in self._reserved or source == target:
            return RelayStatus.NO_RESERVATION
        from_source = [each for each in self._circuits if each.source == source]
        between = sum(each.target == target for each in from_source)
        holder = place or str(source)
        if len(from_source) >= MAX_CIRCUITS_FROM or between >= MAX_CIRCUITS_BETWEEN or not self._has_room(holder):
            return RelayStatus.FULL
        circuit = Circuit(source, target)
        self._circuits[circuit] = holder
        return circuit

    def _has_room(self, holder: str) -> bool:
        if len(self._circuits) < MAX_CIRCUITS:
            return True
        if (oldest := to_give_up(self._circuits, holder)) is None:
            return False
        self.ended(oldest)
        self._given_up.append(oldest)
        return True

    def take_given_up(self) -> list[Circuit]:
        """Those that are to be ended and count no more, once."""
        given_up, self._given_up = self._given_up, []
        return given_up

    def ended(self, circuit: Circuit) -> None:
        """It counts no more; one that was given up did not already."""
        self._circuits.pop(circuit, None)

    def has(self, peer: PeerId, now: float) -> bool:
        """Whether it has a place, or a circuit."""
        until, _ = self._reserved.get(peer, (float("-inf"), ""))
        return until > now or any(peer in (each.source, each.target) for each in self._circuits)

    def num_reserved_at(self, now: float) -> int:
        self._forget(now)
        return len(self._reserved)

    @property
    def num_circuits(self) -> int:
        return len(self._circuits)

    def _forget(self, now: float) -> None:
        self._reserved = {peer: (until, host) for peer, (until, host) in self._reserved.items() if until > now}


class _Fair(Generic[K]):
    """Whose turn it is: of those that wait, whoever had least; one that was away begins with what the others have (as in start-time fair queueing)."""

    def __init__(self) -> None:
        self._had: dict[K, int] = {}
        self._had_last = 0

    def comes(self, key: K) -> None:
        """It waits from now on."""
        self._had[key] = max(self._had.get(key, 0), self._had_last)

    def next_of(self, waiting: Collection[K]) -> K:
        return min(waiting, key=self._had.__getitem__)

    def had(self, key: K, num_bytes: int, waiting: Collection[K]) -> None:
        """Its turn came."""
        self._had_last = self._had[key]
        self._had[key] += num_bytes
        if len(self._had) > MAX_REMEMBERED:
            self._had = {each: had for each, had in self._had.items() if had > self._had_last or each in waiting}


class RelayTurns:
    """The budget: pieces of bytes that wait for their turn. A ticket is a piece's, in the order of asking. Ranges of addresses take turns, and within one its senders:
    names cost nothing."""

    def __init__(self, bytes_per_s: float, now: float) -> None:
        self._rate = bytes_per_s
        self._bucket = TokenBucket(bytes_per_s, burst=max(bytes_per_s * BURST_S, LEAST_PIECE_BYTES), now=now)
        self._waiting: dict[str, dict[PeerId, deque[tuple[int, int]]]] = {}  # place -> sender -> (ticket, bytes)
        self._places = _Fair[str]()
        self._senders: dict[
            str, _Fair[PeerId]
        ] = {}  # of the places where somebody waits, and of some where somebody did
        self._due_at: float | None = None  # when what was taken from the bucket last may go
        self._granted: int | None = None  # the ticket that goes then
        self._tickets = 0
        self.num_bytes = 0  # that had their turn

    def piece_bytes(self) -> int:
        """As much as should be asked for at a time, so that nobody waits long for all others."""
        share = int(self._rate * TURNS_S / (sum(map(len, self._waiting.values())) + 1))
        return max(LEAST_PIECE_BYTES, min(MOST_PIECE_BYTES, share))

    def ask(self, sender: PeerId, num_bytes: int, place: str = "") -> int:
        """A ticket for so many bytes of that sender. Each of its circuits asks for one piece a way at a time. place: its range of addresses; where none is
        known it is alone in one."""
        place = place or str(sender)
        self._tickets += 1
        if place not in self._waiting:
            self._waiting[place] = {}
            self._places.comes(place)
        senders, fair = self._waiting[place], self._senders.setdefault(place, _Fair())
        if sender not in senders:
            senders[sender] = deque()
            fair.comes(sender)
        senders[sender].append((self._tickets, num_bytes))
        return self._tickets

    def withdraw(self, sender: PeerId, ticket: int, place: str = "") -> None:
        """Its circuit has ended."""
        place = place or str(sender)
        queue = self._waiting.get(place, {}).get(sender)
        if queue is None:
            return
        kept = deque(each for each in queue if each[0] != ticket)
        if kept:
            self._waiting[place][sender] = kept
        else:
            self._forget(place, sender)

    def _forget(self, place: str, sender: PeerId) -> None:
        """Nothing of it waits."""
        del self._waiting[place][sender]
        if not self._waiting[place]:
            del self._waiting[place]
            if len(self._senders) > MAX_REMEMBERED:
                self._senders = {each: fair for each, fair in self._senders.items() if each in self._waiting}

    def granted(self, now: float) -> list[int]:
        """The tickets whose turn has come."""
        found: list[int] = []
        while True:
            if self._granted is not None:
                if self._due_at is not None and now < self._due_at:
                    return found
                found.append(self._granted)
                self._granted, self._due_at = None, None
            if not self._waiting:
                return found
            place = self._places.next_of(self._waiting)
            senders, fair = self._waiting[place], self._senders[place]
            sender = fair.next_of(senders)
            self._granted, num_bytes = senders[sender].popleft()
            self._places.had(place, num_bytes, self._waiting)
            fair.had(sender, num_bytes, senders)
            if not senders[sender]:
                self._forget(place, sender)
            self.num_bytes += num_bytes
            self._due_at = now + self._bucket.reserve(num_bytes, now)

    def wait_s(self, now: float) -> float | None:
        """Until `granted` has something; None: nobody waits."""
        return None if self._granted is None or self._due_at is None else max(0.0, self._due_at - now)
