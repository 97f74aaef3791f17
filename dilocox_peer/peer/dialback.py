"""Whether others can dial us: a newcomer asks peers of its run to open a connection to the addresses it announces.

The peer that is asked dials only the host that the asker's own connection comes from, so nobody can have it knock at other machines'
doors, a few ports of it, and says no more than yes or no. Behind one router's address are often many machines: of a range of addresses,
and of all together, so few ports are tried in a minute that nobody looks for open ones this way. It takes a greeting of libp2p for a yes: p2pd itself would not dial
a peer that it is connected with. linkd's port is tried in the same way, as a router may lead to the one and not to the other.
It also says where it sees the asker: behind a router nobody else knows the address at which its connections come out.
"""

import asyncio
import ipaddress
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from enum import StrEnum
from typing import Any, Final, Literal, NamedTuple

from dilocox_peer.admission import Right
from dilocox_peer.dht.records import Lease
from dilocox_peer.errors import ConfigError, DilocoxError, PeerUnavailable, ProtocolError
from dilocox_peer.invitation import Address, address_range, all_loopback, parse_multiaddr
from dilocox_peer.network.bulk import Reply, RequestRefused
from dilocox_peer.network.outside_view import OutsideView
from dilocox_peer.network.p2pd import DIAL_S, greets
from dilocox_peer.network.transport import Transport
from dilocox_peer.token_bucket import TokenBucket
from dilocox_peer.types import PeerId

SERVICE: Final = "dial-back"
FORGET_SERVICE: Final = (
    "hang-up"  # asks to end all connections with the asker, who has moved, and whose old ones lead nowhere
)
FORGET_S = 8.0
ASK_S = 6.0  # for all answers together
AGAIN_S = 5.0  # after nobody could dial us, once: the router may have opened its port only now
MAX_ASKED = 3
MAX_ADDRESSES = 8  # in a question
MAX_DIALLED, MAX_LINKS_DIALLED = 3, 2
MAX_SEEN_CHARS = 100
FORGET_AFTER_S = 0.1
MAX_FORGOTTEN = 64
RANGE_PORTS, RANGE_PORTS_PER_S = 12.0, 0.1  # at once, and a second, of one range of addresses (/24, /48)
ALL_PORTS, ALL_PORTS_PER_S = 120.0, 2.0  # of everybody's
ASKED, ASKED_PER_S = (
    4.0,
    0.2,
)  # questions at once, and a second, of one peer that are looked into: p2pd is asked for all its connections
PLACE_ASKED, PLACE_ASKED_PER_S = 24.0, 1.0  # of all of a range of addresses: names cost nothing
ALL_ASKED, ALL_ASKED_PER_S = 64.0, 10.0
MAX_BUDGETS = 1024  # ranges, and peers: of one that is forgotten the budget is full again
ADVICE: Final = (
    "others cannot dial this peer: it goes on as with --outgoing-only, on stage 0. Open a TCP port and pass --host-maddrs and "
    "--announce-maddrs to hold any stage"
)


OnSeen = Callable[[PeerId, str], None]


def _nobody_listens(_peer: PeerId, _address: str) -> None:
    pass


class Answer(StrEnum):
    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"  # it cannot tell from where it is


class Dialled(NamedTuple):
    """Whether others could dial our p2pd, and our linkd; None where nobody could tell."""

    peer: bool | None
    links: bool | None


def may_dial(
    asked: Sequence[Address], seen_at: Iterable[str], most: int = MAX_DIALLED
) -> tuple[tuple[Address, ...], Answer]:
    """(addresses to dial for who asks, what to say if there are none). seen_at: hosts its connections come from.

    An address elsewhere is not dialled. To who comes from a public host and announces none, the answer is no; within one
    network nothing can be said of addresses outside.
    """
    hosts = {_host(text) for text in seen_at}
    there = [address for address in asked if not address.is_relayed and _host(address.host) in hosts]
    from_outside = any(host is not None and host.is_global for host in hosts)
    return tuple(there[:most]), Answer.NO if from_outside else Answer.UNKNOWN


