"""How much of others' asking is taken, by peer, by range of addresses and in all, and who is turned away for asking too much. Pure.

Every port of p2pd comes by here: messages and their bytes, fetches and other streams, requests to the directory, connections. Members of
our roster and those whom the run's link names have their own budget alone. Strangers, whose identities cost nothing, share one with all
of their range of addresses, and one with all strangers: so many names are no more than one.

Going beyond one's own budget, and sending what no program of ours sends, are trespasses. Faults are points, which fade; beyond
BANNED_AT of them a stranger is turned away and hung up on, for longer each time. What is shared and spent is nobody's doing: else the
flood of some would have others banned. Members are never turned away: their budgets hold, rounds do not depend on what one of us
thinks of another. Bans are one's own. They are shown, and told to nobody, as a ban that travelled would be a weapon.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from types import MappingProxyType
from typing import Final

from dilocox_peer.invitation import place_of
from dilocox_peer.token_bucket import TokenBucket
from dilocox_peer.types import PeerId


@dataclass(frozen=True, slots=True)
class Budget:
    """So many a second, and so many at once after a pause."""

    per_s: float
    burst: float


@dataclass(frozen=True, slots=True)
class Budgets:
    """Of one kind of thing. member: of one peer that is no stranger; stranger, place, strangers: of one stranger, of all of a range of
    addresses, of all there are."""

    member: Budget
    stranger: Budget
    place: Budget
    strangers: Budget


class Budgeted(Enum):
    """What is budgeted."""

    MESSAGES = "messages"
    MESSAGE_BYTES = "bytes of messages"
    STREAMS = "streams"
    REQUESTS = "requests to the directory"
    REQUEST_BYTES = "bytes of requests to the directory"  # and of their answers


KIB, MIB = 1024.0, 1024.0 * 1024.0
ALLOWED: Final = {
    # A swarm in training sends below 10 messages a second to one of its own; a newcomer a heartbeat, and asks for pages of the chain.
    Budgeted.MESSAGES: Budgets(Budget(200, 400), Budget(25, 200), Budget(75, 400), Budget(150, 1600)),
    Budgeted.MESSAGE_BYTES: Budgets(
        Budget(16 * MIB, 64 * MIB), Budget(MIB, 8 * MIB), Budget(2 * MIB, 16 * MIB), Budget(4 * MIB, 32 * MIB)
    ),
    # A newcomer takes its state a few chunks at a time; every look of its own at a peer is a stream.
    Budgeted.STREAMS: Budgets(Budget(200, 400), Budget(20, 200), Budget(40, 400), Budget(80, 800)),
    # A peer at work asks a directory less than once a second.
    Budgeted.REQUESTS: Budgets(Budget(100, 400), Budget(20, 200), Budget(40, 400), Budget(100, 800)),
    Budgeted.REQUEST_BYTES: Budgets(
        Budget(4 * MIB, 16 * MIB), Budget(256 * KIB, 8 * MIB), Budget(MIB, 16 * MIB), Budget(2 * MIB, 32 * MIB)
    ),
}  # fmt: skip

SETTLING = 4.0  # times what strangers have in common, where everybody is one: a newcomer is sent the chain by peers it does not know
MAX_KNOWN = 1024  # peers, and ranges, whose budgets and trespasses are remembered: the least lately seen are forgotten
BANNED_AT, FADE_PER_S = 100.0, 0.5
PLACE_BANNED_AT = 4 * BANNED_AT  # where many live behind one address, one of them is not all
FIRST_BAN_S, MOST_BAN_S, LONGER = 60.0, 3600.0, 4.0
FORGIVEN_S = 24 * 3600.0  # after the last ban, the next is a first one

MAX_STRANGERS, MAX_STRANGERS_OF_PLACE = 96, 24  # connected; beyond these the least useful are hung up on
MAX_STRANGERS_BY_RELAYS = 48  # of these: behind a relay names cost nothing, and it is not seen where they come from
CROWD = 16  # strangers connected, from which on it takes a proof of the run to stay
PROVE_S = 10.0  # for it
DAEMON_BYTES = (
    512 << 20
)  # of memory of p2pd, above which all strangers are hung up on: what they have sent by halves lies there


class Trespass(StrEnum):
    """What no program of ours does, with its points."""

    FLOOD = "more than it may ask for"
    OVERSIZE = "more bytes than anything of this run has"
    MALFORMED = "what cannot be read"


POINTS: Final = {Trespass.FLOOD: 1.0, Trespass.OVERSIZE: 20.0, Trespass.MALFORMED: 4.0}


@dataclass(frozen=True, slots=True)
class Ban:
    """who: a peer, or a range of addresses. until: of the caller's clock."""

    who: str
    reason: str
    until: float
    seconds: float


@dataclass(slots=True)
class _Standing:
    """Of a peer or a range."""

    buckets: dict[Budgeted, TokenBucket] = field(default_factory=dict)
    points: float = 0.0
    faded_at: float = 0.0
    trespasses: Counter[str] = field(default_factory=Counter)
    banned_until: float = float("-inf")
    num_bans: int = 0

    def fade(self, now: float) -> None:
        self.points = max(0.0, self.points - FADE_PER_S * max(0.0, now - self.faded_at))
        self.faded_at = now
        if not self.points:
            self.trespasses.clear()


@dataclass(slots=True)
class _Seen:
    """A connected peer. proved_at: when it last spoke of this run."""

    since: float
    place: str
    proved_at: float = float("-inf")

    @property
    def last_at(self) -> float:
        return max(self.since, self.proved_at)


class Doorkeeper:
    """`refusal` before something of a peer is looked at; `blamed` for trespasses; `seen` with the connections there are, now and then."""

    def __init__(self, now: float, *, allowed: Mapping[Budgeted, Budgets] = MappingProxyType({})) -> None:
        self._allowed = {**ALLOWED, **allowed}
        self._peers: OrderedDict[str, _Standing] = OrderedDict()
        self._places: OrderedDict[str, _Standing] = OrderedDict()
        self._common = _Standing(faded_at=now)  # of all strangers
        self._is_settled: Callable[[], bool] = lambda: False
        self._seen: dict[PeerId, _Seen] = {}
        self._connected: Collection[PeerId] = ()  # as they were last seen
        self._are_friends: list[Callable[[PeerId], bool]] = []
        self._are_kept: list[Callable[[PeerId], bool]] = []
        self._news: list[Ban] = []

    # ---- who is no stranger ------------------------------------------------------------------------------------------

    def befriend(self, is_one: Callable[[PeerId], bool]) -> None:
        """From here on those of whom that is true are no strangers."""
        self._are_friends.append(is_one)

    def set_settled(self, is_settled: Callable[[], bool]) -> None:
        """Whether we know who belongs to us. Until then nobody does, and each has what a member has."""
        self._is_settled = is_settled

    def keep(self, is_one: Callable[[PeerId], bool]) -> None:
        """From here on those of whom that is true are not hung up on for want of room: something of theirs is under way here, in a
        bounded number. They may be banned."""
        self._are_kept.append(is_one)

    def is_stranger(self, peer: PeerId) -> bool:
        return not any(is_one(peer) for is_one in self._are_friends)

    # ---- what is taken -----------------------------------------------------------------------------------------------

    def refusal(self, peer: PeerId, now: float, *wanted: tuple[Budgeted, float]) -> str | None:
        """Why this much of the peer is not taken; None if it is, and then it counts. What is refused for one kind counts for none
        of the later ones."""
        is_stranger = self.is_stranger(peer)
        if is_stranger and (reason := self._why_banned(peer, now)) is not None:
            return reason
        is_settled = self._is_settled()
        record = self._record(self._peers, peer, now)
        for kind, amount in wanted:
            allowed = self._allowed[kind]
            own = allowed.stranger if is_stranger and is_settled else allowed.member
            if not _of(record, kind, own, now).try_take(amount, now):
                self.blamed(peer, Trespass.FLOOD, now)
                return f"more than {own.per_s:g} {kind.value} a second"
            if is_stranger and not all(each.try_take(amount, now) for each in self._shared(peer, kind, now)):
                return f"busy: others ask for too many {kind.value}"
        self.proved(peer, now)
        return None

    def _shared(self, peer: PeerId, kind: Budgeted, now: float) -> Iterator[TokenBucket]:
        """What those of a stranger's range have in common, and then what all strangers have."""
        allowed, times = self._allowed[kind], 1.0 if self._is_settled() else SETTLING
        if place := self._place(peer):
            yield _of(self._record(self._places, place, now), kind, _times(allowed.place, times), now)
        yield _of(self._common, kind, _times(allowed.strangers, times), now)

    def charged(self, peer: PeerId, kind: Budgeted, amount: float, now: float) -> None:
        """What was taken of the peer came to so much more, which shows only afterwards: the next is refused for as long as that takes."""
        is_stranger, allowed = self.is_stranger(peer), self._allowed[kind]
        own = allowed.stranger if is_stranger and self._is_settled() else allowed.member
        shared = self._shared(peer, kind, now) if is_stranger else ()
        for bucket in (_of(self._record(self._peers, peer, now), kind, own, now), *shared):
            bucket.reserve(amount, now)

    def proved(self, peer: PeerId, now: float) -> None:
        """It has spoken, or we have asked something of it; also before its connection was seen."""
        self._seen.setdefault(peer, _Seen(now, "")).proved_at = now

    def is_seen(self, peer: PeerId) -> bool:
        """Whether it is known where its connection comes from: before, what it does counts for no range."""
        return peer in self._connected

    # ---- trespasses and bans ---------------------------------------------------------------------------------------------

    def blamed(self, peer: PeerId, trespass: Trespass, now: float) -> None:
        """It did that. Points count for its range as well; a member has them and stays. What one still sends that is turned away is not
        its neighbours' doing."""
        if self.is_stranger(peer) and self._why_banned(peer, now) is not None:
            return
        self._add(self._record(self._peers, peer, now), peer, trespass, BANNED_AT, now)
        if self.is_stranger(peer) and (place := self._place(peer)):
            self._add(self._record(self._places, place, now), place, trespass, PLACE_BANNED_AT, now)

    def _add(self, record: _Standing, who: str, trespass: Trespass, most: float, now: float) -> None:
        record.fade(now)
        record.points += POINTS[trespass]
        record.trespasses[trespass.value] += 1
        if record.points < most or record.banned_until > now or not self._is_bannable(who):
            return
        if now - record.banned_until > FORGIVEN_S:
            record.num_bans = 0
        seconds = min(MOST_BAN_S, FIRST_BAN_S * LONGER**record.num_bans)
        record.num_bans += 1
        record.banned_until = now + seconds
        self._news.append(Ban(who, _in_words(record.trespasses), record.banned_until, seconds))
        record.points = 0.0
        record.trespasses.clear()

    def _is_bannable(self, who: str) -> bool:
        return who in self._places or self.is_stranger(PeerId(who))

    def _why_banned(self, peer: PeerId, now: float) -> str | None:
        for record in (self._peers.get(peer), self._places.get(self._place(peer))):
            if record is not None and record.banned_until > now:
                return f"turned away for {record.banned_until - now:.0f} s"
        return None

    def new_bans(self) -> list[Ban]:
        """Those since the last time; their peers are to be hung up on."""
        news, self._news = self._news, []
        return news

    def banned(self, now: float) -> list[str]:
        """Peers and ranges that are turned away now."""
        return [who for table in (self._peers, self._places) for who, each in table.items() if each.banned_until > now]

    def points(self, peer: PeerId, now: float) -> float:
        """How much it has done wrong lately."""
        record = self._peers.get(peer)
        if record is None:
            return 0.0
        record.fade(now)
        return record.points

    # ---- connections -------------------------------------------------------------------------------------------------

    def seen(
        self, connections: Iterable[tuple[PeerId, Sequence[str]]], now: float, *, daemon_bytes: int = 0
    ) -> dict[PeerId, str]:
        """Whom to hang up on, and why. connections: all peers that are connected, each with the hosts of its ends; none: through
        relays alone. daemon_bytes: of memory that p2pd has."""
        ends = dict(connections)
        found = {peer: next((place for each in hosts if (place := place_of(each))), "") for peer, hosts in ends.items()}
        self._seen = {peer: self._still(peer, place, now) for peer, place in found.items()}
        self._connected = found.keys()
        strangers = [peer for peer in found if self.is_stranger(peer)]
        out = {peer: reason for peer in strangers if (reason := self._why_banned(peer, now)) is not None}
        strangers = [
            peer for peer in strangers if peer not in out and not any(is_one(peer) for is_one in self._are_kept)
        ]
        if daemon_bytes > DAEMON_BYTES:
            return out | dict.fromkeys(strangers, f"p2pd holds more than {DAEMON_BYTES >> 20} MiB")
        if len(strangers) > CROWD:
            silent = {peer for peer in strangers if self._is_unproved(peer, now)}
            out |= dict.fromkeys(silent, f"said nothing within {PROVE_S:g} s")
            strangers = [peer for peer in strangers if peer not in silent]
        strangers.sort(key=lambda peer: self._seen[peer].last_at, reverse=True)
        of_place: Counter[str] = Counter()
        num_kept = num_by_relays = 0
        for peer in strangers:
            place = self._seen[peer].place
            of_place[place] += 1
            num_by_relays += not ends[peer]
            if place and of_place[place] > MAX_STRANGERS_OF_PLACE:
                out[peer] = f"one of more than {MAX_STRANGERS_OF_PLACE} strangers in {place}"
            elif not ends[peer] and num_by_relays > MAX_STRANGERS_BY_RELAYS:
                out[peer] = f"one of more than {MAX_STRANGERS_BY_RELAYS} strangers that relays pass on"
            elif num_kept >= MAX_STRANGERS:
                out[peer] = f"one of more than {MAX_STRANGERS} strangers"
            else:
                num_kept += 1
        return out

    def _still(self, peer: PeerId, place: str, now: float) -> _Seen:
        seen = self._seen.get(peer) or _Seen(now, place)
        seen.place = place or seen.place
        return seen

    def _is_unproved(self, peer: PeerId, now: float) -> bool:
        seen = self._seen[peer]
        return seen.proved_at < seen.since and now - seen.since > PROVE_S  # of this connection

    def _place(self, peer: PeerId) -> str:
        seen = self._seen.get(peer)
        return "" if seen is None else seen.place

    def _record(self, table: OrderedDict[str, _Standing], key: str, now: float) -> _Standing:
        record = table.get(key)
        if record is None:
            record = table[key] = _Standing(faded_at=now)
            while len(table) > MAX_KNOWN:
                table.popitem(last=False)
        table.move_to_end(key)
        return record


def _times(budget: Budget, times: float) -> Budget:
    return budget if times == 1.0 else Budget(times * budget.per_s, times * budget.burst)


def _bucket(budget: Budget, now: float) -> TokenBucket:
    return TokenBucket(budget.per_s, budget.burst, now)


def _of(record: _Standing, kind: Budgeted, budget: Budget, now: float) -> TokenBucket:
    """The record's bucket of that kind; a new one for who has become a member, or is one no more."""
    bucket = record.buckets.get(kind)
    if bucket is None or (bucket.rate, bucket.burst) != (budget.per_s, budget.burst):
        bucket = record.buckets[kind] = _bucket(budget, now)
    return bucket


def _in_words(trespasses: Counter[str]) -> str:
    return "; ".join(f"{what}, {count} times" for what, count in trespasses.most_common())