class DialBudget:
    """How many questions are looked into, and how many ports are tried for others. Pure: now is in seconds, of any clock that does not
    go back."""

    def __init__(self, now: float) -> None:
        self._all_asked = TokenBucket(ALL_ASKED_PER_S, ALL_ASKED, now)
        self._peers: OrderedDict[str, TokenBucket] = OrderedDict()
        self._places: OrderedDict[str, TokenBucket] = OrderedDict()
        self._all = TokenBucket(ALL_PORTS_PER_S, ALL_PORTS, now)
        self._ranges: OrderedDict[str, TokenBucket] = OrderedDict()

    def may_ask(self, peer: PeerId, place: str, now: float) -> bool:
        """Whether a question of peer is looked into; it counts then. place: whose share it is of, such as its range of addresses."""
        own = _remembered(self._peers, peer, ASKED_PER_S, ASKED, now)
        of_place = _remembered(self._places, place, PLACE_ASKED_PER_S, PLACE_ASKED, now)
        return own.try_take(1.0, now) and of_place.try_take(1.0, now) and self._all_asked.try_take(1.0, now)

    def may_dial(self, addresses: Sequence[Address], now: float) -> bool:
        """Whether all of these may be tried now; they count as tried then."""
        for place in sorted({found for each in addresses if (found := address_range(each.host))}):
            bucket = _remembered(self._ranges, place, RANGE_PORTS_PER_S, RANGE_PORTS, now)
            if not bucket.try_take(sum(address_range(each.host) == place for each in addresses), now):
                return False
        return self._all.try_take(len(addresses), now)


def _remembered(table: OrderedDict[str, TokenBucket], key: str, per_s: float, burst: float, now: float) -> TokenBucket:
    """The bucket of key; the least lately used are forgotten."""
    bucket = table.setdefault(key, TokenBucket(per_s, burst, now))
    table.move_to_end(key)
    while len(table) > MAX_BUDGETS:
        table.popitem(last=False)
    return bucket


class Opinion(NamedTuple):
    """An answer. is_named: of a peer that the link names. from_outside: it sees us at a public address, and is in no house with us."""

    answer: Answer
    is_named: bool
    from_outside: bool


def verdict(found: Iterable[Opinion]) -> bool | None:
    """Whether we can be dialled; None where nobody could tell.

    One who got through is enough, of those whose word counts. Another computer of our house gets through where nobody else does, so of who is
    outside it does; and as a stranger may say anything, of those that the link names, if they can tell. Of strangers half have to have got through: by
    a made-up yes a home has no relay any more, and nobody finds it.
    """
    told = [each for each in found if each.answer is not Answer.UNKNOWN]
    told = [each for each in told if each.from_outside] or told
    told = [each for each in told if each.is_named] or told
    if not told:
        return None
    enough = 1 if told[0].is_named else (len(told) + 1) // 2
    return sum(each.answer is Answer.YES for each in told) >= enough


def for_most(answer: bool | None, addresses: Sequence[str]) -> bool | None:
    """The verdict, for others who have IPv4 alone, as most do: they do not dial who has IPv6 alone."""
    seen = {text.split("/")[1] for text in addresses if not text.startswith(("/ip4/127.", "/ip6/::1/"))}
    return False if answer and seen == {"ip6"} else answer


class DialbackVerdict:
    """What others are told of dialling us: the volunteer's word, the verdict of those who tried, or what our addresses say.

    Of one session: the verdict stays when the network daemon is started again.
    """

    def __init__(self, *, outgoing_only: bool) -> None:
        self.outside = OutsideView()  # where others see us
        self.closed_links: frozenset[str] = frozenset()  # addresses of our linkd that others could not dial
        self.changed = asyncio.Event()  # set when closed_links is another
        self._outgoing_only = outgoing_only
        self._was_dialled: bool | None = None  # None: nobody could tell

    def at(self, addresses: Sequence[str]) -> Literal["direct", "relayed"]:
        if (
            self._outgoing_only
            or self._was_dialled is False
            or (addresses and all("/p2p-circuit" in text for text in addresses))
        ):
            return "relayed"
        return "direct"

    @property
    def is_outgoing_only(self) -> bool:
        """What the volunteer says."""
        return self._outgoing_only

    @property
    def is_known_direct(self) -> bool:
        """Whether somebody dialled us, and the volunteer does not say otherwise."""
        return self._was_dialled is True and not self._outgoing_only

    async def ask_entries(self, transport: Transport, links: Sequence[str] = ()) -> None:
        """Has those we came in by dial us, once; what they found counts from here on, and where they see us. links: of linkd."""
        entries = dict.fromkeys(parse_multiaddr(text, "peer").peer for text in transport.initial_peers)
        asked = [peer for peer in entries if peer is not None]
        answer = await ask(transport, asked, self._seen_by(transport), links=links)
        if answer.peer is not None:
            self._was_dialled = for_most(answer.peer, transport.addresses)
        if links and answer.links is not None:
            self._close(frozenset() if answer.links else frozenset(links))

    async def try_out(
        self, transport: Transport, leases: Sequence[Lease], rng: random.Random, *, again_s: float = AGAIN_S
    ) -> bool | None:
        """Has others dial us; what they found counts from here on. See `can_be_dialled`."""
        on_seen = self._seen_by(transport)
        answer = await can_be_dialled(transport, leases, rng, again_s=again_s, on_seen=on_seen)
        self._was_dialled = for_most(answer, transport.addresses)
        return self._was_dialled

    def moved(self) -> None:
        """We are elsewhere: what others found does not count any more."""
        self._was_dialled = None
        self.outside.forget()
        self._close(frozenset())

    def _close(self, links: frozenset[str]) -> None:
        if links != self.closed_links:
            self.closed_links = links
            self.changed.set()

    def _seen_by(self, transport: Transport) -> "OnSeen":
        clock = asyncio.get_running_loop().time
        return lambda peer, address: self.outside.told(peer, address, clock(), is_named=peer in transport.named)


async def serve(transport: Transport, *, right: Right | None = Right.READ) -> None:
    """Answers others from here on. right: as Transport.serve."""

    budget = DialBudget(time.monotonic())

    async def answer(peer: PeerId, header: dict[str, Any]) -> Reply:
        if not budget.may_ask(peer, await transport.doors.holder(peer), time.monotonic()):
            return Reply({"answer": Answer.UNKNOWN.value})
        seen = await transport.leads_to(peer)
        hosts = [text.split("/")[2] for text in seen]
        dialled, otherwise = may_dial(_addresses(header, "addresses"), hosts)
        links, otherwise_links = may_dial(_addresses(header, "links"), hosts, MAX_LINKS_DIALLED)
        if not budget.may_dial((*dialled, *links), time.monotonic()):
            return Reply({"answer": Answer.UNKNOWN.value})
        greeted = await asyncio.gather(*(greets(address) for address in (*dialled, *links)))
        told = {
            "answer": _found(greeted[: len(dialled)], otherwise).value,
            "links": _found(greeted[len(dialled) :], otherwise_links).value,
        }
        return Reply({**told, "seen": seen[-1] if seen else ""})  # by its newest connection

    await transport.serve(SERVICE, answer, right=right)


async def serve_forgetting(transport: Transport, stack: AsyncExitStack) -> None:
    """From here on, has p2pd forget connections with who asks for it. Else what we send goes on one that leads nowhere, for half a
    minute, though a good one is there: it cannot tell them apart."""
    ending: set[asyncio.Task[None]] = set()

    async def end(peer: PeerId) -> None:
        await asyncio.sleep(FORGET_AFTER_S)  # the answer goes out first
        with suppress(PeerUnavailable):
            await transport.hang_up(peer)

    async def answer(peer: PeerId, _header: dict[str, Any]) -> Reply:
        if len(ending) < MAX_FORGOTTEN:
            task = asyncio.create_task(end(peer), name="hang up")
            ending.add(task)
            task.add_done_callback(ending.discard)
        return Reply({})

    def cancel() -> None:
        for task in ending:
            task.cancel()

    stack.callback(cancel)
    await transport.serve(FORGET_SERVICE, answer, right=None)


async def connect_anew(transport: Transport, peer: PeerId, addresses: Sequence[str]) -> bool:
    """Ends our connections with peer, on both sides, and makes one: ours lead nowhere any more. Whether it is there."""
    try:
        await transport.hang_up(peer)
        await transport.connect(peer, addresses, FORGET_S)
        with suppress(RequestRefused, ProtocolError):  # of a version that does not know it
            await transport.fetch(peer, FORGET_SERVICE, {}, max_body_bytes=0, timeout_s=FORGET_S)
            await asyncio.sleep(2 * FORGET_AFTER_S)
            await transport.connect(peer, addresses, FORGET_S)
    except PeerUnavailable:
        return False
    return True


async def can_be_dialled(
    transport: Transport,
    leases: Sequence[Lease],
    rng: random.Random,
    *,
    again_s: float = AGAIN_S,
    on_seen: OnSeen = _nobody_listens,
) -> bool | None:
    """Whether those we came in by, or peers of the run, can dial us; None where nobody could tell.

    leases: of others. on_seen: as `ask`. again_s: after which they are asked once more; 0: they are not. Takes moments where the answer is yes, at
    most 2 * (DIAL_S + ASK_S) + again_s.
    """
    entry = list(dict.fromkeys(parse_multiaddr(text, "peer").peer for text in transport.initial_peers))
    others = [lease for lease in leases if lease.peer not in entry]
    others = rng.sample(others, min(len(others), MAX_ASKED - 1))
    await asyncio.gather(
        *(transport.connect(lease.peer, lease.addresses, DIAL_S) for lease in others), return_exceptions=True
    )
    asked = [peer for peer in (*entry[:1], *(lease.peer for lease in others), *entry[1:]) if peer is not None]
    answer, _ = await ask(transport, asked, on_seen)
    if answer is False and again_s and not all_loopback(transport.addresses):
        await asyncio.sleep(again_s)
        await transport.refresh_addresses()
        answer, _ = await ask(transport, asked, on_seen)
    return answer


async def ask(
    transport: Transport, peers: Sequence[PeerId], on_seen: OnSeen = _nobody_listens, *, links: Sequence[str] = ()
) -> Dialled:
    """Whether some of these peers can dial us, and our linkd at `links`. Takes at most ASK_S. on_seen(peer, address): told
    where each of them says that it sees us."""
    own = [text for text in transport.addresses if "/p2p-circuit" not in text]
    question = {"addresses": own[:MAX_ADDRESSES], "links": list(links[:MAX_ADDRESSES])}

    async def one(peer: PeerId) -> tuple[Opinion, Opinion]:
        is_named, from_outside = peer in transport.named, False
        try:
            header, _ = await transport.fetch(
                peer, SERVICE, question, max_body_bytes=0, timeout_s=ASK_S, stall_timeout_s=ASK_S
            )
            if isinstance(seen := header.get("seen"), str) and len(seen) <= MAX_SEEN_CHARS:
                on_seen(peer, seen)
                from_outside = _is_outside(seen)
            answers = Answer(str(header.get("answer"))), Answer(str(header.get("links", Answer.UNKNOWN.value)))
        except (DilocoxError, ValueError):
            answers = Answer.UNKNOWN, Answer.UNKNOWN  # it is gone, or of a version that does not know the question
        return Opinion(answers[0], is_named, from_outside), Opinion(answers[1], is_named, from_outside)

    found = await asyncio.gather(*(one(peer) for peer in peers[:MAX_ASKED]))
    return Dialled(verdict(peer for peer, _ in found), verdict(each for _, each in found) if links else None)


def _is_outside(seen: str) -> bool:
    """seen: an address, as another peer sees us."""
    with suppress(ConfigError):
        host = _host(parse_multiaddr(seen, "lease").host)
        return host is not None and host.is_global
    return False


def _found(greeted: Sequence[bool], otherwise: Answer) -> Answer:
    return (Answer.YES if any(greeted) else Answer.NO) if greeted else otherwise


def _addresses(header: dict[str, Any], key: str) -> list[Address]:
    texts, found = header.get(key), []
    if isinstance(texts, list) and len(texts) <= MAX_ADDRESSES:
        for text in texts:
            with suppress(ConfigError):
                if isinstance(text, str):
                    found.append(parse_multiaddr(text, "lease"))
    return found


def _host(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None  # a name: not resolved for strangers
